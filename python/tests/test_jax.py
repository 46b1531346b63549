"""The package with jax, whose arrays are values: read where they lie, never written.
On the CPU, and on a GPU where jax knows one."""

import os

# A process of other libraries too: memory as it is needed.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytest
import references as ref

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import corey
import corey.ops as ops

rng = np.random.default_rng(3)


def devices():
    """COREY's names of what jax has, and its devices."""
    found = {"cpu": jax.devices("cpu")[0]}
    try:
        found["cuda"] = jax.devices("cuda")[0]
    except RuntimeError:
        pass
    return found


@pytest.fixture(params=sorted(devices()))
def device(request):
    """Where arrays that a test makes are."""
    with jax.default_device(devices()[request.param]):
        yield request.param


def is_on(array, device):
    return isinstance(array, jax.Array) and array.devices() == {devices()[device]}


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape).astype("float32"))


def negated(device):
    return corey.compile("""func.func @main(%x: tensor<?x8xf32>) -> tensor<?x8xf32> {
      %0 = ssm.neg %x : tensor<?x8xf32>
      return %0 : tensor<?x8xf32>
    }""", device=device)  # fmt: skip


def test_programs(device):
    x = normal(3, 8)
    y = negated(device)(x)
    assert is_on(y, device) and jnp.array_equal(y, -x)
    # What jax has is given to numpy and back.
    assert jnp.array_equal(jax.jit(lambda v: v + x)(y), jnp.zeros((3, 8)))


def test_values_are_not_written(device):
    program, x, out = negated(device), normal(3, 8), normal(3, 8)
    before = np.array(out)
    with pytest.raises(ValueError, match="expected a tensor that may be written, got a read-only one"):
        program(x, out=out)
    state = normal(2, 4, 3)
    column, matrix = normal(2, 4), normal(2, 3)
    with pytest.raises(ValueError, match="state: expected a tensor that may be written"):
        ops.selective_state_update(state, column, column, -jnp.ones((4, 3)), matrix, matrix)
    with pytest.raises(ValueError, match="conv_state: expected a tensor that may be written"):
        ops.causal_conv1d_update(column, normal(2, 4, 3), normal(4, 4))
    assert np.array_equal(before, out)
    # An array of numpy that jax's inputs are written to is.
    if device == "cpu":
        target = np.zeros((3, 8), "float32")
        assert program(x, out=target) is target and np.array_equal(target, -np.asarray(x))


def test_what_is_queued_is_waited_for(device):
    x = jnp.ones((512, 8), "float32")
    for _ in range(50):
        x = x @ jnp.full((8, 8), 0.125, "float32") + 1
    assert jnp.allclose(negated(device)(x), -x)


def test_devices_are_not_mixed():
    if "cuda" not in devices():
        pytest.skip("no CUDA device")
    program = negated("cuda")
    with pytest.raises(ValueError, match="expected device cuda:0, got cpu"):
        program(jax.device_put(normal(3, 8), devices()["cpu"]))
    there, here = (jax.device_put(normal(4, 3), devices()[name]) for name in ("cuda", "cpu"))
    with pytest.raises(ValueError, match="expected every tensor on cuda:0, got weight on cpu"):
        ops.causal_conv1d_fn(jax.device_put(normal(2, 4, 7), devices()["cuda"]), here)
    assert is_on(there, "cuda")


def test_ops(device):
    u, delta, B, D = normal(2, 4, 7), jnp.abs(normal(2, 4, 7)), normal(2, 3, 7), normal(4)
    A = -jnp.exp(normal(4, 3))
    out, state = ops.selective_scan_fn(u, delta, A, B, B, D, return_last_state=True)
    wanted, last = ref.selective_scan(u, delta, A, B, B, D)
    assert is_on(out, device) and is_on(state, device)
    assert ref.error(out, wanted) < 3e-6 and ref.error(state, last) < 3e-6
    seq_idx = jnp.asarray([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], jnp.int32)
    weight = normal(4, 3)
    out = ops.causal_conv1d_fn(u, weight, D, seq_idx=seq_idx)
    assert is_on(out, device)
    assert ref.error(out, ref.conv(u, weight, D, seq_idx=np.asarray(seq_idx))[0]) < 3e-6
    x, dt, b, start = normal(2, 7, 2, 4), jnp.abs(normal(2, 7, 2)), normal(2, 7, 1, 8), normal(2, 2, 4, 8)
    decay = -jnp.exp(normal(2))
    out, final = ops.mamba_chunk_scan_combined(
        x, dt, decay, b, b, 4, initial_states=start, seq_idx=seq_idx, return_final_states=True
    )
    wanted, states = ref.chunk_scan(x, dt, decay, b, b, initial_states=start, seq_idx=np.asarray(seq_idx))
    assert is_on(out, device) and is_on(final, device)
    assert ref.error(out, wanted) < 3e-6 and ref.error(final, states[:, -1]) < 3e-6


def test_hadamard_of_views_and_types(device):
    x = normal(6, 8)
    for given in (x, x.T[:, :4], x[::2], normal(3, 12)):
        out = ops.hadamard_transform(given, 0.5)
        assert is_on(out, device) and ref.error(out, ref.hadamard(given, 0.5)) < 1e-6
    half = x.astype(jnp.bfloat16)
    out = ops.hadamard_transform(half, 0.5)
    assert out.dtype == jnp.bfloat16 and ref.error(out.astype("float32"), ref.hadamard(half.astype("float32"), 0.5)) < 5e-3
