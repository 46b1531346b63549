"""Compiling programs."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple, Optional, Sequence, Union

from . import _core
from ._table import Table

_contexts: dict[str, _core.Context] = {}
_contexts_lock = threading.Lock()
_threads = 0


def context(device: str) -> _core.Context:
    """The context of a device, which programs share."""
    found = _contexts.get(device)
    if found is None:
        if not isinstance(device, str):
            # torch.device prints as COREY's devices do.
            return context(str(device))
        with _contexts_lock:
            found = _contexts.get(device)
            if found is None:
                found = _core.Context.create(device, _threads)
                _contexts[device] = found
                _contexts.setdefault(found.device, found)
    return found


def set_num_threads(threads: int) -> None:
    """Threads of the parallel loops of a call; 0 takes every processor."""
    global _threads
    with _contexts_lock:
        if threads < 0:
            raise ValueError(f"threads: expected 0 or more, got {threads}")
        _threads = threads
        for made in _contexts.values():
            made.threads = threads


class Argument(NamedTuple):
    """An input, output or weight. Sizes of -1 are free."""

    name: str
    dtype: str
    shape: tuple

    def __str__(self) -> str:
        sizes = "x".join("?" if size < 0 else str(size) for size in self.shape)
        return f"{self.name}: {sizes + 'x' if sizes else ''}{self.dtype}"


class Executable:
    """A compiled program: one compilation serves every batch and length.

    Called with the inputs of its function @main, in order or by name, as tensors
    of numpy, torch, CuPy, JAX or whatever else has DLPack. They are not copied;
    what is returned is of the same library, a tuple where there are several
    results. `out` is a tensor, or several, to write to instead. On a GPU the work
    is put on torch's or CuPy's current stream, or on `stream`, and is not waited
    for. May be called from several threads at a time.
    """

    def __init__(self, core: _core.Executable, name: str):
        self._core = core
        self._name = name
        self._functions = {
            function: ([Argument(*a) for a in inputs], [Argument(*a) for a in outputs])
            for function, (inputs, outputs) in core.functions().items()
        }
        self._default = "main" if "main" in self._functions else next(iter(self._functions), "main")
        self._run = core.run

    def __call__(self, *inputs: Any, function: Optional[str] = None, out: Any = None, stream: Any = None, **named: Any) -> Any:
        function = function or self._default
        if named:
            inputs = self._in_order(function, inputs, named)
        return self._run(*inputs, function=function, out=out, stream=stream)

    def _in_order(self, function: str, inputs: tuple, named: dict) -> tuple:
        names = [a.name for a in self.inputs_of(function)]
        for name in named:
            if name not in names:
                raise TypeError(f"{function}: expected inputs {', '.join(names)}, got {name}")
            if name in names[: len(inputs)]:
                raise TypeError(f"{function}: expected {name} once, got it in order and by name")
        missing = [name for name in names[len(inputs) :] if name not in named]
        if missing:
            raise TypeError(f"{function}: expected {', '.join(missing)}, got nothing")
        return inputs + tuple(named[name] for name in names[len(inputs) :])

    def _function(self, function: Optional[str]) -> tuple:
        found = self._functions.get(function or self._default)
        if found is None:
            raise ValueError(f"function: expected one of {', '.join(self._functions)}, got {function}")
        return found

    def inputs_of(self, function: Optional[str] = None) -> list:
        return self._function(function)[0]

    def outputs_of(self, function: Optional[str] = None) -> list:
        return self._function(function)[1]

    @property
    def functions(self) -> list:
        """Names of what there is to call."""
        return list(self._functions)

    @property
    def inputs(self) -> list:
        """Inputs of @main: name, dtype, shape."""
        return self.inputs_of()

    @property
    def outputs(self) -> list:
        return self.outputs_of()

    @property
    def weights(self) -> list:
        """Weights the program declares, by symbol."""
        return [Argument(*a) for a in self._core.weights()]

    def bind_weights(self, weights: Union[str, os.PathLike, dict], prefix: Optional[str] = None) -> "Executable":
        """Binds the weights to a safetensors file, or to tensors by symbol. On the
        CPU tensors are used where they lie."""
        if isinstance(weights, dict):
            if prefix is not None:
                raise TypeError("prefix: expected with a file, got it with tensors")
            for symbol, tensor in weights.items():
                self._core.bind_weight(symbol, tensor)
        else:
            self._core.bind_weights_file(os.fspath(weights), prefix)
        return self

    def weight(self, symbol: str) -> _core.Tensor:
        """What a weight is bound to."""
        return self._core.bound_weight(symbol)

    def set_chunk(self, site: str, chunk: int) -> None:
        """Fixes the chunk of a scan, in tokens; 0 gives it back to the policy."""
        self._core.set_chunk(site, chunk)

    def set_variant(self, site: str, variant: str) -> None:
        """Fixes the kernel of a scan by name; "" gives it back to the policy."""
        self._core.set_variant(site, variant)

    def set_policy(self, policy: Any, site: str = "") -> None:
        """Gives a site, or all, to another policy."""
        self._core.set_policy(site, str(policy))

    def explain(self) -> Table:
        """What was compiled and how long it took, and for each chunk site what
        its last call used and who chose it."""
        columns = ["site", "batch", "length", "chunk", "variant", "predicted_ms", "policy", "reason"]
        rows = [[chunk[name] for name in columns] for chunk in self._core.chunks()]
        return Table(columns, rows, self._core.explain())

    def observations(self) -> Table:
        """Statistics of the values the program observes."""
        rows = self._core.observations()
        columns = list(rows[0]) if rows else []
        return Table(columns, [list(row.values()) for row in rows])

    @property
    def compile_times(self) -> dict:
        """Milliseconds by phase of compilation."""
        return self._core.compile_times()

    @property
    def traffic(self) -> dict:
        """What the kernels move; a dynamic size counts as 1024."""
        return self._core.traffic()

    def __repr__(self) -> str:
        lines = [f"corey.Executable({self._name})"]
        for function, (inputs, outputs) in self._functions.items():
            lines.append(f"  {function}({', '.join(map(str, inputs))}) -> {', '.join(map(str, outputs))}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            [function, kind, a.name, a.dtype, "x".join("?" if size < 0 else str(size) for size in a.shape)]
            for function, (inputs, outputs) in self._functions.items()
            for kind, arguments in (("input", inputs), ("output", outputs))
            for a in arguments
        ]
        return Table(["function", "kind", "name", "dtype", "shape"], rows, self._name)._repr_html_()


def _read(path_or_text: Union[str, bytes, os.PathLike]) -> tuple:
    if isinstance(path_or_text, bytes):
        return path_or_text, "<source>"
    if isinstance(path_or_text, str) and ("\n" in path_or_text or "{" in path_or_text):
        return path_or_text.encode(), "<source>"
    with open(path_or_text, "rb") as file:
        return file.read(), os.fspath(path_or_text)


def compile(
    path_or_text: Union[str, bytes, os.PathLike],
    device: str = "cpu",
    policy: Any = "measured",
    *,
    fusion: str = "dp",
    vector_bits: int = 0,
    opt_level: int = 2,
    hoist_weights: bool = True,
    weights: Union[None, str, os.PathLike, dict] = None,
) -> Executable:
    """Compiles a program: a file of MLIR text or bytecode, or the text itself.

    device         "cpu", "cuda" or "cuda:<number>"
    policy         who chooses the chunks of scans: a corey.Policy or its text
    fusion         which ops become one kernel: "dp", "entropy", "arithmetic",
                   "static" or "none"
    vector_bits    256 or 512; 0 takes the host's
    opt_level      2 runs the passes that lowered programs need; 0, 1, 3 LLVM's
    hoist_weights  computes what depends on weights alone once
    weights        as for Executable.bind_weights()
    """
    source, name = _read(path_or_text)
    core = context(device).compile(source, name, str(policy), fusion, vector_bits, opt_level, hoist_weights)
    program = Executable(core, name)
    if weights is not None:
        program.bind_weights(weights)
    return program


def emit(
    path_or_text: Union[str, bytes, os.PathLike],
    phase: str,
    device: str = "cpu",
    policy: Any = "measured",
    *,
    fusion: str = "dp",
) -> str:
    """The program after a phase of compilation, as text: "captured", "fused",
    "bound", "lowered", "buffers", "llvm", "llvmir", "llvmir-opt", or "ptx" of a
    GPU."""
    source, name = _read(path_or_text)
    return context(device).emit(source, phase, name, str(policy), fusion)
