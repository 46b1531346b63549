"""Programs: compiling, running on tensors of several libraries, messages."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import references as ref
from libraries import FromLibrary

import corey

SCAN = """
func.func @main(%u: tensor<?x?x8xf32>, %delta: tensor<?x?x8xf32>, %A: tensor<8x4xf32>,
                %B: tensor<?x?x1x4xf32>, %C: tensor<?x?x1x4xf32>) -> (tensor<?x?x8xf32>, tensor<?x8x4xf32>) {
  %y, %h = ssm.selective_scan %u, %delta, %A, %B, %C {delta_softplus, chunk = #ssm.chunk<runtime = @scan>}
      : tensor<?x?x8xf32>, tensor<?x?x8xf32>, tensor<8x4xf32>, tensor<?x?x1x4xf32>, tensor<?x?x1x4xf32>
      -> tensor<?x?x8xf32>, tensor<?x8x4xf32>
  return %y, %h : tensor<?x?x8xf32>, tensor<?x8x4xf32>
}
"""
NEGATE = """
func.func @main(%x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %0 = ssm.neg %x : tensor<?x?xf32>
  return %0 : tensor<?x?xf32>
}
"""
rng = np.random.default_rng(2)


def normal(*shape):
    return rng.standard_normal(shape).astype("float32")


@pytest.fixture(scope="module")
def scan():
    return corey.compile(SCAN)


@pytest.fixture(scope="module")
def negate():
    return corey.compile(NEGATE)


def arguments(batch=2, length=50):
    return [normal(batch, length, 8), normal(batch, length, 8), -np.exp(normal(8, 4)), normal(batch, length, 1, 4),
            normal(batch, length, 1, 4)]  # fmt: skip


def wanted(u, delta, A, B, C):
    y, h = ref.selective_scan(*(v.swapaxes(1, 2) for v in (u, delta)), A, *(v[:, :, 0].swapaxes(1, 2) for v in (B, C)),
                              delta_softplus=True)  # fmt: skip
    return y.swapaxes(1, 2), h


@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
def test_a_program_of_any_batch_and_length(scan, chunk):
    scan.set_chunk("scan", chunk)
    for batch, length in [(1, 1), (2, 50), (3, 129)]:
        inputs = arguments(batch, length)
        y, h = scan(*inputs)
        assert isinstance(y, np.ndarray) and y.dtype == "float32"
        for got, reference in zip((y, h), wanted(*inputs)):
            assert ref.error(got, reference) < 2e-6
    row = scan.explain()[0]
    assert row["length"] == 129 and (row["chunk"] == chunk or chunk == 0 or chunk > 129)
    scan.set_chunk("scan", 0)


def test_inputs_by_name_and_given_outputs(scan):
    inputs = arguments()
    names = [a.name for a in scan.inputs]
    assert names == ["u", "delta", "A", "B", "C"]
    assert scan.inputs[0].shape == (-1, -1, 8) and scan.inputs[0].dtype == "f32"
    out = (np.zeros((2, 50, 8), "float32"), np.zeros((2, 8, 4), "float32"))
    results = scan(*inputs[:2], **dict(zip(names[2:], inputs[2:])), out=out)
    assert results[0] is out[0] and results[1] is out[1]
    assert ref.error(out[0], wanted(*inputs)[0]) < 2e-6


def test_strided_inputs_and_outputs(scan):
    inputs = arguments()
    wide = np.zeros((2, 50, 16), "float32")
    wide[:, :, ::2] = inputs[0]
    out = (np.zeros((2, 8, 50), "float32").swapaxes(1, 2), np.zeros((2, 8, 4), "float32"))
    y, _ = scan(wide[:, :, ::2], *inputs[1:], out=out)
    assert ref.error(y, wanted(*inputs)[0]) < 2e-6


def test_empty(negate):
    assert negate(np.zeros((0, 3), "float32")).shape == (0, 3)
    assert negate(np.zeros((3, 0), "float32")).shape == (3, 0)


def test_a_file_and_its_phases(tmp_path):
    path = tmp_path / "negate.mlir"
    path.write_text(NEGATE)
    x = normal(3, 5)
    assert np.array_equal(corey.compile(path)(x), -x)
    assert np.array_equal(corey.compile(str(path))(x), -x)
    assert "ssm.neg" in corey.emit(path, "captured")
    assert "llvm.func" in corey.emit(path, "llvm")


def test_weights(tmp_path):
    program = corey.compile("""
      ssm.weight @w : tensor<4x8xf32>
      func.func @main(%x: tensor<?x8xf32>) -> tensor<?x4xf32> {
        %w = ssm.get_weight @w : tensor<4x8xf32>
        %y = ssm.projection %x, %w : tensor<?x8xf32>, tensor<4x8xf32> -> tensor<?x4xf32>
        return %y : tensor<?x4xf32>
      }""")
    assert program.weights[0].name == "w" and program.weights[0].shape == (4, 8)
    x, w = normal(3, 8), normal(4, 8)
    with pytest.raises(ValueError, match="weight"):
        program(x)
    # The program keeps the array.
    program.bind_weights({"w": w.copy()})
    gc.collect()
    assert ref.error(program(x), x.astype("f8") @ w.T.astype("f8")) < 1e-6
    assert np.array_equal(np.asarray(program.weight("w")), w)


def test_dlpack_in_and_out(negate):
    x = normal(3, 5)
    result = negate(FromLibrary(x))
    assert isinstance(result, corey.Tensor)
    assert result.shape == (3, 5) and result.dtype == "f32" and result.device == "cpu"
    assert np.array_equal(np.asarray(result), -x)
    assert np.array_equal(np.from_dlpack(result), -x)
    assert np.array_equal(np.asarray(negate(result)), x)


def test_results_outlive_all_else():
    program = corey.compile(NEGATE)
    x = normal(64, 64)
    tensor = program(FromLibrary(x))
    array, again = tensor.numpy(), np.from_dlpack(tensor)
    assert array.ctypes.data == again.ctypes.data  # No copies.
    del program, tensor
    gc.collect()
    [normal(64, 64) for _ in range(100)]
    assert np.array_equal(array, -x) and np.array_equal(again, -x)


def test_inputs_are_not_copied_nor_kept(negate):
    x = normal(4, 4)
    count = sys.getrefcount(x)
    for _ in range(10):
        negate(x)
    assert sys.getrefcount(x) == count


def test_an_unused_capsule_frees_its_tensor(negate):
    result = negate(FromLibrary(normal(256, 1024)))
    for _ in range(2000):
        result.__dlpack__()


REFUSED = [
    (TypeError, r"expected 5 inputs \(u, delta, A, B, C\), got 1", lambda scan: scan(np.zeros((1, 1, 8), "f4"))),
    (TypeError, "u: expected a tensor .* got list", lambda scan: scan([[1.0]], *arguments()[1:])),
    (TypeError, "u: expected float64", lambda scan: scan(arguments()[0].astype(">f4"), *arguments()[1:])),
    (TypeError, "u: expected float64", lambda scan: scan(arguments()[0] + 1j, *arguments()[1:])),
    (ValueError, "input 'u': expected dtype f32, got f64", lambda scan: scan(arguments()[0].astype("f8"), *arguments()[1:])),
    (ValueError, "expected .* got", lambda scan: scan(arguments()[0][:, :, :7], *arguments()[1:])),
    (ValueError, "expected .* got", lambda scan: scan(arguments()[0][:, :3], *arguments()[1:])),
    (TypeError, "expected delta, A, B, C, got nothing", lambda scan: scan(u=arguments()[0])),
    (TypeError, "expected inputs u, delta, A, B, C, got x", lambda scan: scan(x=arguments()[0])),
    (TypeError, "out: expected 2 tensors, got 1", lambda scan: scan(*arguments(), out=np.zeros(3))),
    (ValueError, "function: expected one of main, got other", lambda scan: scan(*arguments(), function="other")),
    (TypeError, "stream: expected a number", lambda scan: scan(*arguments(), stream="main")),
    (ValueError, "stream", lambda scan: scan(*arguments(), stream=1)),
    (ValueError, "expected a chunk site", lambda scan: scan.set_chunk("other", 3)),
    (ValueError, "expected .* got", lambda scan: scan.set_chunk("scan", -3)),
    (ValueError, "expected a policy", lambda scan: scan.set_policy("best")),
    (ValueError, "expected a policy", lambda scan: corey.compile(SCAN, policy="best")),
    (ValueError, "expected .* got", lambda scan: corey.compile(SCAN, fusion="best")),
    (ValueError, "expected .* got", lambda scan: corey.compile(SCAN, device="tpu")),
    (ValueError, "threads: expected 0 or more, got -1", lambda scan: corey.set_num_threads(-1)),
    (corey.CompileError, "<source>:1:", lambda scan: corey.compile("func.func @main() {")),
    (FileNotFoundError, "none.mlir", lambda scan: corey.compile("none.mlir")),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(scan, number):
    kind, message, call = REFUSED[number]
    with pytest.raises(kind, match=message):
        call(scan)


def test_outputs_that_cannot_be_written(negate):
    x = normal(2, 2)
    out = np.zeros((2, 2), "float32")
    out.flags.writeable = False
    with pytest.raises(ValueError, match="result0: expected a tensor that may be written"):
        negate(x, out=out)
    with pytest.raises(ValueError, match="overlap"):
        negate(x, out=x)


def test_tables(scan, negate):
    scan(*arguments())
    table = scan.explain()
    assert len(table) == 1 and table[0]["site"] == "scan" and "policy" in str(table)
    page = table._repr_html_()
    assert page.count("<tr>") == 2 and "<td>scan</td>" in page
    assert "scan" not in negate.explain()._repr_html_()
    assert "<td>delta</td>" in scan._repr_html_() and "u: ?x?x8xf32" in repr(scan)
    assert corey.Table(["a"], [["<&>"]])._repr_html_().count("&lt;&amp;&gt;") == 1


def test_the_lock_is_released_while_a_program_runs(scan):
    inputs = arguments(8, 20000)
    scan(*inputs)
    began, done, ticks = threading.Event(), threading.Event(), 0

    def work():
        began.set()
        for _ in range(10):
            scan(*inputs)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    slowest, last = 0.0, time.perf_counter()
    while not done.is_set():
        time.sleep(0)
        now = time.perf_counter()
        slowest, last, ticks = max(slowest, now - last), now, ticks + 1
    thread.join()
    # Held, there would be a tick for each run at most.
    assert ticks > 100


def test_threads_share_a_program(scan):
    sets = [arguments(2, 30 + i) for i in range(4)]
    references = [wanted(*inputs)[0] for inputs in sets]
    errors = [[] for _ in sets]

    def work(i):
        for _ in range(50):
            errors[i].append(ref.error(scan(*sets[i])[0], references[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(len(e) == 50 and max(e) < 2e-6 for e in errors)


@pytest.mark.parametrize("compiles", [False, True])
def test_fork(scan, compiles):
    """A child runs what its parent compiled, and compiles anew."""
    inputs = arguments()
    y = scan(*inputs)[0]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            program = corey.compile(SCAN) if compiles else scan
            status = 0 if np.array_equal(program(*inputs)[0], y) else 2
        finally:
            os._exit(status)
    deadline = time.time() + 60
    while time.time() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    pytest.fail("expected the child to end, got none after a minute")


def test_other_libraries_are_not_imported(tmp_path):
    code = """if True:
      import sys, corey, corey.ops
      print([m for m in ("torch", "jax", "cupy", "transformers", "ml_dtypes") if m in sys.modules])
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_names_of_the_c_library_stay_its_own():
    """Nothing of LLVM, OpenMP or COREY is seen by libraries that are loaded later."""
    process = ctypes.CDLL(None)
    for name in ("corey_version", "__kmpc_fork_call", "LLVMContextCreate"):
        assert not hasattr(process, name)
