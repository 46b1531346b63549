"""corey-report: results of corey-bench as one HTML page, with pictures and tables
in it, that needs nothing beside itself."""

from __future__ import annotations

import argparse
import html
import io
import math
import os
import re
import sys
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from . import plot

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1b1e; --page: #ffffff; --quiet: #5b6068; --line: #d9dce1; --stripe: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7ea; --page: #16181c; --quiet: #9aa0a9; --line: #34383f; --stripe: #1e2126; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; font-size: 1.2rem; }
a { color: inherit; } p, figcaption { color: var(--quiet); } figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; color: var(--ink); }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; white-space: nowrap; }
td.n { text-align: right; } thead th { position: sticky; top: 0; background: var(--page); border-bottom: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--stripe); } table.whence th { color: var(--quiet); font-weight: normal; }
summary { cursor: pointer; color: var(--quiet); margin: .5rem 0; } code { font-size: 13px; overflow-wrap: anywhere; white-space: normal; }
"""

#: Columns that are shown first, where they are there.
_FIRST = (
    "benchmark", "model", "block", "case", "op", "row", "file", "tensor", "policy", "strategy", "dtype", "threads", "batch", "length",
    "shape", "prompt", "generate", "channels", "states", "variant", "chunk", "median_ms", "cold_us", "warm_us", "median_us",
)  # fmt: skip


def _cell(value: Any) -> Tuple[str, bool]:
    """What a cell says, and whether that is a number."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return "", False
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, float):
        if value == 0 or 1e-3 <= abs(value) < 1e6:
            return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}", True
        return f"{value:.2e}", True
    if isinstance(value, int):
        return str(value), True
    if isinstance(value, (list, tuple)):
        if all(isinstance(v, (int, float)) for v in value):
            return ", ".join(_cell(v)[0] for v in value), False
        return f"{len(value)} entries", False
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(v)[0]}" for k, v in value.items()), False
    return str(value), False


def _table(rows: Sequence[Mapping[str, Any]], title: str, folded: bool = True) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST)))
    # What is the same everywhere is said once.
    def same(name: str) -> bool:
        return len(rows) > 1 and all(name in row for row in rows) and len({_cell(row[name])[0] for row in rows}) == 1

    common = [name for name in names if same(name) and _cell(rows[0][name])[0]]
    shown = [name for name in names if not same(name)] or names
    out = []
    if common and shown is not names:
        said = "; ".join(f"{html.escape(name)} {html.escape(_cell(rows[0][name])[0])}" for name in common)
        out.append(f"<p>Of all rows: {said}.</p>")
    out.append('<div class="scroll"><table><thead><tr>')
    out.extend(f"<th>{html.escape(name)}</th>" for name in shown)
    out.append("</tr></thead><tbody>")
    for row in rows:
        out.append("<tr>")
        for name in shown:
            text, number = _cell(row.get(name))
            out.append(f'<td{" class=n" if number else ""}>{html.escape(text)}</td>')
        out.append("</tr>")
    out.append("</tbody></table></div>")
    body = "".join(out)
    opened = "" if folded else " open"
    return f"<details{opened}><summary>{html.escape(title)}: {len(rows)} row{'s' if len(rows) != 1 else ''}</summary>{body}</details>"


def _svg(figure: Any, name: str) -> str:
    import matplotlib

    stream = io.StringIO()
    # Names of what a drawing refers to are its own, also beside others on the page.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = text.replace(plot.INK, "currentColor")
    own = re.sub(r"\W", "-", name)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{own}-\1"', text)
    text = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{own}-\2"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{own}-\1)", text)
    return text


