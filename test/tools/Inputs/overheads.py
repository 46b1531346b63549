#!/usr/bin/env python3
"""Prints what `corey-bench lm` says of the policies it compared, and checks
that its numbers fit together."""

import json
import math
import sys

results = json.load(open(sys.argv[1]))["results"]
for r in results:
    value, (low, high) = r["prefill_overhead"], r["prefill_overhead_ci95"]
    observing, plain = r["prefill_observing_ms"], r["prefill_plain_ms"]
    assert (low is None) == (r["prefill_overhead_rounds"] < 5)
    if low is not None:
        assert low <= value <= high
        assert math.isclose(value - low, high - value, rel_tol=1e-6)
    if value is not None:
        over = next(
            x for x in results
            if x["policy"] == r["prefill_overhead_over"]
        )
        # All rounds count where the chunks were the same in all of them.
        if r["prefill_overhead_rounds"] * 5 == r["rounds"]:
            ratio = r["prefill_mean_ms"] / over["prefill_mean_ms"]
            assert math.isclose(value, ratio - 1, abs_tol=1e-9), (value, ratio)
    by = r["prefill_overhead_by_observing"]
    assert (by is None) == (observing is None)
    if by is not None:
        share = r["prefill_launches"] / r["rounds"] / 512
        assert math.isclose(by, share * (observing / plain - 1), abs_tol=1e-9)
    print(
        f"{r['policy']} chunk {r['chunk']} rounds {r['rounds']} "
        f"launches {r['prefill_launches']} "
        f"observing {r['prefill_observing_launches']} "
        f"over {r['prefill_overhead_over']} in {r['prefill_overhead_rounds']}"
    )
