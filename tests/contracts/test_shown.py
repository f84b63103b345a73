"""Every result can be shown: as a report, a page, in a notebook, as text and as a table. And errors of calls name arguments."""

from __future__ import annotations

import csv
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import unsilent
from campaigns.faulty_loop import write_loop
from conftest import TINY, inline_campaigns
from events.test_run_report import written
from studies.checkpoint.test_study import write_study
from studies.clean_inference import write_clean
from timeline.pipelines import Pipeline
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns.export import export_store
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.store import open_store
from unsilent.placement import Level, Reduction, System, rank_placements
from unsilent.render.figure_file import write_figure
from unsilent.report.model import Report
from unsilent.report.shown import Shown
from unsilent.studies.campaign_kinds import KINDS, kind_of_store
from unsilent.timeline.load import load_job
from unsilent.timeline.slowdown import measure_slowdown

LOOP = {"workload": "faulty_loop.py:make", "options": {"steps": 12}}
CALLS = {
    "pvf": {"workload": "tiny.py:make", "trials": 12, "per": "tensor", "strata": "bits"},
    "training": {**LOOP, "trials": 4, "floor": "floor.sqlite"},
    "noise": {**LOOP, "switch": ["init"], "replicas": 3},
    "coverage": {**LOOP, "only": "operation:*", "tries": 20, "clean_runs": 1, "changed_runs": 0, "trials": 2},
    "inference-coverage": {
        "workload": "clean.py:make", "only": ["weight-flip", "output-*"], "tries": 40, "profile_samples": 100,
        "clean_samples": 200, "rate": 0.05, "detector": ["ranger", "abft"], "trials": 2,
    },
}  # fmt: skip
"""Of each kind of campaign the smallest one that has a result."""
STORED = (*CALLS, "checkpoint-study")


class Watching(Observer):
    """Which runs were stored, as an observer is notified of it."""

    def __init__(self):
        self.rows = []

    def trial(self, row):
        self.rows.append(row)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(name)``: a result, which was made once in the folder ``made.folder``; ``made.watched``: its observer."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "tiny.py").write_text(TINY)
    write_loop(folder)
    write_clean(folder)
    results, watched = {}, {}

    def make(name):
        if name == "checkpoint-study":
            return write_study(folder / f"{name}.sqlite")
        if name == "placement":
            system = System("two", (Level("node", 2, 1e9, 0.0), Level("gpu", 2, 1e10, 0.0)))
            return rank_placements(system, {"data": 4}, [Reduction(("data",), 1e6)])
        if name == "timeline":
            return measure_slowdown(load_job([Pipeline().write(folder / "trace.parquet")]))
        if name == "events":
            (folder / name).mkdir()
            return unsilent.read_result(written(folder / name))
        if name == "plan":
            get("pvf")
            return unsilent.plan("pvf.sqlite", budget="20%")
        watched[name] = Watching()
        function = getattr(unsilent, name.replace("-", "_"))
        return function(**CALLS[name], store=f"{name}.sqlite", observer=watched[name])

    def get(name):
        if name not in results:
            with pytest.MonkeyPatch.context() as patch, inline_campaigns():
                patch.chdir(folder)
                results[name] = make(name)
        return results[name]

    get.folder, get.watched = folder, watched
    return get


@pytest.fixture(params=[*STORED, "plan", "placement", "timeline", "events"])
def name(request, made, monkeypatch):
    monkeypatch.chdir(made.folder)
    made(request.param)
    return request.param


def test_every_kind_of_campaign_is_tried():
    assert {kind.name for kind in KINDS} == set(STORED)


def test_a_result_is_shown_in_every_way(made, name):
    result = made(name)
    assert isinstance(result, Shown)
    report = result.report()
    assert isinstance(report, Report)
    page = result.write_html(f"{name}.html")
    assert page == Path(f"{name}.html")
    assert page.read_text().startswith("<!doctype html>")
    shown = result._repr_html_()
    assert "<pre" in shown
    assert "<script" not in shown
    assert len(shown) < 60_000
    assert str(result) == repr(result)
    assert repr(result).startswith(f"<{type(result).__name__}> ")
    assert report.headline in repr(result)
    assert len(repr(result).splitlines()) <= 8
    with pytest.raises(UsageError, match="cannot write"):
        result.write_html("no/such.html")


def test_every_figure_of_a_result_is_drawn_by_its_name(made, name, tmp_path):
    pytest.importorskip("matplotlib")
    report = made(name).report()
    for figure in report.plots:
        assert made(name).figure(figure).axes
        write_figure(
            report, figure, tmp_path / "x.svg"
        )  # with a layout that fits: what does not warns, which is an error
    with pytest.raises(UsageError, match="unknown figure|has no figures"):
        made(name).figure("no such")


