"""Offsets of clocks: planted ones are found, from anchors and from the ends of collectives; contradictions are reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kineto_traces import BASE, sharded_step, trace, write
from timeline_arrays import operations
from unsilent.timeline.anchors import best_exchange
from unsilent.timeline.clocks import FEW_COLLECTIVES, align_clocks
from unsilent.timeline.load import load_job
from unsilent.timeline.replay import unexplained_gaps

BEGIN = 1_795_725_889.0
"""Unix seconds of the job's begin, so that what is lost by rounding is seen."""


def job(count, ranks=2, seed=0, noise=20e-6, interval=0.01):
    """A job of all-reduces on one clock: ranks enter late, and end within heavy-tailed noise of each other."""
    random = np.random.default_rng(seed)
    rows = []
    enter = np.arange(count)[:, None] * interval + random.exponential(1e-3, (count, ranks))
    end = enter.max(axis=1, keepdims=True) + 2e-3 + random.exponential(noise, (count, ranks))
    for rank in range(ranks):
        rows += [(rank, rank, enter[i, rank], end[i, rank], i) for i in range(count)]
    return operations(rows)


def on_own_clocks(truth, offsets, drifts):
    """The same job as its ranks see it: their clocks are ahead by offsets (seconds) and drift (seconds in a second)."""
    offset = np.array(offsets)[truth.rank] + np.array(drifts)[truth.rank] * truth.start
    return replace(truth, start=truth.start + offset)


def anchors(offset, drift, at, random):
    """What a rank measures: messages of 20 to 60 µs each way, delayed by a scheduler now and then, more on one way."""
    rows = []
    for moment in at:
        exchanges = []
        for index in range(300):
            sent = BEGIN + moment + index * 1e-4
            delays = random.uniform(20e-6, 60e-6, 2) + random.exponential([3e-4, 5e-5]) * (random.random(2) < 0.5)
            answered, received = sent + delays[0], sent + delays.sum()
            shift = offset + drift * (sent - BEGIN)
            exchanges.append(tuple(round(1e9 * t) for t in (sent + shift, answered, received + shift)))
        seconds, measured, bound = best_exchange(exchanges)
        rows.append((seconds - BEGIN, measured, bound))
    return np.array(rows)


@pytest.mark.parametrize("offset", [1e-3, -1e-3, 50e-3, -50e-3])
@pytest.mark.parametrize("drift", [50e-6, -50e-6])
def test_planted_offsets_and_drift_are_found_from_anchors(offset, drift):
    truth = job(500, ranks=3)
    random = np.random.default_rng(1)
    given = {1: anchors(offset, drift, (-0.1, 5.1), random), 2: anchors(-offset, -drift, (-0.1, 5.1), random)}
    seen = on_own_clocks(truth, (0, offset, -offset), (0, drift, -drift))
    clocks = align_clocks(seen, given)
    assert np.abs(seen.start - truth.start).max() > 9e-4
    assert np.abs(clocks.start - truth.start).max() < 20e-6
    assert clocks.notes == ()
    for rank, planted in ((1, offset + 2.5 * drift), (2, -offset - 2.5 * drift)):
        interval = clocks.offsets[rank]
        assert interval.low <= planted <= interval.high
        assert interval.high - interval.low < 200e-6


def test_an_offset_without_anchors_is_the_median_of_differences_of_ends():
    truth = job(400)
    seen = on_own_clocks(truth, (0, 5e-3), (0, 0))
    clocks = align_clocks(seen, {})
    assert np.abs(clocks.start - truth.start).max() < 10e-6
    assert (clocks.offsets[0].estimate, clocks.offsets[1].n) == (0.0, 400)
    (note,) = clocks.notes
    assert note.startswith("The clock of 1 rank was inferred from when collectives ended, not measured")
    assert "fewer than" not in note
    few = align_clocks(on_own_clocks(job(FEW_COLLECTIVES - 1), (0, 5e-3), (0, 0)), {})
    assert f"{FEW_COLLECTIVES - 1} collectives" in few.notes[0]
    assert "fewer than 300" in few.notes[0]


