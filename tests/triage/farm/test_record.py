"""Simulated incidents: the alarm comes where the cause is, the run without it is quiet, and all parts can be read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from triage.farm import made_incidents as made
from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.monitor.reporter import NO_ALARM
from unsilent.recovery.tensor_files import read_tensors
from unsilent.timeline.flight_recorder import read_dumps
from unsilent.timeline.stragglers import PARTS
from unsilent.triage.farm.planned import FAMILIES, WORKLOADS
from unsilent.triage.findings import FindingKind, Outcome, Query
from unsilent.triage.parts import TIMELINE_KEYS
from unsilent.triage.queries.table import execute

EVERY = [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]


def timeline_of(bundle):
    values = json.loads((bundle.folder / "timeline.json").read_text())
    assert tuple(values) == TIMELINE_KEYS
    return values


def logs_of(bundle):
    return [(bundle.folder / f"rank{rank}" / "log.txt").read_text() for rank in range(2)]


# -- where the alarm is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("exponent bit", "body.first.weight"),
        ("sign bit", "body.first.weight"),
        ("zeroed elements", "body.first.weight"),
    ],
)
def test_changed_weights_are_an_alarm_of_the_fingerprint_in_their_step(tmp_path, kind, tensor):
    bundle = made.incident(tmp_path, "weight bits", kind)
    first = next(one for one in bundle.alarms() if one.feature == FINGERPRINT)
    assert (bundle.incident.step, bundle.incident.suspect, bundle.incident.reason) == (44, 1, FINGERPRINT)
    assert (first.rank, first.tensor, first.series_flagged) == (1, tensor, 1)
    assert execute(bundle, Query("compare-parameters")).kind is FindingKind.CHANGED_BITS


@pytest.mark.parametrize(("kind", "key"), [("first moment", "exp_avg"), ("second moment", "exp_avg_sq")])
def test_changed_moments_are_as_well(tmp_path, kind, key):
    bundle = made.incident(tmp_path, "optimizer bits", kind)
    assert [(one.rank, one.tensor) for one in bundle.alarms()] == [(1, f"body.first.weight/{key}")]
    states = [read_tensors(bundle.folder / f"rank{rank}/state.safetensors") for rank in range(2)]
    of_ranks = [one["optimizers"][0]["state"]["body.first.weight"][key] for one in states]
    assert int((of_ranks[0] != of_ranks[1]).sum()) == 1


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("payload", "changed result"), ("replica", "skipped update"), ("replica", "other weights"),
        ("checkpoint", "stale on one rank"),
    ],
)  # fmt: skip
def test_a_rank_with_other_parameters_is_an_alarm_of_replicas_in_the_next_step(tmp_path, family, kind):
    bundle = made.incident(tmp_path, family, kind, world_size=3)
    assert (bundle.incident.step, bundle.incident.suspect, bundle.incident.reason) == (45, 1, "vote")
    assert [(one.feature, one.ranks) for one in bundle.alarms()] == [(REPLICAS, (1,))]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gradient bits", "exponent bit"),
        ("gradient bits", "scaled"),
        ("data", "NaN"),
        ("precision", "float16 overflow"),
    ],
)
def test_a_gradient_of_one_rank_is_an_alarm_of_its_own_history(tmp_path, family, kind):
    size = 1.0 if kind == "scaled" else 0.0
    bundle = made.incident(tmp_path, family, kind, size=size)
    assert (bundle.incident.step, bundle.incident.suspect, bundle.incident.reason) == (44, 1, "own history")
    finding = execute(bundle, Query("compare-gradients"))
    assert (finding.outcome, finding.ranks, finding.step) == (Outcome.LOCALISED, (1,), 44)


def test_without_an_alarm_a_later_step_is_recorded_without_a_suspect(tmp_path):
    bundle = made.incident(tmp_path, "healthy", "nothing")
    assert bundle.incident.step > made.STEP
    assert (bundle.incident.suspect, bundle.incident.reason, bundle.alarms()) == (-1, NO_ALARM, [])


# -- causes that are not in what is computed -------------------------------------------------------------------------------


def test_a_checkpoint_is_damaged_on_the_disk_and_loaded(tmp_path):
    bundle = made.incident(tmp_path, "checkpoint", "damaged for all")
    twin = made.incident(tmp_path, "checkpoint", "damaged for all", is_twin=True, step=bundle.incident.step)
    found, other = (execute(one, Query("verify-checkpoints")) for one in (bundle, twin))
    assert (found.kind, found.step, other.outcome) == (FindingKind.CHECKPOINT_FILE, 40, Outcome.NOTHING)
    assert "model.body.first.bias has changed" in found.text
    assert all("step 44: started again from a checkpoint" in one for one in (*logs_of(bundle), *logs_of(twin)))
    value = read_tensors(bundle.folder / "rank0/state.safetensors")["model"]["body.first.bias"]
    assert float(value.abs().max()) > 1e30


def test_a_full_disk_cuts_a_checkpoint_and_is_in_the_log(tmp_path):
    bundle = made.incident(tmp_path, "disk", "full disk", size=0.5)
    assert "step 44: checkpoint not saved: OSError: [Errno 28] No space left on device" in logs_of(bundle)[0]
    assert execute(bundle, Query("verify-checkpoints")).step == 44
    assert "Errno" not in logs_of(bundle)[1]


@pytest.mark.parametrize("kind", ["killed process", "hang"])
def test_a_rank_that_stops_is_missing_in_the_next_collective(tmp_path, kind):
    bundle = made.incident(tmp_path, "stopped", kind)
    assert bundle.incident.step == made.STEP
    assert {one.steps[-1] for one in bundle.series()[0].values()} == {made.STEP - 1}
    dumps = {one.rank: next(iter(one.groups.values())) for one in read_dumps([bundle.folder / "flight"])}
    assert (dumps[0].last, dumps[0].open) == (45, {45})
    assert 1 not in dumps if kind == "killed process" else (dumps[1].last, dumps[1].open) == (44, set())
    assert "RuntimeError" in logs_of(bundle)[0]
    assert "RuntimeError" not in logs_of(bundle)[1]
    assert bool(made.missing(bundle)) == (kind == "killed process")


@pytest.mark.parametrize(("kind", "part"), [("slow rank", "forward"), ("slow loader", "loader")])
def test_a_slow_rank_has_longer_times_from_the_step_on(tmp_path, kind, part):
    bundle = made.incident(tmp_path, "time", kind, size=0.5)
    values = timeline_of(bundle)
    seconds = np.array(values["seconds"])[..., PARTS.index(part)]
    is_late = np.array(values["steps"]) >= made.STEP
    ratios = seconds[1] / seconds[0]
    assert np.median(ratios[is_late]) > 1.5 > 1.1 > np.median(ratios[~is_late])


def test_settings_that_are_changed_differ_from_the_earlier_ones(tmp_path):
    def changed(folder, *words, **more):
        own = made.incident(folder, *words, **more).folder
        now, before = (
            json.loads((own / name).read_text()) for name in ("configuration.json", "earlier-configuration.json")
        )
        return {name: (before[name], now[name]) for name in now if now[name] != before[name]}

    rate = changed(tmp_path / "rate", "configuration", "learning rate", size=1.0)
    assert rate["optimizer"][1]["learning_rate"] == pytest.approx(100 * rate["optimizer"][0]["learning_rate"])
    assert changed(tmp_path / "seed", "configuration", "seed")["seed"] == (5, 6)
    harmless = {"run_name", "loader_workers"}
    assert set(changed(tmp_path / "seed", "configuration", "seed", is_twin=True, step=50)) == harmless
    assert set(changed(tmp_path / "plan", "healthy", "learning rate by plan")) == harmless


@pytest.mark.parametrize(("kind", "name"), [("learning rate", "optimizer/learning_rate"), ("seed", "seed")])
def test_a_query_names_the_setting_that_is_changed_and_no_harmless_one(tmp_path, kind, name):
    def asked(**more):
        return execute(made.incident(tmp_path, "configuration", kind, **more), Query("compare-settings"))

    assert asked().tensor == name
    assert asked(is_twin=True, step=50).outcome is Outcome.NOTHING


# -- what is recorded ------------------------------------------------------------------------------------------------------


def test_the_same_incident_has_the_same_bytes(tmp_path):
    torch.manual_seed(int(np.random.default_rng().integers(100)))  # plays no part
    first, again = (made.incident(tmp_path / name, "replica", "other weights").folder for name in "ab")
    names = sorted(one.relative_to(first) for one in first.rglob("*") if one.is_file())
    assert len(names) == 22
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_the_series_are_the_last_steps_and_some_after_the_recorded_one(tmp_path):
    bundle = made.incident(tmp_path, "weight bits", "sign bit", step=None, workload="recurrent")
    series, _ = bundle.series()
    assert [(one.steps[0], one.steps[-1]) for one in series.values()] == [(0, 60)] * 2
    assert {name[0] for name in series[0].names} == {"gradient", "loss"}
    assert series[0].seen.all()


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_kind_has_all_parts_and_most_twins_are_quiet(tmp_path, workload):
    quiet = 0
    for number, (family, kind) in enumerate(EVERY):
        own = tmp_path / str(number)
        bundle = made.incident(own, family, kind, size=0.5, workload=workload)
        twin = made.incident(own, family, kind, size=0.5, workload=workload, is_twin=True, step=bundle.incident.step)
        assert twin.incident.step == bundle.incident.step
        assert not made.missing(twin)
        assert not made.missing(bundle) or kind == "killed process"
        assert all(math.isfinite(one.values[~np.isnan(one.values)].sum()) for one in twin.series()[0].values())
        quiet += not twin.alarms()
    assert quiet >= len(EVERY) - 2
