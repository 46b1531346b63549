"""corey.ops on arrays of numpy: values, layouts, options, refusals."""

import threading

import numpy as np
import pytest
import references as ref

import corey.ops as ops

rng = np.random.default_rng(1)
TOLERANCE = {"float32": 2e-6, "float16": 2e-3}


def normal(*shape, dtype="float32", scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(dtype)


def decay(*shape):
    return -np.exp(rng.standard_normal(shape) * 0.5).astype("float32")


def channel_last(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


# The grid of mamba_ssm's test of its scan, at sizes of a loop in Python.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("length", [1, 2, 37, 64])
@pytest.mark.parametrize("variable_b,variable_c,groups", [(1, 1, 1), (1, 1, 2), (0, 1, 1), (1, 0, 1), (0, 0, 1)])
@pytest.mark.parametrize("has_d,has_z,has_bias,softplus", [(1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1, 1), (0, 1, 0, 1)])
def test_selective_scan(dtype, length, variable_b, variable_c, groups, has_d, has_z, has_bias, softplus):
    batch, dim, n = 2, 4, 8
    matrix = (batch, groups, n, length) if groups > 1 else (batch, n, length)
    arguments = [
        normal(batch, dim, length, dtype=dtype),
        0.5 * np.abs(normal(batch, dim, length)).astype(dtype),
        decay(dim, n),
        normal(*matrix, dtype=dtype) if variable_b else normal(dim, n),
        normal(*matrix, dtype=dtype) if variable_c else normal(dim, n),
        normal(dim) if has_d else None,
        normal(batch, dim, length, dtype=dtype) if has_z else None,
        normal(dim, scale=0.5) if has_bias else None,
        bool(softplus),
    ]
    wanted, last = ref.selective_scan(*arguments)
    out, state = ops.selective_scan_fn(*arguments, return_last_state=True)
    assert out.dtype == dtype and state.dtype == "float32"
    assert out.strides == arguments[1].strides
    assert ref.error(out, wanted) < TOLERANCE[dtype]
    assert ref.error(state, last) < TOLERANCE[dtype]
    alone = ops.selective_scan_fn(*arguments)
    assert np.array_equal(alone, out)


def test_selective_scan_reads_channel_last():
    u, delta, z = (channel_last(normal(2, 6, 50)) for _ in range(3))
    A, B, C = decay(6, 4), normal(2, 4, 50), channel_last(normal(2, 4, 50))
    out = ops.selective_scan_fn(u, delta, A, B, C, z=z, delta_softplus=True)
    assert out.strides == delta.strides
    assert ref.error(out, ref.selective_scan(u, delta, A, B, C, z=z, delta_softplus=True)[0]) < 2e-6


def test_selective_scan_of_slices():
    whole = normal(2, 12, 40)
    u, delta = whole[:, :6, ::2], whole[:, 6:, ::-2]
    assert u.strides[2] == 8 and delta.strides[2] == -8
    A, B, C = decay(6, 4), normal(2, 4, 20), normal(2, 4, 20)
    out = ops.selective_scan_fn(u, delta, A, B, C, delta_softplus=True)
    assert ref.error(out, ref.selective_scan(u, delta, A, B, C, delta_softplus=True)[0]) < 2e-6


def test_read_only_arrays():
    x = normal(2, 8)
    x.flags.writeable = False
    assert ref.error(ops.hadamard_transform(x), ref.hadamard(x, 1.0)) < 1e-6


def test_states_that_are_read_only_are_refused():
    state, conv_state, out = normal(2, 4, 8), channel_last(normal(2, 4, 3)), channel_last(normal(2, 4, 3))
    x, weight = normal(2, 4), normal(4, 4)
    for a in (state, conv_state, out):
        a.flags.writeable = False
    before = state.copy(), conv_state.copy()
    with pytest.raises(ValueError, match="state: expected a tensor that may be written"):
        ops.selective_state_update(state, x, x, decay(4, 8), normal(2, 8), normal(2, 8))
    with pytest.raises(ValueError, match="conv_state: expected a tensor that may be written"):
        ops.causal_conv1d_update(x, conv_state, weight)
    with pytest.raises(ValueError, match="final_states_out: expected a tensor that may be written"):
        ops.causal_conv1d_fn(normal(2, 4, 6), weight, return_final_states=True, final_states_out=out)
    held = normal(2, 4, 5)
    held.flags.writeable = False
    with pytest.raises(ValueError, match="conv_state: expected a tensor that may be written"):
        ops.causal_conv1d_update(x, held, weight)
    assert np.array_equal(state, before[0]) and np.array_equal(conv_state, before[1])


def test_selective_scan_keeps_nan_where_it_is():
    u = normal(2, 3, 10)
    u[1, 2, 5] = np.nan
    out = ops.selective_scan_fn(u, np.abs(normal(2, 3, 10)), decay(3, 4), normal(2, 4, 10), normal(2, 4, 10))
    bad = np.isnan(out)
    assert bad[1, 2, 5:].all() and bad.sum() == 5


# The grid of mamba_ssm's test of its chunked scan.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("length,groups,heads", [(1, 1, 2), (70, 1, 4), (33, 2, 4), (64, 4, 4)])
@pytest.mark.parametrize(
    "d,has_z,has_bias,softplus,initial", [(0, 0, 0, 0, 0), (1, 0, 1, 1, 0), (2, 1, 1, 1, 1), (1, 1, 0, 1, 1)]
)
def test_chunk_scan(dtype, length, groups, heads, d, has_z, has_bias, softplus, initial):
    batch, width, n = 2, 8, 16
    x = normal(batch, length, heads, width, dtype=dtype)
    dt = (0.3 * np.abs(normal(batch, length, heads))).astype(dtype)
    A, B, C = decay(heads), *(normal(batch, length, groups, n, dtype=dtype) for _ in range(2))
    options = dict(
        D=[None, normal(heads), normal(heads, width)][d],
        z=normal(*x.shape, dtype=dtype) if has_z else None,
        dt_bias=normal(heads, scale=0.3) if has_bias else None,
        initial_states=normal(batch, heads, width, n) if initial else None,
        dt_softplus=bool(softplus),
    )
    wanted, states = ref.chunk_scan(x, dt, A, B, C, **options)
    out, final = ops.mamba_chunk_scan_combined(x, dt, A, B, C, 16, return_final_states=True, **options)
    assert out.dtype == dtype and final.dtype == "float32" and out.flags.c_contiguous
    assert ref.error(out, wanted) < TOLERANCE[dtype]
    assert ref.error(final, states[:, -1]) < TOLERANCE[dtype]
    assert np.array_equal(ops.mamba_chunk_scan_combined(x, dt, A, B, C, 256, **options), out)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, np.inf), (0.0, 0.05), (0.1, 0.2), (0.01, np.inf)])
