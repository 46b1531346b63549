"""Programs of torch modules: torch.export's graph becomes one of the ssm dialect.

A value of the graph is kept as what it is made of, a tree of pointwise functions and
sums over elements of tensors; that tensors are transposed, sliced and broadcast is
said by how their axes are numbered. A loop over tokens that export has unrolled is
found as results that differ in the index of a token alone, and are made of one
another: h[t] = a[t] h[t-1] + b[t]. It is the same recurrence that torch's scan and
associative_scan say outright. What comes of it, sum over n of c[t,n] h[t,n], is a
selective scan where a = exp(dt A) and b = dt B u."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

Size = Any  # int, or a symbol of torch.export
Axis = Tuple[str, int, int]  # ("a", axis, offset) or ("c", index, 0)

_DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
_RANK = {"f16": 1, "bf16": 1, "f32": 2}


class UnsupportedError(NotImplementedError):
    """A module has what no program of COREY can say. `node` is the op of torch's
    graph that says it, if it is one."""

    node: Any = None


class _MustBeStatic(Exception):
    def __init__(self, symbol: Any):
        super().__init__(str(symbol))
        self.symbol = symbol


# ===-- Values -------------------------------------------------------------=== #


class Base:
    """A tensor that there is: an input, a weight, or what an op makes of values."""

    def __init__(self, kind: str, shape: Sequence[Size], dtype: str, origin: Any = None, **fields: Any):
        self.kind, self.shape, self.dtype, self.origin = kind, tuple(shape), dtype, origin
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


class Value:
    """An element of a tensor as a function of its indices. Equal ones are one object."""

    __slots__ = ("kind", "data", "children", "shape", "dtype", "number", "origin")

    @property
    def rank(self) -> int:
        return len(self.shape)


class _Poison:
    """A result that only its use makes wrong."""

    def __init__(self, why: str):
        self.why = why


def _identity(rank: int) -> Tuple[Axis, ...]:
    return tuple(("a", i, 0) for i in range(rank))


class Builder:
    """Makes values, and finds recurrences in them."""

    def __init__(self) -> None:
        self._values: Dict[tuple, Value] = {}
        self._remapped: Dict[tuple, Value] = {}
        self._depends: Dict[int, frozenset] = {}
        self._rolled: Dict[tuple, Value] = {}
        self._recurrences: Dict[tuple, Base] = {}
        #: The last states of loops, by the number of their value.
        self.last: Dict[int, Tuple[Base, bool]] = {}
        self.origin: Any = None

    # -- Making --

    def make(self, kind: str, data: Any, children: Sequence[Value], shape: Sequence[Size], dtype: str) -> Value:
        shape = tuple(shape)
        tag = tuple(id(d) if isinstance(d, Base) else d for d in data) if isinstance(data, tuple) else data
        key = (kind, tag, tuple(c.number for c in children), shape, dtype)
        found = self._values.get(key)
        if found is None:
            found = Value()
            found.kind, found.data, found.children = kind, data, tuple(children)
            found.shape, found.dtype = shape, dtype
            found.number, found.origin = len(self._values), self.origin
            self._values[key] = found
        return found

    def leaf(self, base: Base, axes: Optional[Sequence[Axis]] = None, shape: Optional[Sequence[Size]] = None) -> Value:
        axes = _identity(len(base.shape)) if axes is None else tuple(axes)
        return self.make("leaf", (base, axes), (), base.shape if shape is None else shape, base.dtype)

    def constant(self, value: float, shape: Sequence[Size], dtype: str) -> Value:
        return self.make("constant", float(value), (), shape, dtype)

    def unary(self, op: str, x: Value) -> Value:
        return self.make("elementwise", (op, None), (x,), x.shape, x.dtype)

    def scale(self, x: Value, factor: float) -> Value:
        factor = float(factor)
        if x.kind == "constant":
            return self.constant(x.data * factor, x.shape, x.dtype)
        if x.kind == "elementwise" and x.data[0] == "scale":
            factor *= x.data[1]
            x = x.children[0]
        return x if factor == 1.0 else self.make("elementwise", ("scale", factor), (x,), x.shape, x.dtype)

    def cast(self, x: Value, dtype: str) -> Value:
        if x.dtype == dtype:
            return x
        if x.kind == "constant":
            return self.constant(x.data, x.shape, dtype)
        return self.make("elementwise", ("cast", dtype), (x,), x.shape, dtype)

    def binary(self, op: str, x: Value, y: Value) -> Value:
        x, y = self.together(x, y)
        dtype = x.dtype if _RANK[x.dtype] >= _RANK[y.dtype] else y.dtype
        if x.dtype != y.dtype and _RANK[x.dtype] == _RANK[y.dtype]:
            dtype = "f32"
        x, y = self.cast(x, dtype), self.cast(y, dtype)
        if op == "mul":
            # A state that begins as zero stays one: the first step is as the others.
            if y.kind == "constant" and y.data != 0:
                return self.scale(x, y.data)
            if x.kind == "constant" and x.data != 0:
                return self.scale(y, x.data)
        return self.make("elementwise", (op, None), (x, y), x.shape, dtype)

    def sum_last(self, x: Value) -> Value:
        return self.make("sum", None, (x,), x.shape[:-1], x.dtype)

    def together(self, x: Value, y: Value) -> Tuple[Value, Value]:
        if x.shape == y.shape:
            return x, y
        rank = max(x.rank, y.rank)
        a, b = ((1,) * (rank - v.rank) + v.shape for v in (x, y))
        shape = tuple(q if p == 1 else p for p, q in zip(a, b))
        return self.broadcast(x, shape), self.broadcast(y, shape)

    def broadcast(self, x: Value, shape: Sequence[Size]) -> Value:
        shape = tuple(shape)
        if x.shape == shape:
            return x
        first = len(shape) - x.rank
        axes = [("c", 0, 0) if size == 1 and shape[first + i] != 1 else ("a", first + i, 0) for i, size in enumerate(x.shape)]
        return self.remap(x, axes, shape)

    def remap(self, x: Value, axes: Sequence[Axis], shape: Sequence[Size]) -> Value:
        """The value with other axes: where each of its own comes from."""
        axes, shape = tuple(axes), tuple(shape)
        if shape == x.shape and axes == _identity(x.rank):
            return x
        key = (x.number, axes, shape)
        found = self._remapped.get(key)
        if found is not None:
            return found
        if x.kind == "constant":
            found = self.constant(x.data, shape, x.dtype)
        elif x.kind == "leaf":
            base, own = x.data
            composed = []
            for axis in own:
                if axis[0] == "c":
                    composed.append(axis)
                    continue
                to = axes[axis[1]]
                composed.append(("a", to[1], axis[2] + to[2]) if to[0] == "a" else ("c", axis[2] + to[1], 0))
            found = self.leaf(base, composed, shape)
        elif x.kind == "sum":
            inner = x.children[0]
            found = self.sum_last(self.remap(inner, axes + (("a", len(shape), 0),), shape + (inner.shape[-1],)))
        else:
            children = [self.remap(c, axes, shape) for c in x.children]
            found = self.make(x.kind, x.data, children, shape, x.dtype)
        self._remapped[key] = found
        return found

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        axes = [("a", 0, 0)] * x.rank
        for to, one in enumerate(order):
            axes[one] = ("a", to, 0)
        return self.remap(x, axes, [x.shape[i] for i in order])

    def select(self, x: Value, axis: int, index: int) -> Value:
        axes = [("c", index, 0) if i == axis else ("a", i - (i > axis), 0) for i in range(x.rank)]
        return self.remap(x, axes, x.shape[:axis] + x.shape[axis + 1 :])

    def slice(self, x: Value, axis: int, start: int, size: Size) -> Value:
        axes = [("a", i, start if i == axis else 0) for i in range(x.rank)]
        return self.remap(x, axes, x.shape[:axis] + (size,) + x.shape[axis + 1 :])

    def unsqueeze(self, x: Value, axis: int) -> Value:
        axes = [("a", i + (i >= axis), 0) for i in range(x.rank)]
        return self.remap(x, axes, x.shape[:axis] + (1,) + x.shape[axis:])

    # -- Looking --

    def depends(self, x: Value) -> frozenset:
        """The axes that the value changes along."""
        found = self._depends.get(x.number)
        if found is None:
            if x.kind == "constant":
                found = frozenset()
            elif x.kind == "leaf":
                found = frozenset(a[1] for a in x.data[1] if a[0] == "a")
            else:
                found = frozenset().union(*(self.depends(c) for c in x.children))
                if x.kind == "sum":
                    found -= {x.rank}
            self._depends[x.number] = found
        return found

    def factors(self, x: Value, norms: bool = False) -> Tuple[float, List[Value]]:
        """A product's constant and factors; what is divided by its norm is one factor,
        unless norms are asked for."""
        if x.kind == "constant":
            return x.data, []
        if x.kind == "elementwise" and x.data[0] == "mul":
            if not norms and any(c.kind == "elementwise" and c.data[0] == "rsqrt" for c in x.children):
                return 1.0, [x]
            (a, left), (b, right) = (self.factors(c, norms) for c in x.children)
            return a * b, left + right
        if x.kind == "elementwise" and x.data[0] == "scale":
            a, rest = self.factors(x.children[0], norms)
            return a * x.data[1], rest
        if x.kind == "elementwise" and x.data == ("cast", "f32"):
            a, rest = self.factors(x.children[0])
            if len(rest) > 1 or (rest and rest[0] is not x.children[0]):
                # A product that was rounded.
                return 1.0, [x]
        return 1.0, [x]

    def product(self, constant: float, factors: Sequence[Value], shape: Sequence[Size], dtype: str) -> Value:
        if not factors:
            return self.constant(constant, shape, dtype)
        found = factors[0]
        for factor in factors[1:]:
            found = self.binary("mul", found, factor)
        return self.scale(found, constant)

    def terms(self, x: Value, stop: Optional[Value] = None) -> List[Value]:
        if x is not stop and x.kind == "elementwise" and x.data[0] == "add":
            return self.terms(x.children[0], stop) + self.terms(x.children[1], stop)
        return [x]

    # -- Loops --

    def roll(self, steps: Sequence[Value], size: Size) -> Optional[Value]:
        """One value with an axis of steps before its own, of one for each step; null
        where they are not the same function of the step."""
        key = (tuple(s.number for s in steps), size)
        if key not in self._rolled:
            self._rolled[key] = self._roll(list(steps), size)
        return self._rolled[key]

    def _roll(self, steps: List[Value], size: Size) -> Optional[Value]:
        first = steps[0]
        shape = (size,) + first.shape
        later = [("a", i + 1, 0) for i in range(first.rank)]
        if len(steps) > 1 and all(s is first for s in steps):
            return self.remap(first, later, shape)
        if any(s.kind != first.kind or s.shape != first.shape or s.dtype != first.dtype for s in steps):
            return None
        if first.kind == "leaf":
            return self._roll_leaf(steps, shape)
        if first.kind == "constant":
            return self.constant(first.data, shape, first.dtype) if all(s.data == first.data for s in steps) else None
        if first.kind == "sum":
            inner = self.roll([s.children[0] for s in steps], size)
            return None if inner is None else self.sum_last(inner)
        if any(s.data != first.data or len(s.children) != len(first.children) for s in steps):
            return None
        if first.data[0] == "add":
            base = self._recurrence(steps, size)
            if base is not None:
                return self.leaf(base)
        children = [self.roll(one, size) for one in zip(*(s.children for s in steps))]
        if any(c is None for c in children):
            return None
        return self.make("elementwise", first.data, children, shape, first.dtype)

    def _roll_leaf(self, steps: List[Value], shape: Tuple[Size, ...]) -> Optional[Value]:
        base, axes = steps[0].data
        if any(s.data[0] is not base for s in steps):
            return None
        changing = [i for i in range(len(axes)) if len({s.data[1][i] for s in steps}) > 1]
        shifted = [("a", a[1] + 1, a[2]) if a[0] == "a" else a for a in axes]
        if len(steps) == 1:
            # A single step: its token is the one of an axis of one.
            changing = [i for i, a in enumerate(axes) if a[0] == "c" and base.shape[i] in (1, shape[0])][:1]
            if not changing:
                return self.leaf(base, shifted, shape)
        if len(changing) != 1:
            return None
        place = changing[0]
        if any(s.data[1][place][0] != "c" for s in steps):
            return None
        start = axes[place][1]
        if any(s.data[1][place] != ("c", start + t, 0) for t, s in enumerate(steps)):
            return None
        shifted[place] = ("a", 0, start)
        return self.leaf(base, shifted, shape)

    def _recurrence(self, steps: List[Value], size: Size) -> Optional[Base]:
        split = [self.terms(s, steps[t - 1] if t else None) for t, s in enumerate(steps)]
        if len({len(terms) for terms in split}) != 1:
            return None
        place = self._place(steps, split)
        if place is None:
            return None
        term, factor = place
        decays, values, initial = [], [], None
        for t, terms in enumerate(split):
            constant, factors = self._split(terms[term])
            if len(factors) <= factor or (t and factors[factor] is not steps[t - 1]):
                return None
            if t == 0:
                initial = factors[factor]
            rest = factors[:factor] + factors[factor + 1 :]
            decays.append(self.product(constant, rest, steps[t].shape, steps[t].dtype))
            rest = terms[:term] + terms[term + 1 :]
            value = rest[0]
            for other in rest[1:]:
                value = self.binary("add", value, other)
            values.append(value)
        decay, value = self.roll(decays, size), self.roll(values, size)
        if decay is None or value is None:
            return None
        base = self.recurrence(decay, value, None if initial.kind == "constant" and initial.data == 0 else initial)
        self.last[steps[-1].number] = (base, len(steps) == size)
        return base

    def _split(self, term: Value) -> Tuple[float, List[Value]]:
        """Factors of a product, a zero state among them."""
        if term.kind == "elementwise" and term.data[0] == "mul":
            parts = [(c.data, [c]) if c.kind == "constant" and c.data == 0 else self._split(c) for c in term.children]
            (a, left), (b, right) = parts
            return (a or 1.0) * (b or 1.0), left + right
        return self.factors(term)

    def _place(self, steps: List[Value], split: List[List[Value]]) -> Optional[Tuple[int, int]]:
        """Which term of a step, and which of its factors, is the step before it."""
        if len(split[0]) < 2:
            return None
        if len(steps) > 1:
            for i, term in enumerate(split[1]):
                for j, factor in enumerate(self._split(term)[1]):
                    if factor is steps[0]:
                        return i, j
            return None
        # One step alone: a state that is zero, or what an exponential multiplies.
        guesses = []
        for i, term in enumerate(split[0]):
            factors = self._split(term)[1]
            for j, factor in enumerate(factors):
                if factor.kind == "constant" and factor.data == 0:
                    return i, j
                others = factors[:j] + factors[j + 1 :]
                if len(others) == 1 and others[0].kind == "elementwise" and others[0].data[0] == "exp" and factor.kind == "leaf":
                    guesses.append((i, j))
        return guesses[0] if guesses else None

    def recurrence(self, decay: Value, value: Value, initial: Optional[Value]) -> Base:
        """h[t] = decay[t] h[t-1] + value[t] along the first axis."""
        decay, value = self.together(decay, value)
        key = (decay.number, value.number, None if initial is None else initial.number)
        if key not in self._recurrences:
            self._recurrences[key] = Base(
                "recurrence", value.shape, value.dtype, self.origin, decay=decay, value=value, initial=initial
            )
        return self._recurrences[key]


# ===-- Reading torch's graph ----------------------------------------------=== #


def _where(node: Any) -> str:
    """Where a node of torch's graph comes from: the last line of its stack trace."""
    trace = getattr(node, "meta", {}).get("stack_trace") if node is not None else None
    if not trace:
        return ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            code = lines[i + 1] if i + 1 < len(lines) and not lines[i + 1].startswith("File ") else ""
            place = lines[i][5:].replace('"', "").replace(", line ", ":")
            return f" at {place}" + (f", `{code}`" if code else "")
    return ""


