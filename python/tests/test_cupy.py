"""The package with CuPy: arrays where they lie, on CuPy's current stream."""

import numpy as np
import pytest
import references as ref

cupy = pytest.importorskip("cupy")

try:
    cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    pytest.skip("no CUDA device", allow_module_level=True)

import corey
import corey.ops as ops

rng = np.random.default_rng(5)


def normal(*shape, dtype="float32"):
    return cupy.asarray(rng.standard_normal(shape).astype(dtype))


def error(found, wanted):
    return ref.error(cupy.asnumpy(found), wanted)


def numbers(*arrays):
    return [cupy.asnumpy(a) for a in arrays]


def test_programs():
    program = corey.compile("""func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %0 = ssm.neg %x : tensor<?x8xf32>
      return %0 : tensor<?x8xf32>
    }""", device="cuda")  # fmt: skip
    x = normal(3, 8)
    y = program(x)
    assert isinstance(y, cupy.ndarray) and cupy.array_equal(y, -x)
    out = cupy.zeros((3, 8), "float32")
    assert program(x, out=out) is out and cupy.array_equal(out, -x)
    # Views of any strides, and sizes there are none of.
    for view in (normal(8, 6).T, normal(6, 16)[::2, ::2], normal(0, 8), normal(5, 8)[::-1]):
        assert cupy.array_equal(program(view), -view)
    with pytest.raises(ValueError, match="expected device cuda:0, got cpu"):
        program(np.ones((3, 8), "float32"))
    with pytest.raises((TypeError, ValueError), match="expected .*f32.*, got .*f64"):
        program(cupy.ones((3, 8), "float64"))


def test_tensors_are_shared():
    tensor = corey._core.range_tensor(5, "cuda")
    one, other = cupy.from_dlpack(tensor), cupy.from_dlpack(tensor)
    one[0] = 7
    assert one.data.ptr == other.data.ptr and int(other[0]) == 7
    del tensor, one
    assert other.tolist() == [7, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype,bound", [("float32", 3e-6), ("float16", 1e-3)])
def test_ops(dtype, bound):
    u, delta, B, D = normal(2, 4, 7, dtype=dtype), abs(normal(2, 4, 7, dtype=dtype)), normal(2, 3, 7, dtype=dtype), normal(4)
    A = -cupy.exp(normal(4, 3))
    out, state = ops.selective_scan_fn(u, delta, A, B, B, D, return_last_state=True)
    wanted, last = ref.selective_scan(*numbers(u, delta, A, B, B, D))
    assert isinstance(out, cupy.ndarray) and out.dtype == dtype and isinstance(state, cupy.ndarray)
    assert error(out, wanted) < bound and error(state, last) < bound
    weight = normal(4, 3, dtype=dtype)
    out, final = ops.causal_conv1d_fn(u, weight, D.astype(dtype), return_final_states=True, activation="silu")
    y, last = ref.conv(*numbers(u, weight, D.astype(dtype)), activation="silu")
    assert error(out, y) < bound and error(final, last) < bound
    x = normal(6, 8, dtype=dtype)
    assert error(ops.hadamard_transform(x, 0.5), ref.hadamard(cupy.asnumpy(x), 0.5)) < bound


def test_states_are_updated():
    state = normal(2, 4, 3)
    x, dt, B, A = normal(2, 4), abs(normal(2, 4)), normal(2, 3), -cupy.exp(normal(4, 3))
    before = cupy.asnumpy(state)
    out = ops.selective_state_update(state, x, dt, A, B, B)
    xs, dts, Bs, As = numbers(x, dt, B, A)
    h = np.exp(dts[..., None] * As) * before + (dts * xs)[..., None] * Bs[:, None]
    assert error(state, h) < 3e-6 and error(out, (h * Bs[:, None]).sum(-1)) < 3e-6


def test_the_current_stream():
    """Work is put behind what CuPy has on its stream, and CuPy's behind it: nothing
    is waited for on the host."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones((2048, 4096), "float32")
        y = ops.hadamard_transform(x[:, :16])
        for _ in range(60):
            x = x @ cupy.full((4096, 4096), 1 / 4096, "float32") + 1
        y = ops.hadamard_transform(x[:, :16])
        assert not stream.done
        z = y * 2
    stream.synchronize()
    assert float(cupy.abs(z[:, 0] - 2 * x[:, :16].sum(1)).max()) < 1e-3 * float(x.max())
    assert float(cupy.abs(z[:, 1:]).max()) < 1e-3 * float(x.max())
