"""The package with torch: tensors, torch.library, compilation, gradients."""

import numpy as np
import pytest
import references as ref
from libraries import FromLibrary

torch = pytest.importorskip("torch")

import corey
import corey.ops as ops

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(4)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def scan_arguments(device="cpu", dtype=torch.float32, batch=2, dim=4, n=8, length=12, last=False, grad=False):
    def normal(*shape, kind=dtype):
        x = torch.randn(*shape, device=device).to(kind)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if last and len(shape) == 3 else x

    tensors = dict(
        u=normal(batch, dim, length), delta=normal(batch, dim, length).abs() * 0.5,
        A=-torch.rand(dim, n, device=device) - 0.1, B=normal(batch, n, length), C=normal(batch, n, length),
        D=normal(dim, kind=torch.float32), z=normal(batch, dim, length), delta_bias=normal(dim, kind=torch.float32) * 0.3,
    )  # fmt: skip
    return {name: t.detach().requires_grad_(grad) for name, t in tensors.items()}


def ssd_arguments(device="cpu", dtype=torch.float32, batch=2, length=10, heads=4, width=4, groups=2, n=8, grad=False):
    def normal(*shape, kind=dtype):
        return torch.randn(*shape, device=device).to(kind)

    tensors = dict(
        x=normal(batch, length, heads, width), dt=normal(batch, length, heads).abs() * 0.3,
        A=-torch.rand(heads, device=device) - 0.1, B=normal(batch, length, groups, n), C=normal(batch, length, groups, n),
        D=normal(heads, kind=torch.float32), z=normal(batch, length, heads, width),
        dt_bias=normal(heads, kind=torch.float32) * 0.3, initial_states=normal(batch, heads, width, n, kind=torch.float32),
    )  # fmt: skip
    return {name: t.detach().requires_grad_(grad) for name, t in tensors.items()}


