"""The backend `corey` of torch.compile: what it can of a graph becomes programs of
COREY, the rest stays torch's.

    module = torch.compile(module, backend="corey")
    ...
    corey.dynamo.stats()       # what ran where, and why

A graph that corey.from_torch() can take whole is one program. Of others, parts with a
scan, a convolution or a norm in them are; single matrix products and pointwise
functions are left to torch. A graph that records gradients is torch's, as are calls
of corey.ops in it, which run on COREY in either case.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ._from_torch import (
    _HANDLERS, UnsupportedError, _export, _Input, _MustBeStatic, _name, compile_graph,
)  # fmt: skip
from ._table import Table

#: Ops that make a part of a graph worth a program of its own.
_WORTH = ("selective_scan", "ssd", "causal_conv", "rms_norm")

_lock = threading.Lock()
_graphs: List["_Graph"] = []


def stats() -> Table:
    """For each graph that torch.compile handed over: how many of its ops are in
    programs of COREY and in torch, how often it was called there, and why not all
    of it is COREY's."""
    with _lock:
        rows = [g.row() for g in _graphs]
    return Table(["graph", "programs", "ops_corey", "ops_torch", "calls_corey", "calls_torch", "kernels", "reason"], rows)


def reset() -> None:
    """Forgets what was counted."""
    with _lock:
        _graphs.clear()


def _is_work(node: Any) -> bool:
    return node.op == "call_function" and _name(node) not in ("getitem",) and not _name(node).startswith(("aten.sym_", "aten._assert"))


class _Compiled:
    """A graph for sizes like those of one call."""

    def __init__(self, run: Callable, programs: int, inside: int, outside: int, counts: Dict[str, int], reason: str):
        self.run, self.programs, self.inside, self.outside = run, programs, inside, outside
        self.counts, self.reason = counts, reason


class _Part:
    """A program for a part of a graph: inputs in, outputs out, weights as they are."""

    def __init__(self, program: Any, places: Sequence[int], weights: Sequence[int], single: bool = False):
        self.program, self.places, self.weights, self.single = program, places, weights, single
        self.versions: Optional[tuple] = None

    def __call__(self, *args: Any) -> Any:
        # What was computed of a parameter is computed again when that has changed.
        versions = tuple((args[i].data_ptr(), 0 if args[i].is_inference() else args[i]._version) for i in self.weights)
        if versions != self.versions:
            self.program._weights = [args[i] for i in self.weights]
            self.program.bind_weights()
            self.versions = versions
        results = self.program.run([args[i] for i in self.places])
        return results[0] if self.single else tuple(results)


class _Graph:
    """What torch.compile captured, and programs for the sizes it was called with."""

    def __init__(self, module: torch.fx.GraphModule):
        self.module = module
        self.made: List[Tuple[tuple, _Compiled]] = []
        self.calls = [0, 0]
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self.calls[1] += 1
            return self.module(*args)
        key = tuple((tuple(a.shape), a.dtype, str(a.device)) if isinstance(a, torch.Tensor) else a for a in args)
        compiled = next((c for k, c in self.made if k == key), None)
        if compiled is None:
            with self.lock:
                compiled = _compile(self.module, args)
                self.made.append((key, compiled))
        self.calls[0 if compiled.programs else 1] += 1
        return compiled.run(*args)

    def row(self) -> list:
        last = self.made[-1][1] if self.made else None
        name = ", ".join(n.name for n in self.module.graph.nodes if n.op == "placeholder")
        if last is None:
            ops = sum(_is_work(n) or n.op in ("call_method", "call_module") for n in self.module.graph.nodes)
            reason = "records gradients" if self.calls[1] else "not called"
            return [name, 0, 0, ops, *self.calls, "", reason]
        kernels = ", ".join(f"{count} {op}" for op, count in sorted(last.counts.items()))
        return [name, last.programs, last.inside, last.outside, *self.calls, kernels, last.reason]


