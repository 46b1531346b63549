"""Pictures of what corey-bench measured and of what the compiler did.

Every function takes data, as `corey-bench --json` or `corey-bench tune` wrote it,
as a path or as what json.load() made of it, and returns a matplotlib Figure. Data
of another benchmark is a ValueError. matplotlib is imported when a picture is
made."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

Data = Union[str, os.PathLike, Mapping[str, Any]]

#: Colours that can be told apart on a light and on a dark page.
COLOURS = ("#3b82c4", "#e07b39", "#3fa45b", "#b65fc4", "#c9a227", "#d1495b", "#33a6b0", "#8a8f98")

#: Of text and lines. A report puts the page's own colour in its place.
INK = "#1a1b1e"

_MARKERS = "osD^vP*X"

#: What a machine can do, where no file says it: bytes and multiplications with
#: additions in f16 per second, as corey-bench has them.
_CEILINGS = {"NVIDIA H200": (4.3e12, 790e12)}

_OPS_OF_RESULTS = ("scan", "ssd", "step", "conv", "hadamard", "norm", "projection")


# ===-- Data ---------------------------------------------------------------=== #


def read(data: Data) -> Mapping[str, Any]:
    """The contents of a file of results, or what was read already."""
    if isinstance(data, Mapping):
        return data
    name = os.fspath(data)
    with open(name, encoding="utf-8") as file:
        try:
            read = json.load(file)
        except ValueError as failure:
            raise ValueError(f"{name}: expected JSON, got something else ({failure})") from None
    if not isinstance(read, Mapping):
        raise ValueError(f"{name}: expected an object written by corey-bench, got {type(read).__name__}")
    return read


def kind(data: Data) -> str:
    """Which benchmark wrote data: "kernels" (scan, ssd, step, conv, hadamard, norm,
    projection), "chunk-table", "schedule", "fusion", "entropy", "lm", "sol",
    "hadamard" or "paper"; or, of Python's own, "call" or "model"."""
    found = read(data)
    if found.get("schema") == "corey-chunk-table":
        return "chunk-table"
    if "hadamard" in found:
        return "hadamard"
    if "tables" in found:
        return "paper"
    results = found.get("results")
    first = results[0] if isinstance(results, Sequence) and results and isinstance(results[0], Mapping) else {}
    benchmark = found.get("benchmark") or first.get("benchmark")
    if benchmark in _OPS_OF_RESULTS:
        return "kernels"
    if benchmark in ("schedule", "fusion", "entropy", "lm", "sol", "call", "model"):
        return benchmark
    name = "" if isinstance(data, Mapping) else f"{os.fspath(data)}: "
    raise ValueError(f"{name}expected results of corey-bench, got {_said(found)}")


def _said(found: Mapping[str, Any]) -> str:
    keys = ", ".join(sorted(map(str, found))[:6])
    return f"an object of {keys}" if keys else "an empty object"


def _of(data: Data, *kinds: str) -> Mapping[str, Any]:
    found = read(data)
    got = kind(data)
    if got not in kinds:
        name = "data" if isinstance(data, Mapping) else os.fspath(data)
        raise ValueError(f"{name}: expected results of {' or '.join(kinds)}, got those of {got}")
    return found


def _results(found: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    return list(found["results"])


def device(data: Data) -> str:
    """The device that data was measured on, in words."""
    found = read(data)
    if found.get("gpu"):
        return found["gpu"]
    entries = found.get("entries") or found.get("results") or []
    named = entries[0].get("device") if entries and isinstance(entries[0], Mapping) else None
    threads = {e.get("threads") for e in entries if isinstance(e, Mapping) and e.get("threads")}
    words = found.get("cpu") or named or "unknown device"
    return f"{words}, {threads.pop()} threads" if len(threads) == 1 and found.get("target") == "cpu" else words


def _number(value: Any) -> Optional[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _times(shape: Iterable[int]) -> str:
    return "×".join(str(n) for n in shape)


def microseconds(result: Mapping[str, Any]) -> float:
    """The time of a result of a kernel: warm where there are two."""
    for name, factor in (("warm_us", 1.0), ("median_us", 1.0), ("median_ms", 1e3)):
        found = _number(result.get(name))
        if found is not None:
            return found * factor
    raise ValueError(f"results: expected warm_us, median_us or median_ms, got {', '.join(sorted(result))}")


# ===-- Drawing ------------------------------------------------------------=== #


def _figure(columns: int = 1, rows: int = 1, width: float = 7.5, height: float = 4.2, **options: Any):
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ImportError(
            f"corey.plot: expected matplotlib, got {failure}; pip install matplotlib, or corey[plot]"
        ) from None
    style = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#8a8f98",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        for axis in axes.flat:
            axis.xaxis.label, axis.yaxis.label, axis.title  # made in this style
    return figure, axes


def _log_axis(axis: Any, which: str, values: Sequence[float], powers_of_two: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    line = axis.xaxis if which == "x" else axis.yaxis
    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=2 if powers_of_two else 10)
    if powers_of_two:
        line.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        line.set_minor_locator(NullLocator())
        return
    finite = [v for v in values if v > 0]
    # Less than two decades have too few powers of ten to be read.
    narrow = finite and max(finite) / min(finite) < 100
    line.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    line.set_minor_formatter(NullFormatter())
    line.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if 1e-3 <= abs(x) < 1e5 else f"{x:.0e}"))