def test_chunk_scan_limits_dt(limit, softplus):
    """A negative dt is none by default."""
    x, dt, A = normal(1, 20, 2, 4), normal(1, 20, 2), decay(2)
    B, C = normal(1, 20, 1, 8), normal(1, 20, 1, 8)
    out = ops.mamba_chunk_scan_combined(x, dt, A, B, C, 64, dt_softplus=softplus, dt_limit=limit)
    assert ref.error(out, ref.chunk_scan(x, dt, A, B, C, dt_softplus=softplus, dt_limit=limit)[0]) < 2e-6


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("initial", [False, True])
def test_chunk_scan_of_sequences(batch, initial):
    length, heads, width, n = 24, 2, 4, 8
    x, dt, A = normal(batch, length, heads, width), np.abs(normal(batch, length, heads)), decay(heads)
    B, C = normal(batch, length, 1, n), normal(batch, length, 1, n)
    seq_idx = np.sort(rng.integers(0, 4, (batch, length)), 1).astype("int32")
    start = normal(batch, heads, width, n) if initial else None
    wanted, states = ref.chunk_scan(x, dt, A, B, C, seq_idx=seq_idx, initial_states=start)
    out, final = ops.mamba_chunk_scan_combined(
        x, dt, A, B, C, 8, seq_idx=seq_idx, initial_states=start, return_final_states=True
    )
    assert ref.error(out, wanted) < 2e-6
    assert ref.error(final, states[:, -1]) < 2e-6


