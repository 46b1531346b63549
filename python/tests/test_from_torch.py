"""Modules in plain torch, as programs: against the modules in float64."""

import copy
import os
import re
import runpy

import pytest

torch = pytest.importorskip("torch")

import corey  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

try:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.scan import scan
except ImportError:
    pytest.skip("torch without scan and associative_scan", allow_module_level=True)


class Parameters(nn.Module):
    def __init__(self, channels=6, states=4):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.A_log = nn.Parameter(torch.randn(channels, states, generator=generator))
        self.D = nn.Parameter(torch.randn(channels, generator=generator))


class Loop(Parameters):
    """The usual reference: discretized first, a loop over tokens, einsum."""

    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)
        dA = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
        dBu = torch.einsum("bld,bln,bld->bldn", dt, B, u)
        h = torch.zeros(u.shape[0], *A.shape, dtype=u.dtype)
        ys = []
        for i in range(u.shape[1]):
            h = dA[:, i] * h + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i, :]))
        return torch.stack(ys, 1) + u * self.D


class InPlace(Parameters):
    """Discretized in the loop; results are written to their places, the state is a result."""

    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)
        h, y = u.new_zeros(u.shape[0], *A.shape), torch.empty_like(u)
        for i in range(u.shape[1]):
            h = torch.exp(dt[:, i, :, None] * A) * h + (dt[:, i] * u[:, i])[:, :, None] * B[:, i, None]
            y[:, i] = torch.matmul(h, C[:, i].unsqueeze(-1))[..., 0]
        return y, h


class Associative(Parameters):
    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)
        decays = torch.exp(dt[..., None] * A)
        values = dt[..., None] * B[:, :, None, :] * u[..., None]
        _, h = associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, values), 1, combine_mode="pointwise")
        return (h * C[:, :, None]).sum(-1)


class Scan(Parameters):
    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)

        def step(h, token):
            u, dt, B, C = token
            h = torch.exp(dt[..., None] * A) * h + (dt * u)[..., None] * B[:, None]
            return h, (h * C[:, None]).sum(-1)

        start = torch.zeros(u.shape[0], *A.shape, dtype=u.dtype)
        h, y = scan(step, start, tuple(t.transpose(0, 1) for t in (u, dt, B, C)))
        return y.transpose(0, 1), h


class Heads(nn.Module):
    """Mamba-2's recurrence: one decay per head."""

    def __init__(self, heads=3):
        super().__init__()
        self.A_log = nn.Parameter(torch.linspace(-1, 1, heads))

    def forward(self, x, dt, B, C):
        dt, A = F.softplus(dt), -torch.exp(self.A_log)
        h = torch.zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1], dtype=x.dtype)
        ys = []
        for t in range(x.shape[1]):
            h = torch.exp(dt[:, t] * A)[:, :, None, None] * h + torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], B[:, t])
            ys.append(torch.einsum("bhpn,bn->bhp", h, C[:, t]))
        return torch.stack(ys, 1)


class Mixer(nn.Module):
    """A whole block, with a norm written out."""

    def __init__(self, width=8, channels=16, states=4, rank=2):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.inner = nn.Linear(width, 2 * channels, bias=False)
        self.conv = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)
        self.select = nn.Linear(channels, rank + 2 * states, bias=False)
        self.step = nn.Linear(rank, channels)
        self.A_log = nn.Parameter(torch.randn(channels, states))
        self.D = nn.Parameter(torch.randn(channels))
        self.out = nn.Linear(channels, width)
        self.sizes = [rank, states, states]

    def forward(self, x):
        residual, length = x, x.shape[1]
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        x, z = self.inner(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        dt, B, C = self.select(x).split(self.sizes, -1)
        dt, A = F.softplus(self.step(dt)), -torch.exp(self.A_log)
        values = (dt * x)[..., None] * B[:, :, None]
        _, h = associative_scan(
            lambda a, b: (b[0] * a[0], a[1] * b[0] + b[1]), (torch.exp(dt[..., None] * A), values), 1, combine_mode="pointwise"
        )
        return residual + self.out(((h * C[:, :, None]).sum(-1) + self.D * x) * F.silu(z))


def inputs(batch, length, channels=6, states=4, seed=0):
    torch.manual_seed(seed + 7 * length + batch)
    sizes = (channels, channels, states, states)
    return tuple(torch.randn(batch, length, size) for size in sizes)


def check(program, module, given, tolerance=2e-6):
    # torch's scans are compiled anew for every type; the eager module is in float64.
    reference = copy.deepcopy(module).double()
    with torch.no_grad():
        got, want = program(*given), reference(*(t.double() for t in given))
    got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert g.shape == w.shape and g.dtype == given[0].dtype
        error = (g.double() - w).norm() / w.norm()
        assert error < tolerance, f"expected an error below {tolerance}, got {error}"


@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (3, 2), (1, 33)], ids=str)
def test_loop_over_tokens(shape):
    module, given = Loop(), inputs(*shape)
    program = corey.from_torch(module, given)
    assert program.counts["selective_scan"] == 1
    check(program, module, given)
    if shape[0] > 1:
        check(program, module, inputs(shape[0] + 3, shape[1], seed=1))
    with pytest.raises(ValueError, match="expected .* along axis 1, as in the example, got"):
        program(*inputs(shape[0], shape[1] + 1))


