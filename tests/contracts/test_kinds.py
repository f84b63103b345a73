"""What campaigns of every kind can do, shown of the smallest one: `contracts.pi`."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import pickle
import re
import signal
import sqlite3
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

import unsilent
from campaigns.faulty_loop import write_loop
from conftest import TINY, in_process, inline_campaigns
from contracts.pi import PI, PiRow, PiRunner, PiSpec, analyse
from studies.clean_inference import write_clean
from unsilent.basics.errors import StoreError, UsageError, UserCodeError
from unsilent.basics.interval import Interval
from unsilent.basics.options import NOT_AN_OPTION, PRECISION_PANEL, Option, options_of
from unsilent.campaigns import Budget, Store, TrialId, run_campaign
from unsilent.campaigns.campaign_result import CampaignResult
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.code import code_hash
from unsilent.campaigns.codec import row_codec
from unsilent.campaigns.driver import check_strata, run_trials
from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.inline import InlineExecutor
from unsilent.campaigns.options import AnalysisOptions
from unsilent.campaigns.python_function import campaign_function
from unsilent.campaigns.replay import check_same_campaign
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import Spec, Target
from unsilent.campaigns.worker import as_picklable_error
from unsilent.cli.campaign import OUTPUT_CLASSES, CampaignVerb
from unsilent.cli.main import run as cli
from unsilent.cli.table import COMMANDS
from unsilent.studies import campaign_kinds
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE
from unsilent.studies.coverage.kind import COVERAGE
from unsilent.studies.noise.kind import NOISE
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.training.kind import TRAINING
from unsilent.testing import KindContract

SPEC = PiSpec(points=50)


def register(monkeypatch, *kinds):
    """These kinds are all that there are; those that have no command get one."""
    monkeypatch.setattr(campaign_kinds, "KINDS", list(kinds))
    module = types.ModuleType("registered_kinds")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, kind in enumerate(kinds):
        if kind.command_words not in COMMANDS:
            setattr(module, f"KIND_{number}", CampaignVerb(kind).command)
            monkeypatch.setitem(COMMANDS, kind.command_words, f"{module.__name__}:KIND_{number}")


TRIALS = 40
TESTS = str(Path(__file__).parents[1])


@pytest.mark.parametrize("kind", campaign_kinds.KINDS, ids=lambda kind: kind.name)
def test_records_of_our_own_kinds_can_be_stored_and_asked_for(kind):
    kind.check_records()


@pytest.fixture(autouse=True)
def workers_find_the_kind(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))


def run(path, trials=TRIALS, shard=(1, 1), executor=None):
    with executor or InlineExecutor(WorkerJob(PiRunner, SPEC)) as running, Store(path, PI, write=True) as store:
        run_campaign(SPEC, Budget(trials, shard), running, store, command="by hand")
    return path


def lines(path):
    with Store(path, PI) as store:
        return list(canonical_lines(store))


class TestPi(KindContract):
    trials = TRIALS

    def make_kind(self):
        return PI

    def make_spec(self):
        return SPEC


def test_a_campaign_reads(tmp_path):
    with Store(run(tmp_path / "a.sqlite"), PI) as store:
        found = analyse(store, confidence=0.9999)
    assert (found.n, found.low < 3.14159 < found.high) == (TRIALS, True)


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("serial", 1),
        pytest.param("processes", 2, marks=pytest.mark.slow),
        pytest.param("ray", 2, marks=pytest.mark.slow),
    ],
)
def test_every_executor_makes_the_same_store(tmp_path, name, jobs):
    if name == "ray" and find_spec("ray") is None:
        pytest.skip("ray is not installed")
    here = lines(run(tmp_path / "here.sqlite"))
    assert lines(run(tmp_path / "there.sqlite", executor=make_executor(name, PiRunner, SPEC, jobs=jobs))) == here


def verb(capsys, *words):
    assert cli(list(map(str, words))) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert cli(list(map(str, words))) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_verbs_work_for_a_kind_that_is_registered(tmp_path, capsys, monkeypatch):
    register(monkeypatch, *campaign_kinds.KINDS, PI)
    monkeypatch.chdir(tmp_path)
    parts = [run(tmp_path / f"{i}.sqlite", shard=(i, 2)).name for i in (1, 2)]
    assert f"out.sqlite: {TRIALS} trials" in verb(capsys, "merge", *parts, "-o", "out.sqlite")
    assert "pi is 3." in verb(capsys, "report", "out.sqlite")
    assert "Pi" in Path("out.html").read_text()
    told = json.loads(verb(capsys, "report", "out.sqlite", "--json", "--confidence", "0.5"))
    assert (told["schema"], told["results"][0]["confidence"]) == ("unsilent/pi/1", 0.5)
    assert "Two of pi" in verb(capsys, "diff", *parts, "--plain")
    assert len(verb(capsys, "export", "out.sqlite", "--canonical").splitlines()) == TRIALS + 1
    assert f"{TRIALS} of {TRIALS} trials, complete" in verb(capsys, "status", "out.sqlite")


@dataclass(frozen=True)
class CurveRow(PiRow):
    curve: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class ListRow(PiRow):
    points: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ModeSpec(PiSpec):
    mode: Annotated[typing.Literal["a", "b"], Option("Mode.", PRECISION_PANEL)] = "a"


@dataclass(frozen=True)
class FractionsSpec(PiSpec):
    fractions: Annotated[tuple[float, ...], Option("Fractions.", PRECISION_PANEL, separator=",")] = ()


@dataclass(frozen=True)
class UnmarkedSpec(PiSpec):
    secret: int = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row": ListRow}, "column points of ListRow has type list; expected str, int, bool, float"),
        ({"row": CurveRow}, "CurveRow has arrays (curve), but kind pi gives no shapes; add shapes="),
        ({"spec": ModeSpec}, "ModeSpec.mode has type Literal; expected int, float, str, bool, Path"),
        ({"spec": FractionsSpec}, "FractionsSpec.fractions has type tuple; expected int, float"),
        ({"spec": UnmarkedSpec}, "UnmarkedSpec.secret has no Option; expected Annotated[TYPE, Option(…)]"),
        ({"name": "other"}, "0x556e7370 of kind other is that of unsilent pi; choose another"),
        ({"application_id": 0}, "the application id of kind pi is 0x0; expected four letters as a number"),
    ],
)
def test_a_kind_with_a_mistake_is_refused_when_it_is_made(change, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        replace(PI, **change)


def test_the_example_of_a_command_names_a_workload_only_if_the_study_has_any():
    assert CampaignVerb(PI).command.example == "unsilent pi"
    assert CampaignVerb(replace(PVF, example_arguments="")).command.example == "unsilent pvf WORKLOAD"


@dataclass(frozen=True)
class Digits(AnalysisOptions):
    digits: Annotated[int, Option("Digits of pi.", PRECISION_PANEL)] = 3


PI_OF_DIGITS = replace(
    PI,
    analysis_options=Digits,
    analyse=lambda store, confidence, digits: (analyse(store, confidence), digits),
    report=lambda result: replace(PI.report(result[0]), headline=f"pi is {result[0].estimate:.{result[1]}f}"),
)


def test_a_report_has_the_options_of_the_kind_and_shows_what_the_run_showed(tmp_path, monkeypatch):
    register(monkeypatch, *campaign_kinds.KINDS, PI_OF_DIGITS)
    monkeypatch.chdir(tmp_path)
    shown = told("pi", "--trials", 5, "--digits", 7, "--confidence", 0.5, "--store", "a.sqlite", "--plain")
    (headline,) = re.findall(r"pi is \d\.\d{7}(?!\d)", shown)
    assert (
        told("report", "a.sqlite", "--plain", "-o", "again.html").partition("# Report")[0]
        == shown.partition("# Report")[0]
    )
    assert json.loads(told("report", "a.sqlite", "--json"))["results"][0]["confidence"] == 0.5
    assert f"result: {headline}\n" in told("status", "a.sqlite")
    two_digits = f"pi is {float(headline.removeprefix('pi is ')):.2f}"
    assert f"{two_digits}\n" in told("report", "a.sqlite", "--digits", 2, "--plain")
    every, own = (" ".join(told("report", *words, "--help").split()) for words in ((), ("a.sqlite",)))
    assert ("--digits" in own, "--unit" in own, "--card" in own) == (True, False, False)
    assert "--digits" not in every


@dataclass
class Wrong(PiRunner):
    """A runner of pi whose rows are changed."""

    change: Callable[[list[PiRow]], list[PiRow]]

    def __post_init__(self):
        super().__init__(SPEC)

    def run_all(self, trials, alone=False):
        return iter(self.change(list(super().run_all(trials, alone))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[1:], "returned no row for trial square/x/0; expected one row for each trial"),
        (
            lambda rows: [replace(rows[0], trial=TrialId("square", None, 9))],
            "a row of trial square/x/9 where that of trial",
        ),
        (lambda rows: [None], "returned a NoneType where that of trial square/x/0 was due"),
        (lambda rows: rows * 2, "returned a row of trial square/x/0 after those of all its trials"),
    ],
)
def test_a_runner_returns_a_row_of_each_trial(tmp_path, change, said):
    with pytest.raises(UsageError, match=f"the runner Wrong .*{said}"):
        run(tmp_path / "a.sqlite", 3, executor=InlineExecutor(WorkerJob(lambda *_, **__: Wrong(change), SPEC)))


def test_options_are_shown_as_a_command_writes_them(tmp_path, pi_has_flips):
    shown = told("pi", "--flips", "1,2", "--terms", "10,100", "--dry-run", "--quiet")
    assert re.search(r"--terms\s+10,100\s", shown), shown
    told("pi", "--flips", "1,2", "--terms", "10,100", "--trials", 2, "--store", "a.sqlite", "--quiet")
    done = in_process("pi", "--flips", "1,3", "--trials", 2, "--store", "a.sqlite", "--quiet")
    assert "(terms: 10,100 in the store, 10,1000 now; flips: 1,2 in the store, 1,3 now)" in done.stderr


def test_no_two_strata_are_equal(tmp_path, pi_has_flips):
    for words in ((), ("--dry-run",)):
        done = in_process("pi", "--flips", "1,2,1", "--quiet", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "the flips of this campaign contain 1 more than once; expected each of them once" in done.stderr
    with pytest.raises(UsageError, match="the targets of this campaign contain square more than once"):
        check_strata(SPEC, replace(PiRunner(SPEC).baseline, targets=(Target("square"), Target("square"))))


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (0, (), "interrupted; no trial was stored yet, run the same command again to continue"),
        (3, (), "interrupted; finished trials are stored, run the same command again to continue"),
        (None, ("--dry-run",), "interrupted"),
    ],
)
def test_an_interrupt_says_what_is_stored(tmp_path, monkeypatch, rows, words, said):
    def interrupted(self, trials, alone=False):
        yield from itertools.islice(run_all(self, trials, alone), rows)
        raise KeyboardInterrupt

    def no_baseline(self):
        raise KeyboardInterrupt

    run_all = PiRunner.run_all
    register(monkeypatch, PI)
    monkeypatch.setattr(PiRunner, "max_trials_together", 3)
    monkeypatch.setattr(PiRunner, *(("establish_baseline", no_baseline) if rows is None else ("run_all", interrupted)))
    monkeypatch.chdir(tmp_path)
    done = in_process("pi", "--trials", 6, "--store", "a.sqlite", "--quiet", *words)
    assert (done.returncode, done.stderr) == (130, f"unsilent: {said}\n")
    assert rows is None or f"{rows} of 6 trials, not complete" in told("status", "a.sqlite")


def test_a_file_says_what_it_is_before_it_is_closed(tmp_path, monkeypatch):
    """A driver that is killed leaves a log beside the file, with all that was written."""
    register(monkeypatch, PI)
    with Store(tmp_path / "a.sqlite", PI, write=True):
        assert campaign_kinds.find_kind_of_store(tmp_path / "a.sqlite") is PI
        done = in_process("report", tmp_path / "a.sqlite")
    assert (done.returncode, "has no trial yet" in done.stderr) == (2, True)


def test_a_store_of_a_kind_that_is_not_registered_names_those_that_are(tmp_path):
    for verb_, word in (("report", "error: "), ("export", "error: "), ("status", "this ")):
        done = in_process(verb_, run(tmp_path / "a.sqlite", 1))
        said = "is not a store of unsilent pvf, training, noise, checkpoint study, coverage or inference-coverage, or nothing was"
        assert said in done.stdout + done.stderr
        assert word in done.stdout + done.stderr


def test_an_installed_package_registers_a_kind(tmp_path, monkeypatch):
    lines = "from dataclasses import replace\nfrom contracts.pi import PI\nKIND = replace(PI, name='toy', application_id=1)\n"
    (tmp_path / "study_of_toys.py").write_text(lines)
    (tmp_path / "toys-1.0.dist-info").mkdir()
    (tmp_path / "toys-1.0.dist-info" / "entry_points.txt").write_text(
        "[unsilent.kinds]\ntoy = study_of_toys:KIND\ngone = no_such_module:KIND\nother = study_of_toys:KIND\npvf = no:KIND\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "toy Run the study of study_of_toys, which is not part of unsilent" in " ".join(told("--help").split())
    assert "study_of_toys" not in sys.modules
    assert "pi is 3" in told("toy", "--trials", 4, "--store", "a.sqlite", "--quiet")
    for name, said in (
        ("gone", "(no_such_module:KIND) of package no_such_module cannot be imported: Module"),
        ("other", "is the kind toy (study_of_toys"),
    ):
        done = in_process(name)
        assert (done.returncode, done.stderr.count("\n"), said in done.stderr) == (2, 1, True)
    (tmp_path / "toys-1.0.dist-info" / "entry_points.txt").write_text("[unsilent.kinds]\ntoy = study_of_toys:KIND\n")
    assert "pi is 3" in told("report", "a.sqlite")
    assert "toy of pi" in told("status")


def test_the_code_of_a_study_is_part_of_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_study").mkdir()
    (tmp_path / "some_study" / "__init__.py").write_text("")
    (tmp_path / "some_study" / "runner.py").write_text("POINTS = 1\n")
    for name in ("some_study.runner", "some_study"):
        importlib.import_module(name)
        before = code_hash(name)
        assert before == code_hash(name)
        with (tmp_path / "some_study" / "runner.py").open("a") as file:
            file.write("POINTS += 1\n")
        assert code_hash(name) != before
    assert PiRunner(SPEC).baseline.fingerprint["code"] == code_hash("contracts.pi")


def fails(*given, **options):
    raise KeyError("points")


@pytest.mark.parametrize("words", [("report", "a.sqlite"), ("diff", "a.sqlite", "a.sqlite"), ("status", "a.sqlite")])
def test_a_store_without_trials_has_no_result(tmp_path, monkeypatch, words):
    register(monkeypatch, replace(PI, analyse=fails, compare=fails))
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect(run(Path("a.sqlite"), 3))) as db, db:
        db.execute("DELETE FROM trial")
    done = in_process(*words)
    assert (done.returncode, "a.sqlite has no trial yet" in done.stdout + done.stderr) == (
        2 * (words[0] != "status"),
        True,
    )


def test_an_error_of_a_study_names_its_file(tmp_path, monkeypatch):
    register(monkeypatch, replace(PI, analyse=fails))
    done = in_process("report", run(tmp_path / "a.sqlite", 3))
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert re.search(
        r"error: \S+test_kinds.py, line \d+, raised KeyError: 'points'; this file is not part of unsilent", line
    )
    with pytest.raises(KeyError) as caught:
        fails()
    assert isinstance(as_picklable_error(caught.value), UserCodeError)


@dataclass(frozen=True)
class FlipsSpec(PiSpec):
    terms: Annotated[tuple[int, ...], Option("Terms.", PRECISION_PANEL, separator=",")] = (10, 1000)
    flips: Annotated[tuple[int | None, ...], Option("Flips.", PRECISION_PANEL, separator=",")] = (None,)


@dataclass(frozen=True)
class LongerSpec(PiSpec):
    more: Annotated[int, Option("More.", PRECISION_PANEL)] = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"row": CurveRow, "shapes": lambda baseline, values: {"curve": 0}},
            "has other columns than this version of unsilent pi",
        ),
        ({"spec": LongerSpec}, "other options (more) than those of this version of unsilent pi; give another store"),
        ({"schema_version": 9}, "has store version 5, but this version of unsilent pi uses 9"),
    ],
)
def test_a_store_of_another_version_says_so(tmp_path, change, said):
    path = run(tmp_path / "a.sqlite", 3)
    with pytest.raises(StoreError, match=re.escape(said)), Store(path, replace(PI, **change)) as store:
        list(store.rows())


@pytest.fixture
def pi_has_flips(tmp_path, monkeypatch):
    register(monkeypatch, replace(PI, spec=FlipsSpec))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inline():
    with inline_campaigns():
        yield


def test_a_trial_of_a_kind_that_is_registered_is_replayed(tmp_path, capsys, monkeypatch, inline):
    register(monkeypatch, *campaign_kinds.KINDS, PI)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "a.sqlite", 5)
    words = ("replay", "a.sqlite", "square/x/3")
    with Store("a.sqlite", PI) as store:
        inside = store.row(TrialId("square", None, 3)).inside
    assert verb(capsys, *words) == f"square/x/3 ended as stored\ninside: {inside}\n"
    for more in (("--trace",), ("--log", "x.txt")):
        assert f"No such option: {more[0]}" in refused(capsys, *words, *more)
    with closing(sqlite3.connect("a.sqlite")) as db, db:
        db.execute("UPDATE trial SET inside = inside + 1, seconds = 9, worker = 9 WHERE k = 3")
    assert cli(list(words)) == 1
    verdict, *_, last = capsys.readouterr().out.splitlines()
    assert verdict == "square/x/3 ENDED DIFFERENTLY THAN STORED (inside)"
    assert last == f"inside: {inside + 1} stored, {inside} now"
    assert cli([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["trial"], told["same"]) == ("unsilent/replay/1", "square/x/3", False)
    assert (told["differing"], told["again"]["inside"]) == (["inside"], inside)


def test_a_campaign_that_is_another_now_is_not_replayed(tmp_path):
    with Store(run(tmp_path / "a.sqlite", 3), PI) as store:
        found = store.baseline
        check_same_campaign(store, SPEC, found)
        with pytest.raises(
            StoreError, match="a.sqlite differs from this replay in points, numpy; a bit-exact replay needs"
        ):
            check_same_campaign(
                store, PiSpec(points=51), replace(found, fingerprint={**found.fingerprint, "numpy": "0"})
            )


def test_reports_of_two_runs_are_equal_where_they_are_canonical(tmp_path, capsys, monkeypatch):
    register(monkeypatch, *campaign_kinds.KINDS, PI)
    monkeypatch.chdir(tmp_path)
    for name in ("a.sqlite", "b.sqlite"):
        run(tmp_path / name)
    for name_, more in (("report", ()), ("diff", ("a.sqlite",))):
        one, two = (verb(capsys, name_, name, *more, "--json", "--canonical") for name in ("a.sqlite", "b.sqlite"))
        assert one == two
        assert "sqlite" not in one
    assert "only used with --json: leave out --canonical" in refused(capsys, "report", "a.sqlite", "--canonical")


# -- options ------------------------------------------------------------------------------------------------------------

ASKS = {
    "pi": (PI, "points = 50\ntrials = 7", ["--points", "50", "--trials", "7"], {"points": 50}, 7),
    "pvf": (
        PVF, 'workload = "tiny.py:make"\nwith = {sleep = 0}\nflips = [1, 8]\nat = "last.*"\nsamples = 2\ntrials = 7',
        ["tiny.py:make", "--with", "sleep=0", "--flips", "1,8", "--at", "last.*", "--samples", "2", "--trials", "7"],
        {"options": [["sleep", "0"]], "flips": [1, 8], "at": ["last.*"], "samples": 2}, 14,
    ),
    "training": (
        TRAINING, 'workload = "faulty_loop.py:make"\nwith = ["steps=12"]\nfault = ["2*RD", "RD"]\nphase = "fwd"\ntrials = 7',
        ["faulty_loop.py:make", "--with", "steps=12", "--fault", "2*RD", "--fault", "RD", "--phase", "fwd", "--trials", "7"],
        {"options": [["steps", "12"]], "faults": [["RD", 2.0], ["RD", 1.0]], "phases": ["fwd"]}, 7,
    ),
    "noise": (
        NOISE, 'workload = "faulty_loop.py:make"\nwith = ["steps=6"]\nswitch = ["within", "init"]\nreplicas = 3',
        ["faulty_loop.py:make", "--with", "steps=6", "--switch", "within", "--switch", "init", "--replicas", "3"],
        {"options": [["steps", "6"]], "every": 1}, 8,
    ),
    "coverage": (
        COVERAGE, 'workload = "faulty_loop.py:make"\nwith = ["steps=12"]\nonly = "operation:*"\ntries = 20\nclean-runs = 1\n'
        "changed-runs = 0\ntrials = 2",
        ["faulty_loop.py:make", "--with", "steps=12", "--only", "operation:*", "--tries", "20", "--clean-runs", "1",
         "--changed-runs", "0", "--trials", "2"],
        {"options": [["steps", "12"]], "only": ["operation:*"], "tries": 20}, 12,
    ),
    "inference-coverage": (
        INFERENCE_COVERAGE, 'workload = "clean.py:make"\nonly = ["weight-flip", "output-*"]\ntries = 40\nprofile-samples = 100\n'
        'clean-samples = 200\nrate = 0.05\ndetector = ["ranger", "abft"]\ntrials = 2',
        ["clean.py:make", "--only", "weight-flip", "--only", "output-*", "--tries", "40", "--profile-samples", "100",
         "--clean-samples", "200", "--rate", "0.05", "--detector", "ranger", "--detector", "abft", "--trials", "2"],
        {"only": ["weight-flip", "output-*"], "tries": 40, "detectors": ["ranger", "abft"]}, 6,
    ),
}  # fmt: skip
"""A kind; a TOML file and words of a command line that ask the same of it; fields of the spec that follow; trials."""


@pytest.fixture(params=ASKS)
def asks(request, tmp_path, monkeypatch):
    register(monkeypatch, *campaign_kinds.KINDS, PI)
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    write_loop(tmp_path)
    write_clean(tmp_path)
    return ASKS[request.param]


def told(*words):
    done = in_process(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_field_is_an_option_or_marked_as_none(asks):
    for cls in (*asks[0].option_classes, *OUTPUT_CLASSES):
        hints = typing.get_type_hints(cls, include_extras=True)
        for one in fields(cls):
            marks = getattr(hints[one.name], "__metadata__", ())
            assert any(isinstance(mark, Option) or mark == NOT_AN_OPTION for mark in marks), (cls, one.name)


def test_help_has_all_options_in_their_panels(asks):
    shown = told(asks[0].command_words, "--help")
    for option in options_of(*asks[0].option_classes, *OUTPUT_CLASSES).values():
        assert f"{option.option.panel}:" in shown or option.option.missing_error
        assert f"{option.flag} " in shown
    assert told("--help").count(f"\n  {asks[0].command_words} ") == 1


def test_a_dry_run_says_what_would_run_and_runs_nothing(asks):
    kind, _, words, values, trials = asks
    before = set(Path().iterdir())
    found = json.loads(told(kind.command_words, *words, "--dry-run", "--json", "--quiet"))
    assert set(Path().iterdir()) == before
    assert found["spec"].items() >= values.items()
    assert (found["trials"], found["stored"]) == (trials, 0)
    assert sum(row["trials"] for row in found["results"]) == trials
    assert found["seconds"] == found["cpu_seconds"] == pytest.approx(trials * found["golden_seconds"])
    shown = told(kind.command_words, *words, "--dry-run", "--quiet")
    assert f"{trials} trials would run, in at most about" in shown
    assert found["store"] in shown.replace("\n", " ")
    for option in options_of(kind.spec).values():
        assert option.flag in shown


def test_a_file_asks_the_same_as_a_command_line_which_wins(asks):
    kind, text, words, _, _ = asks
    Path("ask.toml").write_text(text)
    ask = (kind.command_words, "--dry-run", "--json", "--quiet")
    one, other = (json.loads(told(*ask, *more)) for more in (words, ["--config", "ask.toml"]))
    times = dict.fromkeys(("headline", "golden_seconds", "seconds", "cpu_seconds"))
    assert one | times == other | times
    count = ("--replicas", 5) if kind is NOISE else ("--trials", 2)
    won = json.loads(told(*ask, "--config", "ask.toml", "--seed", 3, *count))
    assert (won["spec"]["seed"], max(row["trials"] for row in won["results"])) == (3, count[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeed = 1", "unknown key in ask.toml: 'seeed'; did you mean 'seed'?"),
        ("config = 'ask.toml'", "unknown key in ask.toml: 'config'"),
        ("seed = 'one'", "ask.toml: seed is 'one'; expected a whole number"),
        ("seed = 1.5", "ask.toml: seed is 1.5; expected a whole number"),
        ("seed = 1979-05-27", "expected a whole number"),
        ("dry-run = 1", "ask.toml: dry-run is 1; expected true or false"),
        ("seed = \n", "cannot read ask.toml as TOML: Invalid value (at line 1, column 8)"),
        ("a = " + "[" * 100_000, "cannot read ask.toml as TOML"),
        ("seed = " + "9" * 5000, "cannot read ask.toml as TOML"),
        ("\udcff", "cannot read ask.toml as TOML"),
        ("#" * 2**20 + "#", "ask.toml is larger than 1 MiB"),
    ],
)
@pytest.mark.parametrize("asks", ["pi"], indirect=True)
def test_a_file_that_does_not_fit_is_one_line(asks, text, said):
    Path("ask.toml").write_text(text, errors="surrogateescape")
    done = in_process("pi", "--config", "ask.toml")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_a_folder_is_no_file_of_options(tmp_path):
    done = in_process("pvf", "--config", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(tmp_path) in done.stderr


@pytest.mark.parametrize("asks", ["pi"], indirect=True)
def test_a_dry_run_counts_what_is_stored(asks):
    ask = ("pi", "--points", 50, "--store", "a.sqlite", "--quiet", "--json")
    told(*ask, "--trials", 5)
    before = Path("a.sqlite").read_bytes()
    found = json.loads(told(*ask, "--trials", 8, "--dry-run"))
    assert (found["trials"], found["stored"], before) == (8, 5, Path("a.sqlite").read_bytes())
    other = in_process(*ask, "--seed", 1, "--dry-run")
    assert (other.returncode, other.stdout) == (2, "")
    assert "holds another campaign (seed: 0 in the store, 1 now)" in other.stderr


@pytest.mark.parametrize("asks", ["pvf"], indirect=True)
def test_a_dry_run_says_the_most_that_a_precision_can_take(asks):
    ask = ("pvf", "tiny.py:make", "--rel", "20%", "--trials", 1000, "--quiet", "--dry-run")
    found = json.loads(told(*ask, "--json"))
    assert {row["target"]: row["trials"] for row in found["results"]} == dict.fromkeys(("first", "norm", "last"), 1000)
    assert "a pilot decides how many trials each target gets" in told(*ask).replace("\n", " ")
    gate = in_process(*ask, "--assert", "lost<=0.5")
    assert (gate.returncode, gate.stdout) == (2, "")
    assert "did you mean 'last'" in gate.stderr


@pytest.mark.parametrize(
    "kind", [PVF, TRAINING, NOISE, CHECKPOINT_STUDY, COVERAGE, INFERENCE_COVERAGE], ids=lambda kind: kind.name
)
def test_a_function_takes_the_options_of_its_verb(kind):
    options = {option.python_name: option.default for option in options_of(*kind.option_classes).values()}
    own = dict(inspect.signature(getattr(unsilent, kind.name.replace("-", "_"))).parameters)
    assert own.keys() - options.keys() == {"store", "observer"}
    for parameter, default in options.items():
        if parameter != "workload":
            assert own[parameter].default == default, parameter
            assert own[parameter].kind is inspect.Parameter.KEYWORD_ONLY


FUNCTIONS = ["pvf", "training", "noise", "checkpoint_study", "coverage", "inference_coverage"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_of_a_function_says_what_it_takes_returns_and_raises(name):
    function = getattr(unsilent, name)
    signature, text = inspect.signature(function), inspect.getdoc(function)
    returned = signature.return_annotation
    assert issubclass(returned, CampaignResult)
    assert f"Returns:\n    {returned.__name__}: {inspect.getdoc(returned).splitlines()[0]}" in text
    assert "Raises:\n    UsageError: " in text
    assert "    StoreError: " in text
    described = set(re.findall(r"^    (\w+): ", text.partition("Args:")[2].partition("Returns:")[0], re.MULTILINE))
    assert described == set(signature.parameters)
    assert not set(re.findall(r"--([a-z]+)", text)) & set(signature.parameters), "names arguments, not options"
    assert (function.__name__, getattr(importlib.import_module(function.__module__), name)) == (name, function)
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("pvf", {"ci": float | str | None, "flips": int | str | Sequence[int] | None, "data": str | Path | None,
                 "at": str | Sequence[str], "trials": int | str | None, "store": str | Path | None}),
        ("training", {"threshold": Mapping[str, float] | Sequence[str], "floor": str | Path | None, "workload": str,
                      "phase": str | Sequence[str], "guard": bool}),
    ],
)  # fmt: skip
def test_a_function_says_of_what_types_its_arguments_are(name, hints):
    parameters = inspect.signature(getattr(unsilent, name)).parameters
    assert {argument: parameters[argument].annotation for argument in hints} == hints


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "pvf() missing a required argument: 'workload'"),
        ({"workload": "tiny.py:make", "trails": 3}, "pvf() got an unexpected keyword argument 'trails'"),
    ],
)
def test_a_call_that_does_not_fit_names_the_function(arguments, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        unsilent.pvf(**arguments)


@pytest.mark.parametrize("name", ["training", "checkpoint_study"])
def test_a_function_keeps_fault_free_runs_only_where_it_is_told(name):
    assert "floor: File that stores the fault-free runs. Default: none is kept." in getattr(unsilent, name).__doc__


def test_a_kind_of_another_package_has_a_function(tmp_path, monkeypatch, inline):
    register(monkeypatch, PI)
    monkeypatch.chdir(tmp_path)
    estimate_pi = campaign_function(PI, Interval, "Estimate pi.")
    result = estimate_pi(points=50, trials=TRIALS, store="a.sqlite")
    assert (result, lines(Path("a.sqlite"))) == (
        estimate_pi(points=50, trials=TRIALS),
        lines(run(Path("b.sqlite"), TRIALS)),
    )
    assert list(inspect.signature(estimate_pi).parameters)[-2:] == ["store", "observer"]
    with pytest.raises(UsageError, match="trials= is 0; expected 1 or more"):
        estimate_pi(trials=0)


def test_a_command_and_a_function_run_a_kind_in_its_own_way(tmp_path, monkeypatch, inline):
    def run_twice(campaign):
        with campaign.open_executor() as (executor, observer):
            campaign.run_planned_trials(executor, observer)
            run_trials([TrialId("square", None, 99)], executor, campaign.store, observer)
        return campaign.analyse()

    kind = replace(PI, run=run_twice)
    register(monkeypatch, kind)
    monkeypatch.chdir(tmp_path)
    told("pi", "--points", 50, "--trials", 5, "--store", "a.sqlite", "--quiet")
    assert campaign_function(kind, Interval, "Estimate pi.")(points=50, trials=5, store="b.sqlite").n == 6
    assert lines(Path("a.sqlite")) == lines(Path("b.sqlite"))


def test_a_kind_says_what_a_dry_run_shows(tmp_path, monkeypatch):
    shown = DryRun(
        trial_numbers=lambda run, baseline: {("square", None): range(run.spec.points)},
        fault_free_seconds=lambda baseline: 2.0,
        notes=lambda run, baseline, path: [f"{path} would hold points of {len(baseline.targets)} square"],
        has_open_number=lambda asked: True,
    )
    register(monkeypatch, replace(PI, dry_run=shown))
    monkeypatch.chdir(tmp_path)
    words = ("pi", "--points", 7, "--dry-run", "--store", "a.sqlite", "--jobs", 1, "--quiet")
    found = json.loads(told(*words, "--json"))
    assert (found["trials"], found["seconds"]) == (7, 14)
    text = " ".join(told(*words).split())
    assert "a.sqlite would hold points of 1 square" in text
    assert "at most 7 trials would run, in at most about 14 s with 1 job; the campaign decides how many" in text


CALLS = {
    "pvf": {
        "workload": "tiny.py:make", "options": {"sleep": 0}, "flips": [1, 8], "at": "last.*", "samples": 2, "trials": 7,
    },
    "training": {
        "workload": "faulty_loop.py:make", "options": ["steps=12"], "fault": ["2*RD", "RD"], "phase": "fwd", "trials": 7,
        "floor": "floor.sqlite",
    },
    "noise": {
        "workload": "faulty_loop.py:make", "options": {"steps": 6}, "switch": ["within", "init"], "replicas": 3,
    },
    "coverage": {
        "workload": "faulty_loop.py:make", "options": {"steps": 12}, "only": "operation:*", "tries": 20, "clean_runs": 1,
        "changed_runs": 0, "trials": 2,
    },
    "inference-coverage": {
        "workload": "clean.py:make", "only": ["weight-flip", "output-*"], "tries": 40, "profile_samples": 100,
        "clean_samples": 200, "rate": 0.05, "detector": ["ranger", "abft"], "trials": 2,
    },
}  # fmt: skip
"""Arguments that ask the same."""


@pytest.mark.slow
@pytest.mark.parametrize("asks", CALLS, indirect=True)
def test_a_call_asks_the_same_as_a_command_line(asks):
    kind, _, words, _, _ = asks
    floor = ["--floor", "floor.sqlite"] if kind is TRAINING else []
    first = json.loads(told(kind.command_words, *words, *floor, "--store", "a.sqlite", "--quiet", "--json"))
    with inline_campaigns():
        result = getattr(unsilent, kind.name.replace("-", "_"))(**CALLS[kind.name], store="b.sqlite")
    assert result.command == first["command"]
    with Store("a.sqlite", kind) as one, Store("b.sqlite", kind) as other:
        assert list(canonical_lines(one)) == list(canonical_lines(other))


@pytest.mark.parametrize(
    "change", ["inside = -1", "inside = 'many'", "inside = 1.5", "seconds = 9e999", "target = 'x'", "k = -1"]
)
def test_a_cell_that_cannot_be_is_refused(tmp_path, change):
    path = run(tmp_path / "a.sqlite", 3)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE trial SET {change} WHERE k = 0")
    with Store(path, PI) as store, pytest.raises(StoreError, match="is damaged or was not made by this program"):
        list(store.rows())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inside": np.int64(3)}, ""),
        ({"seconds": np.float32(1)}, ""),
        ({"inside": 3.5}, "PiRow.inside of trial square/x/0 is 3.5 (float); expected int"),
        ({"inside": "many"}, "PiRow.inside of trial square/x/0 is many (str); expected int"),
        ({"inside": -1}, "is -1 (int); expected int (Input should be greater than or equal to 0): change the runner"),
        ({"seconds": np.float64("nan")}, "PiRow.seconds of trial square/x/0 is a NaN; expected float"),
        ({"trial": TrialId("square", None, "0")}, "PiRow.k of trial square/x/0 is 0 (str); expected int"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, change, said):
    row = replace(PiRow(TrialId("square", None, 0), 1), **change)
    with Store(run(tmp_path / "a.sqlite", 1), PI, write=True) as store:
        store._db.execute("DELETE FROM trial")
        with nullcontext() if not said else pytest.raises(UsageError, match=re.escape(said)):
            store.add_rows([row])
        assert [list(vars(found).values()) for found in store.rows()] == ([] if said else [list(vars(row).values())])


def test_an_array_of_another_shape_is_not_written(tmp_path):
    codec = row_codec(CurveRow)
    row = CurveRow(TrialId("square", None, 0), 1, curve=np.zeros(3))
    codec.encode(row, lambda values: {"curve": 3})
    with pytest.raises(
        UsageError, match=r"CurveRow.curve of trial square/x/0 has 3 elements; expected the shape \(2, 2\)"
    ):
        codec.encode(row, lambda values: {"curve": (2, 2)})


DRIVER = """
import sys
from contracts.pi import PI, PiSpec
from unsilent.campaigns import Budget, Store, TrialId, run_campaign
from unsilent.campaigns.executors import make_executor