def test_chunk_scan_states_of_sequences():
    cu_seqlens = np.array([0, 5, 6, 20], "int32")
    seq_idx = np.repeat(np.arange(3, dtype="int32"), np.diff(cu_seqlens))[None]
    x, dt, A = normal(1, 20, 2, 4), np.abs(normal(1, 20, 2)), decay(2)
    B, C = normal(1, 20, 1, 8), normal(1, 20, 1, 8)
    wanted, states = ref.chunk_scan(x, dt, A, B, C, seq_idx=seq_idx)
    out, final, varlen = ops.mamba_chunk_scan_combined(
        x, dt, A, B, C, 8, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_final_states=True, return_varlen_states=True
    )
    assert ref.error(out, wanted) < 2e-6
    assert ref.error(varlen, states[0, cu_seqlens[1:] - 1]) < 2e-6
    assert ref.error(final, states[:, -1]) < 2e-6


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("has_z,softplus", [(True, True), (False, False)])
@pytest.mark.parametrize("indexed", [False, True])
def test_state_update(heads, groups, has_z, softplus, indexed):
    batch, dim, n = 4, 5, 8
    shape = (heads, dim) if heads else (dim,)
    groups = groups if heads else 1
    pool = 7 if indexed else batch
    state = normal(pool, *shape, n)
    x, dt = normal(batch, *shape), normal(batch, *shape)
    A, D, bias = decay(*shape, n), normal(*shape), normal(*shape)
    B, C = (normal(batch, groups, n) if heads else normal(batch, n) for _ in range(2))
    z = normal(batch, *shape) if has_z else None
    indices = np.array([3, 0, 6, 2], "int32") if indexed else None
    where = indices if indexed else np.arange(batch)

    flat = lambda v, axis: v.reshape(*v.shape[:axis], -1, *v.shape[axis + 2 :]) if heads else v  # noqa: E731
    column = lambda v: flat(v, 1)[:, :, None]  # noqa: E731
    wanted, after = ref.selective_scan(
        column(x), column(dt), flat(A, 0), (B if heads else B[:, None])[..., None], (C if heads else C[:, None])[..., None],
        flat(D, 0), None if z is None else column(z), flat(bias, 0), softplus, state=flat(state, 1)[where],
    )
    untouched = np.setdiff1d(np.arange(pool), where)
    before = state.copy()
    out = ops.selective_state_update(state, x, dt, A, B, C, D, z, bias, softplus, state_batch_indices=indices)
    assert out.shape == x.shape
    assert ref.error(out, wanted.reshape(x.shape)) < 2e-6
    assert ref.error(state[where], after.reshape(batch, *shape, n)) < 2e-6
    assert np.array_equal(state[untouched], before[untouched])


def test_state_update_of_tied_heads():
    """As Mamba-2 calls it: a head's decay and step are one number."""
    batch, heads, dim, n = 2, 4, 8, 16
    state = normal(batch, heads, dim, n)
    x, dt = normal(batch, heads, dim), normal(batch, heads)
    A, D, bias = decay(heads), normal(heads), normal(heads)
    B, C = normal(batch, 2, n), normal(batch, 2, n)
    wide = lambda v, *shape: np.broadcast_to(v.reshape(v.shape + (1,) * (len(shape) - v.ndim)), shape)  # noqa: E731
    wanted, states = ref.chunk_scan(
        x[:, None], dt[:, None], A, B[:, None], C[:, None], D, None, bias, state, dt_softplus=True
    )
    out = ops.selective_state_update(
        state, x, wide(dt, batch, heads, dim), wide(A, heads, dim, n), B, C, wide(D, heads, dim), None,
        wide(bias, heads, dim), True,
    )
    assert ref.error(out, wanted[:, 0]) < 2e-6
    assert ref.error(state, states[:, 0]) < 2e-6