def test_writes_in_place_and_final_state():
    module, given = InPlace(), inputs(2, 4)
    check(corey.from_torch(module, given), module, given)


@pytest.mark.parametrize("kind", [Associative, Scan])
def test_scans_of_torch_are_of_any_length(kind):
    module = kind()
    program = corey.from_torch(module, inputs(2, 5))
    assert program.counts["selective_scan"] == 1
    for shape in [(2, 5), (1, 1), (3, 1), (1, 70)]:
        check(program, module, inputs(*shape))
    with pytest.raises(ValueError, match="expected 5 along axis 1, as in u, got 4"):
        u, delta, B, C = inputs(2, 5)
        program(u, delta, B[:, :4], C)


def test_heads():
    torch.manual_seed(0)
    given = (torch.randn(2, 6, 3, 5), torch.randn(2, 6, 3), torch.randn(2, 6, 4), torch.randn(2, 6, 4))
    program = corey.from_torch(Heads(), given)
    assert program.counts["ssd"] == 1
    check(program, Heads(), given)


def test_block_of_heads():
    class Block(nn.Module):
        """Mamba-2's, with channels as heads and a gated norm, of any length."""

        def __init__(self, width=8, heads=3, channels=4, states=5):
            super().__init__()
            torch.manual_seed(4)
            self.sizes = [heads * channels, heads * channels + 2 * states, heads]
            self.inner = nn.Linear(width, sum(self.sizes), bias=False)
            self.conv = nn.Conv1d(self.sizes[1], self.sizes[1], 4, groups=self.sizes[1], padding=3)
            self.A_log, self.dt_bias = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads))
            self.D, self.norm = nn.Parameter(torch.randn(heads)), nn.RMSNorm(heads * channels, eps=1e-5)
            self.out = nn.Linear(heads * channels, width, bias=False)
            self.heads, self.channels, self.states = heads, channels, states

        def forward(self, x):
            batch, length, _ = x.shape
            z, xBC, dt = self.inner(x).split(self.sizes, -1)
            xBC = F.silu(self.conv(xBC.transpose(1, 2))[..., :length].transpose(1, 2))
            u, B, C = xBC.split([self.sizes[0], self.states, self.states], -1)
            u = u.view(batch, length, self.heads, self.channels)
            dt = F.softplus(dt + self.dt_bias)
            decay = torch.exp(dt * -torch.exp(self.A_log))[..., None, None]
            value = torch.einsum("blh,blhp,bln->blhpn", dt, u, B)
            _, h = associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay.expand_as(value), value), 1, combine_mode="pointwise"
            )
            y = torch.einsum("blhpn,bln->blhp", h, C) + self.D[:, None] * u
            return self.out(self.norm(y.reshape(batch, length, -1) * F.silu(z)))

    module = Block()
    program = corey.from_torch(module, torch.randn(2, 9, 8))
    assert program.counts["ssd"] == 1 and program.counts["rms_norm"] == 1
    for shape in [(2, 9), (1, 1), (3, 40)]:
        check(program, module, (torch.randn(*shape, 8),))


