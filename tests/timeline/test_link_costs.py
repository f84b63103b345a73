"""Costs of reduction programs and of parameter servers, against figures that are counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.placement.measure import Measurement, Sweep
from unsilent.timeline.ddp.model import MIB, LinkCost, server_cost
from unsilent.timeline.link_costs import FLAT, reduction_costs

MACHINE = """
[[level]]
name = "node"
count = 2
bandwidth = "1GB/s"
latency = "100us"
[[level]]
name = "gpu"
count = 4
bandwidth = "20GB/s"
latency = "10us"
shared_by = 1
"""


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE)
    return str(path)


def test_each_program_costs_what_its_steps_do(machine):
    costs = reduction_costs(machine, 8)
    size = np.array([3.0 * MIB, 40.0 * MIB])
    within = 3 / 4 * size / 20e9 + 3 * 10e-6  # a ring of the four of a node, one way round
    between = 4 * (2 / 2 * size / 4) / 1e9 + 2 * 100e-6  # four rings share the link of a node, each with a quarter
    program = "reduce-scatter inside each node; all-reduce across the nodes; all-gather inside each node"
    assert costs[program](size) == pytest.approx(2 * within + between)
    hops = (6 * 10e-6 + 2 * 100e-6) / 8  # a ring of all eight crosses from node to node twice
    assert costs[FLAT](size) == pytest.approx(2 * 7 / 8 * size / 1e9 + 14 * hops)


def test_a_machine_of_another_size_is_refused(machine):
    with pytest.raises(UsageError, match="8 devices, but the job has 2 ranks"):
        reduction_costs(machine, 2)


def loads_of_servers(ranks: int, servers: int, size: float) -> float:
    """Most bytes that a link carries while all ranks push their gradients, link by link."""
    links: dict[tuple[str, int], float] = {}
    for rank in range(ranks):
        for server in range(servers):
            for link in (("rank", rank), ("server", server)):
                links[link] = links.get(link, 0.0) + size / servers
    return max(links.values())


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_a_server_is_paid_for_its_most_loaded_link_twice(ranks, servers):
    latency, per_byte, size = 2e-4, 1e-9, 8.0 * MIB
    hops = 2 * (ranks - 1)  # an all-reduce by a ring sends the n-th part of its payload in each
    ring = LinkCost(hops * latency, hops / ranks * per_byte, MIB, 9 * MIB)
    cost = server_cost(ring, ranks, servers)
    expected = 2 * (latency + per_byte * loads_of_servers(ranks, servers, size))
    assert cost(np.array([size]))[0] == pytest.approx(expected)
    assert (cost.smallest, cost.largest) == (MIB, 9 * MIB)


def sweep_file(tmp_path, payloads=(2**14, 2**17, 2**20, 2**22), seconds=(5.3e-4, 5.7e-4, 1.3e-3, 8.2e-3)):
    rows = [
        Measurement(collective, ((0, 1),), payload, factor * taken)
        for collective, factor in (("all-reduce", 1), ("reduce-scatter", 0.5), ("all-gather", 0.7))
        for payload, taken in zip(payloads, seconds, strict=True)
    ]
    path = tmp_path / "sweep.json"
    Sweep(("node",), (2,), "gloo", tuple(rows)).save(path)
    return str(path)


def test_a_measured_collective_costs_what_was_measured(tmp_path):
    """No line fits these times: an all-reduce of 4 MiB takes six times as long as one of 1 MiB."""
    costs = reduction_costs(sweep_file(tmp_path), 2)
    sizes, seconds = np.array([2.0**14, 2**17, 2**20, 2**22]), np.array([5.3e-4, 5.7e-4, 1.3e-3, 8.2e-3])
    assert costs[FLAT](sizes) == pytest.approx(seconds)
    assert costs["reduce-scatter over all devices; all-gather over all devices"](sizes) == pytest.approx(1.2 * seconds)
    assert costs[FLAT](np.array([2.5 * MIB]))[0] == pytest.approx((1.3e-3 + 8.2e-3) / 2)


def test_beyond_the_largest_measured_size_the_last_slope_goes_on_and_is_flagged(tmp_path):
    cost = reduction_costs(sweep_file(tmp_path), 2)[FLAT]
    assert cost(np.array([7.0 * MIB]))[0] == pytest.approx(8.2e-3 + 6.9e-3)
    assert cost.covers(np.array([2.0 * MIB]))
    assert not cost.covers(np.array([7.0 * MIB]))
    assert not cost.covers(np.array([1024.0]))


def test_a_server_is_costed_by_the_line_through_what_was_measured(tmp_path):
    line = 1e-4 + 1e-9 * np.array([2.0**14, 2**17, 2**20, 2**22])
    cost = server_cost(reduction_costs(sweep_file(tmp_path, seconds=line), 2)[FLAT], 2, 1)
    expected = server_cost(LinkCost(1e-4, 1e-9, 1, 1), 2, 1)
    assert (cost.latency, cost.per_byte) == pytest.approx((expected.latency, expected.per_byte))
    assert cost(np.array([2.0 * MIB])) == pytest.approx(expected(np.array([2.0 * MIB])))