def test_state_update_leaves_padding_alone():
    state = normal(3, 4, 8)
    before = state.copy()
    indices = np.array([1, -1], "int32")
    x, dt, B, C = normal(2, 4), np.abs(normal(2, 4)), normal(2, 8), normal(2, 8)
    ops.selective_state_update(state, x, dt, decay(4, 8), B, C, state_batch_indices=indices)
    assert np.array_equal(state[[0, 2]], before[[0, 2]]) and not np.array_equal(state[1], before[1])


# The grid of causal-conv1d's tests.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width,length", [(2, 1), (3, 2), (4, 3), (4, 50), (2, 17)])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("has_bias,initial,last", [(True, True, True), (False, False, False), (True, False, True)])
def test_conv(dtype, width, length, activation, has_bias, initial, last):
    x, weight = normal(2, 6, length, dtype=dtype), normal(6, width)
    bias = normal(6) if has_bias else None
    start = channel_last(normal(2, 6, width - 1, dtype=dtype)) if initial else None
    wanted, final = ref.conv(x, weight, bias, start, activation=activation)
    for given in (x, channel_last(x)):
        got = ops.causal_conv1d_fn(
            given, weight, bias, initial_states=start, return_final_states=last, activation=activation
        )
        out = got[0] if last else got
        assert out.dtype == dtype and out.shape == x.shape
        assert length == 1 or out.strides == given.strides
        assert ref.error(out, wanted) < TOLERANCE[dtype]
        if last:
            assert ref.error(got[1], final) == 0


def test_conv_writes_the_final_states_it_is_given():
    x, weight = normal(2, 6, 9), normal(6, 4)
    final = np.zeros((2, 6, 3), "float32")
    out, same = ops.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=final)
    assert same is final and np.array_equal(final, x[:, :, -3:])


def test_conv_of_sequences():
    x, weight, bias = channel_last(normal(2, 6, 30)), normal(6, 4), normal(6)
    seq_idx = np.sort(rng.integers(0, 9, (2, 30)), 1).astype("int32")
    out = ops.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation="silu")
    assert ref.error(out, ref.conv(x, weight, bias, seq_idx=seq_idx, activation="silu")[0]) < 2e-6


@pytest.mark.parametrize("held", [3, 4, 7])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_conv_update(held, tokens, last, indexed):
    weight, bias = normal(6, 4), normal(6)
    x = normal(2, 6, tokens) if tokens else normal(2, 6)
    state = normal(5 if indexed else 2, 6, held)
    state = channel_last(state) if last else state
    indices = np.array([4, 1], "int32") if indexed else None
    where = indices if indexed else np.arange(2)
    columns = x if tokens else x[:, :, None]
    wanted, _ = ref.conv(columns, weight, bias, state[where][:, :, held - 3 :], activation="silu")
    after = np.concatenate([state[where], columns], -1)[:, :, -held:]
    untouched = state[np.setdiff1d(np.arange(len(state)), where)]
    out = ops.causal_conv1d_update(x, state, weight, bias, "silu", conv_state_indices=indices)
    assert ref.error(out, wanted.reshape(x.shape)) < 2e-6
    assert np.array_equal(state[where], after)
    assert np.array_equal(state[np.setdiff1d(np.arange(len(state)), where)], untouched)


