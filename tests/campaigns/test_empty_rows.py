"""A row without a result says nothing, and is stored and read as it is."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields

import numpy as np
import pytest

from unsilent.campaigns.codec import FAULTS_JSON, row_codec
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.stored_values import ReadLimit
from unsilent.studies.campaign_kinds import KINDS

TRIAL = TrialId("target", None, 3)
NOTHING = {"str": "", "int": 0, "bool": False, "float": math.nan}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_without_a_result_says_nothing(kind):
    codec, row = row_codec(kind.row), kind.row.without_result(TRIAL)
    assert row.trial == TRIAL
    for entry, declared in zip(codec.fields, fields(kind.row), strict=True):
        value = getattr(row, entry.name)
        if declared.default is not MISSING:
            assert value == declared.default or math.isnan(value)
        elif FAULTS_JSON in entry.type_annotations:
            assert value == "[]"
        elif entry.is_array:
            assert len(value) == 0
        elif entry.name != "trial":
            parts = value if isinstance(value, tuple) else (value,)
            expected = [0.0 if entry.name == "seconds" else NOTHING[column.kind.__name__] for column in entry.columns]
            np.testing.assert_equal(list(parts), expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_without_a_result_is_read_as_it_was_stored(kind):
    codec, row = row_codec(kind.row), kind.row.without_result(TRIAL)
    empty = {entry.name: 0 for entry in codec.arrays}
    cells = [
        int(cell) if isinstance(cell, bool) else cell for cell in codec.encode(row, lambda values: empty)
    ]  # as SQLite
    read = codec.decode(cells, lambda values: empty, ReadLimit(10_000))
    assert read.reproducible_values() == row.reproducible_values()


def test_what_is_known_of_a_row_is_kept():
    row = KINDS[1].row.without_result(TRIAL, end_reason="raised", error="why")
    assert (row.end_reason, row.error, row.steps_run) == ("raised", "why", 0)
