"""What Python takes of the time: results as corey-bench writes them.

    python benchmark.py calls [--device=cuda] [--json FILE]
    python benchmark.py models --corey-bench build/bin/corey-bench [--json FILE]

`calls` times warm calls of ops from the caller's side: microseconds until the
call returns, on a device with the kernel launched and not waited for, on the CPU
with it done, at sizes whose kernels take next to no time. `models` reads a prompt
with a model of transformers of random weights, with the same model on COREY's
ops, and as one program, and has `corey-bench lm` do that in turn with it.
"""

import argparse
import datetime
import functools
import json
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

import corey
import corey.ops as ops


def whence(device):
    """Where results come from."""
    found = {
        "version": corey.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["benchmark.py", *sys.argv[1:]]),
        "python": platform.python_version(),
    }
    for line in open("/proc/cpuinfo") if sys.platform == "linux" else ():
        if line.startswith("model name"):
            found["cpu"] = line.partition(":")[2].strip()
            break
    for name in ("numpy", "torch", "transformers"):
        if name in sys.modules:
            found[name] = sys.modules[name].__version__
    if device == "cpu":
        return {**found, "target": "cpu"}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {**found, "gpu": gpu, "driver": driver}


def write(arguments, device, rows):
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**whence(device), "results": rows}, file, indent=1)
            file.write("\n")


# ===-- Calls --------------------------------------------------------------=== #


def per_call(call, wait, runs=200, rounds=20):
    """The median of rounds, microseconds. What was launched is waited for between
    them, so that no queue fills up."""
    for _ in range(runs):
        call()
    wait()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(runs):
            call()
        times.append((time.perf_counter() - begin) / runs * 1e6)
        wait()
    return statistics.median(times)


