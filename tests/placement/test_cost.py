"""Predicted times against loads counted hop by hop, and against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.reduction_oracle import program_seconds, ring_loads
from unsilent.basics.errors import UsageError
from unsilent.placement.cost import AlphaBeta, traffic
from unsilent.placement.nccl import Nccl
from unsilent.placement.placements import placements
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.system import Level, System

GIB2 = 2**31


def machine(counts, bandwidths=(12.5e9, 270e9), gpu="", latency=0.0):
    names = [f"level{at}" for at in range(len(counts) - 1)] + ["gpu"]
    links = ["network"] * (len(counts) - 1) + ["nvlink"]
    levels = zip(names, counts, bandwidths, links, strict=True)
    return System("x", tuple(Level(n, c, b, latency, link=link) for n, c, b, link in levels), "test", gpu)


@pytest.mark.parametrize("shared", [(0, 0, 0), (0, 2, 1), (2, 1, 1)])
def test_flows_are_the_hops_over_each_link(shared):
    levels = [
        Level(f"l{at}", count, 1e9, 0.0, shared_by=s)
        for at, (count, s) in enumerate(zip((2, 3, 4), shared, strict=True))
    ]
    system = System("x", tuple(levels))
    for one in placements(system.counts, {"a": 6, "b": 2, "c": 2}):
        for axes in (("a",), ("b",), ("a", "c"), ("a", "b", "c")):
            groups = one.reduction_groups(axes)
            assert list(traffic(system, groups).ring) == ring_loads((2, 3, 4), shared, groups.tolist())


@pytest.mark.parametrize(
    ("counts", "bandwidths"),
    [
        ((2, 2, 2), (1e9, 4e9, 1e10)),
        pytest.param((2, 3, 2), (1e10, 1e9, 2e9), marks=pytest.mark.slow),
        pytest.param((3, 2, 2), (4e9, 1e10, 1e9), marks=pytest.mark.slow),
    ],
)
def test_each_group_of_every_program_is_charged_with_what_its_devices_hold(counts, bandwidths):
    levels = [Level(f"l{at}", c, b, 0.0) for at, (c, b) in enumerate(zip(counts, bandwidths, strict=True))]
    k = int(np.prod(counts))
    found = rank_placements(System("x", tuple(levels)), {"data": k}, [Reduction(("data",), GIB2)], top=2000)
    programs = found.placements[0].programs[0]
    assert len(programs) == 1635
    for one in programs:
        steps = [(step.collective, step.groups) for step in one.program().steps]
        assert one.seconds == pytest.approx(program_seconds(counts, bandwidths, steps, GIB2)), one.program()


def test_loads_of_groups_with_other_payloads():
    """Two groups over one card, one of them with a quarter of the payload; also by trees, and with NCCL's constants."""
    system = machine((2, 2))
    both, shares = np.array([[0, 2], [1, 3]]), np.array([1.0, 0.25])
    equal, uneven, alone = traffic(system, both), traffic(system, both, shares), traffic(system, both[:1])
    assert (equal.ring_load, uneven.ring_load, alone.ring_load) == ((2, 1), (1.25, 1), (1, 1))
    assert uneven.ring == equal.ring == (2, 1)
    assert uneven.trees[0] == pytest.approx(1.25 * alone.trees[0])
    for model in (AlphaBeta(system), AlphaBeta(system, "tree"), Nccl(system)):
        times = [model.cost("all-reduce", each, GIB2).seconds for each in (alone, uneven, equal)]
        assert times[1] - times[0] == pytest.approx((times[2] - times[0]) / 4, rel=1e-3)


def test_a_chain_lacks_the_hop_that_closes_the_ring():
    system = machine((2, 4))
    one = traffic(system, np.arange(8).reshape(1, 8))
    assert (one.ring, one.chain) == ((1, 1), (1, 1))
    pairs = traffic(system, np.array([[0, 4]]))
    assert (pairs.ring, pairs.chain) == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("counts", "inside", "ratio"),
    [
        ((2, 16), 270e9, 1.78),
        ((2, 2), 270e9, 1.43),
        ((4, 16), 270e9, 1.24),
        ((4, 4), 270e9, 1.19),
        ((2, 8), 135e9, 1.61),
        ((4, 8), 135e9, 1.17),
    ],
)
def test_a_program_of_three_steps_beats_a_ring_over_all(counts, inside, ratio):
    """Ring volumes over a shared card of 12.5 GB/s per node: the closed forms of both programs."""
    nodes, gpus = counts
    n, nic = nodes * gpus, 12.5e9
    flat = max(2 * (n - 1) / n * GIB2 / nic, 2 * (n - 1) / n * GIB2 / inside)
    steps = 2 * (gpus - 1) / gpus * GIB2 / inside + gpus * 2 * (nodes - 1) / nodes * GIB2 / gpus / nic
    system = machine(counts, (nic, inside))
    best = rank_placements(system, {"data": n}, [Reduction(("data",), GIB2)]).placements[0].programs[0][0]
    assert best.flat_seconds == pytest.approx(flat)
    assert best.seconds == pytest.approx(steps)
    assert round(best.ratio, 2) == ratio


