"""What keeps memory alive: results, views of them, programs and tensors let go in any
order. `check-asan.sh` runs this under AddressSanitizer."""

import gc
import threading

import numpy as np
import pytest
import references as ref
from libraries import FromLibrary

import corey
import corey.ops as ops

NEGATED = """func.func @main(%x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %0 = ssm.neg %x : tensor<?x?xf32>
  return %0 : tensor<?x?xf32>
}"""
rng = np.random.default_rng(7)


def normal(*shape):
    return rng.standard_normal(shape).astype("float32")


def test_results_outlive_what_made_them():
    x = normal(64, 1000)
    result = corey.compile(NEGATED)(FromLibrary(x))
    view = np.from_dlpack(result)[3:, ::2]
    kept = result.numpy() if hasattr(result, "numpy") else np.asarray(result)
    wanted = -x
    del x, result
    ops.cache_clear()
    gc.collect()
    normal(64, 1000)
    assert np.array_equal(view, wanted[3:, ::2]) and np.array_equal(kept, wanted)
    del kept
    gc.collect()
    assert np.array_equal(view, wanted[3:, ::2])


def test_inputs_end_with_the_call():
    import weakref

    class Array(np.ndarray):
        pass

    x = normal(5, 8).view(Array)
    held = weakref.ref(x)
    out = ops.hadamard_transform(x)
    wanted = ref.hadamard(np.asarray(x), 1.0)
    del x
    gc.collect()
    assert held() is None and ref.error(out, wanted) < 1e-6


def test_plans_end_while_others_call():
    """Caches are emptied under the calls of another thread."""
    x, failures, done = normal(4, 16), [], threading.Event()
    wanted = ref.hadamard(x, 1.0)

    def clear():
        while not done.is_set():
            ops.cache_clear()
            gc.collect()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(30):
            if not ref.error(ops.hadamard_transform(x), wanted) < 1e-6:
                failures.append(1)
    finally:
        done.set()
        thread.join()
    assert not failures


def test_what_fails_half_way():
    """The arguments that were read before the one that is refused are let go."""
    u, m = normal(2, 4, 6), normal(2, 8, 6)
    for bad in ([1.0], u.astype("complex64"), object()):
        for _ in range(20):
            with pytest.raises(TypeError):
                ops.selective_scan_fn(u, u, bad, m, m)
    u.resize((2, 4, 7), refcheck=False)
    u[:] = 1
    odd = np.zeros(4 * 8 + 1, "uint8")[1:].view("float32")
    with pytest.raises(ValueError, match="x: .*misaligned"):
        ops.hadamard_transform(odd)


def test_many_axes():
    x = normal(*[1] * 14, 2, 4)
    assert ref.error(ops.hadamard_transform(x), ref.hadamard(x, 1.0)) < 1e-6
    assert ref.error(ops.hadamard_transform(x.view(np.ndarray).T[..., None, :].swapaxes(0, -1)),
                     ref.hadamard(x.T[..., None, :].swapaxes(0, -1), 1.0)) < 1e-6  # fmt: skip


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 1000)
    wanted = -x
    program = corey.compile(NEGATED)
    y = program(x)
    part = y[5:, ::3]
    z = torch.from_dlpack(program(FromLibrary(x)))
    del x, y, program
    gc.collect()
    torch.randn(64, 1000)
    assert torch.equal(part, wanted[5:, ::3]) and torch.equal(z, wanted)
