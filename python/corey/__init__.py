"""COREY compiles state-space models: programs of the `ssm` dialect, language
models, and the ops of mamba_ssm, on the CPU and on NVIDIA GPUs.

    program = corey.compile("scan.mlir")           # or the text itself
    y = program(u, delta, A_log, B, C)             # numpy, torch, CuPy, JAX
    model = corey.load("path/to/checkpoint")
    text = model.generate("The quick brown fox", max_tokens=64)

Errors are ValueError (what was given is wrong; CompileError for programs),
TypeError, OSError, MemoryError, NotImplementedError and RuntimeError, with the
compiler's own message.
"""

from __future__ import annotations

from ._compile import Executable, compile, emit, set_num_threads
from ._core import CompileError, StateCache, Tensor
from ._from_torch import TorchProgram, UnsupportedError, from_torch
from ._model import Model, load
from ._schedule import Decision, Estimator, Policy, Scheduler, chunk_of_rule
from ._table import Table
from ._core import __version__

__all__ = [
    "CompileError",
    "Decision",
    "Estimator",
    "Executable",
    "Model",
    "Policy",
    "Scheduler",
    "StateCache",
    "Table",
    "Tensor",
    "TorchProgram",
    "UnsupportedError",
    "chunk_of_rule",
    "compile",
    "emit",
    "from_torch",
    "load",
    "set_num_threads",
]
