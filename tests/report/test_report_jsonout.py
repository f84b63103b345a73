"""The JSON object: strict, complete, and nothing in it that json cannot write."""

import json
import math

import numpy as np
import pytest

from report.showing import to_json
from unsilent.basics.strictjson import as_json_values
from unsilent.studies.pvf.report import SCHEMA

TOP_KEYS = {"schema", "command", "spec", "seed", "seconds", "cpu_seconds", "store", "versions", "results"}
ROW_KEYS = {"target", "level", "flips", "estimate", "low", "high", "confidence", "n", "unit"}
COUNTS = {"masked", "benign", "sdc", "due"}


def test_has_what_the_design_promises(demo):
    found = to_json(demo, fit_per_bit=1e-4)
    assert found["schema"] == SCHEMA
    assert set(found) >= TOP_KEYS
    assert len(found["results"]) == len(demo.rows)
    assert all(set(row) >= ROW_KEYS | COUNTS for row in found["results"])
    assert all(set(row) >= ROW_KEYS - {"target", "level", "flips"} for row in found["lookups"])
    assert all(set(row) >= ROW_KEYS for row in found["fit"])
    (heat,) = found["heat_maps"]
    assert len(heat["fields"]) == len(heat["bits"]) == 32
    assert heat["dtype"] == "float32"
    assert found["notes"] == list(demo.notes)
    assert "fit" not in to_json(demo)


def test_round_trip_is_strict(corners, hostile, hostile_names):
    for study in (*corners.values(), hostile):
        text = json.dumps(to_json(study), allow_nan=False)
        assert json.loads(text) == to_json(study)
    assert {row["target"] for row in to_json(hostile)["results"]} >= set(hostile_names)


def test_rows_without_trials_and_rates(corners):
    rows = {row["target"]: row for row in to_json(corners["no trial"])["results"]}
    assert (rows["b"]["estimate"], rows["b"]["low"], rows["b"]["high"], rows["b"]["silent_share"]) == (None, 0, 1, None)
    assert to_json(corners["rate"])["results"][0]["flips"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        ([math.inf, 1.5], [None, 1.5]),
        ({1: (2, {"a": -math.inf})}, {"1": [2, {"a": None}]}),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.float64("nan"), None),
        ({"b", "a"}, ["a", "b"]),
        (complex(1, 2), "(1+2j)"),
        (True, True),
    ],
)
def test_strict(value, expected):
    assert as_json_values(value) == expected


def test_spec_is_complete(demo):
    spec = to_json(demo)["spec"]
    assert set(spec) >= set(demo.spec) | {"unit", "confidence", "samples", "batches", "info"}
    assert (spec["flips"], spec["options"], spec["data"], spec["weights"]) == (
        [1, 4, 16],
        [["rows", "2048"]],
        "clicks.tsv",
        None,
    )
    assert (spec["at"], spec["judge"], spec["dtype"]) == (["param:*"], "top1", "float32")


def test_fit_of_mixed_widths_is_null(result, row):
    fit = to_json(result([row("a"), row("b", widest_share_of_bits=0.5)]), fit_per_bit=1e-4)["fit"]
    assert [f["reason"] for f in fit] == [None, "mixed element widths"]
    assert (fit[1]["estimate"], fit[1]["low"], fit[1]["high"]) == (None, None, None)
