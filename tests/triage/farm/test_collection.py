"""Collections of incidents: the same for the same seed, made further after an interrupt, refused where they are another one."""

from __future__ import annotations

import json

import pytest

from conftest import in_process
from unsilent.basics.errors import UsageError
from unsilent.triage.farm import collection
from unsilent.triage.farm.collection import FARM_FILE, make_collection, simulate_pair
from unsilent.triage.farm.labelled import LABELS_FILE, RIGHT, read_labels
from unsilent.triage.farm.planned import (
    PLANNED_FILE,
    folder_of,
    planned_incidents,
    read_planned,
    unfinished_folder,
    write_planned,
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Workers are threads, one after the other: the fast tests start no process."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(collection, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))


@pytest.fixture
def made(monkeypatch):
    """Numbers of incidents that were made; what they hold is left out."""
    numbers, interrupts = [], [KeyboardInterrupt]

    def simulate(folder, planned):
        numbers.append(planned.number)
        own = unfinished_folder(folder, planned.number)
        write_planned(own, planned)
        if planned.number == 3 and interrupts:
            raise interrupts.pop()
        own.rename(folder_of(folder, planned.number))

    monkeypatch.setattr(collection, "simulate_pair", simulate)
    monkeypatch.setattr(collection, "label_collection", lambda *_: None)
    monkeypatch.setattr(collection, "read_collection", lambda folder: sorted(one.name for one in folder.glob("0*")))
    return numbers


def test_an_interrupted_collection_goes_on_where_it_was(tmp_path, made):
    with pytest.raises(KeyboardInterrupt):
        make_collection(tmp_path / "farm", 6, 1)
    there = {int(one.name) for one in (tmp_path / "farm").glob("0*")}
    assert {0, 1, 2} <= there
    assert 3 not in there
    made.clear()
    assert make_collection(tmp_path / "farm", 6, 1) == [f"{number:05d}" for number in range(6)]
    assert sorted(made) == sorted({*range(6)} - there)
    assert not list((tmp_path / "farm").glob(".*"))
    assert read_planned(tmp_path / "farm/00003" / PLANNED_FILE) == planned_incidents(6, 1)[3]


def test_a_folder_of_another_collection_is_refused(tmp_path, made):
    folder = tmp_path / "farm"
    make_collection(folder, 2, 1)
    for other in ((3, 1), (2, 7)):
        with pytest.raises(
            UsageError, match=r"has a collection of .* seed 1, count 2, real 0; asked for was .*give another folder"
        ):
            make_collection(folder, *other)
    (folder / FARM_FILE).write_text("[]")
    with pytest.raises(UsageError, match="is not that of a collection"):
        make_collection(folder, 2, 1)
    (folder / FARM_FILE).unlink()
    with pytest.raises(UsageError, match=r"has files and no farm\.json; give a folder that is empty or new"):
        make_collection(folder, 2, 1)


@pytest.mark.parametrize("words", [("--incidents", "0"), ("--incidents", "-1"), ("--workers", "0"), ("--seed", "-1")])
def test_numbers_out_of_range_are_refused_in_one_line(tmp_path, words):
    ended = in_process("triage", "farm", str(tmp_path / "farm"), *words)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert words[0] in ended.stderr
    assert not (tmp_path / "farm").exists()


def test_the_verb_counts_incidents_and_alarms_by_family(tmp_path):
    ended = in_process("triage", "farm", str(tmp_path / "farm"), "--incidents", "1", "--seed", "2", "--json")
    assert ended.returncode == 0
    values = json.loads(ended.stdout)
    row = {
        "family": "weight bits",
        "kinds": 1,
        "incidents": 1,
        "with an alarm": 1,
        "with an alarm without the cause": 0,
    }
    assert values["results"] == [row]
    assert values["headline"] == f"1 incident in {tmp_path / 'farm'}, 0 of them without a fault"
    assert json.loads((tmp_path / "farm" / FARM_FILE).read_text())["seed"] == 2
    (labelled,) = read_labels(tmp_path / "farm" / LABELS_FILE)
    assert max(one.grade for one in labelled.graded) == RIGHT


@pytest.mark.slow
def test_incidents_do_not_depend_on_workers(tmp_path, monkeypatch):
    monkeypatch.undo()
    make_collection(tmp_path / "two", 3, 3, workers=2)
    (tmp_path / "one").mkdir()
    for planned in planned_incidents(3, 3):
        simulate_pair(tmp_path / "one", planned)
    names = sorted(one.relative_to(tmp_path / "one") for one in (tmp_path / "one").rglob("*") if one.is_file())
    assert len(names) > 30
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
