"""Grades of findings against what was planned, and of all queries of incidents that a test made."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from triage import made_triage as made
from unsilent import verified_save
from unsilent.basics.errors import UsageError
from unsilent.basics.strictjson import as_json_values
from unsilent.events.incident_folder import SavedCheckpoint, read_incident, write_record
from unsilent.incidents.plant import VARIETIES
from unsilent.triage.farm.grading import grade, grade_incident, label_collection, naming
from unsilent.triage.farm.labelled import LABELS_FILE, RIGHT, read_labels
from unsilent.triage.farm.naming import HEALTHY, NAMING, NAMING_REAL
from unsilent.triage.farm.near_duplicates import distinct
from unsilent.triage.farm.planned import FAMILIES, PlannedIncident, planned_incidents
from unsilent.triage.findings import Finding, FindingKind, Outcome
from unsilent.triage.parts import REPORT_FILE

NOTHING = Finding(outcome=Outcome.NOTHING, text="nothing")
PLANNED = PlannedIncident(0, "gradient bits", "scaled", "mlp", 2, 1, made.STEP, 3, (0.1, 0.2, 0.3, 0.4))


def found(kind=FindingKind.GRADIENT, ranks=(1,), step=made.STEP, outcome=Outcome.LOCALISED, **more):
    return Finding(outcome=outcome, text="found", kind=kind, ranks=ranks, step=step, **more)


def test_every_planned_cause_has_kinds_that_name_it_and_healthy_runs_have_none():
    assert [*NAMING] == [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds]
    assert {family for (family, _), kinds in NAMING.items() if not kinds} == {HEALTHY}
    assert set(NAMING_REAL) == {f"real {kind}" for kind in VARIETIES}
    assert all(naming(one) or one.is_healthy for one in planned_incidents(60, seed=1))


def test_a_cause_that_no_table_has_is_refused_in_one_line():
    with pytest.raises(
        UsageError, match=r"incident 0 is gradient bits, melted; expected .*; make the collection again"
    ):
        naming(replace(PLANNED, kind="melted"))


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (found(), RIGHT),
        (found(step=None), RIGHT),  # its rank is its place
        (found(FindingKind.BATCH), 2),
        (found(ranks=(0,)), 1),
        (found(ranks=(0, 1)), 1),
        (found(outcome=Outcome.DIFFERS), RIGHT),
        (found(outcome=Outcome.UNANSWERED), 0),
        (NOTHING, 0),
    ],
)
def test_a_cause_in_one_rank_is_graded_by_its_rank_and_kind(finding, expected):
    assert grade(PLANNED, finding, NOTHING) == expected


def test_what_the_run_without_the_cause_has_as_well_is_graded_zero():
    assert grade(PLANNED, found(), found(numbers={"score": 9.0})) == 0
    assert grade(PLANNED, found(), found(step=60)) == RIGHT


def test_a_cause_in_one_rank_of_one_is_graded_by_its_step():
    alone = replace(PLANNED, family="data", kind="NaN", world_size=1, rank=0)
    assert grade(alone, found(FindingKind.BATCH, (0,)), NOTHING) == RIGHT
    assert grade(alone, found(FindingKind.ONSET, (0,), made.STEP - 2), NOTHING) == 2
    assert grade(alone, found(FindingKind.ONSET, (0,), made.STEP - 3), NOTHING) == 1


def test_a_state_of_a_single_rank_is_the_state_of_all():
    damaged = replace(PLANNED, family="checkpoint", kind="damaged for all", rank=-1)
    assert grade(damaged, found(FindingKind.STATE), NOTHING) == 2
    assert grade(replace(damaged, world_size=1), found(FindingKind.STATE, (0,)), NOTHING) == RIGHT
    assert grade(damaged, found(FindingKind.COMMON_STATE, (0, 1)), NOTHING) == RIGHT


def test_a_changed_setting_is_named_by_its_name_whatever_the_step():
    planned = replace(PLANNED, family="configuration", kind="learning rate", rank=-1)
    assert grade(planned, found(FindingKind.SETTINGS, (), None, tensor="optimizers/0/groups/0/lr"), NOTHING) == RIGHT
    assert grade(planned, found(FindingKind.SETTINGS, (), made.STEP, tensor="seed"), NOTHING) == 1
    assert grade(planned, found(FindingKind.ONSET, (0, 1)), NOTHING) == 2


def test_a_changed_file_is_a_place_only_of_a_cause_that_changes_it():
    file = found(FindingKind.CHECKPOINT_FILE, (), 20, tensor="80.pt")
    assert grade(replace(PLANNED, family="disk", kind="full disk", rank=-1), file, NOTHING) == RIGHT
    assert grade(replace(PLANNED, family="configuration", kind="seed", rank=-1), file, NOTHING) == 1


@pytest.mark.parametrize("kind", FAMILIES[HEALTHY])
def test_nothing_is_right_of_a_healthy_incident(kind):
    assert grade(replace(PLANNED, family=HEALTHY, kind=kind), found(), NOTHING) == 0


def pair(above, planned=PLANNED, **spoiled):
    """An incident and its twin, as a collection has them."""
    own = above / f"{planned.number:05}"
    for name, more in (("incident", spoiled), ("twin", {})):
        made.folder(above / "made" / own.name / name, planned.world_size, **more).rename(
            own.mkdir(exist_ok=True) or own / name
        )
    (own / "planned.json").write_text(json.dumps(as_json_values(planned)))
    return own


def test_all_queries_of_an_incident_are_executed_and_graded(tmp_path):
    own = pair(tmp_path, series={1: made.spoiled(1, made.STEP, 0, 1e5)})
    graded = {one.query.name: one for one in grade_incident(PLANNED, own / "incident", own / "twin")}
    assert graded["compare-gradients"].grade == RIGHT
    assert graded["find-onset"].grade == 2
    assert graded["inspect-batch"].grade == 0
    assert graded["inspect-batch"].is_same
    replay = graded["replay-step"]
    assert (replay.grade, replay.outcome, replay.is_same) == (0, Outcome.UNANSWERED, True)  # needs the user's code
    assert all(0 <= one.seconds < 60 for one in graded.values())


def test_the_same_damaged_file_in_both_folders_is_no_difference(tmp_path):
    own = pair(tmp_path)
    for name in ("incident", "twin"):
        folder = own / name
        file = folder / "20.safetensors"
        manifest = verified_save({"weight": torch.zeros(4)}, file, step=20)
        file.write_bytes(file.read_bytes()[:-4])
        saved = SavedCheckpoint(path=str(file), step=20, time=0.0, manifest=str(manifest))
        write_record(folder, replace(read_incident(folder), checkpoints=(saved,)))
    graded = {one.query.name: one for one in grade_incident(PLANNED, own / "incident", own / "twin")}
    assert graded["verify-checkpoints"].outcome is Outcome.DIFFERS
    assert graded["verify-checkpoints"].is_same


def test_a_run_like_its_twin_is_masked(tmp_path):
    own = pair(tmp_path)
    assert all(one.is_same and not one.grade for one in grade_incident(PLANNED, own / "incident", own / "twin"))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_collection_is_graded_and_goes_on_where_it_was_ended(tmp_path, workers):
    spoiled = {1: made.spoiled(1, made.STEP, 0, math.nan)}
    for number in range(3):
        pair(tmp_path, replace(PLANNED, number=number), series=spoiled)
    path = label_collection(tmp_path, workers)
    whole = read_labels(path)
    assert [one.planned.number for one in whole] == [0, 1, 2]
    assert whole[0].folder == tmp_path / "00000" / "incident"
    for one in whole:
        assert (one.folder / REPORT_FILE).read_bytes() == (one.folder.parent / "twin" / REPORT_FILE).read_bytes()
    assert 1 <= distinct(whole) <= 3
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50])  # it was ended while it wrote
    assert label_collection(tmp_path, workers).read_bytes().startswith(lines[0])
    again = read_labels(path)
    assert [[one.grade for one in own.graded] for own in again] == [[one.grade for one in own.graded] for own in whole]


def test_an_incident_whose_plan_cannot_be_read_is_one_line(tmp_path):
    (pair(tmp_path) / "planned.json").write_text("[]")
    with pytest.raises(UsageError, match=r"planned\.json does not say what was planned: .*; make the collection again"):
        label_collection(tmp_path)
    assert (tmp_path / LABELS_FILE).read_bytes() == b""