@pytest.mark.parametrize("shape", [(8,), (1,), (3, 64), (2, 3, 5, 16), (4, 12), (2, 1000)])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_hadamard(shape, scale):
    x = normal(*shape)
    got = ops.hadamard_transform(x, scale)
    assert got.shape == x.shape
    assert ref.error(got, ref.hadamard(x, scale)) < 1e-6


def inner_arguments(dim=8, n=4, rank=3, model=6, length=20, given_b=False, rms=False):
    arguments = dict(
        xz=normal(2, 2 * dim, length), conv1d_weight=normal(dim, 1, 4), conv1d_bias=normal(dim),
        x_proj_weight=normal(rank + (1 if given_b else 2) * n, dim, scale=0.3), delta_proj_weight=normal(dim, rank, scale=0.3),
        out_proj_weight=normal(model, dim), out_proj_bias=normal(model), A=decay(dim, n),
        B=normal(dim, n) if given_b else None, D=normal(dim), delta_bias=normal(dim),
    )
    if rms:
        arguments.update(b_rms_weight=normal(n), c_rms_weight=normal(n), dt_rms_weight=normal(rank))
    return arguments


def inner_reference(a, eps=1e-6):
    x, z = np.split(ref.as64(a["xz"]), 2, 1)
    u, _ = ref.conv(x, a["conv1d_weight"][:, 0], a["conv1d_bias"], activation="silu")
    both = np.swapaxes(u, 1, 2) @ ref.as64(a["x_proj_weight"]).T
    rank, n = a["delta_proj_weight"].shape[1], a["A"].shape[1]

    def norm(v, name):
        weight = a.get(name)
        return v if weight is None else v / np.sqrt((v**2).mean(-1, keepdims=True) + eps) * weight

    dt, rest = norm(both[..., :rank], "dt_rms_weight"), both[..., rank:]
    B = a["B"]
    if B is None:
        B, rest = norm(rest[..., :n], "b_rms_weight").swapaxes(1, 2), rest[..., n:]
    C = norm(rest, "c_rms_weight").swapaxes(1, 2)
    delta = (dt @ ref.as64(a["delta_proj_weight"]).T).swapaxes(1, 2)
    y, _ = ref.selective_scan(u, delta, a["A"], B, C, a["D"], z, a["delta_bias"], True)
    return y.swapaxes(1, 2) @ ref.as64(a["out_proj_weight"]).T + a["out_proj_bias"]


@pytest.mark.parametrize("given_b,rms", [(False, False), (True, False), (False, True)])
def test_mamba_inner(given_b, rms):
    arguments = inner_arguments(given_b=given_b, rms=rms)
    if given_b:
        # A projected C has one group, a given B one for each channel.
        with pytest.raises(ValueError, match="C: expected as many groups"):
            ops.mamba_inner_fn(**arguments)
        return
    assert ref.error(ops.mamba_inner_fn(**arguments), inner_reference(arguments)) < 5e-6


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal(3, 16).astype(ml_dtypes.bfloat16)
    got = ops.hadamard_transform(x, 0.25)
    assert got.dtype == x.dtype
    assert ref.error(got, ref.hadamard(x.astype("float32"), 0.25)) < 4e-3