def inner_arguments(device="cpu", dim=6, n=4, rank=3, model=5, length=9, grad=False):
    def normal(*shape):
        return (0.5 * torch.randn(*shape, device=device)).requires_grad_(grad)

    return [
        normal(2, 2 * dim, length), normal(dim, 1, 4), normal(dim), normal(rank + 2 * n, dim), normal(dim, rank),
        normal(model, dim), normal(model), (-torch.rand(dim, n, device=device) - 0.1).requires_grad_(grad), None, None,
        normal(dim), normal(dim), normal(n), normal(n), normal(n), normal(n), normal(rank),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("last", [False, True])
def test_selective_scan(device, dtype, last):
    a = scan_arguments(device, dtype, last=last)
    out, state = ops.selective_scan_fn(**a, delta_softplus=True, return_last_state=True)
    wanted, final = ref.selective_scan(**a, delta_softplus=True)
    assert out.dtype == dtype and out.device.type == device and state.dtype == torch.float32
    assert out.stride() == a["delta"].stride()
    assert ref.error(out, wanted) < TOLERANCE[dtype] and ref.error(state, final) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_chunk_scan(device, dtype):
    a = ssd_arguments(device, dtype)
    out, state = ops.mamba_chunk_scan_combined(chunk_size=4, **a, dt_softplus=True, return_final_states=True)
    wanted, states = ref.chunk_scan(**a, dt_softplus=True)
    assert ref.error(out, wanted) < 2 * TOLERANCE[dtype] and ref.error(state, states[:, -1]) < 2 * TOLERANCE[dtype]


def test_sequences(device):
    a = ssd_arguments(device)
    del a["initial_states"]
    seq_idx = torch.tensor([[0] * 3 + [1] * 7, [0] * 9 + [1]], dtype=torch.int32, device=device)
    out = ops.mamba_chunk_scan_combined(chunk_size=4, **a, seq_idx=seq_idx)
    assert ref.error(out, ref.chunk_scan(**a, seq_idx=seq_idx.cpu().numpy())[0]) < 3e-6
    x = torch.randn(2, 6, 10, device=device)
    w = torch.randn(6, 4, device=device)
    assert ref.error(ops.causal_conv1d_fn(x, w, seq_idx=seq_idx), ref.conv(x, w, seq_idx=seq_idx.cpu().numpy())[0]) < 3e-6


def test_updates_in_place(device):
    a = scan_arguments(device, length=1)
    flat = {k: v[..., 0] if v.dim() == 3 else v for k, v in a.items()}
    state = torch.randn(2, 4, 8, device=device)
    wanted, after = ref.selective_scan(**a, delta_softplus=True, state=state)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    out = ops.selective_state_update(state, *(flat[name] for name in names), dt_softplus=True)
    assert ref.error(out, wanted[..., 0]) < 3e-6 and ref.error(state, after) < 3e-6
    for held in (3, 4):
        conv_state, x, w = torch.randn(2, 6, held, device=device), torch.randn(2, 6, device=device), torch.randn(6, 4, device=device)
        wanted = ref.conv(x[:, :, None], w, None, conv_state[:, :, held - 3 :], activation="silu")[0]
        after = torch.cat([conv_state, x[:, :, None]], -1)[:, :, -held:]
        assert ref.error(ops.causal_conv1d_update(x, conv_state, w, None, "silu"), wanted[..., 0]) < 3e-6
        assert torch.equal(conv_state, after)


def test_hadamard(device):
    x = torch.randn(3, 24, device=device)
    assert ref.error(ops.hadamard_transform(x, 0.5), ref.hadamard(x, 0.5)) < 1e-6


def cases(grad):
    """The ops as torch registers them."""
    a, s, inner = scan_arguments(grad=grad), ssd_arguments(grad=grad), inner_arguments(grad=grad)
    seq_idx = torch.tensor([[0] * 3 + [1] * 7, [0] * 9 + [1]], dtype=torch.int32)
    x, w, b = (torch.randn(*shape).requires_grad_(grad) for shape in ((2, 6, 10), (6, 4), (6,)))
    last = torch.randn(2, 10, 6).transpose(1, 2).detach().requires_grad_(grad)
    start = torch.randn(2, 6, 3).requires_grad_(grad)
    o = torch.ops.corey
    return {
        "selective_scan": (o.selective_scan, (*a.values(), True)),
        "selective_scan_last": (o.selective_scan, (*scan_arguments(grad=grad, last=True).values(), False)),
        "selective_scan_least": (o.selective_scan, (*list(a.values())[:5], None, None, None, False)),
        "chunk_scan": (o.chunk_scan, (*s.values(), None, None, True, 0.0, float("inf"), False)),
        "chunk_scan_packed": (o.chunk_scan, (*s.values(), seq_idx, None, True, 0.01, 0.4, False)),
        "chunk_scan_varlen": (o.chunk_scan, (*(t[:1] if t.dim() > 2 else t for t in list(s.values())[:8]), None, seq_idx[:1],
                                             torch.tensor([0, 3, 10], dtype=torch.int32), True, 0.0, float("inf"), True)),
        "conv": (o.causal_conv1d, (x, w, b, None, start, True)),
        "conv_last": (o.causal_conv1d, (last, w, None, None, None, False)),
        "conv_packed": (o.causal_conv1d, (x, w, b, seq_idx, None, True)),
        "hadamard": (o.hadamard, (torch.randn(3, 12).requires_grad_(grad), 0.5)),
        "mamba_inner": (o.mamba_inner, (*inner, True, 1e-6)),
    }  # fmt: skip


NAMES = ["selective_scan", "selective_scan_last", "selective_scan_least", "chunk_scan", "chunk_scan_packed",
         "chunk_scan_varlen", "conv", "conv_last", "conv_packed", "hadamard", "mamba_inner"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    op, arguments = cases(grad=True)[name]
    torch.library.opcheck(op, arguments)


def test_opcheck_of_updates():
    x, w = torch.randn(2, 6), torch.randn(6, 4)
    for state in (torch.randn(2, 6, 4), torch.randn(2, 3, 6).transpose(1, 2)):
        torch.library.opcheck(torch.ops.corey.causal_conv1d_update, (x, state, w, None, True, None))
    a = [t[..., 0] if t.dim() == 3 else t for t in scan_arguments().values()]
    torch.library.opcheck(torch.ops.corey.selective_state_update, (torch.randn(2, 4, 8), *a, True, None))


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    """Against differences of the op itself; and the reference that is differentiated
    against the op's results."""
    import corey.ops.torch as registered

    op, arguments = cases(grad=True)[name]
    key = {"conv": "causal_conv"}.get(name.partition("_")[0], "_".join(name.split("_")[:2]) if name != "hadamard" else name)
    reference = registered._REFERENCES[key][0]
    tensors = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = op(*arguments)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o.numel()]
    wanted = [o for o in reference(*arguments) if o.numel()]
    for got, other in zip(outputs, wanted):
        assert ref.error(got, other) < 1e-5
    weights = [torch.randn_like(o) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights))
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    # A step along a random direction changes the loss as the gradients say.
    steps = [torch.randn_like(t) for t in tensors]
    predicted = sum((g.double() * s.double()).sum() for g, s in zip(found, steps))

    def at(scale):
        moved = iter([t.detach() + scale * s for t, s in zip(tensors, steps)])
        values = [next(moved) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in arguments]
        results = op(*values)
        results = [results] if isinstance(results, torch.Tensor) else [o for o in results if o.numel()]
        return sum((o.double() * w.double()).sum() for o, w in zip(results, weights))

    h = 2e-3
    measured = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    size = sum((g.double() ** 2).sum() for g in found).sqrt() + 1
    assert abs(measured - predicted) < 5e-3 * size, (measured, predicted)


def test_training_goes_through_the_public_functions():
    a = scan_arguments(grad=True)
    ops.selective_scan_fn(**a, delta_softplus=True).square().sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in a.values())
    with pytest.raises(RuntimeError):
        grad = torch.autograd.grad(ops.selective_scan_fn(**a).sum(), a["u"], create_graph=True)[0]
        grad.sum().backward()


