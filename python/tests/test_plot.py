"""Pictures and the page of results."""

import json
import os
import re

import pytest

matplotlib = pytest.importorskip("matplotlib")

import corey  # noqa: E402
from corey import plot, report  # noqa: E402

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
RESULTS = os.path.join(ROOT, "docs", "benchmarks")
FILES = sorted(f for f in os.listdir(RESULTS) if f.endswith(".json"))


def path(name):
    return os.path.join(RESULTS, name)


def load(name):
    with open(path(name)) as file:
        return json.load(file)


DRAWN = [
    (plot.chunk_curve, "h200-chunk-table.json"),
    (plot.schedule, "h200-schedule-sizes.json"),
    (plot.schedule, "cpu-znver1-schedule-ssd.json"),
    (plot.entropy, "hadamard-activations.json"),
    (plot.estimator, "cpu-znver1-entropy.json"),
    (plot.fusion, "cpu-znver1-fusion.json"),
    (plot.roofline, "h200-kernels.json"),
    (plot.kernels, "h200-step.json"),
    (plot.sol, "h200-sol.json"),
    (plot.decode_timeline, "h200-lm-370m.json"),
    # One token each: no time between tokens.
    (plot.decode_timeline, "h200-lm-entropy-mamba.json"),
    (plot.paper, "h200-paper.json"),
]


@pytest.mark.parametrize("draw,name", DRAWN, ids=lambda x: getattr(x, "__name__", x))
def test_draws_its_own_and_refuses_others(draw, name):
    figure = draw(path(name))
    assert isinstance(figure, matplotlib.figure.Figure)
    assert all(axis.get_title() or not axis.axison or axis.has_data() for axis in figure.axes)
    other = "h200-sol.json" if name.startswith("h200-lm") else "h200-lm-370m.json"
    with pytest.raises(ValueError, match=f"{other}: expected results of .*, got those of (lm|sol)"):
        draw(path(other))


def test_chunk_curve_has_every_candidate_and_the_choices():
    table, choices = load("h200-chunk-table.json"), load("h200-schedule-scan.json")
    problem = dict(batch=1, length=8192, channels=256)
    entry = next(
        e for e in table["entries"] if (e["batch"]["measured"], e["length"]["measured"], e["channels"]) == (1, 8192, 256)
    )
    axis = plot.chunk_curve(table, choices, **problem).axes[0]
    drawn = {(round(x), y) for line in axis.lines for x, y in zip(line.get_xdata(), line.get_ydata())}
    for candidate in entry["candidates"]:
        assert (candidate["chunk"] or 8192, candidate["median_ms"] * 1e3) in drawn
    labels = [line.get_label() for line in axis.lines]
    assert sum(label.startswith("chosen by") for label in labels) == 3
    with pytest.raises(ValueError, match="problem: expected one of those in the data"):
        plot.chunk_curve(table, batch=3)


def test_roofline_is_flops_over_time():
    data = load("h200-step.json")
    one = data["results"][0]
    axis = plot.roofline(data, copies=False, peers=[dict(name="a peer", bytes=2e6, flops=4e6, us=2.0)]).axes[0]
    points = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in axis.lines}
    x, y = points["step, bf16"]
    assert x[0] == pytest.approx(one["flops"] / one["bytes"])
    assert y[0] == pytest.approx(one["flops"] / (one["warm_us"] * 1e-6))
    assert points["a peer"][0][0] == pytest.approx(2) and points["a peer"][1][0] == pytest.approx(2e12)
    with pytest.raises(ValueError, match="expected results of one device"):
        plot.roofline(data, load("cpu-znver1-scan.json"))
    with pytest.raises(ValueError, match="peers: expected name, bytes, flops and us, got no us"):
        plot.roofline(data, peers=[dict(name="x", bytes=1, flops=1)])


def test_fusion_map_has_every_op():
    program = os.path.join(ROOT, "docs", "examples", "mamba_block_ops.mlir")
    found = {}
    for strategy in ("none", "dp"):
        text = corey.emit(program, "fused", fusion=strategy)
        ops = len(re.findall(r"= ssm\.(?!get_weight|bind_chunk|fused)\w+", text))
        regions = re.findall(r"= ssm\.fused.*?\n    }", text, re.S)
        inside = sum(len(re.findall(r"= ssm\.(?!fused)\w+", region)) for region in regions)
        kernels = ops - inside + len(regions)
        found[strategy] = kernels
        title = plot.fusion_map(program, strategy=strategy).axes[0].get_title()
        assert title.startswith(f"{ops} ops in {kernels} kernels"), title
    assert found["dp"] < found["none"]
    with pytest.raises(ValueError, match="program: expected one of the ssm dialect"):
        plot.fusion_map("func.func @main() {\n return\n}")


def test_every_result_has_a_place_in_the_report(tmp_path):
    out = tmp_path / "report.html"
    files = [path(f) for f in FILES]
    assert report.main([*files, "-o", str(out)]) == 0
    page = out.read_text()
    for name in FILES:
        data = load(name)
        assert name in page
        for field in ("date", "driver"):
            assert str(data.get(field, "")) in page
        commit = re.search(r"\((\w+)\)", str(data.get("version", "")))
        assert commit is None or commit.group(1) in page
    # Nothing is loaded from elsewhere, and every reference is in the page.
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "url(http" not in page and "<script" not in page and "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)
    assert plot.INK not in page.split("</style>")[1]


@pytest.mark.parametrize(
    "text,error",
    [("{}", "expected results of corey-bench, got an empty object"), ("[1]", "expected an object"), ("x", "expected JSON")],
)
def test_report_refuses_other_files(tmp_path, capsys, text, error):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert report.main([str(file), "-o", str(tmp_path / "out.html")]) == 1
    message = capsys.readouterr().err
    assert error in message and "other.json" in message
    assert not (tmp_path / "out.html").exists()
