"""What a warm call of an op costs: microseconds of one core, kernel included, at
sizes whose kernels take next to no time.

    python overhead.py
"""

import time

import numpy as np

import corey
import corey.ops as ops


def measure(name, call, runs=4000, rounds=15):
    for _ in range(500):
        call()
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(runs):
            call()
        best = min(best, time.thread_time() - begin)
    print(f"{name:40} {best / runs * 1e6:6.2f} us")


def calls():
    """Arguments of ops by name; activations as projections make them,
    channel-last."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype("float32")  # noqa: E731
    tokens = lambda channels: normal(1, 2, channels).swapaxes(1, 2)  # noqa: E731
    A, D, bias, heads = -np.exp(normal(24, 8)), normal(24), normal(24), (1, 2, 2, 4)
    state = normal(1, 3, 24).swapaxes(1, 2)
    return {
        "selective_scan_fn": (tokens(24), tokens(24), A, tokens(8), tokens(8), D, tokens(24), bias, True),
        "causal_conv1d_fn": (tokens(24), normal(24, 4), D),
        "selective_state_update": (normal(1, 24, 8), normal(1, 24), normal(1, 24), A, normal(1, 8), normal(1, 8), D,
                                   normal(1, 24), bias, True),
        "mamba_chunk_scan_combined": (normal(*heads), normal(1, 2, 2), -np.exp(normal(2)), normal(1, 2, 1, 8),
                                      normal(1, 2, 1, 8), 64, normal(2), normal(*heads), normal(2)),
        "causal_conv1d_update": (normal(1, 24), state, normal(24, 4), D, "silu"),
        "hadamard_transform": (normal(3, 16),),
    }  # fmt: skip


def main():
    corey.set_num_threads(1)
    program = corey.compile("""func.func @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
      %0 = ssm.neg %x : tensor<?x4xf32>
      return %0 : tensor<?x4xf32>
    }""")
    x, out = np.ones((1, 4), "float32"), np.ones((1, 4), "float32")
    measure("a function that does nothing", lambda: None)
    measure("Executable, one input, given output", lambda: program(x, out=out))
    try:
        import torch
    except ImportError:
        torch = None
    if torch:
        torch.set_grad_enabled(False)
    for name, arguments in calls().items():
        op = getattr(ops, name)
        measure(f"{name}, numpy", lambda: op(*arguments))
        if not torch:
            continue
        tensors = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
        measure(f"{name}, torch", lambda: op(*tensors))
    if torch:
        measure("torch.empty_strided alone", lambda: torch.empty_strided((1, 24, 1), (24, 1, 24)))


if __name__ == "__main__":
    main()