def _name(node: Any) -> str:
    target = getattr(node, "target", None)
    text = str(target)
    if getattr(node, "op", "") == "call_function" and not isinstance(target, str):
        module = getattr(target, "__module__", "") or ""
        if not hasattr(target, "_schema") and "higher_order" not in module:
            text = getattr(target, "__name__", text)
    return text


def refuse(node: Any, why: str) -> UnsupportedError:
    error = UnsupportedError(f"from_torch: {_name(node)}{_where(node)}: {why}")
    error.node = node
    return error


def _size(size: Any) -> Size:
    """A size as a number, or as a symbol."""
    if isinstance(size, int):
        return size
    expression = getattr(getattr(size, "node", None), "expr", size)
    return int(expression) if getattr(expression, "is_number", False) else expression


class Reader:
    """Makes values of the nodes of a graph."""

    def __init__(self, builder: Builder):
        self.b = builder
        self.node: Any = None

    def run(self, graph_module: Any, inputs: Sequence[Any]) -> List[Any]:
        """The outputs of a graph, of values for its placeholders."""
        given = iter(inputs)
        env: Dict[Any, Any] = {}
        outer = self.node
        for node in graph_module.graph.nodes:
            self.node = node
            if node.op in ("placeholder", "call_function"):
                self.b.origin = node
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                found = graph_module
                for part in node.target.split("."):
                    found = getattr(found, part)
                env[node] = found
            elif node.op == "output":
                results = node.args[0]
                self.node = outer
                return [env[r] if hasattr(r, "op") else r for r in (results if isinstance(results, (list, tuple)) else [results])]
            elif node.op == "call_function":
                env[node] = self._call(node, env)
            else:
                raise refuse(node, f"expected a function, got a node of kind {node.op}")
        raise refuse(None, "expected a graph with an output, got none")

    def _call(self, node: Any, env: Dict[Any, Any]) -> Any:
        import torch

        def resolved(x: Any) -> Any:
            if hasattr(x, "op") and hasattr(x, "graph"):
                found = env[x]
                if isinstance(found, _Poison):
                    raise refuse(node, found.why)
                return found
            if isinstance(x, (list, tuple)):
                return type(x)(resolved(i) for i in x) if not isinstance(x, torch.Size) else [resolved(i) for i in x]
            return x

        if node.target is operator.getitem:
            source = env[node.args[0]]
            if isinstance(source, _Poison):
                raise refuse(node, source.why)
            return source[node.args[1]]
        name = _name(node)
        handler = _HANDLERS.get(name) or _HANDLERS.get(name.rsplit(".", 1)[0])
        if handler is None:
            if name.startswith(("aten.sym_", "sym_")) or isinstance(node.meta.get("val"), (torch.SymInt, int)):
                return _size(node.meta["val"])
            if name.startswith(("aten._assert", "_assert", "aten.sym_constrain", "aten._assert_scalar")):
                return None
            raise refuse(node, "expected an op that COREY has, got another")
        args = [resolved(a) for a in node.args]
        kwargs = {k: resolved(v) for k, v in node.kwargs.items()}
        if any(isinstance(a, _Scattered) for a in args) and handler not in _WRITES:
            raise refuse(node, "expected a tensor whose tokens are all written, got one with some left")
        try:
            return handler(self, node, *args, **kwargs)
        except (AttributeError, TypeError, IndexError, KeyError) as failure:
            raise refuse(node, f"expected tensors and numbers as COREY knows them, got other arguments ({failure})") from failure

    # What handlers use.

    def shape_of(self, node: Any) -> Tuple[Size, ...]:
        return tuple(_size(s) for s in node.meta["val"].shape)

    def dtype_of(self, node: Any) -> str:
        return self.dtype(node.meta["val"].dtype)

    def dtype(self, dtype: Any) -> str:
        found = _DTYPES.get(str(dtype))
        if found is None:
            raise refuse(self.node, f"expected float32, float16 or bfloat16, got {str(dtype).replace('torch.', '')}")
        return found

    def tensor(self, x: Any, what: str = "a tensor") -> Value:
        if not isinstance(x, Value):
            raise refuse(self.node, f"expected {what}, got {type(x).__name__}")
        return x

    def axis(self, axis: int, rank: int) -> int:
        return axis + rank if axis < 0 else axis


_HANDLERS: Dict[str, Callable[..., Any]] = {}