def _below(figure: Any, axis: Any, columns: int = 4) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False, fontsize=8, labelcolor=INK
        )


def _title(data: Mapping[str, Any], text: str) -> str:
    return f"{text}\n{device(data)}"


# ===-- Chunks -------------------------------------------------------------=== #


def _problem_of_entry(entry: Mapping[str, Any]) -> dict:
    return {
        "op": entry["op"],
        "channels": entry["channels"],
        "head_dim": entry.get("head_dim", 1),
        "states": entry["states"],
        "batch": entry["batch"]["measured"],
        "length": entry["length"]["measured"],
        "dtype": entry.get("dtype"),
    }


def _problem_of_result(result: Mapping[str, Any]) -> dict:
    shape = result["shape"]
    if result["benchmark"] == "scan":
        batch, length, channels, states = shape
        head = 1
        op = "selective_scan"
    else:
        batch, length, channels, head, states = shape[:5]
        op = "ssd"
    return {
        "op": op, "channels": channels, "head_dim": head, "states": states, "batch": batch, "length": length,
        "dtype": result.get("dtype"),
    }  # fmt: skip


def curves(data: Data) -> List[Tuple[dict, List[dict]]]:
    """For each problem of a chunk table or of results of scan and ssd, its
    candidates: chunk, variant and ms."""
    found = _of(data, "chunk-table", "kernels")
    if kind(data) == "chunk-table":
        return [
            (_problem_of_entry(e), [{"chunk": c["chunk"], "variant": c["variant"], "ms": c["median_ms"]} for c in e["candidates"]])
            for e in found["entries"]
        ]
    problems: dict = {}
    for result in _results(found):
        if result["benchmark"] in ("scan", "ssd"):
            problem = _problem_of_result(result)
            candidate = {
                "chunk": result.get("chunk", 0),
                "variant": result.get("variant") or f"{result.get('threads', 1)} threads",
                "ms": microseconds(result) / 1e3,
            }
            problems.setdefault(tuple(problem.items()), (problem, []))[1].append(candidate)
    return list(problems.values())


def _choices(schedule: Optional[Data], problem: Mapping[str, Any]) -> List[dict]:
    if schedule is None:
        return []
    for result in _results(_of(schedule, "schedule")):
        if any(result.get(name, problem[name]) != problem[name] for name in ("op", "channels", "head_dim", "states")):
            continue
        for given in result.get("problems", []):
            if given["batch"] == problem["batch"] and given["length"] == problem["length"]:
                return [
                    {"policy": p["policy"], "chunk": p["chunk"], "variant": p.get("variant", ""), "ms": p["ms"]}
                    for p in given["policies"]
                ]
    return []


def _spread(data: Data) -> dict:
    """The problem whose choice of a chunk matters most."""

    def worth(item: Tuple[dict, List[dict]]) -> Tuple[int, float]:
        candidates = item[1]
        chunks = {c["chunk"] for c in candidates}
        unsplit = [c["ms"] for c in candidates if c["chunk"] == 0]
        best = min(c["ms"] for c in candidates)
        return (len(chunks) > 3, min(unsplit) / best if unsplit else 1.0)

    found = curves(data)
    if not found:
        raise ValueError("data: expected results of scan or ssd, got none")
    return max(found, key=worth)[0]