def _whence(name: str, data: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Where results come from, as the file says it."""
    version = str(data.get("version", ""))
    commit = re.search(r"\(([0-9a-f]+)[^)]*\)", version)
    missing = "not recorded in the file"
    driver = data.get("driver")
    if driver and data.get("driver_cuda"):
        driver = f"{driver} (CUDA {data['driver_cuda']})"
    gpu = data.get("gpu") or ""
    if gpu and data.get("multiprocessors"):
        clock = f", {data['clock_khz'] / 1e6:.2f} GHz" if data.get("clock_khz") else ""
        gpu += f", {data['multiprocessors']} multiprocessors{clock}"
    host = data.get("cpu")
    if host and "avx512" in data:
        host += " (AVX-512)" if data["avx512"] else " (AVX2)"
    rows = [
        ("device", gpu or plot.device(data)),
        ("host", host or missing),
        ("driver", driver or ("none: on the CPU" if data.get("target") == "cpu" else missing)),
        ("version", re.sub(r"\s*\(.*", "", version) if data.get("schema") is None else f"format {version}"),
        ("commit", commit.group(1) if commit else missing),
        ("date", str(data.get("date") or missing)),
    ]
    if data.get("command"):
        rows.append(("command", str(data["command"])))
    return [(label, value or missing) for label, value in rows]


def _rows(kind: str, data: Mapping[str, Any]) -> List[Tuple[str, List[Mapping[str, Any]]]]:
    """Tables of a file: title and rows."""
    if kind == "chunk-table":
        rows = [
            {**{k: v for k, v in problem.items()}, **candidate} for problem, candidates in plot.curves(data) for candidate in candidates
        ]
        return [("Candidates", rows)]
    if kind == "schedule":
        tables = []
        for result in data["results"]:
            name = f"{result['op']}, {result['channels']} channels"
            tables.append((f"{name}: policies", [{k: v for k, v in p.items() if k != "regimes"} for p in result["policies"]]))
            problems = [
                {"batch": p["batch"], "length": p["length"], "best": f"{p['oracle_variant']} {p['oracle_chunk']}",
                 "best_ms": p["oracle_ms"], **{k: v for k, v in policy.items()}}
                for p in result.get("problems", []) for policy in p["policies"]
            ]  # fmt: skip
            tables.append((f"{name}: sizes", problems))
            regimes = [{"policy": p["policy"], **r} for p in result["policies"] for r in p.get("regimes", [])]
            tables.append((f"{name}: regimes of the load", regimes))
        return tables
    if kind == "hadamard":
        tables = []
        for model in data["hadamard"]:
            rows = []
            for tensor in model["tensors"]:
                row = {k: v for k, v in tensor.items() if not isinstance(v, Mapping)}
                for when in ("before", "after"):
                    row.update({f"{when} {k}": v for k, v in tensor[when].items()})
                rows.append(row)
            tables.append((model["file"], rows))
        return tables
    if kind == "paper":
        tables = []
        for name, rows in data["tables"].items():
            flat = []
            for row in rows:
                one = {k: v for k, v in row.items() if k not in ("one_call", "call_per_slice")}
                for part in ("one_call", "call_per_slice"):
                    wanted = ("median_ms", "low_ms", "high_ms", "calls", "rel_l2_error", "against_unsplit", "speedup_over_unsplit")
                    one.update({f"{part} {k}": v for k, v in (row.get(part) or {}).items() if k in wanted})
                flat.append(one)
            tables.append((f"Table {name}", flat))
        return tables
    return [("Results", list(data["results"]))]


def _pictures(kind: str, data: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> List[Tuple[str, Callable[[], Any]]]:
    """Captions, and what draws them."""
    if kind == "chunk-table":
        matching = _schedule_of(data, others)
        return [("Each kernel of a scan by chunk, where the chunk matters most.", lambda: plot.chunk_curve(data, matching, **_problem(data, matching)))]
    if kind == "schedule":
        return [("What the choices of each policy cost.", lambda: plot.schedule(data))]
    if kind == "hadamard":
        return [
            ("Entropy of activations by layer; violins are over texts.", lambda: plot.entropy(data)),
            ("Peak over root mean square.", lambda: plot.entropy(data, "peak_to_rms")),
        ]
    if kind == "entropy":
        return [("Throughput of the estimator.", lambda: plot.estimator(data))]
    if kind == "fusion":
        return [("Kernels, bytes and times by strategy.", lambda: plot.fusion(data))]
    if kind == "lm":
        return [("When the tokens come.", lambda: plot.decode_timeline(data))]
    if kind in ("call", "model"):
        return []
    if kind == "sol":
        return [("Every case, with its floor.", lambda: plot.sol(data)), ("Roofline.", lambda: plot.roofline(data))]
    if kind == "paper":
        tables = [rows for rows in data["tables"].values() if rows and "call_per_slice" in rows[0]]
        return [("Scans of the published tables.", lambda: plot.paper(data))] if tables else []
    pictures = []
    for problem, candidates in plot.curves(data):
        if len({c["chunk"] for c in candidates}) > 3:
            pictures.append(("Time by chunk.", lambda p=problem: plot.chunk_curve(data, **p)))
            break
    pictures.append(("The best of each size.", lambda: plot.kernels(data)))
    if any(r.get("flops") and r.get("bytes") for r in data["results"]):
        pictures.append(("Roofline.", lambda: plot.roofline(data)))
    return pictures


def _schedule_of(table: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Optional[Mapping[str, Any]]:
    for other in others:
        if plot.kind(other) == "schedule" and any(
            plot._choices(other, problem) for problem, _ in plot.curves(table)
        ):
            return other
    return None


def _problem(table: Mapping[str, Any], schedule: Optional[Mapping[str, Any]]) -> dict:
    """Of the problems whose choices are known, that whose chunk matters most."""
    if schedule is None:
        return {}
    known = [e for e in table["entries"] if plot._choices(schedule, plot._problem_of_entry(e))]
    return plot._spread({**table, "entries": known})


def report(paths: Sequence[str]) -> str:
    """The page, of files of results and of programs, whose fusion is drawn."""
    read: List[Tuple[str, str, Any]] = []
    for path in paths:
        if os.fspath(path).endswith(".mlir"):
            read.append((path, "program", None))
            continue
        data = plot.read(path)
        read.append((path, plot.kind(path), data))
    results = [data for _, _, data in read if data is not None]
    sections, contents = [], []

    kernels: dict = {}
    for _, kind, data in read:
        if kind in ("kernels", "sol"):
            kernels.setdefault(data.get("gpu") or data.get("cpu"), []).append(data)
    together = [(device, files) for device, files in kernels.items() if len(files) > 1]
    if together:
        drawn = []
        for number, (device, files) in enumerate(together):
            figure = plot.roofline(*files)
            drawn.append(f"<figure>{_svg(figure, f'all-{number}')}<figcaption>All kernels, {html.escape(str(device))}</figcaption></figure>")
        contents.append('<li><a href="#all">Rooflines of all files</a></li>')
        sections.append(f'<h2 id="all">Rooflines of all files</h2>{"".join(drawn)}')

    for number, (path, kind, data) in enumerate(read):
        title = os.path.basename(os.fspath(path))
        anchor = f"file-{number}"
        contents.append(f'<li><a href="#{anchor}">{html.escape(title)}</a></li>')
        out = [f'<h2 id="{anchor}">{html.escape(title)}</h2>']
        if data is None:
            pictures = [("Its kernels: S is the score that a region was formed with.", lambda p=path: plot.fusion_map(p))]
        else:
            whence = "".join(
                f"<tr><th>{html.escape(label)}</th><td><code>{html.escape(value)}</code></td></tr>" for label, value in _whence(path, data)
            )
            out.append(f'<table class="whence"><tbody>{whence}</tbody></table>')
            pictures = _pictures(kind, data, results)
        for index, (caption, draw) in enumerate(pictures):
            out.append(f"<figure>{_svg(draw(), f'{anchor}-{index}')}<figcaption>{html.escape(caption)}</figcaption></figure>")
        if data is not None:
            for name, rows in _rows(kind, data):
                out.append(_table(rows, name, folded=len(rows) > 30))
        sections.append("\n".join(out))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>COREY results</title><style>{_STYLE}</style></head><body><h1>COREY results</h1>"
        f"<ul>{''.join(contents)}</ul>{''.join(sections)}</body></html>\n"
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="corey-report", description="Writes results of corey-bench as one HTML page with pictures and tables."
    )
    parser.add_argument("files", nargs="+", metavar="file", help="results (.json), or a program (.mlir) whose fusion is drawn")
    parser.add_argument("-o", "--output", required=True, metavar="report.html", help="the page to write")
    given = parser.parse_args(arguments)
    try:
        page = report(given.files)
        with open(given.output, "w", encoding="utf-8") as file:
            file.write(page)
    except (OSError, ValueError, ImportError) as failure:
        print(f"corey-report: {failure}", file=sys.stderr)
        return 1
    print(f"{given.output}: {len(given.files)} file{'s' if len(given.files) != 1 else ''}, {len(page.encode()) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