if __name__ == "__main__":
    spec = PiSpec(points=50)
    with Store(sys.argv[1], PI, write=True) as store, make_executor("serial", PI.runner, spec) as executor:
        run_campaign(spec, Budget(int(sys.argv[2])), executor, store)
"""


@pytest.mark.slow
def test_what_was_killed_goes_on(tmp_path):
    path, many = tmp_path / "a.sqlite", 20_000
    process = subprocess.Popen([sys.executable, "-c", DRIVER, path, str(many)])
    end = time.monotonic() + 60
    while time.monotonic() < end and held(path) < 10:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 10 <= held(path) < many
    fewer = held(path)
    assert lines(run(path, fewer + 50)) == lines(run(tmp_path / "b.sqlite", fewer + 50))


def held(path):
    if not path.exists():
        return 0
    try:
        with Store(path, PI) as store:
            return len(store.stored_trial_ids())
    except StoreError:  # not written yet
        return 0


def test_a_field_named_as_a_property_of_every_spec_needs_a_default():
    with pytest.raises(TypeError, match=r"Seedless.seed has no default, which a field named as a property"):

        class Seedless(Spec, study="seedless"):
            seed: int

    @dataclass(frozen=True, slots=True)
    class Seeded(Spec, study="seeded"):
        seed: int = 3

    assert Seeded().seed == 3
