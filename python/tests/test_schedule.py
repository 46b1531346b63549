"""Policies, estimators and decisions."""

import math

import numpy as np
import pytest

import corey

rng = np.random.default_rng(3)


def test_estimator():
    x = rng.standard_normal((4, 100, 8)).astype("float32")
    statistics = corey.Estimator(bins=64).estimate(x)
    # As numpy's histogram, but for the bins' edges.
    counts, _ = np.histogram(x, 64, (x.min(), x.max()))
    p = counts[counts > 0] / x.size
    assert abs(statistics["entropy"] + (p * np.log(p)).sum()) < 1e-3
    assert statistics["count"] == x.size and statistics["validity"] == "ok"
    assert math.isclose(statistics["mean"], x.astype("f8").mean(), rel_tol=1e-5, abs_tol=1e-6)
    assert math.isclose(statistics["variance"], x.astype("f8").var(), rel_tol=1e-4)
    assert statistics["min"] == x.min() and statistics["max"] == x.max()


def test_estimator_counts_what_is_not_finite():
    x = np.array([1, np.nan, np.inf, -np.inf, 2], "float16")
    statistics = corey.Estimator().estimate(x)
    assert [statistics[k] for k in ("count", "nan", "positive_infinity", "negative_infinity")] == [2, 1, 1, 1]
    assert corey.Estimator().estimate(np.zeros((0,), "f4"))["validity"] == "empty"
    assert corey.Estimator().estimate(np.ones((9,), "f8"))["validity"] == "constant"


def test_policies():
    assert corey.Scheduler("static:256").decide(1, 1000).chunk == 256
    assert corey.Scheduler("unsplit").decide(2, 1000).chunk == 1000
    policy = corey.Policy("guarded", inner=corey.Policy("sampled"), delta=3)
    assert str(policy) == "guarded:inner=[sampled],delta=3" and policy == corey.Policy(str(policy))
    assert str(corey.Policy("static:256")) == "static:256"


def test_a_policy_of_data_uses_what_was_observed():
    scheduler = corey.Scheduler("entropy")
    assert not scheduler.decide(1, 4096).used_data
    x = rng.standard_normal((1, 256, 64)).astype("float32")
    entropy = scheduler.observe(x)["entropy"]
    decision = scheduler.decide(1, 4096)
    assert decision.used_data and decision.chunk == corey.chunk_of_rule("unified", entropy)
    assert "entropy" in decision.reason
    scheduler.set_chunk(32)
    assert scheduler.decide(1, 4096).chunk == 32


REFUSED = [
    ("expected a policy of", lambda: corey.Policy("best")),
    ("expected", lambda: corey.Policy("static:-1")),
    ("bins", lambda: corey.Estimator(bins=1)),
    ("range: expected one of minmax, padded, fixed, quantile, got wide", lambda: corey.Estimator(range="wide")),
    ("op: expected one of selective_scan, ssd, got conv", lambda: corey.Scheduler(op="conv")),
    ("dtype: expected one of f64, f32, f16, bf16, got i8", lambda: corey.Scheduler(dtype="i8")),
    ("expected one that decides on statistics", lambda: corey.Scheduler("unsplit").observe(np.zeros(3, "f4"))),
    ("expected", lambda: corey.chunk_of_rule("best", 1.0)),
    ("expected", lambda: corey.Scheduler("unsplit").decide(0, 3)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    message, call = REFUSED[number]
    with pytest.raises(ValueError, match=message):
        call()


def test_types_that_have_no_statistics():
    with pytest.raises(TypeError, match="x: expected f64, f32, f16 or bf16, got i32"):
        corey.Estimator().estimate(np.zeros(3, "int32"))