def test_sixteen_groups_over_one_card_take_sixteen_times_as_long():
    system = machine((4, 16))
    shared = rank_placements(system, {"data": 4, "tensor": 16}, [Reduction(("data",), GIB2)])
    times = {one.placement.matrix: one.seconds for one in shared.placements}
    assert times[((4, 1), (1, 16))] / times[((1, 4), (4, 4))] == pytest.approx(16 * 270 / 12.5)


def test_latency_counts_each_hop_in_turn():
    system = System("x", (Level("node", 2, 1e9, 10e-6), Level("gpu", 4, 1e9, 1e-6)))
    cost = AlphaBeta(system).cost("all-reduce", traffic(system, np.arange(8).reshape(1, 8)), 1e-9)
    assert cost.seconds == pytest.approx(14 / 8 * (2 * 10e-6 + 6 * 1e-6))


def test_trees_between_two_nodes_send_each_byte_once_in_each_direction():
    system = machine((2, 4))
    flows = traffic(system, np.arange(8).reshape(1, 8))
    assert AlphaBeta(system, "tree").cost("all-reduce", flows, GIB2).seconds == pytest.approx(GIB2 / 12.5e9)
    four = machine((4, 4))
    flows = traffic(four, np.arange(16).reshape(1, 16))
    assert AlphaBeta(four, "tree").cost("all-reduce", flows, GIB2).seconds == pytest.approx(2 * GIB2 / 12.5e9)
    assert AlphaBeta(four, "auto").cost("all-reduce", flows, GIB2).algorithm == "ring"


def nccl(version, counts, algorithm, protocol, payload, collective="all-reduce", gpu="a100"):
    system = machine(counts, gpu=gpu)
    n = int(np.prod(counts))
    flows = traffic(system, np.arange(n).reshape(1, n))
    times = {
        name: t
        for t, name in Nccl(system, version)._times(
            collective, flows, payload, min(12.5 if counts[0] > 1 else 270, 270)
        )
    }
    return times[f"{algorithm} {protocol}"]


def test_nccl_times_by_hand():
    """Worked out from the published lines of tuning.cc, in µs."""
    one_node = nccl("2.7.5", (1, 16), "ring", "Simple", 1e9)
    assert one_node == pytest.approx(8.4 + 30 * 3.4 + 1e9 / (1000 * 235 * 16 / 30))
    two = nccl("2.7.5", (2, 8), "ring", "Simple", 1e9)
    assert two == pytest.approx(1.9 * (8.4 + (30 - 2) * 3.4 + 2 * 9.6) + 1e9 / (1000 * 12.5 * 16 / 30))
    tree = nccl("2.7.5", (4, 4), "tree", "Simple", 2**30)
    assert tree == pytest.approx(0 + 2 * (3 * 28 + 2 * 50) + 2**30 / (1000 * 12.5 * 0.9 * 0.5))
    small = nccl("2.7.5", (2, 8), "ring", "LL", 256)
    assert small == pytest.approx(3.6 + 28 * 0.47 * 1.8 + 2 * 2.7 + 256 / (1000 * 12.5 / 4 * 16 / 30))
    newer = nccl("2.20.3", (2, 8), "ring", "Simple", 1e9)
    assert newer == pytest.approx(1.4 * (8.4 + (30 - 4) * 3.4 + 4 * 14.0) + 1e9 / (1000 * 12.5 * 16 / 30))
    gather = nccl("2.20.3", (1, 16), "ring", "LL", 1e6, "all-gather")
    assert gather == pytest.approx(6.6 + 15 * 0.6 + 1e6 / (1000 * min(270 / 3, 87.7) * 16 / 15))


def test_ll128_is_left_out_where_it_may_corrupt_data():
    system = machine((1, 8), gpu="")
    flows = traffic(system, np.arange(8).reshape(1, 8))
    assert not any("LL128" in name for _, name in Nccl(system)._times("all-reduce", flows, 1e6, 270))


def test_an_unknown_version_is_refused():
    with pytest.raises(UsageError, match=r"unknown version of NCCL '2\.7\.4'; did you mean '2\.7\.5'"):
        Nccl(machine((2, 2)), "2.7.4")


def test_several_reductions_are_ranked_by_their_weighted_sum():
    system = machine((2, 4))
    axes = {"data": 2, "tensor": 4}
    both = [Reduction(("data",), 2**28), Reduction(("tensor",), 2**24, 48.0)]
    ranking = rank_placements(system, axes, both)
    alone = [{p.placement.matrix: p.seconds for p in rank_placements(system, axes, [one]).placements} for one in both]
    for one in ranking.placements:
        assert one.seconds == pytest.approx(alone[0][one.placement.matrix] + alone[1][one.placement.matrix])
    assert [one.seconds for one in ranking.placements] == sorted(one.seconds for one in ranking.placements)