def backend(module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable:
    """Of torch.compile(backend="corey")."""
    if options:
        raise TypeError(f"corey: expected no options, got {', '.join(options)}")
    graph = _Graph(module)
    with _lock:
        _graphs.append(graph)
    return graph


def _compile(module: torch.fx.GraphModule, args: Sequence[Any]) -> _Compiled:
    args = tuple(args)
    try:
        exported = _export(module, args, {}, None)
    except Exception as failure:
        reason = f"torch.export: {str(failure).splitlines()[0]}"
        ops = sum(n.op in ("call_function", "call_method", "call_module") for n in module.graph.nodes)
        return _Compiled(module, 0, 0, ops, {}, reason)
    graph = exported.graph_module
    # What the graph holds itself comes before what it is given.
    held: List[Any] = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            held.append(exported.constants.get(spec.target, exported.state_dict.get(spec.target)))
    single = not isinstance(module.graph.output_node().args[0], (tuple, list))
    ops = sum(map(_is_work, graph.graph.nodes))
    if any(s.kind.name != "USER_OUTPUT" for s in exported.graph_signature.output_specs):
        return _Compiled(module, 0, 0, ops, {}, "it changes inputs or buffers")
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    everything = held + list(args)
    try:
        part = _part(graph, nodes, everything)
    except (UnsupportedError, _MustBeStatic, ValueError) as failure:
        return _partition(module, graph, held, ops, everything, failure)
    counts = part.program.counts

    def whole(*given: Any) -> Any:
        results = part(*held, *given)
        return results[0] if single else results

    if not any(op in counts for op in _WORTH):
        return _Compiled(module, 0, 0, ops, {}, "no scan, convolution or norm in it")
    return _Compiled(whole, 1, ops, 0, counts, "")


def _part(graph: torch.fx.GraphModule, nodes: Sequence[Any], values: Sequence[Any], single: bool = False) -> _Part:
    """A program of a graph whose placeholders have values like these."""
    placeholders: List[Tuple[str, Any]] = []
    places: List[int] = []
    weights: List[int] = []
    tensors: List[Any] = []
    device = None
    for i, (node, value) in enumerate(zip(nodes, values)):
        if not isinstance(value, torch.Tensor):
            placeholders.append(("constant", _Input(value)))
            places.append(i)
            continue
        device = device or str(value.device)
        if isinstance(value, torch.nn.Parameter):
            placeholders.append(("weight", len(tensors)))
            weights.append(i)
            tensors.append(value)
        else:
            placeholders.append(("input", None))
            places.append(i)
    program = compile_graph(graph, placeholders, tensors, (None, None), device)
    return _Part(program, places, weights, single)


def _partition(module, graph, held, ops, everything, failure) -> _Compiled:
    """Programs for parts of a graph that is not one as a whole."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupport

    reason = str(failure).replace("from_torch: ", "")
    refused: set = set()
    refuse_named = getattr(failure, "node", None)
    if refuse_named is not None:
        refused.add(refuse_named.name)

    class Support(OperatorSupport):
        def is_node_supported(self, submodules, node):
            if node.name in refused:
                return False
            if node.op == "get_attr":
                return True
            name = _name(node)
            return node.op == "call_function" and (name == "getitem" or name in _HANDLERS or name.rsplit(".", 1)[0] in _HANDLERS)

    originals = {n.name: n for n in graph.graph.nodes}
    values = {n.name: v for n, v in zip([n for n in graph.graph.nodes if n.op == "placeholder"], everything)}
    for _ in range(64):
        copy = torch.fx.GraphModule(graph, _copied(graph.graph))
        partitioner = CapabilityBasedPartitioner(copy, Support(), allows_single_node_partition=True)
        fused = partitioner.fuse_partitions(partitioner.propose_partitions())
        made: Dict[str, Tuple[Any, int]] = {}
        counts: Dict[str, int] = {}
        again = False
        for node in fused.graph.nodes:
            if node.op != "call_module" or not node.target.startswith("fused_"):
                continue
            sub = getattr(fused, node.target)
            given = []
            for argument in node.args:
                meta = argument.meta.get("val")
                given.append(values.get(argument.name, meta))
            size = sum(map(_is_work, sub.graph.nodes))
            placeholders = [n for n in sub.graph.nodes if n.op == "placeholder"]
            for p, argument in zip(placeholders, node.args):
                p.meta.setdefault("val", argument.meta.get("val"))
            result = sub.graph.output_node().args[0]
            try:
                part = _part(sub, placeholders, given, single=not isinstance(result, (tuple, list)))
            except (UnsupportedError, _MustBeStatic, ValueError, TypeError) as inner:
                at = getattr(inner, "node", None)
                names = {n.name for n in sub.graph.nodes}
                if at is not None and at.name in originals and at.name in names and at.op == "call_function":
                    refused.add(at.name)
                    again = True
                    break
                # Where it comes from is not known: the part is torch's.
                refused |= {n.name for n in sub.graph.nodes if n.op == "call_function"}
                again = True
                break
            if any(op in part.program.counts for op in _WORTH):
                made[node.target] = (part, size)
                for op, count in part.program.counts.items():
                    counts[op] = counts.get(op, 0) + count
        if again:
            continue
        if not made:
            return _Compiled(module, 0, 0, ops, {}, reason)
        for target, (part, _) in made.items():
            setattr(fused, target, _Module(part))
        inside = sum(size for _, size in made.values())
        single = not isinstance(module.graph.output_node().args[0], (tuple, list))

        def run(*given: Any) -> Any:
            results = fused(*held, *given)
            return results[0] if single else tuple(results)

        return _Compiled(run, len(made), inside, ops - inside, counts, reason)
    return _Compiled(module, 0, 0, ops, {}, reason)


class _Module(torch.nn.Module):
    def __init__(self, part: _Part):
        super().__init__()
        self._part = part

    def forward(self, *args: Any) -> Any:
        return self._part(*args)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    known: Dict[Any, Any] = {}
    result = copy.graph_copy(graph, known)
    copy.output(result)
    return copy


def _register() -> None:
    from torch._dynamo.backends import registry

    if "corey" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(backend, name="corey")


_register()