u, matrix = normal(2, 4, 6), normal(2, 8, 6)
REFUSED = [
    (ValueError, "A: expected shape", lambda: ops.selective_scan_fn(u, u, decay(3, 8), matrix, matrix)),
    (ValueError, "delta: expected shape", lambda: ops.selective_scan_fn(u, u[:, :, :3], decay(4, 8), matrix, matrix)),
    (ValueError, "B: expected shape", lambda: ops.selective_scan_fn(u, u, decay(4, 8), matrix[:1], matrix)),
    (TypeError, "A: expected float64, float32", lambda: ops.selective_scan_fn(u, u, decay(4, 8) + 1j, matrix, matrix)),
    (TypeError, "u: expected float32", lambda: ops.selective_scan_fn(u.astype("f8"), u, decay(4, 8), matrix, matrix)),
    (TypeError, "u: expected a tensor", lambda: ops.selective_scan_fn([1.0], u, decay(4, 8), matrix, matrix)),
    (ValueError, "chunk_size: expected at least 1",
     lambda: ops.mamba_chunk_scan_combined(u, u, u, u, u, 0)),
    (ValueError, "x: expected 4 axes", lambda: ops.mamba_chunk_scan_combined(u, u, u, u, u, 8)),
    (ValueError, "cu_seqlens: expected with return_varlen_states",
     lambda: ops.mamba_chunk_scan_combined(u, u, u, u, u, 8, return_varlen_states=True)),
    (ValueError, "seq_idx: expected with cu_seqlens",
     lambda: ops.mamba_chunk_scan_combined(u, u, u, u, u, 8, cu_seqlens=np.zeros(2, "int32"))),
    (ValueError, "weight: expected a width of 2 to 4", lambda: ops.causal_conv1d_fn(u, normal(4, 5))),
    (NotImplementedError, "activation: expected", lambda: ops.causal_conv1d_fn(u, normal(4, 4), activation="gelu")),
    (NotImplementedError, "initial_states: expected none with seq_idx",
     lambda: ops.causal_conv1d_fn(u, normal(4, 4), seq_idx=np.zeros((2, 6), "int32"), initial_states=u)),
    (NotImplementedError, "cache_seqlens",
     lambda: ops.causal_conv1d_update(u, u, normal(4, 4), cache_seqlens=np.zeros(2, "int32"))),
    (ValueError, "conv_state: expected at least 3",
     lambda: ops.causal_conv1d_update(u[:, :, 0], u[:, :, :2], normal(4, 4))),
    (TypeError, "state_batch_indices: expected int32",
     lambda: ops.selective_state_update(normal(2, 4, 8), u[:, :, 0], u[:, :, 0], decay(4, 8), matrix[..., 0], matrix[..., 0],
                                        state_batch_indices=np.zeros(2, "int64"))),
    (ValueError, "state: expected a contiguous",
     lambda: ops.selective_state_update(normal(2, 4, 16)[..., ::2], u[:, :, 0], u[:, :, 0], decay(4, 8), matrix[..., 0],
                                        matrix[..., 0])),
    (ValueError, "expected a value below|expected .* got",
     lambda: ops.selective_state_update(normal(2, 4, 8), u[:, :, 0], u[:, :, 0], decay(4, 8), matrix[..., 0], matrix[..., 0],
                                        state_batch_indices=np.array([0, 2], "int32"))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    kind, message, call = REFUSED[number]
    with pytest.raises(kind, match=message):
        call()


def test_one_program_serves_every_batch_and_length():
    ops.cache_clear()
    A, weight = decay(16, 4), normal(16, 4)
    for batch, length in [(1, 1), (2, 30), (5, 7), (1, 300)]:
        v, m = normal(batch, 16, length), normal(batch, 4, length)
        out = ops.selective_scan_fn(v, v, A, m, m, delta_softplus=True)
        assert ref.error(out, ref.selective_scan(v, v, A, m, m, delta_softplus=True)[0]) < 2e-6
        ops.causal_conv1d_fn(v, weight)
    info = ops.cache_info()
    assert info["programs"] == 2 and info["compiled"] == 2 and info["plans"] == 8


def test_threads():
    A, failures = decay(16, 4), []

    def work(seed):
        own = np.random.default_rng(seed)
        for _ in range(20):
            v = own.standard_normal((2, 16, int(own.integers(1, 40)))).astype("float32")
            m = own.standard_normal((2, 4, v.shape[2])).astype("float32")
            out = ops.selective_scan_fn(v, v, A, m, m, delta_softplus=True)
            if not ref.error(out, ref.selective_scan(v, v, A, m, m, delta_softplus=True)[0]) < 2e-6:
                failures.append(seed)

    ops.cache_clear()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
