"""The benchmark of rankings: which programs it runs, and how it judges times that are known beforehand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from unsilent.placement.cost import AlphaBeta, traffic
from unsilent.placement.programs import COLLECTIVES
from unsilent.placement.synthesis import groupings
from unsilent.placement.system import Level, System

COUNTS = (2, 2, 2)
LEVELS = (Level("rack", 2, 5e6, 1e-3), Level("node", 2, 2e7, 5e-4), Level("device", 2, 1e9, 1e-4))
SYSTEM = System("known", LEVELS)
PAYLOAD = 2**17
SPANNED = [("rack", "node"), ("rack", "device"), ("node", "device"), ("rack", "node", "device")]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        yield importlib.import_module("benchmarks.placement_ranking")


def axes_over(spanned: tuple[str, ...]) -> dict[str, int]:
    return {"data": 8} if len(spanned) == 3 else {"data": 4, "tensor": 2}


def row_of(bench, spanned: tuple[str, ...]) -> dict:
    """A configuration whose collectives and programs take exactly as long as the known machine says."""
    import numpy as np

    model, axes = AlphaBeta(SYSTEM), axes_over(spanned)
    sweep = [
        (name, groups, size, model.cost(name, traffic(SYSTEM, np.array(groups)), size).seconds)
        for groups in (grouping.groups(COUNTS) for grouping in groupings(COUNTS))
        for name in COLLECTIVES
        for size in (2**14, 2**18)
    ]
    programs = bench.drawn(bench.ranked(SYSTEM, axes, PAYLOAD, spanned, model)[1], PAYLOAD)
    times = {name: [one.seconds] * 4 for name, one in programs.items()}
    row = {"counts": COUNTS, "axes": axes, "spanned": spanned, "payload": PAYLOAD, "rate": 1.0}
    return {**row, "times": times, "sweep": sweep}


@pytest.mark.parametrize("spanned", SPANNED)
def test_times_that_are_as_predicted_have_the_first_place_and_no_error(bench, spanned: tuple[str, ...]):
    result = bench.judge(row_of(bench, spanned))
    assert result["programs"] == 93
    assert result["places"]["alpha-beta"][0] == 1
    assert max(result["errors"]["alpha-beta"]) < 1e-6


def test_a_program_that_is_fast_against_the_prediction_has_its_place_and_error(bench):
    row = row_of(bench, ("rack", "node"))
    slowest = max(row["times"], key=lambda name: row["times"][name][0])
    predicted = row["times"][slowest][0]
    row["times"][slowest] = [1e-6] * 4
    result = bench.judge(row)
    assert result["best"] == slowest
    assert result["places"]["alpha-beta"][1] > 80
    assert max(result["errors"]["alpha-beta"]) == pytest.approx(predicted / 1e-6 - 1, rel=1e-3)


def test_programs_of_three_levels_are_drawn_with_the_single_all_reduce_whatever_their_order(bench):
    programs = bench.ranked(SYSTEM, {"data": 8}, PAYLOAD, ("rack", "node", "device"))[1]
    assert len(programs) == 1635
    drawn = bench.drawn(programs, 1)
    assert list(drawn) == list(bench.drawn(programs[::-1], 1)) != list(bench.drawn(programs, 2))
    assert len(drawn) == 93
    assert "all-reduce {0,1,2,3,4,5,6,7}" in drawn


def test_a_count_has_exact_limits(bench):
    # 0.025 ** (1 / 36), by hand
    assert bench.counted([True] * 36) == "36 of 36 (90.3 – 100.0 %)"