def _handles(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        for name in names:
            _HANDLERS[name] = function
        return function

    return register


for _one in ("exp", "silu", "sigmoid"):
    _HANDLERS[f"aten.{_one}"] = lambda r, n, x, op=_one: r.b.unary(op, r.tensor(x))


@_handles("aten.neg")
def _neg(r, n, x):
    return r.b.scale(r.tensor(x), -1.0)


@_handles("aten.softplus")
def _softplus(r, n, x, beta=1, threshold=20):
    if beta != 1 or threshold < 15:
        raise refuse(n, f"expected beta 1 and a threshold of 15 or more, got {beta} and {threshold}")
    return r.b.unary("softplus", r.tensor(x))


@_handles("aten.log_sigmoid", "aten.logsigmoid", "aten.log_sigmoid_forward")
def _log_sigmoid(r, n, x):
    return r.b.scale(r.b.unary("softplus", r.b.scale(r.tensor(x), -1.0)), -1.0)


@_handles("aten.gelu")
def _gelu(r, n, x, approximate="none"):
    if approximate != "none":
        raise refuse(n, f"expected the exact form, got approximate={approximate!r}")
    return r.b.unary("gelu", r.tensor(x))


@_handles("aten.tanh")
def _tanh(r, n, x):
    twice = r.b.scale(r.b.unary("sigmoid", r.b.scale(r.tensor(x), 2.0)), 2.0)
    return r.b.binary("sub", twice, r.b.constant(1.0, twice.shape, twice.dtype))


def _operand(r, x, like):
    if isinstance(x, Value):
        return x
    if isinstance(x, (int, float)):
        return r.b.constant(x, like.shape, like.dtype)
    raise refuse(r.node, f"expected a tensor or a number, got {x}")


def _arithmetic(r, op, x, y, alpha=1):
    if not isinstance(x, Value) and not isinstance(y, Value):
        raise refuse(r.node, "expected a tensor, got numbers")
    x, y = _operand(r, x, y), _operand(r, y, x)
    if alpha != 1:
        y = r.b.scale(y, alpha)
    if x.kind == "constant" and y.kind == "constant":
        a, b = r.b.together(x, y)
        value = {"add": a.data + b.data, "sub": a.data - b.data, "mul": a.data * b.data}[op]
        return r.b.constant(value, a.shape, a.dtype)
    return r.b.binary(op, x, y)


@_handles("aten.add", "aten.add_")
def _add(r, n, x, y, alpha=1):
    return _arithmetic(r, "add", x, y, alpha)


@_handles("aten.sub", "aten.sub_")
def _sub(r, n, x, y, alpha=1):
    return _arithmetic(r, "sub", x, y, alpha)


@_handles("aten.rsub")
def _rsub(r, n, x, y, alpha=1):
    return _arithmetic(r, "sub", y, x if alpha == 1 else r.b.scale(x, alpha))


@_handles("aten.mul", "aten.mul_")
def _mul(r, n, x, y):
    return _arithmetic(r, "mul", x, y)


@_handles("aten.div", "aten.div_", "aten.true_divide")
def _div(r, n, x, y, rounding_mode=None):
    if rounding_mode is not None or isinstance(y, Value) and y.kind != "constant" or not isinstance(x, Value):
        raise refuse(n, "expected a tensor divided by a number, got another quotient")
    divisor = y.data if isinstance(y, Value) else y
    if not isinstance(divisor, (int, float)) or divisor == 0:
        raise refuse(n, f"expected a number other than 0 to divide by, got {divisor}")
    return r.b.scale(x, 1.0 / divisor)


@_handles("aten.addcmul")
def _addcmul(r, n, x, y, z, value=1):
    return r.b.binary("add", x, r.b.scale(r.b.binary("mul", y, z), value))


@_handles("aten.square")
def _square(r, n, x):
    return r.b.binary("mul", x, x)


@_handles("aten.pow")
def _pow(r, n, x, power):
    if not isinstance(x, Value) or power not in (1, 2, -0.5):
        raise refuse(n, f"expected a tensor to the power of 2, got {power}")
    return x if power == 1 else _rsqrt(r, n, x) if power == -0.5 else _square(r, n, x)


@_handles("aten.rsqrt")
def _rsqrt(r, n, x):
    return r.b.unary("rsqrt", r.tensor(x))


@_handles("aten.reciprocal")
def _reciprocal(r, n, x):
    if x.kind == "elementwise" and x.data[0] == "sqrt":
        return r.b.unary("rsqrt", x.children[0])
    raise refuse(n, "expected the reciprocal of a square root, got another")


@_handles("aten.sqrt")
def _sqrt(r, n, x):
    return r.b.unary("sqrt", r.tensor(x))


@_handles("aten.to", "aten._to_copy", "aten.type_as")
def _to(r, n, x, *rest, **options):
    import torch

    val = n.meta["val"]
    source = n.args[0].meta["val"]
    if val.device != source.device:
        raise refuse(n, f"expected a tensor that stays on {source.device}, got a copy to {val.device}")
    if isinstance(x, Value) and val.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return r.b.cast(x, r.dtype_of(n))
    r.dtype_of(n)
    return x


@_handles(
    "aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.detach_", "aten.lift_fresh_copy", "aten.lift_fresh",
    "aten.positive", "aten._assert_tensor_metadata",
)  # fmt: skip
def _same(r, n, x, *rest, **options):
    return x


@_handles("aten.dropout", "aten.native_dropout")
def _dropout(r, n, x, p, train):
    if train and p:
        raise refuse(n, "expected a module in evaluation mode, got dropout that is on; call module.eval()")
    return x


@_handles("aten.copy", "aten.copy_")
def _copy(r, n, x, source, non_blocking=False):
    return r.b.cast(r.b.broadcast(source, x.shape), x.dtype)


# -- Shapes --


@_handles("aten.transpose", "aten.t", "aten.swapaxes")
def _transpose(r, n, x, a=0, b=1):
    order = list(range(x.rank))
    if x.rank < 2:
        return x
    a, b = r.axis(a, x.rank), r.axis(b, x.rank)
    order[a], order[b] = order[b], order[a]
    return r.b.permute(x, order)


@_handles("aten.permute")
def _permute(r, n, x, order):
    return r.b.permute(x, [r.axis(a, x.rank) for a in order])


@_handles("aten.movedim")
def _movedim(r, n, x, source, destination):
    source = [r.axis(a, x.rank) for a in (source if isinstance(source, (list, tuple)) else [source])]
    destination = [r.axis(a, x.rank) for a in (destination if isinstance(destination, (list, tuple)) else [destination])]
    order = [a for a in range(x.rank) if a not in source]
    for to, one in sorted(zip(destination, source)):
        order.insert(to, one)
    return r.b.permute(x, order)


@_handles("aten.mT", "aten.mH")
def _m_t(r, n, x):
    return _transpose(r, n, x, -1, -2)


@_handles("aten.unsqueeze")
def _unsqueeze(r, n, x, axis):
    return r.b.unsqueeze(x, r.axis(axis, x.rank + 1))


@_handles("aten.squeeze")
def _squeeze(r, n, x, axis=None):
    axes = range(x.rank) if axis is None else [r.axis(a, x.rank) for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
    for a in sorted(axes, reverse=True):
        if x.shape[a] == 1:
            x = r.b.select(x, a, 0)
    return x


@_handles("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _expand(r, n, x, *rest, **options):
    return r.b.broadcast(x, r.shape_of(n))


@_handles("aten.select")
def _select(r, n, x, axis, index):
    axis = r.axis(axis, x.rank)
    if not isinstance(index, int):
        raise refuse(n, f"expected the number of an element, got {index}")
    if index < 0:
        if not isinstance(x.shape[axis], int):
            raise _MustBeStatic(x.shape[axis])
        index += x.shape[axis]
    if isinstance(x, _Scattered):
        if axis != x.axis:
            raise refuse(n, f"expected tokens along axis {x.axis}, got axis {axis}")
        return x.steps[index] if index in x.steps else r.b.select(x.like, axis, index)
    return r.b.select(x, axis, index)


@_handles("aten.slice")
def _slice(r, n, x, axis=0, start=None, end=None, step=1):
    axis = r.axis(axis, x.rank)
    size = r.shape_of(n)[axis]
    start = 0 if start is None else start
    if step != 1 and "associative_scan(" in _where(n):
        raise refuse(n, "expected associative_scan with combine_mode='pointwise', got a generic one, which torch takes apart")
    if step != 1 or not isinstance(start, int):
        raise refuse(n, f"expected every element from a number on, got [{start}:{end}:{step}]")
    if start < 0:
        if not isinstance(x.shape[axis], int):
            raise _MustBeStatic(x.shape[axis])
        start = max(0, start + x.shape[axis])
    if start == 0 and size == x.shape[axis]:
        return x
    return r.b.slice(x, axis, start, size)


@_handles("aten.narrow")
def _narrow(r, n, x, axis, start, length):
    return r.b.slice(x, r.axis(axis, x.rank), start, length)


def _parts(r, n, x, sizes, axis):
    axis = r.axis(axis, x.rank)
    parts, start = [], 0
    for size in sizes:
        parts.append(r.b.slice(x, axis, start, size))
        start += size
    return parts


@_handles("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split")
def _split(r, n, x, sizes, axis=0):
    axis = r.axis(axis, x.rank)
    return _parts(r, n, x, [_size(v.shape[axis]) for v in n.meta["val"]], axis)


@_handles("aten.unbind")
def _unbind(r, n, x, axis=0):
    axis = r.axis(axis, x.rank)
    if not isinstance(x.shape[axis], int):
        raise _MustBeStatic(x.shape[axis])
    return [r.b.select(x, axis, i) for i in range(x.shape[axis])]


@_handles("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as", "aten.reshape_as")
def _view(r, n, x, *rest, **options):
    return _reshaped(r, n, x, r.shape_of(n))


def _reshaped(r, n, x, shape):
    old = [(i, s) for i, s in enumerate(x.shape) if s != 1]
    new = [(i, s) for i, s in enumerate(shape) if s != 1]
    if [s for _, s in old] == [s for _, s in new]:
        axes = [("c", 0, 0)] * x.rank
        for (i, _), (j, _) in zip(old, new):
            axes[i] = ("a", j, 0)
        return r.b.remap(x, axes, shape)
    if x.kind == "constant":
        return r.b.constant(x.data, shape, x.dtype)
    # Axes that become one, or one that becomes several.
    groups, i, j = [], 0, 0
    while i < len(x.shape) or j < len(shape):
        ins, outs = [i] if i < len(x.shape) else [], [j] if j < len(shape) else []
        i, j = i + 1, j + 1

        def total(sizes, which):
            product = 1
            for w in which:
                product = product * sizes[w]
            return product

        while total(x.shape, ins) != total(shape, outs):
            left, right = total(x.shape, ins), total(shape, outs)
            if not isinstance(left, int) or not isinstance(right, int):
                raise refuse(n, f"expected axes of known sizes to become others, got {list(x.shape)} as {list(shape)}")
            if left < right and i < len(x.shape):
                ins.append(i)
                i += 1
            elif left > right and j < len(shape):
                outs.append(j)
                j += 1
            else:
                raise refuse(n, f"expected axes that can be split or joined, got {list(x.shape)} as {list(shape)}")
        if len(ins) > 1 and len(outs) > 1:
            raise refuse(n, f"expected axes that can be split or joined, got {list(x.shape)} as {list(shape)}")
        groups.append((ins, outs))
    # Of size one: they are no axes of the tensor that is reshaped.
    base = Base("reshape", shape, x.dtype, n, x=x, groups=groups)
    return r.b.leaf(base)


@_handles("aten.stack")
def _stack(r, n, parts, axis=0):
    rank = parts[0].rank + 1
    return _rolled(r, n, list(parts), r.axis(axis, rank))


def _rolled(r, n, steps, axis):
    found = r.b.roll(steps, len(steps))
    if found is None:
        raise refuse(
            n,
            "expected results of the steps of one loop, h = exp(dt A) h + dt B u and y = sum of C h, got steps that differ in "
            "more than their token",
        )
    order = list(range(1, found.rank))
    order.insert(axis, 0)
    return r.b.permute(found, order)


@_handles("aten.cat", "aten.concat")
def _cat(r, n, parts, axis=0):
    parts = [p for p in parts if isinstance(p, Value) and p.shape != (0,)]
    axis = r.axis(axis, parts[0].rank)
    if len(parts) == 1:
        return parts[0]
    if all(p.shape[axis] == 1 for p in parts):
        return _rolled(r, n, [r.b.select(p, axis, 0) for p in parts], axis)
    raise refuse(n, "expected the results of single tokens, got tensors to put beside one another")


@_handles("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty",
          "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.scalar_tensor")  # fmt: skip
def _filled(r, n, *args, **options):
    name = _name(n).split(".")[1]
    value = 1.0 if "ones" in name else 0.0
    if name == "full" or name.endswith("full") or name == "full_like":
        value = options.get("fill_value", args[2] if name == "new_full" else args[1] if len(args) > 1 else 0)
    elif name == "scalar_tensor":
        value = args[0]
    if not isinstance(value, (int, float)):
        raise refuse(n, f"expected a number to fill with, got {value}")
    return r.b.constant(value, r.shape_of(n), r.dtype_of(n))


class _Scattered:
    """A tensor whose tokens are written one after another."""

    def __init__(self, like: Value, axis: int, steps: Dict[int, Value]):
        self.like, self.axis, self.steps = like, axis, steps
        self.shape, self.rank, self.dtype = like.shape, like.rank, like.dtype


@_handles("aten.select_scatter")
def _select_scatter(r, n, x, source, axis, index):
    axis = r.axis(axis, x.rank)
    size = x.shape[axis]
    if not isinstance(size, int):
        raise _MustBeStatic(size)
    index = index + size if index < 0 else index
    if not isinstance(x, _Scattered):
        if x.kind != "constant":
            raise refuse(n, "expected a new tensor to write tokens to, got one that is computed")
        x = _Scattered(x, axis, {})
    if x.axis != axis:
        raise refuse(n, f"expected tokens along axis {x.axis}, got axis {axis}")
    steps = dict(x.steps)
    steps[index] = r.b.cast(r.b.broadcast(source, x.shape[:axis] + x.shape[axis + 1 :]), x.dtype)
    if len(steps) == size:
        return _rolled(r, n, [steps[i] for i in range(size)], axis)
    return _Scattered(x.like, axis, steps)


@_handles("aten.slice_scatter")
def _slice_scatter(r, n, x, source, axis=0, start=None, end=None, step=1):
    axis = r.axis(axis, x.rank)
    if source.shape != x.shape or (start or 0) != 0 or step != 1:
        raise refuse(n, "expected the whole of an axis to be written, got a part of it")
    return source


#: What may be done to a tensor before all of its tokens are written.
_WRITES = (_select, _slice, _select_scatter, _slice_scatter, _copy, _same)


# -- Sums --


@_handles("aten.sum", "aten.mean")
def _sum(r, n, x, axis=None, keepdim=False, dtype=None):
    axes = range(x.rank) if axis is None else [r.axis(a, x.rank) for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
    count = 1
    if dtype is not None:
        x = r.b.cast(x, r.dtype(dtype))
    for a in sorted(axes, reverse=True):
        size = x.shape[a]
        if not isinstance(size, int):
            raise _MustBeStatic(size)
        count *= size
        x = r.b.sum_last(r.b.permute(x, [i for i in range(x.rank) if i != a] + [a]))
        if keepdim:
            x = r.b.unsqueeze(x, a)
    return r.b.scale(x, 1.0 / count) if _name(n).startswith("aten.mean") else x


@_handles("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot")
def _matmul(r, n, x, y):
    squeeze_left, squeeze_right = x.rank == 1, y.rank == 1
    if squeeze_left:
        x = r.b.unsqueeze(x, 0)
    # A vector, and what has one column, take no axis of their own.
    column = not squeeze_right and y.shape[-1] == 1
    if column:
        y = r.b.select(y, y.rank - 1, 0)
    if squeeze_right or column:
        if y.rank > 1:
            y = r.b.unsqueeze(y, y.rank - 1)
        found = r.b.sum_last(r.b.binary("mul", x, y))
        if column:
            found = r.b.unsqueeze(found, found.rank)
    else:
        left = r.b.unsqueeze(x, x.rank - 1)
        right = _transpose(r, n, y, -1, -2)
        right = r.b.unsqueeze(right, right.rank - 2)
        found = r.b.sum_last(r.b.binary("mul", left, right))
    if squeeze_left:
        found = r.b.select(found, found.rank - 1 - (0 if squeeze_right else 1), 0)
    return found


@_handles("aten.addmm")
def _addmm(r, n, bias, x, y, beta=1, alpha=1):
    return r.b.binary("add", r.b.scale(bias, beta), r.b.scale(_matmul(r, n, x, y), alpha))


@_handles("aten.baddbmm")
def _baddbmm(r, n, bias, x, y, beta=1, alpha=1):
    return _addmm(r, n, bias, x, y, beta, alpha)


@_handles("aten.einsum")
def _einsum(r, n, equation, operands, path=None):
    equation = equation.replace(" ", "")
    if "." in equation:
        raise refuse(n, f"expected every axis by a letter, got {equation}")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if any(len(set(t)) != len(t) for t in terms):
        raise refuse(n, f"expected no diagonals, got {equation}")
    summed = [c for c in dict.fromkeys(left.replace(",", "")) if c not in right]
    order = right + "".join(summed)
    sizes: Dict[str, Size] = {}
    for term, x in zip(terms, operands):
        for c, size in zip(term, x.shape):
            if sizes.get(c, 1) == 1:
                sizes[c] = size
    shape = [sizes[c] for c in order]
    found = None
    for term, x in zip(terms, operands):
        x = r.b.remap(x, [("a", order.index(c), 0) if x.shape[i] == sizes[c] else ("c", 0, 0) for i, c in enumerate(term)], shape)
        found = x if found is None else r.b.binary("mul", found, x)
    for c in reversed(summed):
        if not isinstance(sizes[c], int):
            raise _MustBeStatic(sizes[c])
        found = r.b.sum_last(found)
    return found


@_handles("aten.linear")
def _linear(r, n, x, weight, bias=None):
    if x.rank >= 3:
        # One product, whatever is taken of it.
        base = Base("linear", x.shape[:-1] + (weight.shape[0],), x.dtype, n, x=x, weight=weight, bias=bias)
        return r.b.leaf(base)
    found = _matmul(r, n, x, r.b.permute(weight, (1, 0)))
    return found if bias is None else r.b.binary("add", found, bias)


@_handles("aten.rms_norm")
def _rms_norm(r, n, x, shape, weight=None, eps=None):
    if len(shape) != 1:
        raise refuse(n, f"expected a norm of the last axis, got one of {list(shape)}")
    if eps is None:
        import torch

        eps = torch.finfo(n.args[0].meta["val"].dtype).eps
    return r.b.leaf(Base("rms_norm", x.shape, x.dtype, n, x=x, weight=weight, eps=float(eps)))


@_handles("aten.pad", "aten.constant_pad_nd")
def _pad(r, n, x, amounts, mode="constant", value=None):
    if mode != "constant" or (value or 0) != 0:
        raise refuse(n, "expected padding with zeros, got another")
    if not any(amounts):
        return x
    if len(amounts) > 2 and any(amounts[2:]) or amounts[1] != 0 or amounts[0] < 0:
        raise refuse(n, f"expected zeros before the first token of the last axis, got padding {list(amounts)}")
    return r.b.leaf(Base("pad", x.shape[:-1] + (x.shape[-1] + amounts[0],), x.dtype, n, x=x, left=amounts[0]))


def _one(x: Any) -> Any:
    return x[0] if isinstance(x, (list, tuple)) else x


@_handles("aten.conv1d")
def _conv1d(r, n, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    stride, dilation = _one(stride), _one(dilation)
    padding = padding if isinstance(padding, str) else _one(padding)
    channels, width = x.shape[1], weight.shape[2]
    if x.rank != 3 or stride != 1 or dilation != 1 or groups != channels or weight.shape[0] != channels:
        raise refuse(
            n, f"expected a depthwise convolution of stride and dilation 1, got groups {groups} of {channels} channels, "
            f"stride {stride}, dilation {dilation}"
        )  # fmt: skip
    if not 2 <= width <= 4:
        raise refuse(n, f"expected a width from 2 to 4, got {width}")
    if padding == 0 and x.kind == "leaf" and x.data[0].kind == "pad" and x.data[0].left == width - 1 and x.data[1] == _identity(3):
        x = x.data[0].x
        out = x.shape[2]
    elif padding == width - 1:
        out = r.shape_of(n)[2]
    else:
        raise refuse(n, f"expected a causal convolution: padding {width - 1}, of which the last are cut, or zeros in front, got {padding}")
    length = x.shape[2]
    base = Base(
        "conv", (x.shape[0], out, channels), x.dtype, n, x=x, weight=r.b.select(weight, 1, 0), bias=bias, valid=length, silu=False
    )
    return r.b.leaf(base, [("a", 0, 0), ("a", 2, 0), ("a", 1, 0)], (x.shape[0], channels, out))


# -- Loops that say so --


def _body(r, graph_module, values):
    return Reader(r.b).run(graph_module, values)


@_handles("scan", "higher_order.scan")
def _scan(r, n, combine, initial, tokens, extra=()):
    length = tokens[0].shape[0] if tokens else None
    if length is None:
        raise refuse(n, "expected tensors to scan over, got none")
    states, ys = [list(initial)], []
    # What one step does, three times: as a loop over any number does it.
    for t in range(3):
        out = _body(r, combine, states[-1] + [r.b.select(x, 0, t) for x in tokens] + list(extra))
        states.append(out[: len(initial)])
        ys.append(out[len(initial) :])
    results: List[Any] = []
    for y in zip(*ys):
        found = r.b.roll(list(y), length)
        results.append(
            _Poison("expected y = sum of C h of a state h = exp(dt A) h + dt B u, got another step") if found is None else found
        )
    final: List[Any] = []
    for state in zip(*states[1:]):
        found = r.b.roll(list(state), length)
        if found is not None and found.kind == "leaf" and found.data[0].kind == "recurrence":
            final.append(r.b.leaf(Base("last", found.shape[1:], "f32", n, recurrence=found.data[0])))
        else:
            final.append(_Poison("expected a state h = exp(dt A) h + dt B u, got another"))
    return final + results


@_handles("associative_scan", "higher_order.associative_scan")
def _associative_scan(r, n, combine, tokens, extra=()):
    """Decays, and states that each go with one of them, in any order."""
    if len(tokens) < 2:
        raise refuse(n, f"expected pairs of a decay and a value, got {len(tokens)} tensors")
    count = len(tokens)
    shapes = [t.shape[1:] for t in tokens]
    symbols = [r.b.leaf(Base("symbol", s, t.dtype)) for _ in range(2) for s, t in zip(shapes, tokens)]
    given = [p for p in combine.graph.nodes if p.op == "placeholder"]
    # A placeholder that there is for one token more or less stands for its axis.
    values = [v if len(p.meta["val"].shape) == v.rank else r.b.unsqueeze(v, 0) for v, p in zip(symbols, given)]
    out = _body(r, combine, values + list(extra))
    earlier, later = values[:count], values[count:]

    def factors(x: Value) -> Tuple[float, tuple]:
        constant, found = r.b.factors(x)
        return constant, tuple(sorted(f.number for f in found))

    def is_product(x: Any, *of: Value) -> bool:
        # Broadcast as the product broadcasts them.
        of = [r.b.broadcast(f, x.shape) for f in of] if isinstance(x, Value) else of
        return isinstance(x, Value) and factors(x) == (1.0, tuple(sorted(f.number for f in of)))

    decays = [i for i in range(count) if is_product(out[i], earlier[i], later[i])]
    results: List[Any] = [_Poison("expected the states of a scan, got the products of its decays")] * count
    for i in set(range(count)).difference(decays):
        terms = r.b.terms(out[i]) if isinstance(out[i], Value) else []
        if len(terms) == 2 and is_product(terms[0], later[i]):
            terms.reverse()
        own = [d for d in decays if len(terms) == 2 and is_product(terms[0], later[d], earlier[i])]
        if not own or not is_product(terms[1], later[i]):
            raise refuse(n, "expected (a1 a2, a2 b1 + b2), a recurrence h = a h + b, got another combination")
        results[i] = r.b.leaf(r.b.recurrence(tokens[own[0]], tokens[i], None))
    if len(decays) == count:
        raise refuse(n, "expected (a1 a2, a2 b1 + b2), a recurrence h = a h + b, got another combination")
    return results


@_handles("while_loop", "higher_order.while_loop")
def _while_loop(r, n, *rest):
    raise refuse(n, "expected torch's scan or associative_scan, or a loop over tokens of a known number, got while_loop")


# -- COREY's own ops --


@_handles("corey.selective_scan")
def _own_scan(r, n, u, delta, A, B, C, D, z, bias, softplus):
    def last(x):
        return None if x is None else r.b.permute(x, (0, 2, 1))

    def matrix(x):
        if x.rank == 3:
            x = r.b.unsqueeze(x, 1)
        if x.rank != 4:
            raise refuse(n, "expected B and C that change from token to token, got constant ones")
        return r.b.permute(x, (0, 3, 1, 2))

    batch, channels, length = u.shape
    fields = dict(
        u=last(u), delta=last(delta), A=A, B=matrix(B), C=matrix(C), D=D, z=last(z), bias=bias, softplus=bool(softplus), initial=None
    )
    scan = Base("selective_scan", (batch, length, channels), u.dtype, n, **fields)
    y = r.b.leaf(scan, [("a", 0, 0), ("a", 2, 0), ("a", 1, 0)], u.shape)
    state = r.b.leaf(Base("last", (batch, channels, A.shape[1]), "f32", n, recurrence=scan))
    return [y, state]


@_handles("corey.causal_conv1d")
def _own_conv(r, n, x, weight, bias, seq_idx, initial_states, silu):
    if seq_idx is not None or initial_states is not None:
        raise refuse(n, "expected whole sequences without earlier tokens, got seq_idx or initial_states")
    base = Base(
        "conv", (x.shape[0], x.shape[2], x.shape[1]), x.dtype, n, x=x, weight=weight, bias=bias, valid=x.shape[2], silu=bool(silu)
    )
    return [r.b.leaf(base, [("a", 0, 0), ("a", 2, 0), ("a", 1, 0)], x.shape), _Poison("expected the convolution, got its final state")]


# ===-- Writing a program --------------------------------------------------=== #


class Tensor:
    """A value of the program, with its sizes."""

    __slots__ = ("name", "shape", "dtype")

    def __init__(self, name: str, shape: Sequence[Size], dtype: str):
        self.name, self.shape, self.dtype = name, tuple(shape), dtype

    @property
    def type(self) -> str:
        return "tensor<" + "".join(f"{s if isinstance(s, int) else '?'}x" for s in self.shape) + self.dtype + ">"


class Writer:
    """Writes the ops that make values."""

    def __init__(self, builder: Builder):
        self.b = builder
        self.lines: List[str] = []
        self.arguments: List[Tuple[Tensor, int, tuple]] = []  # which input, which of its axes
        self.weights: List[Tuple[str, Tensor, int, tuple]] = []
        self.dims: Dict[Any, str] = {}
        self.scans = 0
        self.counts: Dict[str, int] = {}
        self._made: Dict[tuple, Tensor] = {}
        self._bases: Dict[int, Any] = {}
        self._views: Dict[tuple, Tensor] = {}
        self._names = 0
        self._indices: Dict[int, str] = {}

    # -- Text --

    def _fresh(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def _emit(self, text: str, shape: Sequence[Size], dtype: str) -> Tensor:
        result = Tensor(self._fresh(), shape, dtype)
        self.lines.append(f"{result.name} = {text}")
        return result

    def _op(self, op: str, text: str, shape: Sequence[Size], dtype: str) -> Tensor:
        self.counts[op] = self.counts.get(op, 0) + 1
        return self._emit(f"ssm.{op} {text}", shape, dtype)

    def dim(self, size: Size) -> str:
        """A size as the operand of an op."""
        if isinstance(size, int):
            return str(size)
        if size not in self.dims:
            raise _MustBeStatic(size)
        return self.dims[size]

    def _index(self, value: int) -> str:
        if value not in self._indices:
            self._indices[value] = f"%i{value}"
        return self._indices[value]

    def static(self, *sizes: Size) -> None:
        for size in sizes:
            if not isinstance(size, int):
                raise _MustBeStatic(size)

    # -- Tensors that are given --

    def _given(self, base: Base, view: tuple) -> Tensor:
        """An input or weight with its axes in an order; those that are not in it are
        of size one."""
        key = (id(base), view)
        if key in self._views:
            return self._views[key]
        shape = [base.shape[i] for i in view]
        if base.kind == "weight":
            name = f"w{len(self.weights)}"
            made = self._emit(f"ssm.get_weight @{name} : {Tensor('', shape, base.dtype).type}", shape, base.dtype)
            self.weights.append((name, made, base.index, view))
        else:
            made = Tensor(f"%arg{len(self.arguments)}", shape, base.dtype)
            self.arguments.append((made, base.index, view))
        self._views[key] = made
        return made

    def prepare_dims(self, inputs: Sequence[Base]) -> None:
        """Names for the symbols of inputs, whose lines are written at the end."""
        for base in inputs:
            for axis, size in enumerate(base.shape):
                if not isinstance(size, int) and getattr(size, "is_Symbol", False) and size not in self.dims:
                    self.dims[size] = f"%d{len(self.dims)}"

    # -- Values --

    def value(self, x: Value, axes: Sequence[int]) -> Tensor:
        """The value with axes in an order."""
        axes = tuple(axes)
        if axes != tuple(range(x.rank)) and x.number not in self.b.last:
            if not self.b.depends(x) <= set(axes):
                raise refuse(x.origin, "expected a value of fewer axes, got one that changes along others")
            # Of the same with other axes beside them there is one.
            places = [("a", axes.index(i), 0) if i in axes else ("c", 0, 0) for i in range(x.rank)]
            x = self.b.remap(x, places, [x.shape[a] for a in axes])
            axes = tuple(range(x.rank))
        key = (x.number, axes)
        if key not in self._made:
            outer, self.b.origin = self.b.origin, x.origin
            self._made[key] = self._value(x, axes)
            self.b.origin = outer
        return self._made[key]

    def full(self, x: Value) -> Tensor:
        return self.value(x, range(x.rank))

    def _value(self, x: Value, axes: Tuple[int, ...]) -> Tensor:
        shape = [x.shape[a] for a in axes]
        depends = self.b.depends(x)
        wanted = [a for a in axes if a in depends]
        if len(wanted) < len(depends):
            raise refuse(x.origin, "expected a value of fewer axes, got one that changes along others")
        if len(wanted) < len(axes) and not all(x.shape[a] == 1 for a in axes if a not in depends):
            return self._spread(x, axes, wanted, shape)
        if len(wanted) < len(axes):
            return self._with_units(x, axes, wanted, shape)
        known = self.b.last.get(x.number)
        if known is not None and known[1]:
            return self._last(known[0], axes, x)
        if x.kind == "leaf":
            return self._leaf(x, axes, shape)
        if x.kind == "sum":
            return self._sum(x, axes)
        return self._elementwise(x, axes, shape)

    def _with_units(self, x: Value, axes: Sequence[int], wanted: Sequence[int], shape: Sequence[Size]) -> Tensor:
        inner = self._constant(x, []) if x.kind == "constant" else self.value(x, wanted)
        return self._grouped(inner, shape)

    def _grouped(self, x: Tensor, shape: Sequence[Size]) -> Tensor:
        """A tensor with axes of size one put in."""
        if tuple(shape) == x.shape:
            return x
        groups: List[List[int]] = []
        for place, size in enumerate(shape):
            if size != 1 and (len(groups) == 0 or any(shape[p] != 1 for p in groups[-1])):
                groups.append([place])
            elif groups:
                groups[-1].append(place)
            else:
                groups.append([place])
        if len(groups) != len(x.shape):
            # Axes of one among those of the tensor itself.
            groups = [[i] for i in range(len(x.shape))]
            groups[-1] += range(len(x.shape), len(shape))
        text = ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups)
        result = Tensor("", shape, x.dtype)
        return self._emit(
            f"tensor.expand_shape {x.name} [{text}] output_shape [{', '.join(map(self.dim, shape))}] : {x.type} into {result.type}",
            shape, x.dtype,
        )  # fmt: skip

    def _constant(self, x: Value, shape: Sequence[Size]) -> Tensor:
        result = Tensor("", shape, x.dtype)
        if all(isinstance(s, int) for s in shape):
            return self._emit(f"arith.constant dense<{_literal(x.data)}> : {result.type}", shape, x.dtype)
        scalar = self._fresh()
        self.lines.append(f"{scalar} = arith.constant {_literal(x.data)} : {x.dtype}")
        free = [self.dim(s) for s in shape if not isinstance(s, int)]
        return self._emit(f"tensor.splat {scalar}[{', '.join(free)}] : {result.type}", shape, x.dtype)

    def _spread(self, x: Value, axes: Sequence[int], wanted: Sequence[int], shape: Sequence[Size]) -> Tensor:
        """The same along axes that the value does not change along."""
        if x.kind == "constant":
            return self._constant(x, shape)
        inner = self.value(x, wanted)
        free = [self.dim(s) for s in shape if not isinstance(s, int)]
        result = Tensor("", shape, inner.dtype)
        empty = self._emit(f"tensor.empty({', '.join(free)}) : {result.type}", shape, inner.dtype)
        added = [i for i, a in enumerate(axes) if a not in wanted]
        return self._emit(
            f"linalg.broadcast ins({inner.name} : {inner.type}) outs({empty.name} : {empty.type}) dimensions = {added}", shape,
            inner.dtype,
        )  # fmt: skip

    def _permuted(self, x: Tensor, order: Sequence[int]) -> Tensor:
        if list(order) == list(range(len(order))):
            return x
        shape = [x.shape[i] for i in order]
        free = [self.dim(s) for s in shape if not isinstance(s, int)]
        empty = self._emit(f"tensor.empty({', '.join(free)}) : {Tensor('', shape, x.dtype).type}", shape, x.dtype)
        return self._emit(
            f"linalg.transpose ins({x.name} : {x.type}) outs({empty.name} : {empty.type}) permutation = {list(order)}", shape, x.dtype
        )

    def _leaf(self, x: Value, axes: Tuple[int, ...], shape: Sequence[Size]) -> Tensor:
        base, own = x.data
        if base.kind == "recurrence":
            raise refuse(base.origin, "expected states that C sums up, got one that is used itself")
        if base.kind == "pad":
            raise refuse(base.origin, "expected zeros in front of a causal convolution, got them elsewhere")
        places = {a[1]: i for i, a in enumerate(own) if a[0] == "a"}
        if len(places) < sum(a[0] == "a" for a in own):
            raise refuse(x.origin, "expected each axis once, got a diagonal")
        order = [places[a] for a in axes]
        if base.kind in ("input", "weight"):
            dropped = [i for i in range(len(own)) if i not in order]
            if all(base.shape[i] == 1 for i in dropped):
                source = self._given(base, tuple(order))
                return self._sliced(source, [own[i][2] for i in order], shape, range(len(order)))
            view = tuple(sorted(dropped)) + tuple(order)
            source = self._given(base, view)
            offsets = [own[i][1] if own[i][0] == "c" else own[i][2] for i in view]
            sizes = [1] * len(dropped) + list(shape)
            return self._sliced(source, offsets, sizes, range(len(dropped), len(view)))
        source = self.base(base)
        stored = [a for a in own if a[0] == "a"]
        kept = [i for i, a in enumerate(own) if a[0] == "a"]
        sizes = [x.shape[a[1]] if a[0] == "a" else 1 for a in own]
        offsets = [a[2] if a[0] == "a" else a[1] for a in own]
        if base.kind == "conv":
            if offsets[1] != 0 or own[1][0] != "a" or sizes[1] != base.valid:
                raise refuse(base.origin, "expected the first tokens of a convolution, as many as it was given, got others")
        found = self._sliced(source, offsets, sizes, kept)
        present = [a[1] for a in stored]
        return self._permuted(found, [present.index(a) for a in axes])

    def _sliced(self, x: Tensor, offsets: Sequence[int], sizes: Sequence[Size], kept: Sequence[int]) -> Tensor:
        for offset, size, whole in zip(offsets, sizes, x.shape):
            if (offset or size != whole) and not isinstance(whole, int):
                raise _MustBeStatic(whole)
        kept = list(kept)
        if not any(offsets) and tuple(sizes) == x.shape and len(kept) == len(x.shape):
            return x
        shape = [sizes[i] for i in kept]
        result = Tensor("", shape, x.dtype)
        return self._emit(
            f"tensor.extract_slice {x.name}[{', '.join(map(str, offsets))}] [{', '.join(map(self.dim, sizes))}] "
            f"[{', '.join('1' for _ in sizes)}] : {x.type} to {result.type}", shape, x.dtype,
        )  # fmt: skip

    def _elementwise(self, x: Value, axes: Tuple[int, ...], shape: Sequence[Size]) -> Tensor:
        op, parameter = x.data
        if op in ("mul", "scale"):
            norm = self._norm(x, axes)
            if norm is not None:
                return norm
        if op in ("rsqrt", "sqrt"):
            raise refuse(x.origin, "expected the root of a mean square, in a norm of the last axis, got another")
        if op == "cast":
            inner = self.value(x.children[0], axes)
            return self._op("cast", f"{inner.name} : {inner.type} to {Tensor('', shape, parameter).type}", shape, parameter)
        if op == "scale":
            inner = self.value(x.children[0], axes)
            if parameter == -1.0:
                return self._op("neg", f"{inner.name} : {inner.type}", shape, inner.dtype)
            return self._op("scale", f"{inner.name} by {parameter!r} : {inner.type}", shape, inner.dtype)
        if len(x.children) == 1:
            inner = self.value(x.children[0], axes)
            return self._op(op, f"{inner.name} : {inner.type}", shape, inner.dtype)
        left, right = x.children
        if op in ("add", "mul", "sub") and not self._covers(left, axes) and self._covers(right, axes):
            if op == "sub":
                left, right, op = self.b.scale(right, -1.0), left, "add"
            else:
                left, right = right, left
        first = self.value(left, axes)
        second = self._trailing(right, axes)
        return self._op(op, f"{first.name}, {second.name} : {first.type}, {second.type}", shape, first.dtype)

    def _covers(self, x: Value, axes: Sequence[int]) -> bool:
        return all(a in self.b.depends(x) for a in axes)

    def _trailing(self, x: Value, axes: Tuple[int, ...]) -> Tensor:
        """An operand that may lack leading axes."""
        depends = self.b.depends(x)
        first = next((i for i, a in enumerate(axes) if a in depends), max(len(axes) - 1, 0))
        if not depends and axes and not isinstance(x.shape[axes[-1]], int):
            first = 0
        return self.value(x, axes[first:])

    # -- Norms --

    def _norm(self, x: Value, axes: Tuple[int, ...]) -> Optional[Tensor]:
        """x rsqrt(mean(x x) + eps) w, over the last axis."""
        if not axes:
            return None
        constant, factors = self.b.factors(x, norms=True)
        last = axes[-1]
        for root in factors:
            if root.kind != "elementwise" or root.data[0] != "rsqrt" or last in self.b.depends(root):
                continue
            terms = self.b.terms(root.children[0])
            eps = [t.data for t in terms if t.kind == "constant"]
            means = [t for t in terms if t.kind != "constant"]
            if len(means) != 1 or len(eps) > 1:
                continue
            scale, inner = self.b.factors(means[0])
            if len(inner) != 1 or inner[0].kind != "sum":
                continue
            summed = inner[0].children[0]
            size = summed.shape[-1]
            if not isinstance(size, int) or size != x.shape[last] or abs(scale * size - 1) > 1e-6:
                continue
            square, twice = self.b.factors(summed)
            if square != 1.0 or len(twice) != 2 or twice[0] is not twice[1]:
                continue
            # What was summed over, at the last axis of the product.
            source = self.b.remap(twice[0], [("a", i, 0) for i in range(x.rank)] + [("a", last, 0)], x.shape)
            rest = [f for f in factors if f is not root]
            if source not in rest:
                continue
            rest.remove(source)
            weights = [f for f in rest if self.b.depends(f) == {last}]
            others = [f for f in rest if f not in weights]
            weight = self.b.product(constant, weights, x.shape, "f32")
            first = self.value(source, axes)
            if not others and first.dtype != x.dtype:
                first = self.value(self.b.cast(source, x.dtype), axes)
            norm = self._rms(first, self._weight(weight, last), eps[0] if eps else 0.0)
            if not others:
                return norm
            for f in others:
                second = self._trailing(f, axes)
                norm = self._op("mul", f"{norm.name}, {second.name} : {norm.type}, {second.type}", norm.shape, norm.dtype)
            return norm
        return None

    def _weight(self, weight: Value, last: int) -> Tensor:
        return self.value(weight, (last,))

    def _rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.static(x.shape[-1])
        return self._op(
            "rms_norm", f"{x.name}, {weight.name} {{eps = {_literal(eps)} : f32}} : {x.type}, {weight.type} -> {x.type}", x.shape, x.dtype
        )

    # -- Sums --

    def _sum(self, x: Value, axes: Tuple[int, ...]) -> Tensor:
        inner = x.children[0]
        last = x.rank
        constant, factors = self.b.factors(inner)
        states = [f for f in factors if f.kind == "leaf" and f.data[0].kind == "recurrence"]
        if not states:
            # A state that was rounded before C sums it up.
            bare = []
            for f in factors:
                while f.kind == "elementwise" and f.data[0] == "cast":
                    f = f.children[0]
                bare.append(f)
            if any(f.kind == "leaf" and f.data[0].kind == "recurrence" for f in bare):
                factors = bare
                states = [f for f in bare if f.kind == "leaf" and f.data[0].kind == "recurrence"]
        outside = [f for f in factors if last not in self.b.depends(f)]
        inside = [f for f in factors if last in self.b.depends(f)]
        if len(states) == 1 and states[0] in inside:
            found, order = self._readout(x, states[0], [f for f in inside if f is not states[0]])
            found = self._permuted(found, [order.index(a) for a in axes])
        elif states:
            raise refuse(states[0].data[0].origin, "expected a sum over the states of a channel, got another use of them")
        else:
            found = self._product(x, inside, axes)
        if found.dtype != x.dtype:
            found = self._op("cast", f"{found.name} : {found.type} to {Tensor('', found.shape, x.dtype).type}", found.shape, x.dtype)
        if constant != 1.0:
            found = self._op("scale", f"{found.name} by {constant!r} : {found.type}", found.shape, found.dtype)
        for f in outside:
            flat = self.b.remap(f, [("a", i, 0) if i < last else ("c", 0, 0) for i in range(last + 1)], x.shape)
            second = self._trailing(flat, axes)
            found = self._op("mul", f"{found.name}, {second.name} : {found.type}, {second.type}", found.shape, found.dtype)
        return found

    def _product(self, x: Value, factors: List[Value], axes: Tuple[int, ...]) -> Tensor:
        """A product with a matrix."""
        last = x.rank
        for one in factors:
            own = self.b.depends(one) - {last}
            others = [f for f in factors if f is not one]
            rest = frozenset().union(*(self.b.depends(f) for f in others)) - {last} if others else frozenset()
            if len(own) != 1 or own & rest or not others or not self._is_given(one):
                continue
            column = next(iter(own))
            rows = [a for a in axes if a != column]
            inner = self.b.product(1.0, others, others[0].shape, others[0].dtype)
            left = self.value(inner, rows + [last])
            weight = self.value(one, (column, last))
            shape = [x.shape[a] for a in rows] + [x.shape[column]]
            self.static(x.shape[column], inner.shape[last])
            result = Tensor("", shape, left.dtype)
            found = self._op(
                "projection", f"{left.name}, {weight.name} : {left.type}, {weight.type} -> {result.type}", shape, left.dtype
            )
            order = rows + [column]
            return self._permuted(found, [order.index(a) for a in axes])
        raise refuse(x.origin, "expected a product with a weight, or sum of C h of the states of a scan, got another sum")

    def _is_given(self, x: Value) -> bool:
        if x.kind == "leaf":
            return x.data[0].kind == "weight"
        return x.kind != "constant" and all(self._is_given(c) or c.kind == "constant" for c in x.children)

    # -- Scans --

    def _site(self) -> str:
        self.scans += 1
        return "@scan" if self.scans == 1 else f"@scan{self.scans - 1}"

    def _readout(self, x: Value, state: Value, reads: List[Value]) -> Tuple[Tensor, List[int]]:
        """Sum over n of the reads and the state, and which axes of x it has."""
        base, own = state.data
        last = x.rank
        if any(a[0] != "a" or a[2] != 0 for a in own) or len({a[1] for a in own}) != len(own):
            raise refuse(base.origin, "expected every token's state, got a part of them")
        if any(x.shape[a[1]] != size for a, size in zip(own, base.shape) if a[1] != last):
            raise refuse(base.origin, "expected every token's state, got a part of them")
        of_child = {a[1]: i for i, a in enumerate(own)}
        n = of_child[last]
        # In the axes of the recurrence.
        readouts = []
        for f in reads:
            if not self.b.depends(f) <= set(of_child):
                raise refuse(x.origin, "expected C of the axes of the state, got one of others")
            axes = [("a", of_child[i], 0) if i in of_child else ("c", 0, 0) for i in range(last + 1)]
            readouts.append(self.b.remap(f, axes, base.shape))
        made, order = self._scan(base, n, readouts)
        return made["y"], [own[i][1] for i in order]

    def _roles(self, base: Base, n: int) -> Tuple[int, List[int], float, List[Value], List[Value]]:
        """Of a recurrence: its axis of batches, the others but t and n, and its exponent
        as a constant, factors that change with the token, and factors that do not."""
        decay = base.decay
        origin = base.origin
        while decay.kind == "elementwise" and decay.data[0] == "cast":
            decay = decay.children[0]
        if decay.kind != "elementwise" or decay.data[0] != "exp":
            raise refuse(origin, "expected a decay exp(dt A), got another")
        constant, exponent = self.b.factors(decay.children[0])
        moving = [f for f in exponent if 0 in self.b.depends(f)]
        still = [f for f in exponent if 0 not in self.b.depends(f)]
        others = [i for i in range(1, len(base.shape)) if i != n]
        fixed = frozenset().union(*(self.b.depends(f) for f in still)) if still else frozenset()
        free = [i for i in others if i not in fixed]
        if not free:
            raise refuse(origin, "expected a batch that A does not change along, got none")
        batch = free[0]
        return batch, [i for i in others if i != batch], constant, moving, still

    def _scan(self, base: Base, n: int, readouts: List[Value]) -> Tuple[Dict[str, Tensor], List[int]]:
        """The scan of a recurrence, and which axes of it the result has."""
        key = (id(base), tuple(r.number for r in readouts))
        if key in self._bases:
            return self._bases[key]
        batch, channels, constant, moving, still = self._roles(base, n)
        if len(channels) == 1:
            made = self._selective(base, n, batch, channels[0], constant, moving, still, readouts), [batch, 0, channels[0]]
        elif len(channels) == 2:
            made = self._ssd(base, n, batch, channels, constant, moving, still, readouts)
        else:
            raise refuse(base.origin, f"expected states [batch, channels, states] or [batch, heads, channels, states], got {len(base.shape) - 1} axes")
        self._bases[key] = made
        return made

    def _input(self, base: Base, moving: List[Value]) -> Tuple[float, List[Value]]:
        """The factors of what is added to the state, without dt."""
        constant, factors = self.b.factors(base.value)
        for f in moving:
            if f not in factors:
                raise refuse(base.origin, "expected dt B u, with the dt of exp(dt A), to be added to the state, got another value")
            factors.remove(f)
        return constant, factors

    def _halves(self, base: Base, factors: List[Value], n: int) -> Tuple[List[Value], List[Value]]:
        return [f for f in factors if n in self.b.depends(f)], [f for f in factors if n not in self.b.depends(f)]

    def _within(self, base: Base, what: str, value: Value, axes: Sequence[int]) -> Value:
        if not self.b.depends(value) <= set(axes):
            raise refuse(base.origin, f"expected {what} that changes along fewer axes, got another recurrence")
        return value

    def _group(self, base: Base, what: str, value: Value, batch: int, channel: int, n: int) -> Tensor:
        """B or C, [B, L, G, N]."""
        self._within(base, what, value, (batch, 0, channel, n))
        if channel in self.b.depends(value):
            return self.value(value, (batch, 0, channel, n))
        flat = self.value(value, (batch, 0, n))
        shape = (flat.shape[0], flat.shape[1], 1, flat.shape[2])
        result = Tensor("", shape, flat.dtype)
        return self._emit(
            f"tensor.expand_shape {flat.name} [[0], [1], [2, 3]] output_shape [{', '.join(map(self.dim, shape))}] : {flat.type} into "
            f"{result.type}", shape, flat.dtype,
        )  # fmt: skip

    def _selective(self, base, n, batch, d, constant, moving, still, readouts) -> Dict[str, Tensor]:
        self.static(base.shape[d], base.shape[n])
        b = self.b
        dt = self._within(base, "a dt", b.product(1.0, moving, base.shape, "f32"), (batch, 0, d))
        A = self._within(base, "an A", b.product(constant, still, base.shape, "f32"), (d, n))
        factor, factors = self._input(base, moving)
        of_n, others = self._halves(base, factors, n)
        u = self._within(base, "an input", b.product(factor, others, base.shape, "f32"), (batch, 0, d))
        B = b.product(1.0, of_n, base.shape, "f32")
        C = b.product(1.0, readouts, base.shape, "f32")
        values = {
            "u": self.value(u, (batch, 0, d)),
            "delta": self.value(dt, (batch, 0, d)),
            "A": self.value(b.cast(A, "f32"), (d, n)),
            "B": self._group(base, "a B", B, batch, d, n),
            "C": self._group(base, "a C", C, batch, d, n),
        }
        if base.initial is not None:
            # The state has no axis of tokens.
            values["initial"] = self.value(base.initial, (batch - 1, d - 1, n - 1))
        return self._emit_scan(values)

    def _emit_scan(self, v: Dict[str, Any], softplus: bool = False) -> Dict[str, Tensor]:
        u, delta, A, B, C = (v[k] for k in ("u", "delta", "A", "B", "C"))
        options = ""
        for field, word in (("D", "D"), ("z", "z"), ("bias", "delta_bias"), ("initial", "initial_state")):
            if v.get(field) is not None:
                options += f" {word}({v[field].name} : {v[field].type})"
        state = Tensor("", (u.shape[0],) + A.shape, v["initial"].dtype if v.get("initial") is not None else "f32")
        attributes = ("delta_softplus, " if softplus else "") + f"chunk = #ssm.chunk<runtime = {self._site()}>"
        y = Tensor(self._fresh(), u.shape, u.dtype)
        self.counts["selective_scan"] = self.counts.get("selective_scan", 0) + 1
        self.lines.append(
            f"{y.name}:2 = ssm.selective_scan {u.name}, {delta.name}, {A.name}, {B.name}, {C.name}{options} {{{attributes}}} : "
            f"{u.type}, {delta.type}, {A.type}, {B.type}, {C.type} -> {y.type}, {state.type}"
        )
        return {"y": Tensor(y.name + "#0", y.shape, y.dtype), "state": Tensor(y.name + "#1", state.shape, state.dtype)}

    def _ssd(self, base, n, batch, channels, constant, moving, still, readouts):
        b = self.b
        spread = b.depends(base.decay)
        heads = [c for c in channels if c in spread]
        if n in spread or len(heads) != 1:
            raise refuse(base.origin, "expected a decay per head, exp(dt A) of [batch, length, heads], got another")
        h = heads[0]
        p = next(c for c in channels if c != h)
        self.static(base.shape[h], base.shape[p], base.shape[n])
        dt = self._within(base, "a dt", b.product(1.0, moving, base.shape, "f32"), (batch, 0, h))
        A = self._within(base, "an A", b.product(constant, still, base.shape, "f32"), (h,))
        factor, factors = self._input(base, moving)
        of_n, others = self._halves(base, factors, n)
        x = self._within(base, "an input", b.product(factor, others, base.shape, "f32"), (batch, 0, h, p))
        B = b.product(1.0, of_n, base.shape, "f32")
        C = b.product(1.0, readouts, base.shape, "f32")
        x_, dt_, A_ = self.value(x, (batch, 0, h, p)), self.value(dt, (batch, 0, h)), self.value(A, (h,))
        B_, C_ = self._group(base, "a B", B, batch, h, n), self._group(base, "a C", C, batch, h, n)
        initial = ""
        state = Tensor("", (x_.shape[0], base.shape[h], base.shape[p], base.shape[n]), "f32")
        if base.initial is not None:
            given = self.value(base.initial, (batch - 1, h - 1, p - 1, n - 1))
            initial = f" initial_states({given.name} : {given.type})"
            state.dtype = given.dtype
        name = self._fresh()
        self.counts["ssd"] = self.counts.get("ssd", 0) + 1
        self.lines.append(
            f"{name}:2 = ssm.ssd {x_.name} dt({dt_.name} : {dt_.type}) A({A_.name} : {A_.type}) B({B_.name}) C({C_.name}){initial} "
            f"{{chunk = #ssm.chunk<runtime = {self._site()}>}} : {x_.type}, {B_.type}, {C_.type} -> {x_.type}, {state.type}"
        )
        made = {"y": Tensor(name + "#0", x_.shape, x_.dtype), "state": Tensor(name + "#1", state.shape, state.dtype)}
        return made, [batch, 0, h, p]

    def _last(self, base: Base, axes: Tuple[int, ...], x: Any) -> Tensor:
        """The state after the last token, with axes in an order."""
        if base.kind == "selective_scan":
            return self._permuted(self._own_scan(base)["state"], axes)
        # The scan that was read, if there is one.
        for key, made in self._bases.items():
            if isinstance(key, tuple) and key[0] == id(base):
                found, order = made
                break
        else:
            raise refuse(base.origin, "expected a state that C sums up, got one that is only returned")
        n = ({*range(1, len(base.shape))} - set(order)).pop()
        stored = [a - 1 for a in order if a != 0] + [n - 1]
        return self._permuted(found["state"], [stored.index(a) for a in axes])

    # -- Ops --

    def base(self, base: Base) -> Tensor:
        if id(base) not in self._bases:
            outer, self.b.origin = self.b.origin, base.origin
            self._bases[id(base)] = getattr(self, f"_make_{base.kind}")(base)
            self.b.origin = outer
        return self._bases[id(base)]

    def _make_symbol(self, base: Base) -> Tensor:
        raise refuse(base.origin, "expected a value, got a symbol")

    def _make_last(self, base: Base) -> Tensor:
        return self._last(base.recurrence, tuple(range(len(base.shape))), base)

    def _make_reshape(self, base: Base) -> Tensor:
        x = self.full(base.x)
        joined = [g for g in base.groups if len(g[0]) > 1]
        split = [g for g in base.groups if len(g[1]) > 1 or not g[0]]
        if joined:
            x = self._collapse(x, base)
        if split or tuple(x.shape) != base.shape:
            x = self._expand(x, base)
        return x

    def _collapse(self, x: Tensor, base: Base) -> Tensor:
        groups = [list(g[0]) for g in base.groups if g[0]]
        shape = []
        for g in groups:
            size = 1
            for i in g:
                size = size * x.shape[i]
            shape.append(size)
        if len(groups) == len(x.shape):
            return x
        self.static(*(s for g, s in zip(groups, shape) if len(g) > 1))
        text = ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups)
        result = Tensor("", shape, x.dtype)
        return self._emit(f"tensor.collapse_shape {x.name} [{text}] : {x.type} into {result.type}", shape, x.dtype)

    def _expand(self, x: Tensor, base: Base) -> Tensor:
        groups: List[List[int]] = []
        for ins, outs in base.groups:
            if ins:
                groups.append(list(outs))
            elif groups:
                groups[-1] += outs
            else:
                raise refuse(base.origin, "expected axes that can be split, got new ones in front")
        if any(not g for g in groups):
            raise refuse(base.origin, "expected axes that can be split or joined, got others")
        text = ", ".join("[" + ", ".join(map(str, g)) + "]" for g in groups)
        result = Tensor("", base.shape, x.dtype)
        return self._emit(
            f"tensor.expand_shape {x.name} [{text}] output_shape [{', '.join(map(self.dim, base.shape))}] : {x.type} into {result.type}",
            base.shape, x.dtype,
        )  # fmt: skip

    def _make_linear(self, base: Base) -> Tensor:
        self.static(base.shape[-1], base.x.shape[-1])
        x, weight = self.full(base.x), self.full(base.weight)
        bias = ""
        if base.bias is not None:
            made = self.full(base.bias)
            bias = f" bias({made.name} : {made.type})"
        result = Tensor("", base.shape, base.dtype)
        return self._op("projection", f"{x.name}, {weight.name}{bias} : {x.type}, {weight.type} -> {result.type}", base.shape, base.dtype)

    def _make_rms_norm(self, base: Base) -> Tensor:
        x = self.full(base.x)
        weight = base.weight if base.weight is not None else self.b.constant(1.0, base.shape[-1:], "f32")
        self.static(base.shape[-1])
        return self._rms(x, self.full(weight), base.eps)

    def _make_conv(self, base: Base) -> Tensor:
        self.static(base.shape[2])
        x, weight = self.value(base.x, (0, 2, 1)), self.full(base.weight)
        bias = ""
        if base.bias is not None:
            made = self.full(base.bias)
            bias = f" bias({made.name} : {made.type})"
        silu = " {silu}" if base.silu else ""
        return self._op("causal_conv", f"{x.name}, {weight.name}{bias}{silu} : {x.type}, {weight.type} -> {x.type}", x.shape, x.dtype)

    def _own_scan(self, base: Base) -> Dict[str, Tensor]:
        key = ("own", id(base))
        if key not in self._bases:
            values = {
                name: None if base.fields[name] is None else self.full(base.fields[name])
                for name in ("u", "delta", "A", "B", "C", "D", "z", "bias", "initial")
            }
            for name in ("u", "delta", "A", "B", "C"):
                self.static(*values[name].shape[(2 if name != "A" else 0) :])
            self._bases[key] = self._emit_scan(values, base.softplus)
        return self._bases[key]

    def _make_selective_scan(self, base: Base) -> Tensor:
        return self._own_scan(base)["y"]

    # -- The whole --

    def natural(self, x: Value) -> List[int]:
        """An order of axes that needs nothing moved."""
        found = self._natural(x)
        return list(range(x.rank)) if found is None or sorted(found) != list(range(x.rank)) else found

    def _natural(self, x: Value) -> Optional[List[int]]:
        if x.kind == "leaf":
            base, own = x.data
            return None if base.kind in ("input", "weight", "recurrence") else [a[1] for a in own if a[0] == "a"]
        if x.kind == "sum":
            for f in self.b.factors(x.children[0])[1]:
                if f.kind == "leaf" and f.data[0].kind == "recurrence":
                    base, own = f.data
                    n = next((i for i, a in enumerate(own) if a[1] == x.rank), None)
                    if n is None:
                        return None
                    batch, channels, *_ = self._roles(base, n)
                    heads = [c for c in channels if c in self.b.depends(base.decay)]
                    order = [batch, 0] + heads + [c for c in channels if c not in heads]
                    return [own[i][1] for i in order]
            return None
        for child in x.children:
            found = self._natural(child)
            if found is not None and len(found) == x.rank:
                return found
        return None

    def text(self, results: Sequence[Tensor], inputs: Sequence[Base]) -> str:
        head = [f"  ssm.weight @{name} : {made.type}" for name, made, _, _ in self.weights]
        arguments = ", ".join(f"{made.name}: {made.type}" for made, _, _ in self.arguments)
        kinds = ", ".join(r.type for r in results)
        first: List[str] = []
        known = set()
        for made, _, _ in self.arguments:
            for axis, size in enumerate(made.shape):
                if size in self.dims and size not in known:
                    known.add(size)
                    index = self._index(axis)
                    first.append(f"{self.dims[size]} = tensor.dim {made.name}, {index} : {made.type}")
        constants = [f"{name} = arith.constant {value} : index" for value, name in sorted(self._indices.items())]
        body = "\n    ".join(constants + first + self.lines + [f"return {', '.join(r.name for r in results)} : {kinds}"])
        weights = "\n".join(head)
        return f"module {{\n{weights}\n  func.func @main({arguments}) -> ({kinds}) {{\n    {body}\n  }}\n}}\n"


def _literal(value: float) -> str:
    if math.isinf(value) or math.isnan(value):
        raise UnsupportedError(f"from_torch: expected finite constants, got {value}")
    text = repr(float(value))
    return text if "." in text or "e" not in text else text.replace("e", ".0e")


# ===-- Programs -----------------------------------------------------------=== #


class Translation:
    """A program of an exported graph, and how tensors go to it and come from it."""

    def __init__(self, graph_module: Any, bases: Sequence[Any], limit: int = 200000):
        builder = Builder()
        old = sys.getrecursionlimit()
        # A loop of many tokens is a deep tree.
        sys.setrecursionlimit(max(old, limit))
        try:
            values = [builder.leaf(b) if isinstance(b, Base) else b for b in bases]
            outputs = Reader(builder).run(graph_module, values)
            self.writer = writer = Writer(builder)
            given = [b for b in bases if isinstance(b, Base)]
            writer.prepare_dims([b for b in given if b.kind == "input"])
            results: List[Tensor] = []
            #: For each output: the result that it is and the order of its axes.
            self.outputs: List[Any] = []
            for output in self._sorted(outputs):
                results.append(writer.value(output, writer.natural(output)))
            numbers = {o.number: i for i, o in enumerate(self._sorted(outputs))}
            for output in outputs:
                if isinstance(output, _Poison):
                    raise UnsupportedError(f"from_torch: {output.why}")
                if isinstance(output, Value):
                    order = writer.natural(output)
                    self.outputs.append((numbers[output.number], [order.index(a) for a in range(output.rank)]))
                elif output is None:
                    self.outputs.append(None)
                elif isinstance(output, _Scattered):
                    raise UnsupportedError("from_torch: expected a result whose tokens are all written, got one with some left")
                else:
                    raise UnsupportedError(f"from_torch: expected tensors as results, got {type(output).__name__}")
            if not results:
                raise UnsupportedError("from_torch: expected a module that returns tensors, got none")
            self.text = writer.text(results, given)
        finally:
            sys.setrecursionlimit(old)
        self.arguments = [(index, view) for _, index, view in writer.arguments]
        self.weights = [(name, index, view) for name, _, index, view in writer.weights]
        self.counts = dict(writer.counts)

    @staticmethod
    def _sorted(outputs: Sequence[Any]) -> List[Value]:
        """Outputs, each once, states after what reads them."""
        once = {o.number: o for o in outputs if isinstance(o, Value)}
        return sorted(once.values(), key=lambda o: _state_last(o))


def _state_last(x: Value) -> int:
    return 1 if x.kind == "leaf" and x.data[0].kind == "last" or x.kind == "elementwise" and x.data[0] == "add" else 0


def _view(tensor: Any, view: Sequence[int]) -> Any:
    dropped = [i for i in range(tensor.dim()) if i not in view]
    found = tensor.permute(*dropped, *view) if tensor.dim() else tensor
    return found[(0,) * len(dropped)] if dropped else found


class TorchProgram:
    """A torch module as a COREY program, called like it.

    `program` is the Executable, `source` its text, `counts` how often it has each
    op. Parameters are used where they lie, as they were when the module was
    compiled; after changing them call `bind_weights()`. Results record no
    gradients: inputs that ask for them are refused.
    """

    def __init__(self, program: Any, translation: Translation, inputs: Sequence[Any], weights: Sequence[Any], specs: tuple):
        self.program, self._translation = program, translation
        self.source, self.counts = translation.text, translation.counts
        self._inputs, self._weights = list(inputs), list(weights)
        self._in_spec, self._out_spec = specs
        self._checked = [(b.name, b.shape, b.torch_dtype) if isinstance(b, Base) else b for b in self._inputs]
        self.bind_weights()

    def bind_weights(self) -> "TorchProgram":
        """Takes the module's parameters as they are now."""
        for name, index, view in self._translation.weights:
            tensor = _view(self._weights[index].detach(), view)
            self.program.bind_weights({name: tensor if tensor.is_contiguous() else tensor.contiguous()})
        return self

    def _check(self, given: Sequence[Any]) -> None:
        import torch

        sizes: Dict[Any, Tuple[int, str]] = {}
        for expected, tensor in zip(self._checked, given):
            if isinstance(expected, _Input):
                if type(tensor) is not type(expected.value) or tensor != expected.value:
                    raise ValueError(f"expected {expected.value!r}, as in the example, got {tensor!r}")
                continue
            name, shape, dtype = expected
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.dtype != dtype:
                raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
            if tensor.dim() != len(shape):
                raise ValueError(f"{name}: expected {len(shape)} axes, got {tensor.dim()}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(f"{name}: expected a tensor without gradients (torch.no_grad()), got one that asks for them")
            for axis, (want, got) in enumerate(zip(shape, tensor.shape)):
                if isinstance(want, int):
                    if want != got:
                        raise ValueError(f"{name}: expected {want} along axis {axis}, as in the example, got {got}")
                elif sizes.setdefault(want, (got, name))[0] != got:
                    size, other = sizes[want]
                    raise ValueError(f"{name}: expected {size} along axis {axis}, as in {other}, got {got}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch.utils._pytree as pytree

        flat, spec = pytree.tree_flatten((args, kwargs))
        if self._in_spec is not None and spec != self._in_spec:
            raise TypeError(f"expected arguments like those of the example, {self._in_spec}, got {spec}")
        results = self.run(flat)
        return results if self._out_spec is None else pytree.tree_unflatten(results, self._out_spec)

    def run(self, flat: Sequence[Any]) -> List[Any]:
        """Outputs of flat inputs."""
        if len(flat) != len(self._checked):
            raise TypeError(f"expected {len(self._checked)} inputs, got {len(flat)}")
        self._check(flat)
        given = [_view(flat[index], view).detach() for index, view in self._translation.arguments]
        made = self.program(*given)
        made = made if isinstance(made, tuple) else (made,)
        return [None if o is None else made[o[0]].permute(o[1]) for o in self._translation.outputs]

    def explain(self) -> Any:
        return self.program.explain()

    def __repr__(self) -> str:
        ops = ", ".join(f"{count} {op}" for op, count in sorted(self.counts.items()))
        return f"corey.TorchProgram({ops})\n{self.program!r}"

    def _repr_html_(self) -> str:
        return self.program._repr_html_()


def _tensor_base(kind: str, index: int, name: str, val: Any) -> Base:
    dtype = _DTYPES.get(str(val.dtype))
    if dtype is None:
        if kind == "weight":
            return Base("unsupported", (), "f32", None, name=name)
        raise UnsupportedError(f"from_torch: {name}: expected float32, float16 or bfloat16, got {str(val.dtype).replace('torch.', '')}")
    return Base(kind, [_size(s) for s in val.shape], dtype, None, index=index, name=name, torch_dtype=val.dtype)


def compile_graph(graph_module: Any, placeholders: Sequence[Tuple[str, Any]], weights: Sequence[Any], specs: tuple, device: Optional[str],
                  **options: Any) -> TorchProgram:  # fmt: skip
    """A program of a graph of ATen. A placeholder is ("input", name, example),
    ("weight", number of it in weights) or ("constant", value)."""
    from ._compile import compile

    bases: List[Any] = []
    inputs: List[Any] = []
    for node, (kind, what) in zip([n for n in graph_module.graph.nodes if n.op == "placeholder"], placeholders):
        if kind == "constant":
            bases.append(what)
            if isinstance(what, _Input):
                inputs.append(what)
                bases[-1] = what.value
        elif kind == "weight":
            base = _tensor_base("weight", what, node.name, weights[what])
            bases.append(_Poison(f"{node.name}: expected float32, float16 or bfloat16, got {weights[what].dtype}") if base.kind == "unsupported" else base)
        else:
            base = _tensor_base("input", len(inputs), node.name, node.meta["val"])
            inputs.append(base)
            bases.append(base)
    translation = Translation(graph_module, bases)
    program = compile(translation.text, device=device or "cpu", **options)
    return TorchProgram(program, translation, inputs, weights, specs)


class _Input:
    """An input that is no tensor: always what it was in the example."""

    def __init__(self, value: Any):
        self.value = value


def _export(module: Any, args: tuple, kwargs: dict, dynamic: Any) -> Any:
    import torch

    with torch.no_grad(), _whole_scans():
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
        return exported.run_decompositions({})


@contextlib.contextmanager
def _whole_scans() -> Any:
    """Has torch.export see an associative_scan of combine_mode "generic" as one op, as
    it sees a pointwise one, on this thread. torch itself takes it apart, into slices
    of a number of steps that the length decides."""
    import importlib

    # The package has a function of this name.
    module = importlib.import_module("torch._higher_order_ops.associative_scan")
    needed = ("generic_associative_scan", "wrap_combine_fn_flat", "associative_scan_op", "_maybe_compile_and_run_fn")
    if not all(hasattr(module, name) for name in needed):
        # What is taken apart is refused where it is read.
        yield
        return
    original, thread = module.generic_associative_scan, threading.get_ident()

    def whole(operator: Any, leaves: Any, *rest: Any, **options: Any) -> Any:
        given = getattr(operator, "keywords", {})
        # The function of single tokens, which torch maps over many.
        mapped = given.get("combine_fn")
        combine = inspect.getclosurevars(mapped).nonlocals.get("func") if inspect.isfunction(mapped) else None
        if threading.get_ident() != thread or combine is None or rest:
            return original(operator, leaves, *rest, **options)
        combine = functools.partial(module.wrap_combine_fn_flat, **{**given, "combine_fn": combine})
        results = module._maybe_compile_and_run_fn(
            lambda function, xs: module.associative_scan_op(function, xs, additional_inputs=()), combine, leaves
        )
        # A single one comes as it is.
        return results if isinstance(results, (list, tuple)) else [results]

    with _whole_scans_lock:
        module.generic_associative_scan = whole
        try:
            yield
        finally:
            module.generic_associative_scan = original


_whole_scans_lock = threading.RLock()


def from_torch(
    module: Any,
    example: Any,
    kwargs: Optional[dict] = None,
    *,
    dynamic_shapes: Any = "auto",
    device: Optional[str] = None,
    policy: Any = "measured",
    fusion: str = "dp",
) -> TorchProgram:
    """Compiles a torch module that is written in plain torch.

    module          a torch.nn.Module in evaluation mode
    example         a tensor, or the tuple of its arguments
    kwargs          arguments by name
    dynamic_shapes  "auto" leaves every size open that the module leaves open, or
                    as for torch.export.export(); None fixes all
    device          where to run; by default where the parameters or inputs are
    policy, fusion  as for corey.compile()

    What it may be made of: linear layers, depthwise causal convolutions, RMS norms,
    pointwise functions, reshapes, and scans: torch's scan and associative_scan for
    any length, or a loop over the tokens, whose number is then that of the example.
    All else is an UnsupportedError that names the op and the line it comes from.
    """
    try:
        import torch
    except ImportError as failure:
        raise ImportError(f"from_torch: expected torch, got {failure}") from None
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    args = example if isinstance(example, tuple) else (example,)
    kwargs = dict(kwargs or {})
    if module.training and any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p for m in module.modules()):
        raise ValueError("module: expected one in evaluation mode, got one with dropout in training; call module.eval()")
    fixed: set = set()
    for _ in range(16):
        dynamic = _auto(module.forward, args, kwargs, fixed) if isinstance(dynamic_shapes, str) else dynamic_shapes
        exported = _export(module, args, kwargs, dynamic)
        try:
            return _compiled(module, exported, device, policy=policy, fusion=fusion)
        except _MustBeStatic as must:
            if not isinstance(dynamic_shapes, str):
                raise UnsupportedError(f"from_torch: expected a fixed size in place of {must.symbol}, got a dynamic one") from None
            places = _places(exported, must.symbol)
            if not places - fixed:
                raise UnsupportedError(f"from_torch: expected sizes that are known, got {must.symbol}") from None
            fixed |= places
    raise UnsupportedError("from_torch: expected sizes that can be fixed, got more and more that cannot")


def _leaves(args: tuple, kwargs: dict) -> Tuple[List[Any], Any]:
    import torch.utils._pytree as pytree

    return pytree.tree_flatten((args, kwargs))


def _auto(forward: Callable, args: tuple, kwargs: dict, fixed: set) -> Any:
    import torch
    import torch.utils._pytree as pytree

    flat, spec = _leaves(args, kwargs)
    shapes = [
        {axis: torch.export.Dim.STATIC if (i, axis) in fixed else torch.export.Dim.AUTO for axis in range(x.dim())}
        if isinstance(x, torch.Tensor)
        else None
        for i, x in enumerate(flat)
    ]
    of_args, of_kwargs = pytree.tree_unflatten(shapes, spec)
    return dict(inspect.signature(forward).bind(*of_args, **of_kwargs).arguments)


def _user_inputs(exported: Any) -> List[str]:
    return [s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"]


def _places(exported: Any, symbol: Any) -> set:
    """The axes of inputs whose size a symbol is in."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    symbols = getattr(symbol, "free_symbols", {symbol})
    found = set()
    for i, name in enumerate(_user_inputs(exported)):
        node = nodes.get(name)
        val = None if node is None else node.meta.get("val")
        for axis, size in enumerate(getattr(val, "shape", ())):
            expression = _size(size)
            if not isinstance(expression, int) and symbols & expression.free_symbols:
                found.add((i, axis))
    return found


def _compiled(module: Any, exported: Any, device: Optional[str], **options: Any) -> TorchProgram:
    import torch

    weights: List[Any] = []
    placeholders: List[Tuple[str, Any]] = []
    signature = exported.graph_signature
    kinds = [s.kind.name for s in signature.output_specs]
    if any(kind != "USER_OUTPUT" for kind in kinds):
        raise UnsupportedError("from_torch: expected a module that changes none of its inputs and buffers, got one that does")
    devices = set()
    flat_args, _ = _leaves(*exported.example_inputs)
    given = iter(flat_args)
    live = dict(module.named_parameters(remove_duplicate=False))
    live.update(module.named_buffers(remove_duplicate=False))
    for spec in signature.input_specs:
        if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            tensor = live.get(spec.target)
            if tensor is None:
                tensor = exported.constants.get(spec.target, exported.state_dict.get(spec.target))
            placeholders.append(("weight", len(weights)))
            weights.append(tensor)
            devices.add(str(tensor.device))
        elif spec.kind.name == "USER_INPUT":
            value = next(given)
            if isinstance(value, torch.Tensor):
                placeholders.append(("input", None))
                devices.add(str(value.device))
            else:
                placeholders.append(("constant", _Input(value)))
        else:
            raise UnsupportedError(f"from_torch: expected tensors as inputs, got {spec.kind.name.lower()}")
    if len(devices) > 1 and device is None:
        raise ValueError(f"module: expected tensors on one device, got {', '.join(sorted(devices))}")
    device = device or (devices.pop() if devices else "cpu")
    in_spec = exported.call_spec.in_spec
    program = compile_graph(exported.graph_module, placeholders, weights, (in_spec, exported.call_spec.out_spec), device, **options)
    return program
