"""The file of graded incidents: what is written is read again, and lines that nobody wrote are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unsilent.basics.errors import UsageError
from unsilent.triage.farm.labelled import GradedQuery, LabelledIncident, read_labels, write_labels
from unsilent.triage.farm.planned import planned_incidents
from unsilent.triage.findings import Blanks, FindingKind, Outcome, Query

GRADED = (
    GradedQuery(Query("find-onset", Blanks(steps=(80, 95))), 2, Outcome.DIFFERS, FindingKind.ONSET, False, 0.25),
    GradedQuery(Query("inspect-state", Blanks(rank=1)), 3, Outcome.LOCALISED, FindingKind.STATE, False, 0.5),
    GradedQuery(Query("replay-step"), 0, Outcome.UNANSWERED, None, True, 0.0),
)


def incidents(folder, count=2):
    return [
        LabelledIncident(one, folder / f"{one.number:05}" / "incident", f"group{one.number}", GRADED)
        for one in planned_incidents(count, seed=5)
    ]


def test_what_is_written_is_read_again(tmp_path):
    wanted = incidents(tmp_path, 30)
    write_labels(tmp_path / "labels.jsonl", wanted)
    assert read_labels(tmp_path / "labels.jsonl") == wanted
    tmp_path.rename(moved := tmp_path.with_name("moved"))
    assert read_labels(moved / "labels.jsonl")[0].folder == moved / "00000" / "incident"


def test_an_incident_that_some_query_tells_from_its_twin_is_not_masked(tmp_path):
    one = incidents(tmp_path)[0]
    assert not one.is_masked
    assert replace(one, graded=(GRADED[2],)).is_masked


def changed(line, path, value):
    values = json.loads(line)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("folder",), "../../etc", r"folder is '\.\./\.\./etc'; expected one below"),
        (("folder",), "/etc", "folder is '/etc'; expected one below"),
        (("folder",), "", "folder is ''; expected one below"),
        (("group",), 3, "group is '3'; expected"),
        (("planned",), [], "planned is "),
        (("planned", "kind"), "melted", "kind is 'melted', which"),
        (("planned", "world_size"), 0, "world_size is 0; expected 1 to"),
        (("planned", "rank"), 9, "rank is 9; expected -1 to"),
        (("graded", 0, "grade"), 4, "grade is 4; expected 0 to 3"),
        (("graded", 0, "grade"), True, "grade is 'True'; expected"),
        (("graded", 0, "outcome"), "FINE", "outcome is 'FINE'; expected one of NOTHING, DIFFERS"),
        (("graded", 0, "kind"), "value", "kind is 'value'; expected one of GRADIENT"),
        (("graded", 0, "seconds"), float("nan"), "seconds is nan; expected a number from 0"),
        (("graded", 0, "seconds"), -1, "seconds is -1.0; expected a number from 0"),
        (("graded", 0, "blanks", "steps"), [1, 2, 3], "steps has 3 numbers; expected 2"),
        (("graded", 0, "blanks", "steps"), [1], "steps has 1 numbers; expected 2"),
        (("graded", 1, "blanks", "rank"), -1, "--rank is -1; expected 0 or more"),
        (("graded", 1, "template"), None, "template is 'None'; expected"),
    ],
)
def test_hostile_lines_are_refused_in_one_line(tmp_path, path, value, why):
    file = tmp_path / "labels.jsonl"
    write_labels(file, incidents(tmp_path))
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{changed(second, path, value)}\n")
    with pytest.raises(UsageError, match=rf"line 2 of .* is no graded incident: {why}") as caught:
        read_labels(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["", "[]", "{", "{}", '"x"', "[" * 100_000, "\xff"])
def test_lines_that_are_no_object_are_refused(tmp_path, line):
    (tmp_path / "labels.jsonl").write_text(f"{line}\n", encoding="latin-1")
    with pytest.raises(UsageError, match=r"line 1 of .* is no graded incident: .*; remove the line, and grade"):
        read_labels(tmp_path / "labels.jsonl")


def test_an_incident_that_is_there_twice_is_refused(tmp_path):
    file = tmp_path / "labels.jsonl"
    write_labels(file, incidents(tmp_path, 1) * 2)
    with pytest.raises(UsageError, match="line 2 of .* number 0 is in an earlier line as well"):
        read_labels(file)
