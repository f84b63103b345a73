"""Peaks of allocated memory, from the memory events of traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kineto_traces import cpu_job, cpu_step, trace, write
from unsilent.timeline.diagnosis import diagnose
from unsilent.timeline.load import load_job
from unsilent.timeline.memory import memory_peaks


def allocation(ts, total, device_type=0):
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts,
        "args": {"Total Allocated": total, "Bytes": total, "Device Type": device_type, "Device Id": 0},
    }  # fmt: skip


def job(folder, *memory):
    """Two ranks; the first one has memory events in its second step, which begins at 1,000."""
    for rank in (0, 1):
        events = [*cpu_step(3, 0), *cpu_step(4, 1000), *(memory if not rank else ())]
        write(folder / f"t{rank}.json", trace(events, rank))
    return load_job([folder])


def test_a_peak_has_its_step_and_phase(tmp_path):
    recorded = job(tmp_path, allocation(100, 500), allocation(1080, 700), allocation(1250, 9000), allocation(1890, 600))
    (peak,) = memory_peaks(recorded)
    assert (peak.rank, peak.bytes, peak.step, peak.phase) == (0, 9000, 4, "backward")
    report = diagnose(recorded).report()
    (table,) = next(one for one in report.sections if one.title == "Memory").parts
    assert table.title == "peak of memory allocated since the recording began"
    assert any("such as parameters, is not in them" in note for note in report.notes)
    assert table.rows[0].cells == ("0", 9000, "4", "backward")


def test_memory_of_a_device_counts_where_there_is_one(tmp_path):
    (peak,) = memory_peaks(job(tmp_path, allocation(1080, 900), allocation(1100, 400, device_type=1)))
    assert (peak.bytes, peak.phase) == (400, "forward")


@pytest.mark.parametrize("total", [None, "1", -5, 2**70, True])
def test_events_without_a_number_of_bytes_do_not_count(tmp_path, total):
    assert memory_peaks(job(tmp_path, allocation(1080, total))) == []


def test_memory_outside_of_steps_does_not_count(tmp_path):
    assert memory_peaks(job(tmp_path, allocation(-50, 900), allocation(5000, 900))) == []


def test_traces_without_memory_events_have_no_peaks(tmp_path):
    cpu_job(tmp_path)
    recorded = load_job([tmp_path])
    assert memory_peaks(recorded) == []
    assert not any("parameters" in note for note in diagnose(recorded).report().notes)
    assert "Memory" not in [one.title for one in diagnose(recorded).report().sections]


def test_the_memory_of_a_rank_with_a_device_is_not_said_to_lack_its_parameters(tmp_path):
    recorded = job(tmp_path, allocation(1080, 400, device_type=1))
    lanes = tuple(lane._replace(is_device=True) for lane in recorded.lanes)
    assert not any("parameters" in note for note in diagnose(replace(recorded, lanes=lanes)).report().notes)