def chunk_curve(data: Data, schedule: Optional[Data] = None, **problem: Any):
    """Time against chunk for each kernel of a scan, and where each policy's choice
    lies on it.

    data      of `corey-bench tune`, or of scan or ssd with --chunks=all
    schedule  of `corey-bench schedule` over given sizes: the policies' choices
    problem   which one of those in data: batch=, length=, channels=, states=, op=,
              dtype=; by default the one whose chunk matters most
    """
    found = curves(data)
    if problem:
        chosen = [item for item in found if all(item[0].get(name) == value for name, value in problem.items())]
        if not chosen:
            raise ValueError(f"problem: expected one of those in the data, got {problem}")
    else:
        best = _spread(data)
        chosen = [item for item in found if item[0] == best]
    described, candidates = chosen[0]
    figure, axes = _figure()
    axis = axes[0, 0]
    length = described["length"]
    variants = sorted({c["variant"] for c in candidates})
    for index, variant in enumerate(variants):
        own = sorted((c for c in candidates if c["variant"] == variant), key=lambda c: c["chunk"] or length)
        split = [c for c in own if c["chunk"]]
        colour = COLOURS[index % len(COLOURS)]
        if split:
            axis.plot([c["chunk"] for c in split], [c["ms"] * 1e3 for c in split], "-o", ms=4, color=colour, label=variant)
        for c in own:
            if not c["chunk"]:
                axis.plot([length], [c["ms"] * 1e3], "s", ms=6, color=colour, mfc="none", label=f"{variant}, not split")
    for index, choice in enumerate(_choices(schedule, described)):
        axis.plot(
            [choice["chunk"] or length], [choice["ms"] * 1e3], _MARKERS[(index + 3) % len(_MARKERS)], ms=11 - 2 * index,
            color=COLOURS[(index + 5) % len(COLOURS)], alpha=0.9, zorder=5 + index,
            label=f"chosen by {choice['policy']}" + (f" ({choice['variant']})" if choice["variant"] else ""),
        )  # fmt: skip
    values = [c["ms"] * 1e3 for c in candidates]
    _log_axis(axis, "x", [], powers_of_two=True)
    _log_axis(axis, "y", values)
    axis.set_xlabel(f"chunk, tokens (not split: {length})")
    axis.set_ylabel("time, µs")
    heads = f" P {described['head_dim']}" if described["op"] == "ssd" else ""
    name = "H" if described["op"] == "ssd" else "D"
    axis.set_title(
        _title(
            read(data),
            f"{described['op']}: B {described['batch']}, L {length}, {name} {described['channels']}{heads}, "
            f"N {described['states']}, {described['dtype']}",
        )
    )
    _below(figure, axis, 3)
    return figure


