"""What a warm call of an op costs: microseconds of one core for a scan of 24
channels and one token, kernel included.

    python overhead.py
"""

import time

import numpy as np

import corey
import corey.ops as ops


def measure(name, call, runs=20000, rounds=5):
    for _ in range(1000):
        call()
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(runs):
            call()
        best = min(best, time.thread_time() - begin)
    print(f"{name:40} {best / runs * 1e6:6.2f} us")


def main():
    corey.set_num_threads(1)
    normal = lambda *shape: np.random.default_rng(0).standard_normal(shape).astype("float32")  # noqa: E731
    column, matrix = (1, 24, 1), (1, 8, 1)
    arguments = [normal(*column), normal(*column), -np.exp(normal(24, 8)), normal(*matrix), normal(*matrix), normal(24),
                 normal(*column), normal(24)]  # fmt: skip
    program = corey.compile("""func.func @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
      %0 = ssm.neg %x : tensor<?x4xf32>
      return %0 : tensor<?x4xf32>
    }""")
    x, out = normal(1, 4), normal(1, 4)
    measure("a function that does nothing", lambda: None)
    measure("Executable, one input, given output", lambda: program(x, out=out))
    measure("selective_scan_fn, 8 tensors of numpy", lambda: ops.selective_scan_fn(*arguments, True))
    try:
        import torch
    except ImportError:
        return
    torch.set_grad_enabled(False)
    tensors = [torch.from_numpy(a) for a in arguments]
    measure("selective_scan_fn, 8 tensors of torch", lambda: ops.selective_scan_fn(*tensors, True))
    measure("torch.empty_strided alone", lambda: torch.empty_strided((1, 24, 1), (24, 1, 24)))


if __name__ == "__main__":
    main()
