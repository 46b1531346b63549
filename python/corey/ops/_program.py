"""Programs of ops: views of arguments, MLIR text, and the plans of calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Callable, List, Optional, Sequence, Tuple

from .. import _core
from .._compile import context

FLOATS = ("f32", "f16", "bf16")

#: Programs that are kept. More than one model needs, of any size.
MOST_PROGRAMS = 256

_programs: "OrderedDict[tuple, _core.Executable]" = OrderedDict()
_launchers: List[_core.Launcher] = []
_lock = threading.RLock()
_counts = {"hits": 0, "compiled": 0}


class View:
    """How an argument's memory is read: strides in elements."""

    __slots__ = ("argument", "name", "dtype", "shape", "strides", "offset")

    def __init__(self, argument: int, name: str, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int = 0):
        self.argument, self.name, self.dtype = argument, name, dtype
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset

    def _with(self, shape: Sequence[int], strides: Sequence[int], offset: Optional[int] = None) -> "View":
        return View(self.argument, self.name, self.dtype, shape, strides, self.offset if offset is None else offset)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def permute(self, *order: int) -> "View":
        return self._with([self.shape[i] for i in order], [self.strides[i] for i in order])

    def unsqueeze(self, axis: int) -> "View":
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(axis, 1)
        strides.insert(axis, 0)
        return self._with(shape, strides)

    def squeeze(self, axis: int) -> "View":
        return self._with(self.shape[:axis] + self.shape[axis + 1 :], self.strides[:axis] + self.strides[axis + 1 :])

    def expand(self, axis: int, size: int) -> "View":
        """An axis of size 1, `size` times the same."""
        shape, strides = list(self.shape), list(self.strides)
        shape[axis], strides[axis] = size, 0
        return self._with(shape, strides)

    def slice(self, axis: int, start: int, stop: int) -> "View":
        shape = list(self.shape)
        shape[axis] = stop - start
        return self._with(shape, self.strides, self.offset + start * self.strides[axis])

    def merge(self, axis: int) -> "View":
        """The axis and the next as one. Raises where the memory does not allow it."""
        outer, inner = self.shape[axis : axis + 2]
        stride, step = self.strides[axis : axis + 2]
        if outer > 1 and inner > 1 and stride != inner * step:
            raise ValueError(
                f"{self.name}: expected axes of {outer} and {inner} that can be one, got strides {list(self.strides)}; "
                "pass a contiguous tensor"
            )
        return self._with(
            self.shape[:axis] + (outer * inner,) + self.shape[axis + 2 :],
            self.strides[:axis] + (step if inner > 1 else stride,) + self.strides[axis + 2 :],
        )

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size > 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    @property
    def is_dense(self) -> bool:
        """Whether neighbours on the last axis are neighbours in memory."""
        return self.rank == 0 or self.shape[-1] <= 1 or self.strides[-1] == 1

    def tuple(self) -> tuple:
        return (self.argument, self.shape, self.strides, self.offset)


