"""Every combination of the options of each op: its results are those of loops in
float64, or it is refused by a message that names an argument. There is no third
outcome, and which of the two it is to be is said here."""

import itertools

import numpy as np
import pytest
import references as ref

import corey.ops as ops

try:
    import torch
except ImportError:
    torch = None

DTYPES = ["float32", "float16"] + (["bfloat16"] if torch else [])
TOLERANCE = {"float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}


class Maker:
    """Tensors of a type: of torch where numpy has not got it."""

    def __init__(self, dtype, seed=0):
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def wrap(self, array, dtype="float32"):
        if self.dtype != "bfloat16":
            return array.astype(dtype)
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(getattr(torch, dtype))

    def __call__(self, *shape, scale=1.0):
        """Of the type of activations."""
        return self.wrap(scale * self.rng.standard_normal(shape), self.dtype)

    def steps(self, *shape):
        return self.wrap(0.3 * np.abs(self.rng.standard_normal(shape)), self.dtype)

    def weight(self, *shape, scale=1.0):
        return self.wrap(scale * self.rng.standard_normal(shape))

    def decay(self, *shape):
        return self.wrap(-np.exp(0.5 * self.rng.standard_normal(shape)))

    def numbers(self, *values):
        return self.wrap(np.array(values), "int32")

    def channel_last(self, tensor):
        if self.dtype == "bfloat16":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return np.ascontiguousarray(tensor.swapaxes(1, 2)).swapaxes(1, 2)


def copy(tensor):
    return tensor.clone() if torch and isinstance(tensor, torch.Tensor) else tensor.copy()


def combinations(**choices):
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


def check(op, call, refused, wanted, dtype, case):
    """`refused` names the argument that a message is to be about; else `wanted` gives
    what is to come out."""
    try:
        got = call()
    except (NotImplementedError, TypeError, ValueError) as failure:
        assert refused is not None, f"{case}: {failure}"
        message = str(failure)
        assert f"{refused}: expected" in message and "got" in message, f"{case}: {message}"
        assert refused == "A" or message.startswith(f"{op}: "), message
        return False
    assert refused is None, f"{case}: expected a message about {refused}, got a result"
    got, wanted = (v if isinstance(v, tuple) else (v,) for v in (got, wanted()))
    assert len(got) == len(wanted), case
    for one, other in zip(got, wanted):
        assert ref.error(one, other) < TOLERANCE[dtype], case
    return True


MATRICES = ["constant", "variable", "two groups"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("complex_a", [False, True])
@pytest.mark.parametrize("b_kind", MATRICES)
def test_selective_scan_fn(dtype, complex_a, b_kind):
    batch, dim, n, length = 2, 4, 2, 3
    make = Maker(dtype)

    def matrix(kind):
        if kind == "constant":
            return make.weight(dim, n)
        return make(batch, n, length) if kind == "variable" else make(batch, 2, n, length)

    u, delta, z, A = make(batch, dim, length), make.steps(batch, dim, length), make(batch, dim, length), make.decay(dim, n)
    if complex_a:
        A = A + 1j * make.weight(dim, n)
    B, D, bias = matrix(b_kind), make.weight(dim), make.weight(dim, scale=0.3)
    accepted = 0
    for case in combinations(C=MATRICES, D=[0, 1], z=[0, 1], bias=[0, 1], delta_softplus=[False, True], last=[False, True]):
        C = matrix(case["C"])
        refused = None
        if complex_a:
            refused = "A"
        elif {b_kind, case["C"]} == {"constant", "two groups"}:
            # Of channels in groups on the one side, each its own on the other.
            refused = "B" if b_kind == "two groups" else "C"
        options = dict(
            D=D if case["D"] else None, z=z if case["z"] else None, delta_bias=bias if case["bias"] else None,
            delta_softplus=case["delta_softplus"],
        )  # fmt: skip

        def wanted():
            out, last = ref.selective_scan(u, delta, A, B, C, **options)
            return (out, last) if case["last"] else out

        accepted += check(
            "selective_scan_fn", lambda: ops.selective_scan_fn(u, delta, A, B, C, return_last_state=case["last"], **options),
            refused, wanted, dtype, case,
        )  # fmt: skip
    assert accepted == (0 if complex_a else 96 if b_kind == "variable" else 64)


@pytest.mark.parametrize("skip", ["none", "of heads", "of channels"])
@pytest.mark.parametrize("has_z", [False, True])
def test_mamba_chunk_scan_combined(skip, has_z):
    """Types in turn."""
    length, heads, width, n = 12, 2, 4, 8
    cases = combinations(
        bias=[0, 1], initial=[0, 1], seq_idx=[0, 1], cu_seqlens=[0, 1], dt_softplus=[False, True],
        dt_limit=[(0.0, float("inf")), (0.1, 0.5)], return_final_states=[False, True], return_varlen_states=[False, True],
    )  # fmt: skip
    makers = [Maker(dtype) for dtype in DTYPES]
    arguments = [
        (m(1, length, heads, width), m.steps(1, length, heads), m.decay(heads), m(1, length, 2, n), m(1, length, 2, n))
        for m in makers
    ]  # fmt: skip
    ends, accepted = [4, 5, 12], 0
    for case in cases:
        kind = sum(case[name] for name in ("bias", "initial", "dt_softplus")) % len(makers)
        make, (x, dt, A, B, C) = makers[kind], arguments[kind]
        sequences = make.numbers(*[0] * 4, 1, *[2] * 7).reshape(1, length)
        options = dict(
            D={"none": None, "of heads": make.weight(heads), "of channels": make.weight(heads, width)}[skip],
            z=make(1, length, heads, width) if has_z else None, dt_bias=make.weight(heads, scale=0.3) if case["bias"] else None,
            initial_states=make.weight(1, heads, width, n) if case["initial"] else None,
            seq_idx=sequences if case["seq_idx"] else None, dt_softplus=case["dt_softplus"], dt_limit=case["dt_limit"],
        )  # fmt: skip
        final, varlen, packed = case["return_final_states"], case["return_varlen_states"], case["cu_seqlens"]
        refused = None
        if varlen and not packed:
            refused = "cu_seqlens"
        elif packed and not case["seq_idx"]:
            refused = "seq_idx"
        elif packed and case["initial"]:
            refused = "initial_states"

        def wanted():
            given = dict(options, seq_idx=None if options["seq_idx"] is None else ref.as64(options["seq_idx"]))
            out, states = ref.chunk_scan(x, dt, A, B, C, **given)
            results = (out,)
            if final:
                results += (states[:, -1],)
            if varlen:
                results += (states[0, np.array(ends) - 1],)
            return results

        accepted += check(
            "mamba_chunk_scan_combined",
            lambda: ops.mamba_chunk_scan_combined(
                x, dt, A, B, C, 4, cu_seqlens=make.numbers(0, *ends) if packed else None, return_final_states=final,
                return_varlen_states=varlen, **options,
            ),
            refused, wanted, make.dtype, case,
        )  # fmt: skip
    # Without cu_seqlens no states of sequences; with them seq_idx, and no states before.
    assert len(cases) == 256 and accepted == 64 + 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,groups,tied", [(0, 1, False), (3, 1, False), (3, 3, False), (3, 2, False), (3, 1, True), (3, 3, True)])
def test_selective_state_update(dtype, heads, groups, tied):
    """`tied` is what Mamba-2 gives: a head's decay, step and bias are one number."""
    batch, dim, n, pool = 2, 4, 8, 5
    make = Maker(dtype)
    shape = (heads, dim) if heads else (dim,)

    def wide(tensor, *sizes):
        tensor = tensor[(...,) + (None,) * (len(sizes) - len(tensor.shape))]
        return tensor.expand(*sizes) if dtype == "bfloat16" else np.broadcast_to(tensor, sizes)

    x, z = make(batch, *shape), make(batch, *shape)
    D = make.weight(*shape)
    if tied:
        dt, A = wide(make(batch, heads), batch, *shape), wide(make.decay(heads), *shape, n)
        bias = wide(make.weight(heads), *shape)
    else:
        dt, A, bias = make(batch, *shape), make.decay(*shape, n), make.weight(*shape)
    B, C = (make(batch, groups, n) if heads else make(batch, n) for _ in range(2))
    flat = lambda v, axis: ref.as64(v).reshape(*v.shape[:axis], heads * dim, *v.shape[axis + 2 :]) if heads else ref.as64(v)  # noqa: E731
    accepted = 0
    for case in combinations(D=[0, 1], z=[0, 1], bias=[0, 1], dt_softplus=[False, True], indices=[0, 1]):
        state = make.weight(pool if case["indices"] else batch, *shape, n)
        indices = make.numbers(3, 1) if case["indices"] else None
        where = [3, 1] if case["indices"] else [0, 1]
        before = ref.as64(state)

        def call():
            out = ops.selective_state_update(
                state, x, dt, A, B, C, D if case["D"] else None, z if case["z"] else None, bias if case["bias"] else None,
                case["dt_softplus"], indices,
            )  # fmt: skip
            return out, state

        def wanted():
            column = lambda v: flat(v, 1)[:, :, None]  # noqa: E731
            b, c = ((ref.as64(m) if heads else ref.as64(m)[:, None])[..., None] for m in (B, C))
            out, after = ref.selective_scan(
                column(x), column(dt), flat(A, 0), b, c, flat(D, 0) if case["D"] else None, column(z) if case["z"] else None,
                flat(bias, 0) if case["bias"] else None, case["dt_softplus"], state=flat(before, 1)[where],
            )  # fmt: skip
            all_states = before.copy()
            all_states[where] = after.reshape(batch, *shape, n)
            return out.reshape(batch, *shape), all_states

        accepted += check(
            "selective_state_update", call, "B" if heads % groups and groups > 1 else None, wanted, dtype, case
        )
    assert accepted == (0 if groups == 2 else 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("last", [False, True])
def test_causal_conv1d_fn(dtype, width, last):
    batch, dim, length = 2, 4, 6
    make = Maker(dtype)
    lay = make.channel_last if last else copy
    x, weight, bias = lay(make(batch, dim, length)), make.weight(dim, width), make.weight(dim)
    before = lay(make(batch, dim, width - 1))
    seq_idx = make.numbers(0, 0, 1, 1, 1, 2, 0, 1, 2, 3, 3, 3).reshape(batch, length)
    accepted = 0
    for case in combinations(
        bias=[0, 1], seq_idx=[0, 1], initial=[0, 1], final=[False, True], out=[0, 1], activation=[None, "silu", "swish", "gelu"]
    ):
        given = dict(bias=bias if case["bias"] else None, activation=case["activation"])
        refused = None
        if case["activation"] == "gelu":
            refused = "activation"
        elif case["out"] and not case["final"]:
            refused = "final_states_out"
        elif case["seq_idx"] and case["initial"]:
            refused = "initial_states"
        elif case["seq_idx"] and case["final"]:
            refused = "return_final_states"
        elif width == 5:
            refused = "weight"
        out = lay(make(batch, dim, width - 1)) if case["out"] else None

        def call():
            result = ops.causal_conv1d_fn(
                x, weight, seq_idx=seq_idx if case["seq_idx"] else None, initial_states=before if case["initial"] else None,
                return_final_states=case["final"], final_states_out=out, **given,
            )  # fmt: skip
            if out is not None and case["final"]:
                assert result[1] is out
            return result

        def wanted():
            y, final = ref.conv(
                x, weight, initial=before if case["initial"] else None,
                seq_idx=ref.as64(seq_idx) if case["seq_idx"] else None, **given,
            )  # fmt: skip
            return (y, final) if case["final"] else y

        accepted += check("causal_conv1d_fn", call, refused, wanted, dtype, case)
    # A bias or none and three activations: of sequences, and with states before, after
    # and written to.
    assert accepted == (0 if width == 5 else 2 * 3 * (1 + 2 * 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [2, 3, 4])
@pytest.mark.parametrize("last", [False, True])
def test_causal_conv1d_update(dtype, held, last):
    batch, dim, width, pool = 2, 4, 4, 5
    make = Maker(dtype)
    lay = make.channel_last if last else copy
    weight, bias = make.weight(dim, width), make.weight(dim)
    accepted = 0
    for case in combinations(
        tokens=[0, 1, 3], bias=[0, 1], activation=[None, "silu", "swish", "gelu"], cache_seqlens=[0, 1], indices=[None, "slots", "padding"]
    ):
        x = make(batch, dim, case["tokens"]) if case["tokens"] else make(batch, dim)
        state = lay(make(pool if case["indices"] else batch, dim, held))
        slots = {None: [0, 1], "slots": [4, 2], "padding": [3, -1]}[case["indices"]]
        before, columns = ref.as64(state), ref.as64(x).reshape(batch, dim, -1)
        in_place = held == width - 1 and last
        refused = None
        if case["activation"] == "gelu":
            refused = "activation"
        elif case["cache_seqlens"]:
            refused = "cache_seqlens"
        elif held < width - 1:
            refused = "conv_state"
        elif case["indices"] == "padding" and not in_place:
            refused = "conv_state_indices"

        def call():
            out = ops.causal_conv1d_update(
                x, state, weight, bias if case["bias"] else None, case["activation"],
                make.numbers(0, 1) if case["cache_seqlens"] else None, make.numbers(*slots) if case["indices"] else None,
            )  # fmt: skip
            # What comes out of padding is not said.
            return (out[:1] if case["indices"] == "padding" else out), state

        def wanted():
            rows = [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
            after, outputs = before.copy(), []
            for row, slot in rows:
                out, _ = ref.conv(
                    columns[row : row + 1], weight, bias if case["bias"] else None, before[slot : slot + 1, :, held - width + 1 :],
                    activation=case["activation"],
                )  # fmt: skip
                outputs.append(out[0])
                after[slot] = np.concatenate([before[slot], columns[row]], -1)[:, -held:]
            return np.stack(outputs).reshape(len(rows), *x.shape[1:]), after

        accepted += check("causal_conv1d_update", call, refused, wanted, dtype, case)
    # Three counts of tokens, a bias or none, three activations; of states where they
    # are, slots of a pool, and slots with padding.
    assert accepted == 3 * 2 * 3 * (0 if held < width - 1 else 3 if held == width - 1 and last else 2)


RMS = ["none", "b", "c", "dt", "all"]


@pytest.mark.parametrize("b_kind", ["projected", *MATRICES])
@pytest.mark.parametrize("c_kind", ["projected", *MATRICES])
def test_mamba_inner_fn(b_kind, c_kind):
    """What concerns B and C in full; types and what does not, in turn."""
    batch, dim, n, rank, model, length = 1, 4, 2, 3, 5, 4
    accepted = 0
    cases = combinations(rms=RMS, b_bias=[0, 1], c_bias=[0, 1])
    for number, case in enumerate(cases):
        make = Maker(DTYPES[number % len(DTYPES)])
        rest = {name: bool(number >> bit & 1) for bit, name in enumerate(["conv", "out", "D", "delta_bias", "softplus"])}
        chosen = lambda name, *shape: make.weight(*shape, scale=0.4) if rest[name] else None  # noqa: E731

        def matrix(kind):
            if kind == "projected":
                return None
            if kind == "constant":
                return make.weight(dim, n)
            return make(batch, n, length) if kind == "variable" else make(batch, 2, n, length)

        norm = lambda name, size: make.weight(size) if case["rms"] in (name, "all") else None  # noqa: E731
        B, C = matrix(b_kind), matrix(c_kind)
        a = dict(
            xz=make(batch, 2 * dim, length), conv1d_weight=make.weight(dim, 1, 3), conv1d_bias=chosen("conv", dim),
            x_proj_weight=make(rank + n * ((B is None) + (C is None)), dim, scale=0.5),
            delta_proj_weight=make(dim, rank, scale=0.5), out_proj_weight=make(model, dim), out_proj_bias=chosen("out", model),
            A=make.decay(dim, n), B=B, C=C, D=chosen("D", dim), delta_bias=chosen("delta_bias", dim),
            B_proj_bias=make.weight(n) if case["b_bias"] else None, C_proj_bias=make.weight(n) if case["c_bias"] else None,
            delta_softplus=rest["softplus"], checkpoint_lvl=number % 2, b_rms_weight=norm("b", n), c_rms_weight=norm("c", n),
            dt_rms_weight=norm("dt", rank), b_c_dt_rms_eps=1e-5,
        )  # fmt: skip
        groups = {"projected": 1, "variable": 1, "two groups": 2, "constant": dim}
        refused = None
        if B is not None and a["B_proj_bias"] is not None:
            refused = "B_proj_bias"
        elif B is not None and a["b_rms_weight"] is not None:
            refused = "b_rms_weight"
        elif C is not None and a["C_proj_bias"] is not None:
            refused = "C_proj_bias"
        elif C is not None and a["c_rms_weight"] is not None:
            refused = "c_rms_weight"
        elif groups[b_kind] != groups[c_kind]:
            small, large = sorted([(groups[b_kind], b_kind, "B"), (groups[c_kind], c_kind, "C")])
            if small[1] == "projected" or small[0] != 1:
                refused = small[2]

        accepted += check(
            "mamba_inner_fn", lambda: ops.mamba_inner_fn(**a), refused, lambda: inner(a), make.dtype, (case, rest)
        )
    # Biases and norms are of what is projected.
    count = {(True, True): 20, (True, False): 6, (False, True): 6, (False, False): 2}
    both = count[b_kind == "projected", c_kind == "projected"]
    fits = groups[b_kind] == groups[c_kind] or {b_kind, c_kind} in ({"variable", "two groups"}, {"variable", "constant"})
    assert accepted == (both if fits else 0)


def inner(a):
    x, z = np.split(ref.as64(a["xz"]), 2, 1)
    u, _ = ref.conv(x, ref.as64(a["conv1d_weight"])[:, 0], a["conv1d_bias"], activation="silu")
    both = np.swapaxes(u, 1, 2) @ ref.as64(a["x_proj_weight"]).T
    rank, n = a["delta_proj_weight"].shape[1], a["A"].shape[1]

    def projected(value, bias, weight):
        value = value if bias is None else value + ref.as64(bias)
        if weight is None:
            return value
        return value / np.sqrt((value**2).mean(-1, keepdims=True) + a["b_c_dt_rms_eps"]) * ref.as64(weight)

    dt, both = projected(both[..., :rank], None, a["dt_rms_weight"]), both[..., rank:]
    B, C = a["B"], a["C"]
    if B is None:
        B, both = projected(both[..., :n], a["B_proj_bias"], a["b_rms_weight"]).swapaxes(1, 2), both[..., n:]
    if C is None:
        C = projected(both, a["C_proj_bias"], a["c_rms_weight"]).swapaxes(1, 2)
    delta = (dt @ ref.as64(a["delta_proj_weight"]).T).swapaxes(1, 2)
    y, _ = ref.selective_scan(u, delta, a["A"], B, C, a["D"], z, a["delta_bias"], a["delta_softplus"])
    y = y.swapaxes(1, 2) @ ref.as64(a["out_proj_weight"]).T
    return y if a["out_proj_bias"] is None else y + ref.as64(a["out_proj_bias"])