@pytest.mark.parametrize("name", STORED, indirect=True)
def test_a_stored_result_is_read_again(made, name):
    again = unsilent.read_result(f"{name}.sqlite")
    assert type(again) is type(made(name))
    assert again.report().headline == made(name).report().headline
    assert again.report().estimates == made(name).report().estimates


@pytest.mark.parametrize("name", STORED, indirect=True)
def test_a_table_has_the_rows_and_columns_of_the_export(made, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows = made(name).to_frame()
    with open_store(f"{name}.sqlite", kind_of_store(Path(f"{name}.sqlite"))) as store:
        export_store(store, Path("trials.csv"))
    usual = csv.field_size_limit(10**8)
    try:
        with open("trials.csv", newline="") as file:
            exported = list(csv.DictReader(file))
    finally:
        csv.field_size_limit(usual)  # of the whole process
    assert [list(row) for row in rows] == [list(row) for row in exported]
    for column in ("target", "k"):
        assert [str(row[column]) for row in rows] == [row[column] for row in exported]


def test_a_table_is_of_pandas(made, monkeypatch):
    result = made("pvf")
    monkeypatch.chdir(made.folder)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'unsilent\[pandas\]'"):
        result.to_frame()
    monkeypatch.undo()
    monkeypatch.chdir(made.folder)
    if find_spec("pandas") is None:
        return
    frame = result.to_frame()
    assert len(frame) == result.trials_done
    assert frame["seconds"].dtype == "float64"


def test_trials_that_were_not_kept_have_no_table(made):
    with inline_campaigns(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        result = unsilent.pvf("tiny.py:make", trials=2)
    with pytest.raises(
        UsageError, match="does not exist any more; keep the trials of a campaign with store='FILE.sqlite'"
    ):
        result.to_frame()


def test_what_is_no_result_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("nothing of ours")
    for path in ("text.txt", "missing.sqlite", "missing.jsonl", "."):
        with pytest.raises(UnsilentError) as raised:
            unsilent.read_result(path)
        assert "\n" not in str(raised.value)
        assert "--" not in str(raised.value)


def test_options_of_a_report_are_those_of_its_kind(made):
    assert "FIT" in str(made("pvf").report(fit_per_bit=1e-4).sections)
    with pytest.raises(UsageError, match="^fit_per_bit= is -1; expected a rate of 0 or more"):
        made("pvf").report(fit_per_bit=-1)
    with pytest.raises(TypeError, match="fit_per_bit"):
        made("noise").report(fit_per_bit=1e-4)


# -- observers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS, indirect=True)
def test_an_observer_is_notified_of_every_run(made, name):
    """Of those of the store, and of the fault-free runs of a training, whose store is another file."""
    files = [f"{name}.sqlite", *(["floor.sqlite"] if name == "training" else [])]
    count = 0
    for file in files:
        with open_store(file, kind_of_store(Path(file))) as store:
            count += len(store.stored_trial_ids())
    assert len(made.watched[name].rows) >= count > 0


# -- names ----------------------------------------------------------------------------------------------------------------

COMMON = [{"trials": 0}, {"trials": "x"}, {"jobs": 0}, {"seed": 1.5}, {"executor": "no"}, {"deadline": -1},
          {"confidence": 2}, {"options": "x"}, {"store": "text.txt"}, {"ray": "a:1", "executor": "serial"},
          {"jobs": 2, "executor": "serial"}]  # fmt: skip
INFERENCE = [
    {"engine": "no"},
    {"memory": "x"},
    {"device": "no"},
    {"judge": "no"},
    {"shard": "3/2"},
    {"shard": "5/9", "trials": 2},
]
WRONG = {
    "pvf": [{"flips": 0}, {"flips": [1, 1]}, {"per": "no"}, {"law": "no"}, {"strata": "no"}, {"unit": "no"}, {"samples": 0},
            {"threads": 0}, {"ci": 3}, {"rel": "x"}, {"dtype": "no"}, {"faults": "no.json"},
            {"faults_as": "alfi"}, {"trials": "all", "ci": "1%"}, {"ci": 0.1, "shard": "1/2"}, {"at": "no"},
            {"fault": "no"}, {"fault": "bitflip:count=2", "flips": 3}, {"trials": "all", "law": "per-tensor"},
            {"samples": 2, "unit": "batch"}, {"rel": "0.1%", "trials": 3}, {"workload": "tiny.py:no"}],
    "training": [{"phase": "no"}, {"layer": "no"}, {"per": "no"}, {"moment": "no"}, {"steps": 0}, {"horizon": 0}, {"init": -1},
                 {"replicas": 2}, {"noise": "control"}, {"noise": "init"}, {"threshold": {"no": 1}}, {"margin": 2}, {"seed": -1},
                 {"fault": "no"}, {"per": "tensor", "phase": "fwd"}, {"accelerator": "no"}, {"value": "no"}, {"fault": "0*RD"},
                 {"per": "tensor", "fault": "RD"}, {"margin": 0.1}, {"moment": "update"}],
    "noise": [{"replicas": 0}, {"variants": "no"}, {"switch": "no"}, {"level": 0.001}, {"every": 0}, {"steps": 0}],
    "coverage": [{"only": "no"}, {"follow": 0}, {"tries": 0}, {"steps": 0}, {"clean_runs": -1}, {"clean_steps": 0}, {"rate": 2},
                 {"sampling": 0}, {"fault": "no"}, {"phase": "no"},
                 {"large_fault": "no"}],
    "inference_coverage": [{"only": "no"}, {"tries": 0}, {"rate": 2}, {"detector": "no"}, {"flip_rate": 2}, {"burst": "x"},
                           {"output_flip": "no"}, {"profile_samples": 0}, {"clean_samples": 0}, *INFERENCE],
    "checkpoint_study": [{"strategy": "no"}, {"ranks": 0}, {"section": "no"}, {"flips": 0}, {"law": "no"}, {"steps": 0},
                         {"loaded_by": "no"}, {"replicas": 2}, {"fault": "no"}],
    "plan": [{"budget": "x"}, {"budget": "1B"}, {"granularity": "no"}, {"unit": "no"}, {"confidence": 2}, {"fit_per_bit": -1},
             {"accelerator": "no.toml"}, {"truth": "no.sqlite"}, {"validation_trials": 0}, {"store": "no.sqlite"},
             {"validate": True, "validation_trials": 0}, {"validation_seed": 3}, {"validation_store": "x.sqlite"},
             {"validate": True, "data": "no"}],
    "load": [{"ref": "no"}, {"ref": "tiny.py:make", "options": {"no": "1"}}, {"ref": "tiny.py:make", "data": "x"},
             {"ref": "digits-cnn", "data": "x"}, {"ref": "needs.py:make"}, {"ref": "cifar-resnet20"}],
    "read_result": [{"path": "no.sqlite"}, {"path": "text.txt"}],
}  # fmt: skip
WRONG["pvf"] += INFERENCE
FIRST = {
    "pvf": {"workload": "tiny.py:make"},
    "training": {**LOOP, "floor": "floor.sqlite"},
    "inference_coverage": {"workload": "clean.py:make"},
    "checkpoint_study": {"workload": "train-resnet"},
    "plan": {"store": "pvf.sqlite"},
    "load": {},
    "read_result": {},
}


@pytest.mark.parametrize("function", WRONG)
def test_errors_of_calls_name_arguments(made, function, monkeypatch):
    made("pvf")
    made("training")
    monkeypatch.chdir(made.folder)
    Path("text.txt").write_text("nothing of ours")
    Path("needs.py").write_text("def make(depth, data, weights):\n    return 1\n")
    common = [] if function in ("plan", "load", "read_result") else COMMON
    own = inspect.signature(getattr(unsilent, function)).parameters
    with inline_campaigns():
        for wrong in [*WRONG[function], *(one for one in common if one.keys() <= own.keys())]:
            with pytest.raises(UnsilentError) as raised:
                getattr(unsilent, function)(**{**FIRST.get(function, LOOP), **wrong})
            assert "--" not in str(raised.value), wrong
            assert "\n" not in str(raised.value)


def test_errors_of_a_call_keep_what_they_say(tiny):
    for wrong, said in (
        ({"trials": 0}, "trials= is 0; expected 1 or more"),
        ({"trials": "x"}, "trials= is 'x'; expected a number of trials of 1 or more, or all"),
        ({"unit": "no"}, "unknown unit='no'. Known: batch, sample."),
        ({"shard": "5/9", "trials": 2}, "shard=5/9 has no trials, because trials= is 2; use fewer parts"),
        ({"trials": "all", "ci": "1%"}, "trials= all runs every possible fault: leave out ci="),
    ):
        with pytest.raises(UsageError) as raised:
            unsilent.pvf("tiny.py:make", **wrong)
        assert str(raised.value) == said


def test_dir_has_what_is_offered_and_no_more():
    names = [name for name in dir(unsilent) if not (name.startswith("__") and name.endswith("__"))]
    assert names == sorted(name for name in unsilent.__all__ if not name.startswith("__"))
    for name in unsilent.__all__:
        assert getattr(unsilent, name) is not None
    from unsilent.guard import Guard
    from unsilent.monitor import Monitor

    assert (unsilent.Guard, unsilent.Monitor) == (Guard, Monitor)


def test_a_result_of_a_call_is_read_again_as_the_call_asked(tmp_path):
    workload = unsilent.load("digits-cnn")
    made = unsilent.pvf(workload, trials=4, seed=3, unit="batch", confidence=0.5, store=tmp_path / "s.sqlite")
    again = unsilent.read_result(tmp_path / "s.sqlite")
    assert (again.unit, again.confidence) == (made.unit, made.confidence) == ("batch", 0.5)
    assert again.rows == made.rows