def test_block():
    module = Mixer()
    program = corey.from_torch(module, torch.randn(2, 9, 8))
    assert program.counts["rms_norm"] == 1 and program.counts["causal_conv"] == 1 and program.counts["projection"] == 4
    for shape in [(2, 9), (1, 1), (3, 50)]:
        check(program, module, (torch.randn(*shape, 8),))
    # Parameters are where they were; what was made of them is made again when asked.
    given = torch.randn(1, 3, 8)
    with torch.no_grad():
        module.out.weight.mul_(2)
        module.A_log.add_(0.5)
    program.bind_weights()
    check(program, module, (given,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    module = Mixer().to(dtype)
    given = (torch.randn(2, 12, 8, dtype=dtype),)
    # Of rounding every result of the module to the type.
    check(corey.from_torch(module, given), module, given, 3e-2 if dtype is torch.bfloat16 else 4e-3)


def test_channels_first_and_a_given_state():
    class First(Parameters):
        def forward(self, u, delta, B, C, h):
            A, ys = -torch.exp(self.A_log), []
            dA = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
            dBu = torch.einsum("bdl,bdl,bnl->bdln", delta, u, B)
            for i in range(u.shape[2]):
                h = dA[:, :, i] * h + dBu[:, :, i]
                ys.append(torch.einsum("bdn,bn->bd", h, C[:, :, i]))
            return torch.stack(ys, 2) * F.silu(u), h

    given = tuple(t.abs().transpose(1, 2) for t in inputs(2, 6)) + (torch.randn(2, 6, 4),)
    program = corey.from_torch(First(), given)
    check(program, First(), given)
    check(program, First(), tuple(t.contiguous() for t in given))


def test_other_discretizations_of_the_loop():
    class Other(Parameters):
        def forward(self, u, delta, B, C):
            # A constant in dt, B per channel, the skip inside the loop.
            A, dt = -torch.exp(self.A_log), 0.5 * torch.sigmoid(delta)
            B = B[:, :, None, :] * (1 + self.D[:, None])
            h, ys = torch.zeros(u.shape[0], *A.shape, dtype=u.dtype), []
            for i in range(u.shape[1]):
                h = B[:, i] * (u[:, i] * dt[:, i])[..., None] + h * torch.exp(A * dt[:, i][..., None])
                ys.append((C[:, i, None] * h).sum(-1) + self.D * u[:, i])
            return torch.stack(ys, dim=1)

    given = inputs(2, 5)
    check(corey.from_torch(Other(), given), Other(), given)


def test_ops_of_corey():
    from corey import ops

    class Ops(Parameters):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(6, 6, 4, groups=6)

        def forward(self, u, delta, B, C):
            u, delta, B, C = (t.transpose(1, 2) for t in (u, delta, B, C))
            u = ops.causal_conv1d_fn(u, self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
            y = ops.selective_scan_fn(u, delta, -torch.exp(self.A_log), B, C, self.D, delta_softplus=True)
            return y.transpose(1, 2)

    class Plain(Ops):
        def forward(self, u, delta, B, C):
            u = F.silu(self.conv(F.pad(u.transpose(1, 2), (3, 0)))).transpose(1, 2)
            return Loop.forward(self, u, delta, B, C)

    module, plain, given = Ops(), Plain(), inputs(2, 7)
    plain.load_state_dict(module.state_dict())
    for one in (module, plain):
        program = corey.from_torch(one, given)
        assert program.counts["causal_conv"] == 1 and program.counts["selective_scan"] == 1
        check(program, plain, given)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_mixers_of_transformers(kind):
    """In plain torch, as they are without mamba_ssm: a loop over tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=16, conv_kernel=4, expand=2, time_step_rank=2, intermediate_size=16
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = transformers.AutoModelForCausalLM.from_config(config).backbone.layers[0].mixer.eval()
    plain = getattr(mixer, "slow_forward", mixer.forward)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = mixer

        def forward(self, x):
            return plain(x)

    given = torch.randn(2, 6, 8)
    program = corey.from_torch(Plain(), given)
    assert program.counts["selective_scan"] == 1 and program.counts["causal_conv"] == 1
    with torch.no_grad():
        torch.testing.assert_close(program(given), Plain()(given), rtol=1e-4, atol=1e-5)


class Generic(Parameters):
    """With the pair the other way round."""

    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)
        values = dt[..., None] * B[:, :, None, :] * u[..., None]
        h, _ = associative_scan(
            lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]), (values, torch.exp(dt[..., None] * A)), 1, combine_mode="generic"
        )
        return (h * C[:, :, None]).sum(-1)


def test_generic_associative_scans():
    module = Generic()
    program = corey.from_torch(module, inputs(2, 5))
    assert program.counts["selective_scan"] == 1
    for shape in [(2, 5), (1, 1), (3, 2), (1, 70)]:
        check(program, module, inputs(*shape))


class Several(Parameters):
    """Three states of two decays in one scan, in any order."""

    def __init__(self, mode, *rest):
        super().__init__(*rest)
        self.mode = mode

    def forward(self, u, delta, B, C):
        A, dt = -torch.exp(self.A_log), F.softplus(delta)
        slow, fast = torch.exp(dt[..., None] * A), torch.exp(dt[..., None] * (A * 3))
        first = dt[..., None] * B[:, :, None, :] * u[..., None]
        second = dt[..., None] * B[:, :, None, :] * torch.sigmoid(u)[..., None]

        def combine(x, y):
            (a, h, g, b, k), (c, p, q, d, r) = x, y
            return a * c, c * h + p, q + d * g, d * b, r + k * c

        _, h, g, _, k = associative_scan(combine, (slow, first, first, fast, second), 1, combine_mode=self.mode)
        outputs = [(s * C[:, :, None]).sum(-1) for s in (h, g, k)]
        return outputs[0] + 2 * outputs[1], outputs[2]


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
def test_associative_scans_of_several_states(mode):
    module = Several(mode)
    program = corey.from_torch(module, inputs(2, 5))
    assert program.counts["selective_scan"] == 3
    for shape in [(2, 5), (1, 1), (3, 2), (1, 70)]:
        given = inputs(*shape)
        with torch.no_grad():
            # torch has code for pointwise ones on a GPU alone.
            wanted = Several("generic")
            wanted.load_state_dict(module.state_dict())
            wanted = wanted(*given)
        torch.testing.assert_close(program(*given), wanted, rtol=1e-4, atol=1e-5)


def test_scans_of_other_functions_are_refused():
    class Sum(Parameters):
        def forward(self, x):
            return associative_scan(lambda a, b: a + b, x, 1, combine_mode="generic")

    class Product(Parameters):
        def forward(self, x, y):
            return associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] * b[1]), (x, y), 1, combine_mode="generic")[1]

    x = torch.randn(2, 5, 4)
    with pytest.raises(corey.UnsupportedError, match="expected pairs of a decay and a value, got 1 tensors"):
        corey.from_torch(Sum(), x)
    with pytest.raises(corey.UnsupportedError, match="a recurrence h = a h . b, got another combination"):
        corey.from_torch(Product(), (x, x))


def test_gradients_are_refused():
    program = corey.from_torch(Mixer(), torch.randn(2, 4, 8))
    with pytest.raises(RuntimeError, match="x: expected a tensor without gradients"):
        program(torch.randn(2, 4, 8, requires_grad=True))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def almost_a_scan(x):
    h, ys = torch.zeros(x.shape[0], 4, 3), []
    for t in range(x.shape[1]):
        # One step decays by something else.
        h = torch.exp(-x[:, t, :, None] * (2.0 if t == 2 else 1.0)) * h + x[:, t, :, None] * x[:, t, None, :3]
        ys.append((h * x[:, t, None, :3]).sum(-1))
    return torch.stack(ys, 1)


def no_dt_in_the_input(x):
    h, ys = torch.zeros(x.shape[0], 4, 3), []
    A = torch.ones(4, 3)
    for t in range(x.shape[1]):
        h = torch.exp(-x[:, t, :, None] * A) * h + x[:, t, None, :3].expand(-1, 4, 3)
        ys.append((h * x[:, t, None, :3]).sum(-1))
    return torch.stack(ys, 1)


@pytest.mark.parametrize(
    "function,error",
    [
        (torch.cumsum, None),
        (lambda x: torch.cos(x), r"aten\.cos.*test_from_torch\.py.*expected an op that COREY has"),
        (lambda x: torch.flip(x, [1]), r"aten\.flip.*test_from_torch\.py"),
        (lambda x: x / x, r"aten\.div.*expected a tensor divided by a number"),
        (lambda x: x.sum(-1), r"aten\.sum.*expected a product with a weight"),
        (lambda x: F.softplus(x, beta=2), r"softplus.*expected beta 1"),
        (lambda x: x.double(), r"expected float32, float16 or bfloat16, got float64"),
        (almost_a_scan, r"aten\.stack.*steps that differ in more than their token"),
        (no_dt_in_the_input, r"expected dt B u"),
    ],
    ids=range(9),
)
def test_all_else_is_refused_by_name(function, error):
    if error is None:
        function, error = (lambda x: torch.cumsum(x, 1)), r"aten\.cumsum.*test_from_torch\.py:\d+"
    with pytest.raises(corey.UnsupportedError, match=error):
        corey.from_torch(Apply(function), torch.randn(2, 5, 4))


def half_written(x):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 1]
    return y + x


def test_a_half_written_buffer_is_refused():
    with pytest.raises(corey.UnsupportedError, match=r"aten\.add.*expected a tensor whose tokens are all written"):
        corey.from_torch(Apply(half_written), torch.randn(2, 3, 4))


def test_numbers_are_those_of_the_example():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return F.silu(x) * factor

    program = corey.from_torch(Scaled(), (torch.randn(2, 3, 4), 0.5))
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(program(x, 0.5), F.silu(x) * 0.5)
    with pytest.raises(ValueError, match="expected 0.5, as in the example, got 0.25"):
        program(x, 0.25)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="module: expected a torch.nn.Module, got function"):
        corey.from_torch(lambda x: x, torch.ones(2))
    program = corey.from_torch(Apply(F.silu), torch.randn(2, 3, 4))
    with pytest.raises(TypeError, match="expected torch.float32, got torch.float64"):
        program(torch.randn(2, 3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected 3 axes, got 2"):
        program(torch.randn(2, 3))


def test_tutorial(tmp_path, capsys):
    """The page as it stands."""
    page = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "FromTorch.md")
    with open(page) as file:
        blocks = re.findall(r"```python\n(.*?)```", file.read(), re.S)
    assert len(blocks) == 7
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    torch._dynamo.reset()
    runpy.run_path(str(script))
    said = capsys.readouterr().out
    assert "1 selective_scan" in said and "ssm.selective_scan" in said
    assert "fft_rfft" in said and "page.py" in said


# ===-- torch.compile ------------------------------------------------------=== #


def test_backend_takes_a_whole_block():
    from corey import dynamo

    torch._dynamo.reset()
    dynamo.reset()
    module = Mixer()
    compiled = torch.compile(module, backend="corey")
    for length in (5, 9):
        given = torch.randn(2, length, 8)
        with torch.no_grad():
            check(compiled, module, (given,))
    row = dynamo.stats()[0]
    assert row["programs"] == 1 and row["ops_torch"] == 0 and row["ops_corey"] > 10 and row["calls_corey"] >= 1
    # Changed parameters are seen.
    with torch.no_grad():
        module.A_log.add_(0.5)
        check(compiled, module, (given,))


def test_backend_leaves_the_rest_to_torch():
    from corey import dynamo

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = Mixer()

        def forward(self, x):
            return torch.cos(self.mixer(torch.flip(x, [1])))

    torch._dynamo.reset()
    dynamo.reset()
    module = Partly()
    with torch.no_grad():
        check(torch.compile(module, backend="corey"), module, (torch.randn(2, 6, 8),))
    row = dynamo.stats()[0]
    assert row["programs"] == 1 and row["ops_torch"] == 2 and "aten." in row["reason"], row


def test_backend_leaves_gradients_to_torch():
    from corey import dynamo

    torch._dynamo.reset()
    dynamo.reset()
    module = Loop()
    given = inputs(1, 3)
    torch.compile(module, backend="corey")(*given).sum().backward()
    want = copy.deepcopy(module)
    want.zero_grad()
    want(*given).sum().backward()
    torch.testing.assert_close(module.A_log.grad, want.A_log.grad)
    assert dynamo.stats()[0]["calls_torch"] == 1