def schedule(data: Data):
    """How much longer each policy's choices take than the best of each call: the
    mean over a load of calls, or every problem of given sizes from the least loss
    to the largest."""
    found = _of(data, "schedule")
    results = _results(found)
    if all("problems" in r for r in results):
        losses: dict = {}
        for result in results:
            for problem in result["problems"]:
                for policy in problem["policies"]:
                    losses.setdefault(policy["policy"], []).append(max(policy["loss"], 0.0) * 100)
        figure, axes = _figure()
        axis = axes[0, 0]
        top = 0.0
        for index, (policy, values) in enumerate(losses.items()):
            values.sort()
            top = max(top, values[-1])
            mean = sum(values) / len(values)
            axis.plot(
                [100 * (i + 0.5) / len(values) for i in range(len(values))], values, "-", lw=1.8,
                color=COLOURS[index % len(COLOURS)], label=f"{policy}: mean {mean:.2g} %, most {values[-1]:.3g} %",
            )  # fmt: skip
        axis.set_yscale("symlog", linthresh=1, linscale=0.6)
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        axis.yaxis.set_major_locator(FixedLocator([0, 0.5, 1] + [10.0**i * f for i in range(0, 5) for f in (2, 5, 10)]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.set_ylim(-0.05, max(top * 1.3, 1))
        axis.set_xlabel(f"share of the {len(values)} sizes, %, from the least loss to the largest")
        axis.set_ylabel("longer than the best, %")
        axis.set_title(_title(found, "What each policy's choices cost"))
        _below(figure, axis, 2)
        return figure
    policies = [p["policy"] for p in results[0]["policies"]]
    figure, axes = _figure(columns=len(results), width=max(7.5, 5 * len(results)), height=0.6 + 0.27 * len(policies) + 0.8)
    for axis, result in zip(axes.flat, results):
        rows = sorted(result["policies"], key=lambda p: p["gap_to_oracle"])
        gaps = [p["gap_to_oracle"] * 100 for p in rows]
        colours = [COLOURS[0] if p.get("used_data") == 0 else COLOURS[1] for p in rows]
        axis.barh(range(len(rows)), gaps, color=colours, height=0.7)
        axis.set_yticks(range(len(rows)), [p["policy"] for p in rows])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.axvline(0, color=INK, lw=0.8)
        reach = max(max(abs(g) for g in gaps), 1.0)
        for row, gap in enumerate(gaps):
            axis.annotate(
                f"{gap:.1f}", (gap, row), (3 if gap >= 0 else -3, 0), textcoords="offset points", va="center",
                ha="left" if gap >= 0 else "right", fontsize=7.5, color=INK,
            )  # fmt: skip
        low = min(min(gaps), 0)
        axis.set_xlim(low - 0.14 * reach if low < 0 else 0, max(max(gaps), 0.1 * reach) + 0.16 * reach)
        axis.set_xlabel("mean time above the best chunk of every call, %  (orange: looks at data)")
        axis.set_title(_title(found, f"{result['op']}, {result['calls']} calls, {result['dtype']}"))
    return figure


# ===-- Entropy ------------------------------------------------------------=== #


def entropy(data: Data, statistic: str = "entropy_k256_nats"):
    """A statistic of activations, layer by layer, before and after a Hadamard
    rotation: a violin over texts, and each text. `statistic` is a name in the
    file, such as "kurtosis"."""
    found = _of(data, "hadamard")
    models = found["hadamard"]
    figure, axes = _figure(columns=len(models), width=max(7.5, 4.2 * len(models)))
    for axis, model in zip(axes.flat, models):
        layers: dict = {}
        for tensor in model["tensors"]:
            for when in ("before", "after"):
                if statistic not in tensor[when]:
                    raise ValueError(f"statistic: expected one of {', '.join(sorted(tensor[when]))}, got {statistic}")
            name = re.search(r"layer(\d+)", tensor["tensor"])
            layer = int(name.group(1)) if name else tensor["tensor"]
            layers.setdefault(layer, []).append((tensor["before"][statistic], tensor["after"][statistic]))
        order = sorted(layers, key=str) if any(isinstance(k, str) for k in layers) else sorted(layers)
        for side, (label, colour) in enumerate((("before", COLOURS[1]), ("after rotation", COLOURS[0]))):
            values = [[pair[side] for pair in layers[layer]] for layer in order]
            places = [i + (side - 0.5) * 0.38 for i in range(len(order))]
            many = [(v, p) for v, p in zip(values, places) if len(v) > 1 and max(v) > min(v)]
            if many:
                drawn = axis.violinplot([v for v, _ in many], [p for _, p in many], widths=0.34, showextrema=False)
                for body in drawn["bodies"]:
                    body.set(facecolor=colour, edgecolor=colour, alpha=0.35)
            for value, place in zip(values, places):
                axis.plot([place] * len(value), value, "o", ms=3, color=colour)
            axis.plot([], [], "o", ms=4, color=colour, label=label)
            for value, place in zip(values, places):
                axis.plot([place - 0.12, place + 0.12], [sorted(value)[len(value) // 2]] * 2, "-", lw=2, color=colour)
        axis.set_xticks(range(len(order)), [str(layer) for layer in order])
        axis.set_xlabel("layer")
        unit = ", nats" if statistic.endswith("_nats") else ""
        axis.set_ylabel(statistic.replace("_nats", "").replace("_k", ", bins ").replace("_", " ") + unit)
        axis.set_title(f"{model['file']}: {len(model['tensors'])} tensors")
    _below(figure, axes.flat[0])
    return figure


def estimator(data: Data):
    """Throughput of the entropy estimator by type and stride."""
    found = _of(data, "entropy")
    results = _results(found)
    series: dict = {}
    for result in results:
        series.setdefault((result["dtype"], result.get("threads", 1)), []).append((result["stride"], result["gb_per_s"]))
    dtypes = sorted({dtype for dtype, _ in series})
    threads = sorted({count for _, count in series})
    figure, axes = _figure()
    axis = axes[0, 0]
    for (dtype, count), points in sorted(series.items()):
        points.sort()
        axis.plot(
            [p[0] for p in points], [p[1] for p in points], ("-", "--", ":", "-.")[threads.index(count) % 4], marker="o", ms=4,
            color=COLOURS[dtypes.index(dtype) % len(COLOURS)], label=f"{dtype}, {count} thread{'s' if count > 1 else ''}",
        )  # fmt: skip
    _log_axis(axis, "x", [], powers_of_two=True)
    _log_axis(axis, "y", [r["gb_per_s"] for r in results])
    axis.set_xticks(sorted({r["stride"] for r in results}))
    axis.set_xlabel("stride: one element of so many is looked at")
    axis.set_ylabel("GB/s of the tensor")
    axis.set_title(_title(found, "Entropy estimator"))
    _below(figure, axis)
    return figure


# ===-- Fusion -------------------------------------------------------------=== #

_OP = re.compile(r"^\s*(?:(%[\w$.-]+)(?::\d+)?(?:\s*,\s*%[\w$.-]+(?::\d+)?)*\s*=\s*)?(?:\"?)([a-z_]+\.[a-z_.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w$.-]+")
_SCORE = re.compile(r"(entropy|intensity|memory|score|threshold)\s*=\s*([-+.\deE]+)")


def _kernels(text: str) -> List[dict]:
    """The kernels of a program with fused regions, in order: names of their ops,
    the score of the region, and which of those before they read from."""
    kernels: List[dict] = []
    made: dict = {}
    region: Optional[dict] = None
    for line in text.splitlines():
        stripped = line.strip()
        match = _OP.match(line)
        if region is not None:
            if stripped == "}":
                region = None
            elif match and match.group(2) != "ssm.yield":
                region["ops"].append(match.group(2).split(".", 1)[1])
            continue
        if stripped.startswith("func.func"):
            made = {}
        if not match:
            continue
        result, op, rest = match.groups()
        reads = sorted({made[v] for v in _VALUE.findall(rest) if v in made})
        if op == "ssm.fused":
            score = dict((name, float(value)) for name, value in _SCORE.findall(rest))
            region = {"ops": [], "score": score or None, "reads": reads}
            kernels.append(region)
        elif op.startswith("ssm.") and op not in ("ssm.weight", "ssm.get_weight", "ssm.bind_chunk", "ssm.observe"):
            kernels.append({"ops": [op.split(".", 1)[1]], "score": None, "reads": reads})
        else:
            # What moves no data hands on what it is made of.
            if result and reads:
                made[result] = reads[0]
            continue
        if result:
            made[result] = len(kernels) - 1
    return kernels


def fusion_map(program: Any, strategy: str = "dp", device: str = "cpu"):
    """The kernels of a program: which ops each is made of, the score that its
    region was formed with, and what it reads of the others.

    program   a file of MLIR, its text, before fusion or after, or the lines that
              `corey-run --emit=fused` prints
    strategy  of ssm-fuse, for a program that has no regions yet
    """
    if isinstance(program, Mapping):
        raise ValueError("program: expected a file of MLIR or its text, got results of a benchmark")
    text = program if isinstance(program, str) and ("\n" in program or "{" in program) else None
    if text is None:
        with open(program, encoding="utf-8") as file:
            text = file.read()
    if "ssm." not in text:
        raise ValueError("program: expected one of the ssm dialect, got another text")
    if "ssm.fused" not in text:
        from ._compile import emit

        text = emit(text, "fused", device, fusion=strategy)
    kernels = _kernels(text)
    if not kernels:
        raise ValueError("program: expected ops of the ssm dialect in a function, got none")
    scores = [k["score"]["score"] for k in kernels if k["score"]]
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    tau = {k["score"]["threshold"] for k in kernels if k["score"]}

    from textwrap import wrap

    import matplotlib
    from matplotlib.colors import Normalize
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    lines = [wrap(" · ".join(k["ops"]), 46) for k in kernels]
    heights = [0.42 + 0.26 * len(line) for line in lines]
    gap = 0.34
    total = sum(heights) + gap * (len(kernels) - 1)
    figure, axes = _figure(width=7.5, height=max(2.5, 0.62 * total + 1.0))
    axis = axes[0, 0]
    axis.axis("off")
    shades = matplotlib.colormaps["viridis"]
    scale = Normalize(low - 0.15 * (high - low + 1e-9), high + 0.15 * (high - low + 1e-9))
    tops: List[float] = []
    at = total
    for index, (kernel, words, height) in enumerate(zip(kernels, lines, heights)):
        tops.append(at)
        face = shades(scale(kernel["score"]["score"])) if kernel["score"] else "none"
        axis.add_patch(
            FancyBboxPatch(
                (1.2, at - height), 5.6, height, boxstyle="round,pad=0,rounding_size=0.08", lw=1.1,
                fc=face, ec=INK, alpha=1.0, mutation_aspect=1,
            )  # fmt: skip
        )
        light = kernel["score"] and sum(c * w for c, w in zip(face[:3], (0.3, 0.59, 0.11))) > 0.55
        colour = INK if not kernel["score"] else ("black" if light else "white")
        axis.text(4.0, at - height / 2, "\n".join(words), ha="center", va="center", fontsize=8.5, color=colour)
        axis.text(1.05, at - height / 2, str(index), ha="right", va="center", fontsize=8, color=INK)
        if kernel["score"]:
            s = kernel["score"]
            axis.text(
                7.0, at - height / 2, f"S {s['score']:.3f}\nH {s['entropy']:.2f}  AI {s['intensity']:.2f}  M {s['memory']:.2f}",
                ha="left", va="center", fontsize=7.5, color=INK,
            )  # fmt: skip
        at -= height + gap
    for index, kernel in enumerate(kernels):
        for source in kernel["reads"]:
            start, end = tops[source] - heights[source], tops[index]
            if source == index - 1:
                arrow = FancyArrowPatch((4.0, start), (4.0, end), arrowstyle="-|>", mutation_scale=9, lw=1.1, color=INK)
            else:
                bend = 0.12 + 0.05 * (index - source)
                arrow = FancyArrowPatch(
                    (1.2, tops[source] - heights[source] / 2), (1.2, tops[index] - heights[index] / 2), arrowstyle="-|>",
                    mutation_scale=8, lw=0.9, color=COLOURS[7], connectionstyle=f"arc3,rad={min(bend, 0.45)}",
                )  # fmt: skip
            axis.add_patch(arrow)
    axis.set_xlim(-1.4, 9.6)
    axis.set_ylim(-0.2, total + 0.2)
    ops = sum(len(k["ops"]) for k in kernels)
    threshold = f", τ {tau.pop():.2f}" if len(tau) == 1 else ""
    axis.set_title(f"{ops} ops in {len(kernels)} kernels{threshold}")
    return figure


def fusion(data: Data):
    """Kernels, bytes moved and times of whole blocks by fusion strategy."""
    found = _of(data, "fusion")
    groups: dict = {}
    for result in _results(found):
        key = (result.get("case") or result["block"], result["dtype"])
        groups.setdefault(key, {})[(result["strategy"], bool(result.get("profile")))] = result
    figure, axes = _figure(columns=2, width=9, height=1.4 + 0.42 * len(groups) + 0.7, sharey=True)
    strategies = list(dict.fromkeys(key for group in groups.values() for key in group))
    plain = list(dict.fromkeys(strategy for strategy, _ in strategies))
    names = [f"{what}, {dtype}" for what, dtype in groups]
    height = 0.8 / len(strategies)
    numbered = height > 0.1
    for column, (field, label) in enumerate((("bytes_moved", "bytes moved, MB"), ("median_ms", "time, ms"))):
        axis = axes[0, column]
        for index, key in enumerate(strategies):
            strategy = key[0] + (", measured entropies" if key[1] else "")
            for row, group in enumerate(groups.values()):
                if key not in group:
                    continue
                value = group[key][field] * (1e-6 if field == "bytes_moved" else 1)
                place = row + (index - (len(strategies) - 1) / 2) * height
                axis.barh(
                    place, value, height * 0.92, color=COLOURS[plain.index(key[0]) % len(COLOURS)], alpha=0.5 if key[1] else 1.0,
                    label=strategy if row == 0 else None,
                )  # fmt: skip
                if field == "bytes_moved" and numbered:
                    axis.annotate(
                        f"{group[key]['kernels']}", (value, place), (2, 0), textcoords="offset points", va="center", fontsize=6.5,
                        color=INK,
                    )  # fmt: skip
        axis.set_yticks(range(len(names)), names)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(label + (" (at the bars: kernels)" if field == "bytes_moved" and numbered else ""))
    axes[0, 0].invert_yaxis()
    figure.suptitle(_title(found, "Fusion of whole blocks"), fontsize=10, color=INK)
    _below(figure, axes[0, 0], 3 if any(key[1] for key in strategies) else 5)
    return figure


# ===-- Roofline -----------------------------------------------------------=== #


def _ceilings(found: Mapping[str, Any], ceilings: Optional[Tuple[float, float]]) -> Tuple[Optional[float], Optional[float], str]:
    if ceilings is not None:
        return (*ceilings, "as given")
    given = found.get("ceilings")
    if given:
        return given["bytes_per_second"], given["flops_per_second"], "of the file"
    if found.get("gpu") in _CEILINGS:
        return (*_CEILINGS[found["gpu"]], "of f16")
    return None, None, ""


def roofline(
    *data: Data,
    ceilings: Optional[Tuple[float, float]] = None,
    peers: Sequence[Mapping[str, Any]] = (),
    copies: bool = True,
):
    """Arithmetic per second against arithmetic per byte, of the least bytes and
    arithmetic that the work takes; of several kernels for a size the one that COREY
    chooses, or else the fastest.

    data      results of scan, ssd, step, conv, hadamard, norm, projection or sol, of
              one device
    ceilings  bytes and operations per second that it can do, where it is no device
              that corey-bench knows
    peers     others' measurements: name, bytes, flops, us
    copies    also a copy by the driver of as many bytes, where it was measured
    """
    if not data:
        raise ValueError("data: expected results, got none")
    series: dict = {}
    copied: List[Tuple[float, float]] = []
    devices = set()
    for one in data:
        found = _of(one, "kernels", "sol")
        devices.add(found.get("gpu") or found.get("cpu"))
        for result in _best(_results(found)):
            if not result.get("flops") or not result.get("bytes"):
                continue
            time = microseconds(result) * 1e-6
            name = result.get("benchmark", "sol")
            if name == "sol":
                name = "ssd (SOL L2/043)"
            elif result.get("dtype"):
                name += f", {result['dtype']}"
            series.setdefault(name, []).append((result["flops"] / result["bytes"], result["flops"] / time))
            copy = _number(result.get("copy_warm_us"))
            if copy:
                copied.append((result["flops"] / result["bytes"], result["flops"] / (copy * 1e-6)))
    if len(devices) > 1:
        raise ValueError(f"data: expected results of one device, got {', '.join(sorted(map(str, devices)))}")
    if not series:
        raise ValueError("data: expected results with bytes and flops, got none")
    found = read(data[0])
    bandwidth, arithmetic, whence = _ceilings(found, ceilings)
    figure, axes = _figure(height=4.8)
    axis = axes[0, 0]
    for index, (name, points) in enumerate(sorted(series.items())):
        axis.plot(
            [p[0] for p in points], [p[1] for p in points], _MARKERS[index % len(_MARKERS)], ms=6, alpha=0.85,
            color=COLOURS[index % len(COLOURS)], label=name,
        )  # fmt: skip
    if copies and copied:
        axis.plot([p[0] for p in copied], [p[1] for p in copied], "_", ms=10, mew=1.6, color=COLOURS[7], label="copy of as many bytes")
    for index, peer in enumerate(peers):
        missing = [name for name in ("name", "bytes", "flops", "us") if name not in peer]
        if missing:
            raise ValueError(f"peers: expected name, bytes, flops and us, got no {', '.join(missing)}")
        axis.plot(
            [peer["flops"] / peer["bytes"]], [peer["flops"] / (peer["us"] * 1e-6)], _MARKERS[-1 - index % len(_MARKERS)], ms=8,
            mfc="none", mew=1.6, color=COLOURS[(index + 4) % len(COLOURS)], label=peer["name"],
        )  # fmt: skip
    every = [p for points in series.values() for p in points] + copied
    low, high = min(p[0] for p in every) / 2, max(p[0] for p in every) * 2
    rates = [p[1] for p in every]
    if bandwidth and arithmetic:
        high = max(high, 2 * arithmetic / bandwidth)
        steps = [low * (high / low) ** (i / 200) for i in range(201)]
        roof = [min(s * bandwidth, arithmetic) for s in steps]
        axis.plot(steps, roof, "-", lw=1.5, color=INK, label=f"{bandwidth / 1e12:.3g} TB/s, {arithmetic / 1e12:.4g} TFLOP/s ({whence})")
        rates += [max(roof)]
    axis.set_xlim(low, high)
    _log_axis(axis, "x", [low, high])
    _log_axis(axis, "y", rates)
    from matplotlib.ticker import FuncFormatter

    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / 1e9:g}" if y < 1e12 else f"{y / 1e9:,.0f}"))
    axis.set_xlabel("least arithmetic per least byte, FLOP/B")
    axis.set_ylabel("GFLOP/s")
    axis.set_title(_title(found, "Roofline"))
    _below(figure, axis, 3)
    return figure


def _best(results: Sequence[Mapping[str, Any]]) -> List[Mapping[str, Any]]:
    """One result of each size: as COREY chooses, or else the fastest."""
    best: dict = {}
    for result in results:
        key = (result.get("benchmark"), tuple(result.get("shape", ())), result.get("dtype"), result.get("threads"), result.get("case"))
        before = best.get(key)
        chosen = result.get("variant") == "rule"
        if before is None or chosen or before.get("variant") != "rule" and microseconds(result) < microseconds(before):
            best[key] = result
    return list(best.values())


def kernels(data: Data, most: int = 24):
    """Times of single kernels, and of a copy by the driver of as many bytes."""
    found = _of(data, "kernels")
    results = _results(found)
    best = _best(results)
    shown = best[:most]
    left = len(best) - len(shown)
    figure, axes = _figure(height=1.3 + 0.3 * len(shown))
    axis = axes[0, 0]
    labels = []
    copies = False
    for row, result in enumerate(shown):
        time = microseconds(result)
        axis.barh(row - 0.17, time, 0.34, color=COLOURS[0], label="COREY" if row == 0 else None)
        copy = _number(result.get("copy_warm_us"))
        if copy:
            axis.barh(row + 0.17, copy, 0.34, color=COLOURS[7], label=None if copies else "copy of as many bytes")
            copies = True
        threads = f", {result['threads']} thr." if result.get("threads") else ""
        labels.append(f"{result['benchmark']} {_times(result['shape'])}, {result.get('dtype', '')}{threads}")
    axis.set_yticks(range(len(shown)), labels)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    _log_axis(axis, "x", [microseconds(r) for r in shown])
    axis.set_xlabel("time, µs" + (" (warm)" if "warm_us" in shown[0] else "") + (f"; {left} more in the table" if left else ""))
    axis.set_title(_title(found, "Kernels"))
    _below(figure, axis)
    return figure


def sol(data: Data):
    """The cases of SOL-ExecBench's SSD, by length, with the floor of each."""
    found = _of(data, "sol")
    results = sorted(_results(found), key=lambda r: r["batch"] * r["length"])
    figure, axes = _figure()
    axis = axes[0, 0]
    places = range(len(results))
    axis.plot(places, [r["floor_us"] for r in results], "_", ms=14, mew=2, color=COLOURS[7], label="floor")
    axis.plot(places, [r["median_us"] for r in results], "o", color=COLOURS[0], label="cold L2")
    axis.plot(places, [r["warm_us"] for r in results], "D", ms=5, mfc="none", color=COLOURS[1], label="warm")
    failing = [i for i, r in enumerate(results) if not r["pass"]]
    if failing:
        axis.plot(failing, [results[i]["median_us"] for i in failing], "x", ms=12, color=COLOURS[5], label="wrong")
    axis.set_xticks(places, [f"{r['batch']}×{r['length']}" for r in results], rotation=60, ha="right", rotation_mode="anchor")
    _log_axis(axis, "y", [r["floor_us"] for r in results] + [r["median_us"] for r in results])
    axis.set_xlabel("batch × length")
    axis.set_ylabel("µs")
    axis.set_title(_title(found, f"{found['suite'].split()[0].split('_')[0]}: geometric mean {found['geomean_us']:.3g} µs"))
    _below(figure, axis)
    return figure


# ===-- Language models ----------------------------------------------------=== #


def decode_timeline(data: Data):
    """When the tokens of whole models come: the prompt, then one after another,
    with the floors of the device."""
    found = _of(data, "lm")
    results = _results(found)
    figure, axes = _figure(height=1.5 + 0.75 * len(results))
    axis = axes[0, 0]
    labels = []
    floors = False
    for row, result in enumerate(results):
        # Where the prompt's token is the only one, no time lies between two.
        prefill, token = result["prefill_ms"], result["per_token_ms"] or 0
        count = max(int(result["generate"]), 1)
        axis.barh(row, prefill, 0.5, color=COLOURS[0], label="prompt, until its token is known" if row == 0 else None)
        axis.barh(row, token * (count - 1), 0.5, left=prefill, color=COLOURS[1], alpha=0.45, label="tokens after it" if row == 0 else None)
        # Each token as a line, of many not all.
        step = max(1, (count - 1) // 64)
        ends = [prefill + token * i for i in range(0, count, step)]
        axis.vlines(ends, row - 0.25, row + 0.25, color=COLOURS[1], lw=0.8)
        floor, each = _number(result.get("prefill_floor_ms")), _number(result.get("per_token_floor_ms"))
        if floor is not None and each is not None:
            end = floor + each * (count - 1)
            axis.plot(
                [floor, floor, end, end], [row + 0.34, row + 0.42, row + 0.42, row + 0.34], "-", lw=1.2, color=INK,
                label=None if floors else "floor: prompt, then the last token",
            )  # fmt: skip
            axis.plot([0, floor], [row + 0.42] * 2, "-", lw=1.2, color=INK)
            floors = True
        rate = f", {1e3 / token:.0f} tokens/s" if token else ""
        axis.annotate(
            f"{prefill + token * (count - 1):.3g} ms{rate}", (prefill + token * (count - 1), row), (5, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK,
        )  # fmt: skip
        policy = f", {result['policy']}" if len({r.get("policy") for r in results}) > 1 else ""
        model = os.path.basename(str(result["model"]).rstrip("/"))
        labels.append(f"{model}, {result['dtype']}\n{result['prompt']} + {result['generate']} tokens{policy}")
    axis.set_yticks(range(len(results)), labels)
    axis.set_ylim(len(results) - 0.4, -0.5)
    longest = max(r["prefill_ms"] + (r["per_token_ms"] or 0) * (max(r["generate"], 1) - 1) for r in results)
    axis.set_xlim(0, longest * 1.28)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("ms since the prompt was given")
    axis.set_title(_title(found, "Prompt and tokens" + (f", batch {results[0]['batch']}" if results[0].get("batch", 1) > 1 else "")))
    _below(figure, axis, 3)
    return figure


# ===-- Published tables ---------------------------------------------------=== #


def paper(data: Data):
    """Scans of the published tables, measured again: each policy's one call
    against the same work in a call per slice."""
    found = _of(data, "paper")
    tables = [
        (name, rows)
        for name, rows in found["tables"].items()
        if rows and all(_number(r.get("one_call", {}).get("median_ms")) is not None or "call_per_slice" in r for r in rows)
    ]
    if not tables:
        raise ValueError("data: expected a table of scans (2/19, 3m, 17, 18 or 30), got none")
    longest = max(len(rows) for _, rows in tables)
    columns = min(len(tables), 2)
    lines = -(-len(tables) // columns)
    figure, axes = _figure(columns=columns, rows=lines, width=5.4 * columns, height=lines * (0.9 + 0.27 * longest))
    for axis in axes.flat[len(tables) :]:
        axis.axis("off")
    for axis, (name, rows) in zip(axes.flat, tables):
        for row, result in enumerate(rows):
            for field, marker, colour in (("one_call", "o", COLOURS[0]), ("call_per_slice", "D", COLOURS[1])):
                one = result.get(field) or {}
                median = _number(one.get("median_ms"))
                if median is None:
                    low, high = _number(one.get("low_ms")), _number(one.get("high_ms"))
                    median = None if low is None or high is None else (low + high) / 2
                if median is not None:
                    axis.plot([median * 1e3], [row], marker, ms=5, color=colour, mfc="none" if marker == "D" else colour)
        axis.set_yticks(range(len(rows)), [r["row"] for r in rows], fontsize=7)
        axis.invert_yaxis()
        _log_axis(axis, "x", [1e3 * _number(r["call_per_slice"]["median_ms"]) for r in rows if "median_ms" in r.get("call_per_slice", {})])
        axis.set_xlabel("µs")
        axis.set_title(f"table {name}")
    axes.flat[0].plot([], [], "o", color=COLOURS[0], label="one call, chunk bound")
    axes.flat[0].plot([], [], "D", mfc="none", color=COLOURS[1], label="a call per slice")
    figure.suptitle(_title(found, "Published tables of scans, measured here"), fontsize=10, color=INK)
    _below(figure, axes.flat[0])
    return figure
