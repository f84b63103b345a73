"""Sweeps: fits recover the machine the times come from, the table repeats its measurements, files from outside are checked."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed

from unsilent.basics.errors import UsageError
from unsilent.placement.cost import AlphaBeta, traffic
from unsilent.placement.measure import MeasuredTable, Measurement, Sweep, fitted_system, load_sweep, measure_here
from unsilent.placement.programs import COLLECTIVES
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.synthesis import groupings

COUNTS = (2, 3, 4)
LATENCY, BANDWIDTH = (50e-6, 9e-6, 2e-6), (1e9, 12e9, 150e9)
SIZES = (2**12, 2**18, 2**24)


def ring_seconds(level, collective, size, flows, payload):
    """Of a ring over one level, by hand: each of the hops in turn moves an n-th of the payload of every flow."""
    hops = (2 if collective == "all-reduce" else 1) * (size - 1)
    return hops * (LATENCY[level] + flows * payload / size / BANDWIDTH[level])


def planted_sweep():
    """Every grouping at every size; groups over one level alone take the time of a ring, all else ten seconds."""
    over_one_level = {}
    for level, size in enumerate(COUNTS):
        inside = int(np.prod(COUNTS[level + 1 :]))
        for place in ("all", "first"):
            flows = inside if place == "all" else 1
            groups = tuple(
                tuple(range(start + offset, start + size * inside, inside))
                for start in range(0, 24, size * inside)
                for offset in range(flows)
            )
            over_one_level[groups] = level, size, flows
    rows = []
    for grouping in groupings(COUNTS):
        groups = grouping.groups(COUNTS)
        for collective in COLLECTIVES:
            for payload in SIZES:
                ring = groups in over_one_level and collective not in ("reduce", "broadcast")
                seconds = (
                    ring_seconds(*over_one_level[groups][:1], collective, *over_one_level[groups][1:], payload)
                    if ring
                    else 10.0
                )
                rows.append(Measurement(collective, groups, payload, seconds))
    return Sweep(("node", "socket", "core"), COUNTS, "gloo", tuple(rows))


def test_a_fit_recovers_latency_and_bandwidth_of_every_level():
    system = fitted_system(planted_sweep())
    assert system.counts == COUNTS
    assert [level.latency for level in system.levels] == pytest.approx(LATENCY, rel=1e-6)
    assert [level.bandwidth for level in system.levels] == pytest.approx(BANDWIDTH, rel=1e-6)


def test_the_table_repeats_what_was_measured_and_leaves_the_rest_to_the_fit():
    sweep = planted_sweep()
    system = fitted_system(sweep)
    table = MeasuredTable(system, sweep)
    for row in sweep.rows:
        load = traffic(system, np.array(row.groups))
        assert table.cost(row.collective, load, row.payload).seconds == pytest.approx(row.seconds, rel=1e-6)
    load = traffic(system, np.array([[0, 12, 1, 13]]))
    assert table.cost("all-gather", load, 2**20) == AlphaBeta(system).cost("all-gather", load, 2**20)
    assert rank_placements(system, {"data": 24}, [Reduction(("data",), 2**20)], table).model == "measured table"


def test_a_sweep_is_read_as_it_was_saved(tmp_path):
    path = tmp_path / "sweep.json"
    planted_sweep().save(path)
    assert load_sweep(str(path)) == planted_sweep()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "other"},
        {"rows": []},
        {"rows": [{"collective": "all-reduce"}]},
        {"rows": [{"collective": "sum", "groups": [[0, 1]], "payload": 1, "seconds": 1}]},
        {"rows": [{"collective": "reduce", "groups": [[0, 24]], "payload": 1, "seconds": 1}]},
        {"rows": [{"collective": "reduce", "groups": [[0, 1], [2, 3, 4]], "payload": 1, "seconds": 1}]},
        {"rows": [{"collective": "reduce", "groups": [[0, 1]], "payload": 1, "seconds": float("nan")}]},
        {"rows": [{"collective": "reduce", "groups": [[0, 1]], "payload": 1, "seconds": 0}]},
        {"rows": [{"collective": "reduce", "groups": [[0, 1]], "payload": 0, "seconds": 1}]},
        {"counts": [2, 0, 4]},
        {"counts": [6, 4]},
        {"counts": 24},
    ],
    ids=str,
)
def test_a_file_that_is_no_sweep_is_refused_in_one_line(tmp_path, change):
    path = tmp_path / "sweep.json"
    planted_sweep().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError) as caught:
        load_sweep(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "sweep.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a file of unsilent placement measure -o"):
        load_sweep(str(path))


def test_a_level_without_measurements_is_refused():
    sweep = planted_sweep()
    with pytest.raises(UsageError, match="no group that extends over level node alone"):
        fitted_system(replace(sweep, rows=tuple(row for row in sweep.rows if row.seconds == 10)))


def test_a_level_whose_times_do_not_grow_has_at_least_the_bandwidth_that_was_seen():
    """Of 256 KiB in 1 ms, most bytes pass a node's link in all-reduces of 12 pairs."""
    sweep = planted_sweep()
    constant = tuple(replace(row, seconds=1.0) for row in sweep.rows if row.payload == SIZES[0])
    flat = tuple(replace(row, payload=SIZES[1], seconds=1e-3) for row in constant)
    system = fitted_system(replace(sweep, rows=constant + flat))
    assert system.levels[0].bandwidth == pytest.approx(2 * 12 * SIZES[1] / 2 / 1e-3)  # of an all-reduce: two rounds
    assert "the bandwidth of node, socket, core is a lower bound" in system.source
    assert "lower bound" not in fitted_system(sweep).source


@pytest.mark.parametrize("counts", [(), (1,), (0, 4), (2, 64)], ids=str)
def test_a_number_of_devices_that_cannot_be_started_here_is_refused(counts, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="expected 2 to 64"):
        measure_here(counts)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_processes_of_this_computer_are_swept(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sweep = measure_here((2, 2), ("node", "device"), (2**12, 2**20), repeats=3)
    expected = {(c, g.groups((2, 2)), size) for c in COLLECTIVES for g in groupings((2, 2)) for size in (2**12, 2**20)}
    assert {(row.collective, row.groups, row.payload) for row in sweep.rows} == expected
    assert len(sweep.rows) == len(expected)
    assert fitted_system(sweep).counts == (2, 2)
