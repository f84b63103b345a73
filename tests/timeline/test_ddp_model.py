"""Predicted steps of a training under DDP: buckets as torch fills them, and times by an obvious simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size

from unsilent.timeline.ddp.model import MIB, DdpSteps, LinkCost, assign_buckets, fit_link_cost
from unsilent.timeline.ddp.optimise import PRECISIONS, bucket_sizes, optimise, predict, reasons
from unsilent.timeline.ddp.optimise_report import find_settings
from unsilent.timeline.ddp.traces import DdpJob
from unsilent.timeline.link_costs import FLAT


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.lists(st.integers(4, 20000), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_buckets_are_those_of_torch(elements, caps):
    tensors = [torch.empty(one) for one in elements]
    expected, _ = _compute_bucket_assignment_by_size(tensors, caps)
    assert assign_buckets([4 * one for one in elements], caps) == expected


def steps_of(ranks: int, steps: int, gradients: int, seed: int) -> DdpSteps:
    generator = np.random.default_rng(seed)
    ready = np.sort(generator.uniform(0, 0.05, (ranks, steps, gradients)), 2)
    return DdpSteps(
        generator.integers(1, 9, gradients) * MIB, generator.uniform(0.01, 0.02, (ranks, steps)), ready, ready.max(2) + 1e-3,
        generator.uniform(0.001, 0.003, (ranks, steps)), generator.uniform(0, 0.01, ranks),
    )  # fmt: skip


def slow_prediction(recorded: DdpSteps, buckets: list[list[int]], latency: float, per_byte: float) -> list[float]:
    """The same in scalars, one event after the other."""
    ranks, steps = recorded.before.shape
    now, result = [float(one) for one in recorded.skew], []
    for step in range(steps):
        begins = [now[rank] + recorded.before[rank, step] for rank in range(ranks)]
        free = 0.0
        for bucket in buckets:
            for rank in range(ranks):
                for gradient in bucket:
                    free = max(free, begins[rank] + recorded.ready[rank, step, gradient])
            free += latency + per_byte * sum(int(recorded.sizes[gradient]) for gradient in bucket)
        ends = [
            max(free, begins[rank] + recorded.backward[rank, step]) + recorded.after[rank, step]
            for rank in range(ranks)
        ]
        result.append(max(ends) - max(now))
        now = ends
    return result


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 30), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_steps_take_as_long_as_in_a_slow_simulation(ranks, gradients, cap, seed):
    recorded = steps_of(ranks, 4, gradients, seed)
    buckets = assign_buckets(recorded.sizes.tolist(), [cap * MIB])
    cost = LinkCost(1e-4, 1e-9, 1, 1e9)
    assert recorded.step_seconds(buckets, cost) == pytest.approx(slow_prediction(recorded, buckets, 1e-4, 1e-9))


def test_half_the_bytes_cost_no_more():
    recorded = steps_of(2, 5, 8, 0)
    buckets = assign_buckets(recorded.sizes.tolist(), [4 * MIB])
    cost = LinkCost(1e-4, 1e-8, 1, 1e9)
    assert (recorded.step_seconds(buckets, cost, 0.5) <= recorded.step_seconds(buckets, cost)).all()


@given(st.floats(1e-5, 1e-2), st.floats(1e-10, 1e-7), st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_the_cost_of_a_link_is_found(latency, per_byte, count):
    sizes = np.repeat(np.geomspace(1e4, 1e8, count), 5)
    cost = fit_link_cost(sizes, latency + per_byte * sizes)
    assert cost(sizes) == pytest.approx(latency + per_byte * sizes, rel=1e-6)
    assert cost.covers(sizes)
    assert not cost.covers(2 * sizes)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 50))
@settings(max_examples=15, deadline=None)
def test_the_best_settings_are_no_slower_than_any_uniform_ones(ranks, gradients, seed):
    recorded, cost = steps_of(ranks, 4, gradients, seed), LinkCost(2e-3, 1e-9, 1, 1e9)
    best = optimise(recorded, cost, ["fp32"])[0]
    every = [predict(recorded, cost, (cap,)) for cap in range(1, int(recorded.sizes.sum()) // MIB + 2)]
    assert best.mean <= min(one.mean for one in [*every, predict(recorded, cost)]) + 1e-12
    assert best.seconds == pytest.approx(predict(recorded, cost, best.caps).seconds)


def test_a_slow_start_of_transfers_asks_for_one_bucket_and_a_slow_link_for_several():
    recorded = steps_of(2, 4, 10, 3)
    assert (
        len(
            assign_buckets(
                recorded.sizes.tolist(), [MIB * cap for cap in optimise(recorded, LinkCost(1, 0, 1, 1))[0].caps]
            )
        )
        == 1
    )
    assert (
        len(
            assign_buckets(
                recorded.sizes.tolist(), [MIB * cap for cap in optimise(recorded, LinkCost(0, 1e-9, 1, 1))[0].caps]
            )
        )
        > 1
    )


def test_neighbouring_buckets_are_explained():
    recorded, cost = steps_of(2, 4, 10, 3), LinkCost(0, 1e-9, 1, 1)
    best = optimise(recorded, cost, ["fp32"])[0]
    buckets = assign_buckets(recorded.sizes.tolist(), [MIB * cap for cap in best.caps])
    assert len(reasons(recorded, cost, best)) == len(buckets) - 1


def test_no_chosen_bucket_is_larger_than_what_was_measured():
    recorded = steps_of(2, 4, 10, 3)
    largest = 2 * float(recorded.sizes.max())
    best = optimise(recorded, LinkCost(1.0, 0.0, 1, largest), ["fp32"])[0]  # one bucket would be the fastest
    assert bucket_sizes(recorded, best).max() <= largest


def test_of_all_reduction_programs_the_fastest_is_chosen():
    recorded = steps_of(2, 4, 10, 3)
    buckets = assign_buckets(recorded.sizes.tolist(), [4 * MIB])
    costs = {FLAT: LinkCost(1e-3, 1e-9, 0, 1e12), "quick start": LinkCost(1e-5, 2e-9, 0, 1e12),
             "wide": LinkCost(2e-3, 2e-10, 0, 1e12), "worse": LinkCost(3e-3, 2e-9, 0, 1e12)}  # fmt: skip
    result = find_settings(DdpJob(recorded, buckets, costs[FLAT], recorded.step_seconds(buckets, costs[FLAT])), costs)
    every = {
        name: min(predict(recorded, cost, (cap,), precision).mean for cap in range(1, 90) for precision in PRECISIONS)
        for name, cost in costs.items()
    }
    assert result.reduction == min(every, key=every.__getitem__)
    assert result.best[0].mean <= min(every.values()) + 1e-12
    assert result.default.mean == pytest.approx(predict(recorded, costs[FLAT]).mean)
    assert f"reduced by: {result.reduction}" in " ".join(result.report().findings)


def test_a_program_that_is_no_faster_is_not_chosen():
    recorded = steps_of(2, 4, 10, 3)
    cost = LinkCost(1e-3, 1e-9, 0, 1e12)
    buckets = [list(range(10))]
    job = DdpJob(recorded, buckets, cost, recorded.step_seconds(buckets, cost))
    result = find_settings(job, {"the same": cost, FLAT: cost})
    assert result.reduction == FLAT
    assert not any("reduced by" in one for one in result.report().findings)