def contiguous_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    strides: List[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def tensor_type(dtype: str, sizes: Sequence[Optional[int]]) -> str:
    return "tensor<" + "".join(f"{'?' if size is None else size}x" for size in sizes) + dtype + ">"


class Program:
    """Collects a function, what it reads and what it writes."""

    def __init__(self, op: str, device: str):
        self.op, self.device = op, device
        self.arguments: List[str] = []
        self.lines: List[str] = []
        self.inputs: List[Any] = []
        self.outputs: List[tuple] = []
        #: Values, types, and attributes of results.
        self.returns: List[Tuple[str, str, str]] = []
        self.results: List[int] = []
        self._names = 0

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{self.op}: {what}")

    def support(self, condition: bool, what: str) -> None:
        if not condition:
            raise NotImplementedError(f"{self.op}: {what}")

    def expect_shape(self, view: Optional[View], shape: Sequence[int], axes: str) -> None:
        if view is not None and view.shape != tuple(shape):
            raise ValueError(f"{self.op}: {view.name}: expected shape {tuple(shape)} ({axes}), got {view.shape}")

    def expect_float(self, *views: Optional[View]) -> None:
        for view in views:
            if view is not None and view.dtype not in FLOATS:
                raise TypeError(f"{self.op}: {view.name}: expected float32, float16 or bfloat16, got {view.dtype}")

    def expect_int32(self, view: Optional[View]) -> None:
        if view is not None and view.dtype != "i32":
            raise TypeError(f"{self.op}: {view.name}: expected int32, got {view.dtype}")

    def expect_integers(self, view: View) -> None:
        if not view.dtype.startswith("i"):
            raise TypeError(f"{self.op}: {view.name}: expected integers, got {view.dtype}")

    def value(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _strides(self, view: View, in_place: bool) -> str:
        """The attribute of what is read or written as it lies, by kernels of a GPU
        alone: those of a CPU want vectors."""
        return " {ssm.any_strides}" if in_place and self.device != "cpu" and not view.is_dense else ""

    def input(
        self, view: Any, sizes: Sequence[Optional[int]], dtype: Optional[str] = None, in_place: bool = False
    ) -> Tuple[str, str]:
        """An argument of the function: its value and type. Sizes of None are
        dynamic; `in_place` is of an op whose kernels read any strides."""
        name = f"%a{len(self.arguments)}"
        kind = tensor_type(view.dtype if dtype is None else dtype, sizes)
        self.arguments.append(f"{name}: {kind}{self._strides(view, in_place) if isinstance(view, View) else ''}")
        self.inputs.append(view.tuple() if isinstance(view, View) else view)
        return name, kind

    def cast(self, value: Tuple[str, str], dtype: str) -> Tuple[str, str]:
        name, kind = value
        head, _, old = kind[len("tensor<") : -1].rpartition("x")
        if old == dtype:
            return value
        result, new = self.value(), f"tensor<{head}x{dtype}>"
        self.lines.append(f"{result} = ssm.cast {name} : {kind} to {new}")
        return result, new

    def emit(self, text: str, kind: str) -> Tuple[str, str]:
        """A line of one result."""
        result = self.value()
        self.lines.append(f"{result} = {text}")
        return result, kind

    def output(
        self, value: Tuple[str, str], dtype: str, shape: Sequence[int], strides: Sequence[int],
        view: Callable[[View], View], in_place: bool = False,
    ) -> int:  # fmt: skip
        """A result that is made anew with a shape and strides as the caller sees
        them; `view` makes the function's of it. `in_place` is of an op whose kernels
        write any strides."""
        made = view(View(-1, "output", dtype, shape, strides))
        row_major = tuple(strides) == contiguous_strides(shape)
        self.outputs.append((made.tuple(), dtype, tuple(shape), () if row_major else tuple(strides)))
        self.returns.append((*value, self._strides(made, in_place)))
        return len(self.outputs) - 1

    def update(self, value: Tuple[str, str], view: View) -> None:
        """A result that is written to an argument."""
        self.outputs.append((view.tuple(), view.dtype, (), ()))
        self.returns.append((*value, ""))

    def plan(self, *results: int) -> _core.Plan:
        names = ", ".join(value for value, _, _ in self.returns)
        kinds = ", ".join(kind for _, kind, _ in self.returns)
        outputs = ", ".join(kind + attributes for _, kind, attributes in self.returns)
        body = "\n  ".join(self.lines)
        text = f"func.func @main({', '.join(self.arguments)}) -> ({outputs}) {{\n  {body}\n  return {names} : {kinds}\n}}\n"
        return _core.Plan(_compiled(self.op, text, self.device), self.inputs, self.outputs, list(results))


def _compiled(op: str, text: str, device: str) -> _core.Executable:
    key = (text, device)
    with _lock:
        found = _programs.get(key)
        if found is not None:
            _programs.move_to_end(key)
            _counts["hits"] += 1
            return found
        made = context(device).compile(text.encode(), f"corey.ops.{op}")
        _counts["compiled"] += 1
        _programs[key] = made
        if len(_programs) > MOST_PROGRAMS:
            _programs.popitem(last=False)
            # Plans keep their programs.
            for launcher in _launchers:
                launcher.clear()
        return made


class Op(dict):
    """An op: for each choice of its options a function of its tensors, which
    returns NotImplemented where only torch's dispatcher can make the call; and,
    as `direct`, one that never does. A dict, so that finding it runs no code."""

    def __init__(self, name: str, arguments: str, build: Callable[..., Any]):
        self.name = name
        self.names = arguments.split()
        self.direct: dict = _Direct(self)
        self._build = build

    def __missing__(self, options: tuple) -> Callable:
        self._make(options)
        return self[options]

    def _make(self, options: tuple) -> None:
        def builder(device: str, described: list) -> Any:
            on_first_use()
            views = [None if one is None else View(i, self.names[i], *one) for i, one in enumerate(described)]
            # A plan, or a function of the tensors where it takes more than a program.
            return self._build(Program(self.name, device), *views, *options)

        with _lock:
            if options not in self:
                launcher = _core.Launcher(self.name, self.names, builder)
                _launchers.append(launcher)
                self.direct[options] = launcher.direct
                self[options] = launcher.function


class _Direct(dict):
    def __init__(self, op: Op):
        self._op = op

    def __missing__(self, options: tuple) -> Callable:
        self._op._make(options)
        return self[options]


def on_first_use() -> None:
    """Where torch is there, its ops are registered with it."""
    import sys

    if "torch" in sys.modules and "corey.ops.torch" not in sys.modules:
        import importlib

        importlib.import_module("corey.ops.torch")


def cache_info() -> dict:
    """Programs that are kept, were compiled, and were found for calls of new
    shapes; and calls of how many shapes are known."""
    with _lock:
        return {"programs": len(_programs), **_counts, "plans": sum(len(launcher) for launcher in _launchers)}


def cache_clear() -> None:
    """Forgets every program."""
    with _lock:
        _programs.clear()
        _counts.update(hits=0, compiled=0)
        for launcher in _launchers:
            launcher.clear()
