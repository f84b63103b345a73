"""The JSON object of a comparison: strict, and every number with its limits, n and unit."""

import json

from report.showing import to_json as comparison_json
from unsilent.studies.pvf.comparison_report import SCHEMA

ESTIMATE = {"estimate", "low", "high", "confidence", "n", "unit"}


def test_has_what_the_design_promises(comparisons):
    demo = comparisons["demo"]
    told = comparison_json(demo)
    assert told["schema"] == SCHEMA
    assert told["spec"] == {
        "fault": "bitflip", "law": "per-element", "per": "component", "unit": "sample", "judge": "top1", "confidence": 0.95,
        "flips": [1, 4, 16],
    }  # fmt: skip
    assert len(told["results"]) == len(demo.rows)
    for row, found in zip(told["results"], demo.rows, strict=True):
        assert set(row) >= ESTIMATE | {
            "target",
            "level",
            "parent",
            "flips",
            "is_paired",
            "p",
            "p_adjusted",
            "differs",
            "method",
        }
        assert all(set(row[key]) >= ESTIMATE for key in ("ratio", "a", "b"))
        assert (row["estimate"], row["low"], row["high"]) == (
            found.difference.estimate, found.difference.low, found.difference.high
        )  # fmt: skip
        assert row["n"] == min(found.a.n, found.b.n)
        assert row["b"]["estimate"] == found.b.estimate
    assert told["a"]["campaign"] != told["b"]["campaign"]
    assert told["changes"][0] == {"what": "dtype", "a": "float32", "b": "bfloat16"}


def test_round_trip_is_strict(comparisons):
    for name, found in comparisons.items():
        told = comparison_json(found)
        assert json.loads(json.dumps(told, allow_nan=False)) == told, name


def test_a_ratio_that_nothing_bounds_is_null(comparisons):
    for row in comparison_json(comparisons["no event"])["results"]:
        assert (row["ratio"]["estimate"], row["ratio"]["high"]) == (None, None)