def test_intervals_of_inferred_offsets_cover():
    """200 subsamples of one long job, with an offset in each; 95 % intervals hold the truth in 178 or more with p > 0.999."""
    whole = job(5000, seed=3)
    random = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        chosen = np.isin(whole.collective, random.choice(5000, 60, replace=False))
        part = operations(
            [(r, r, s, e, c) for r, s, e, c in zip(
                whole.rank[chosen], whole.start[chosen], whole.end[chosen], whole.collective[chosen], strict=True)]
        )  # fmt: skip
        offset = random.uniform(-50e-3, 50e-3)
        interval = align_clocks(on_own_clocks(part, (0, offset), (0, 0)), {}).offsets[1]
        covered += interval.low <= offset <= interval.high
    assert 178 <= covered <= 200


def test_ranks_without_a_common_collective_are_aligned_over_others():
    pairs = [(0, 1), (1, 2), (2, 3)]
    offsets = (0, 1e-3, -2e-3, 4e-3)
    rows = []
    for number in range(900):
        for rank in pairs[number % 3]:
            start = number * 0.01 + offsets[rank]
            rows.append((rank, rank, start, start + 0.001, number))
    clocks = align_clocks(operations(sorted(rows)), {})
    assert [clocks.offsets[rank].estimate for rank in range(4)] == pytest.approx(offsets, abs=1e-9)
    alone = align_clocks(operations([*sorted(rows), (4, 4, 0.0, 1.0, -1)]), {})
    assert 4 not in alone.offsets
    assert any("rank 4" in note and "as recorded" in note for note in alone.notes)


def test_a_mix_of_anchors_and_inference():
    truth = job(400, ranks=3)
    seen = on_own_clocks(truth, (0, 5e-3, -7e-3), (0, 0, 0))
    clocks = align_clocks(seen, {1: np.array([[0.0, 5e-3, 1e-5]])})
    assert np.abs(clocks.start - truth.start).max() < 12e-6
    assert (clocks.offsets[1].method, clocks.offsets[2].method) == ("messages", "order statistics")


def test_clocks_that_contradict_causality_are_reported():
    truth = job(400)
    wrong = np.array([[0.0, 8e-3, 1e-5]])
    (note,) = align_clocks(truth, {1: wrong}).notes
    assert note.startswith("In ")
    assert "of 400 collectives, a rank had ended before another one began, as rank 1 before rank 0 by " in note
    assert align_clocks(truth, {1: np.array([[0.0, 0.0, 1e-5]])}).notes == ()


def test_broadcasts_say_nothing_of_clocks():
    truth = replace(job(400), names=("compute", "gloo:broadcast"))
    clocks = align_clocks(truth, {})
    assert 1 not in clocks.offsets
    assert any("rank 1" in note for note in clocks.notes)


def test_a_clock_that_drifts_hides_no_wait(tmp_path):
    """What begins when a collective ends does so on the common clock as well: a wait that is not found looks like a gap."""
    drift = [[BASE * 1e-9, 0.0, 1e-6], [BASE * 1e-9 + 10, 1e-3, 1e-6]]

    def unexplained(name, clock):
        folder = tmp_path / name
        folder.mkdir()
        for rank, own in ((0, []), (1, clock)):
            events = [one for step in range(3) for one in sharded_step(step, 1000 * step)]
            write(folder / f"t{rank}.json", trace(events, rank, unsilent_clock=own))
        job = load_job([folder])
        return unexplained_gaps(job)[job.operations.rank == 1].sum()

    assert unexplained("drifting", drift) == pytest.approx(
        unexplained("steady", [[*one[:1], 0.0, 1e-6] for one in drift]), abs=2e-6
    )