def test_what_torch_makes_of_calls():
    """Transforms, modes and traces see the op, not what it computed once."""
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 8)
    graph = make_fx(lambda v: ops.hadamard_transform(v))(x)
    assert any(node.target is torch.ops.corey.hadamard.default for node in graph.graph.nodes)
    other = torch.randn(3, 8)
    traced = torch.jit.trace(lambda v: ops.hadamard_transform(v) + 1, (x,))
    assert torch.equal(traced(other), ops.hadamard_transform(other) + 1)
    assert ref.error(torch.vmap(ops.hadamard_transform)(x), ref.hadamard(x, 1.0)) < 1e-6
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda v: ops.hadamard_transform(v).sum())(x)
    with forward_ad.dual_level():
        assert torch.equal(ops.hadamard_transform(x), ops.hadamard_transform(x))
        with pytest.raises(NotImplementedError, match="hadamard_transform: expected tensors without derivatives that are taken forward"):
            ops.hadamard_transform(forward_ad.make_dual(x, torch.ones_like(x)))


def test_views_with_other_signs():
    x = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert ref.error(ops.hadamard_transform(x), ref.hadamard(x.resolve_neg(), 1.0)) < 1e-6
    program = corey.compile("""func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %0 = ssm.neg %x : tensor<?x8xf32>
      return %0 : tensor<?x8xf32>
    }""")
    with pytest.raises(ValueError, match="x: expected a tensor of what is in memory"):
        program(x)


def test_updates_refuse_gradients():
    x = torch.randn(2, 6, requires_grad=True)
    with pytest.raises(NotImplementedError, match="expected tensors without gradients"):
        ops.causal_conv1d_update(x, torch.zeros(2, 6, 4), torch.randn(6, 4))
    with torch.no_grad():
        ops.causal_conv1d_update(x, torch.zeros(2, 6, 4), torch.randn(6, 4))


def test_compile_fullgraph():
    def block(u, delta, A, B, C, D, z, bias, x, dt, a, b, c, w):
        y = ops.selective_scan_fn(u, delta, A, B, C, D, z, bias, True)
        y = ops.causal_conv1d_fn(y, w, activation="silu")
        s = ops.mamba_chunk_scan_combined(x, dt, a, b, c, 8, dt_softplus=True)
        return ops.hadamard_transform(y, 0.5).sum() + s.sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for length in (12, 9):
        s = list(ssd_arguments(length=length).values())[:5]
        arguments = [*scan_arguments(length=length).values(), *s, torch.randn(4, 4)]
        assert torch.allclose(compiled(*arguments), block(*arguments), rtol=1e-4)


def test_compile_of_updates():
    def step(state, conv_state, x, w, A, B):
        y = ops.causal_conv1d_update(x, conv_state, w, activation="silu")
        return ops.selective_state_update(state, y, y.abs(), A, B, B)

    arguments = [torch.randn(2, 4, 8), torch.randn(2, 4, 4), torch.randn(2, 4), torch.randn(4, 4), -torch.rand(4, 8), torch.randn(2, 8)]
    other = [t.clone() for t in arguments]
    with torch.no_grad():
        y = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments)
        assert torch.allclose(y, step(*other))
    assert all(torch.equal(a, b) for a, b in zip(arguments, other))


def test_export():
    class Block(torch.nn.Module):
        def forward(self, u, delta, A, B, C):
            return ops.selective_scan_fn(u, delta, A, B, C, delta_softplus=True)

    arguments = tuple(scan_arguments().values())[:5]
    length = torch.export.Dim("length", min=2, max=1000)
    shapes = ({2: length}, {2: length}, None, {2: length}, {2: length})
    program = torch.export.export(Block(), arguments, dynamic_shapes=shapes)
    longer = tuple(scan_arguments(length=31).values())[:5]
    assert torch.allclose(program.module()(*longer), Block()(*longer))


def test_programs_take_tensors(device):
    program = corey.compile(
        """func.func @main(%x: tensor<?x?xbf16>) -> tensor<?x?xbf16> {
          %0 = ssm.neg %x : tensor<?x?xbf16>
          return %0 : tensor<?x?xbf16>
        }""",
        device=device,
    )
    x = torch.randn(3, 5, device=device).bfloat16()
    y = program(x)
    assert isinstance(y, torch.Tensor) and y.device.type == device and torch.equal(y, -x)
    assert torch.equal(program(x[:, ::2]), -x[:, ::2])
    w = torch.nn.Parameter(x)
    with pytest.raises(TypeError, match="x: expected a tensor without a gradient"):
        program(w)
    with torch.no_grad():
        assert torch.equal(program(w), -x)
    if device == "cpu":
        shared = torch.from_dlpack(program(FromLibrary(x)))
        assert torch.equal(shared, -x)


def test_mixed_devices_are_refused():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    a = scan_arguments()
    with pytest.raises(ValueError, match="expected every tensor on cuda:0, got delta on cpu"):
        ops.selective_scan_fn(**{**a, "u": a["u"].cuda()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_streams_and_graphs():
    a = scan_arguments("cuda", torch.bfloat16, dim=64, length=300)
    wanted = ops.selective_scan_fn(**a, delta_softplus=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(ops.selective_scan_fn(**a, delta_softplus=True), wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.selective_scan_fn(**a, delta_softplus=True)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
