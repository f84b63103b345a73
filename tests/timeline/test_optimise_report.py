"""What ``unsilent timeline optimise`` recommends, and that its text fits its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kineto_traces import MIB, ddp_job_files
from timeline.test_ddp_model import steps_of
from unsilent.basics.errors import UsageError
from unsilent.timeline.ddp.model import LinkCost
from unsilent.timeline.ddp.optimise_report import find_settings
from unsilent.timeline.ddp.traces import DdpJob, ddp_job
from unsilent.timeline.load import load_job


def read(folder, **options):
    return ddp_job(load_job([ddp_job_files(folder, **options)]))


def recorded_with(buckets, cost, item_bytes=4):
    steps = steps_of(2, 4, 10, 3)
    return DdpJob(steps, buckets, cost, steps.step_seconds(buckets, cost), item_bytes)


def settings_rows(result):
    (table,) = result.report().sections[0].parts
    return [(row.cells[0], row.cells[1]) for row in table.rows]


def test_the_recorded_buckets_are_what_others_are_compared_with():
    cost = LinkCost(0.05, 1e-9, 1, 1e12)  # each bucket costs much, so that ten are far too many
    result = find_settings(recorded_with([[one] for one in range(10)], cost))
    report = result.report()
    assert "as recorded" in report.headline
    assert "shortens a step" in report.headline
    assert result.recorded.mean > result.default.mean
    assert next(row[0] for row in settings_rows(result)) == "as recorded"


def test_settings_that_are_no_faster_are_not_recommended():
    cost = LinkCost(0.05, 1e-9, 1, 1e12)
    report = find_settings(recorded_with([list(range(10))], cost)).report()
    assert "keep the recorded ones" in report.headline
    assert "DDP's default" not in report.headline


def test_half_the_bits_within_the_noise_floor_are_not_called_faster():
    job = recorded_with([list(range(10))], LinkCost(1e-3, 1e-12, 1, 1e12))
    (finding,) = find_settings(job).report().findings
    assert finding.endswith("whether that is faster is not established")


def test_no_row_is_shown_twice(tmp_path):
    rows = settings_rows(find_settings(read(tmp_path)))
    assert len(rows) == len(set(rows))


def test_sizes_beyond_the_fit_are_said_with_their_precision():
    cost = LinkCost(1e-3, 1e-9, 30 * MIB, 60 * MIB)
    result = find_settings(recorded_with([list(range(10))], cost))
    notes = [note for note in result.report().notes if "outside the sizes" in note]
    assert any("fp16" in note for note in notes)


def test_nothing_is_recommended_where_the_model_misses_the_recorded_steps():
    job = recorded_with([[one] for one in range(10)], LinkCost(0.05, 1e-9, 1, 1e12))
    report = find_settings(replace(job, recorded=1.5 * job.recorded)).report()
    assert report.headline.startswith(
        "No settings are recommended: the model of DDP misses single recorded steps by 33.3 %"
    )
    shown = " ".join([report.headline, *report.findings, *(str(one) for one in report.sections)])
    assert "bucket_cap_mb" not in shown
    assert report.further_json["results"]["best"] == []


def test_gradients_of_16_bits_are_not_recommended_to_have_them(tmp_path):
    result = find_settings(read(tmp_path, dtype="c10::BFloat16"))
    assert len(result.best) == 1
    assert not any("16 bits" in one for one in result.report().findings)
    assert {row[1] for row in settings_rows(result)} == {"16 bits"}


def test_ranks_that_were_not_read_are_said(tmp_path):
    assert any(
        "1 of 2 ranks was read" in note for note in find_settings(read(tmp_path, ranks=1, world_size=2)).report().notes
    )


def test_one_rank_is_refused(tmp_path):
    with pytest.raises(UsageError, match="one rank"):
        read(tmp_path, ranks=1)