def arguments_of_ops(channel_last):
    """Arguments of ops by name: activations as projections make them, channel-last,
    or contiguous as mamba_ssm's own are."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype("float32")  # noqa: E731

    def tokens(channels, length=2):
        return normal(1, length, channels).swapaxes(1, 2) if channel_last else normal(1, channels, length)

    A, D, bias, heads = -np.exp(normal(24, 8)), normal(24), normal(24), (1, 2, 2, 4)
    found = {
        "selective_scan_fn": (tokens(24), tokens(24), A, tokens(8), tokens(8), D, tokens(24), bias, True),
        "causal_conv1d_fn": (tokens(24), normal(24, 4), D),
    }
    if channel_last:
        found.update({
            "selective_state_update": (normal(1, 24, 8), normal(1, 24), normal(1, 24), A, normal(1, 8), normal(1, 8), D,
                                       normal(1, 24), bias, True),
            "mamba_chunk_scan_combined": (normal(*heads), normal(1, 2, 2), -np.exp(normal(2)), normal(1, 2, 1, 8),
                                          normal(1, 2, 1, 8), 64, normal(2), normal(*heads), normal(2)),
            "causal_conv1d_update": (normal(1, 24), tokens(24, 3), normal(24, 4), D, "silu"),
            "hadamard_transform": (normal(3, 16),),
        })  # fmt: skip
    return found


def time_calls(arguments):
    device, rows = arguments.device, []
    corey.set_num_threads(1)
    try:
        import torch

        torch.set_grad_enabled(False)
    except ImportError:
        torch = None
    if device != "cpu" and torch is None:
        sys.exit("benchmark.py: error: --device: expected torch for tensors of a device, got none")
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None

    calls = []

    def measure(op, library, layout, call):
        calls.append(({"benchmark": "call", "op": op, "library": library, "layout": layout}, call))

    program = corey.compile("""func.func @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
      %0 = ssm.neg %x : tensor<?x4xf32>
      return %0 : tensor<?x4xf32>
    }""", device=device)  # fmt: skip
    if torch:
        # Clocks go up with work.
        x, end = torch.ones(8, device=device), time.perf_counter() + 2
        while time.perf_counter() < end:
            x = x * 1
        wait()
    libraries = {"numpy": lambda a: a} if device == "cpu" else {}
    if torch:
        # Strides of an array become those of a tensor on any device.
        libraries["torch"] = lambda a: torch.empty_strided(
            a.shape, [s // a.itemsize for s in a.strides], dtype=torch.float32, device=device
        ).copy_(torch.from_numpy(a))
    for library, make in libraries.items():
        x, out = make(np.ones((1, 4), "float32")), make(np.ones((1, 4), "float32"))
        measure("Executable, given output", library, "", functools.partial(program, x, out=out))
        for layout in ("channel-last", "channel-first"):
            for name, given in arguments_of_ops(layout == "channel-last").items():
                given = [make(a) if isinstance(a, np.ndarray) else a for a in given]
                measure(name, library, layout, functools.partial(getattr(ops, name), *given))
    if torch:
        measure("torch's own addition", "torch", "", functools.partial(torch.add, x, x))
        measure("torch.empty_strided", "torch", "", lambda: torch.empty_strided((1, 24, 2), (48, 1, 24), device=device))
    # In turns: what else the machine does meanwhile is in none of the medians.
    times = [[per_call(call, wait) for _, call in calls] for _ in range(5)]
    for i, (row, _) in enumerate(calls):
        row["median_us"] = statistics.median(turn[i] for turn in times)
        print(f"{row['op']:34} {row['library']:6} {row['layout']:14} {row['median_us']:7.2f} us", flush=True)
        rows.append(row)
    write(arguments, device, rows)


# ===-- Models -------------------------------------------------------------=== #


def time_models(arguments):
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    import corey.integrations.transformers as integration

    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    names = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    # As corey-bench has it: mamba-370m.
    config = MambaConfig(hidden_size=1024, num_hidden_layers=48, vocab_size=50280)
    model = MambaForCausalLM(config).to("cuda", names[arguments.dtype]).eval()
    ids = torch.randint(0, config.vocab_size, (1, arguments.prompt), device="cuda")
    prompt, rows = ids[0].tolist(), []

    def milliseconds(call):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def row(variant, **times):
        rows.append({"benchmark": "model", "model": "mamba-370m", "variant": variant, "dtype": arguments.dtype,
                     "prompt": arguments.prompt, "generate": arguments.generate, **times})  # fmt: skip
        print(f"{variant:26}", ", ".join(f"{k} {v:.3f}" for k, v in times.items()), flush=True)

    # The logits of the last token, as generation needs them.
    forward = lambda: model(ids, use_cache=True, logits_to_keep=1)  # noqa: E731
    for patched in (False, True):
        if patched:
            integration.patch(model)
        forward()
        times = [milliseconds(forward) for _ in range(20 if patched else 3)]
        row("transformers on corey.ops" if patched else "transformers", prefill_ms=statistics.median(times))
        if patched:
            integration.unpatch(model)

    program = corey.load(model)
    for count in (1, arguments.generate) * 2:
        program.generate(prompt, count, stop_tokens=[])
    bench = [arguments.corey_bench, "lm", "--target=cuda", "--model=mamba-370m", f"--dtype={arguments.dtype}",
             f"--prompt={arguments.prompt}", f"--generate={arguments.generate}", "--json=-"]  # fmt: skip
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        first, total = (
            statistics.median(milliseconds(lambda: program.generate(prompt, count, stop_tokens=[])) for _ in range(40))
            for count in (1, arguments.generate)
        )
        ours.append((first, total))
        result = json.loads(subprocess.run(bench, capture_output=True, text=True, check=True).stdout)["results"][0]
        theirs.append((result["prefill_ms"], result["total_ms"]))
    for variant, times in (("corey.load", ours), ("corey-bench lm", theirs)):
        first, total = (statistics.median(column) for column in zip(*times))
        row(variant, prefill_ms=first, total_ms=total)
    write(arguments, "cuda", rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    calls = commands.add_parser("calls")
    calls.add_argument("--device", default="cpu", help="cpu or cuda")
    calls.set_defaults(run=time_calls)
    models = commands.add_parser("models")
    models.add_argument("--corey-bench", required=True, help="the executable")
    models.add_argument("--dtype", default="f16", choices=["f32", "f16", "bf16"])
    models.add_argument("--prompt", type=int, default=976, help="tokens")
    models.add_argument("--generate", type=int, default=32, help="tokens")
    models.add_argument("--rounds", type=int, default=3)
    models.set_defaults(run=time_models)
    for command in (calls, models):
        command.add_argument("--json", help="a file for the results")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
