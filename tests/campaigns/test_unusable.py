"""Trials after which their process is of no more use: a poisoned device, a worker that is killed, memory that runs out."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import unsilent
from campaigns.faulty_loop import running, write_loop
from campaigns.forked import forked_workers
from conftest import TINY, in_process
from unsilent.basics.errors import ProcessUnusable, UnsilentError, UsageError
from unsilent.campaigns import TrialId, WorkerSettings
from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.runner import Runner
from unsilent.outcomes import Outcome
from unsilent.sites.memory import TensorMemory
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow
from unsilent.studies.pvf.study import live_executor
from unsilent.studies.training.kind import TRAINING
from unsilent.studies.training.spec import TrainingSpec
from unsilent.workloads import process_side_effects

pytestmark = pytest.mark.slow

POISON = (
    TINY
    + '''
from unsilent.sites.memory import TensorMemory

REASON = "device-side assert triggered"
poisoned = False


def check(*_):
    if poisoned:
        raise RuntimeError(f"{REASON}\\nsecond line")


def poison(undo):
    """Every later call raises, as after a device-side assertion; with ``undo`` also reads and writes of the model's memory."""
    global poisoned
    poisoned = True
    if undo:
        TensorMemory.read = TensorMemory.write = TensorMemory.hash = check
    check()


def device(undo: bool = True):
    """A look-up whose index may be out of range: a model on a device that does not survive that."""
    def run(model, batch):
        check()
        scores = model(batch)
        if bool(scores.abs().max() > 1e20):
            poison(undo)
        return scores

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="device")


def deadly():
    """The process of a trial that corrupts the last bias dies; that of one that corrupts the first bias dies once."""
    def run(model, batch):
        once = bool((model.first.bias.detach() != Tiny().first.bias).any()) and not os.path.exists("killed")
        if once:
            open("killed", "w").close()
        if once or corrupted(model):
            os.kill(os.getpid(), 9)
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="deadly")


def greedy():
    """Memory runs out: once when the first bias is corrupted, always when the last one is."""
    def run(model, batch):
        once = bool((model.first.bias.detach() != Tiny().first.bias).any()) and not os.path.exists("short")
        if once or corrupted(model):
            open("short", "a").close()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="greedy")
'''
)
REASON = "RuntimeError: device-side assert triggered"
HUGE = "set:value=1e30"


class Heard(Observer):
    """What was said on the way."""

    def __init__(self):
        self.lines = []

    def say(self, sentence):
        self.lines.append(sentence)

    def worker_lost(self, trial, why):
        self.lines.append(f"{trial}: {why}")


@pytest.fixture(autouse=True)
def _forked():
    with forked_workers():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "device.py").write_text(POISON)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(spec, trials, heard=None, make_runner=PVF.runner, **how):
    """Rows by trial; each comes once."""
    with make_executor(None, make_runner, spec, observer=heard or Heard(), **how) as executor:
        rows = [row for some in executor.run(iter(trials)) for row in some]
    assert sorted(row.trial for row in rows) == sorted(trials)
    return {row.trial: row for row in rows}


def ended(row):
    return {Outcome(code).name.lower() for code in set(row.outcome_codes)} - {"spared"}


MIXED = [TrialId(target, 1, k) for k in range(2) for target in ("first.weight", "last.bias", "last.weight")]


@pytest.mark.parametrize(("engine", "undo"), [("plain", False), ("plain", True), ("auto", True)])
def test_a_poisoned_device_is_a_crash_and_the_campaign_goes_on(folder, engine, undo):
    spec = PvfSpec(
        "device.py:device",
        options=(("undo", str(undo)),),
        at=("first.weight", "last.*"),
        per="tensor",
        fault="bitflip:bits=30",
    )
    rows = ran(spec, MIXED, worker_settings=WorkerSettings(engine=engine))
    found = Counter(next(iter(ended(row)), "") if len(ended(row)) == 1 else "several" for row in rows.values())
    assert found["crash"] >= 1
    for row in rows.values():
        assert ("crash" in ended(row)) == (row.error == REASON), row.error
        assert row.error in ("", REASON)


@pytest.mark.parametrize("at", ["op:last", "input:0"])
def test_faults_in_operations_and_inputs_that_poison_the_device(folder, at):
    spec = PvfSpec("device.py:device", at=(at,), fault=HUGE)
    target = "last" if at == "op:last" else "input"
    rows = ran(spec, [TrialId(target, 1, k) for k in range(2)])
    assert [ended(row) for row in rows.values()] == [{"crash"}] * 2
    assert {row.error for row in rows.values()} == {REASON}


def test_a_live_model_cannot_go_on_and_says_so(folder, monkeypatch):
    for name in ("read", "write", "hash"):
        monkeypatch.setattr(TensorMemory, name, getattr(TensorMemory, name))  # put back afterwards
    names: dict[str, object] = {}
    exec(POISON, names)
    with pytest.raises(UnsilentError, match="trial last/x1/. .*device-side assert.*FILE.py:NAME") as raised:
        unsilent.pvf(names["device"](), at="last.bias", fault=HUGE, trials=3, engine="plain", store="s.sqlite")
    assert "\n" not in str(raised.value)
    with PvfStore("s.sqlite") as store:
        assert not store.stored_trial_ids()


def test_the_command_ends_well_and_replay_says_why_it_crashed(folder):
    ask = ("pvf", "device.py:device", "--at", "last.bias", "--fault", HUGE, "--trials", 1, "--engine", "plain")
    done = in_process(*ask, "--store", "s.sqlite", workers=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (row,) = map(json.loads, in_process("export", "s.sqlite").stdout.splitlines())
    assert (row["crash"], row["error"]) == (14, REASON)
    for words in ((), ("--trace",)):
        done = in_process("replay", "s.sqlite", "last/x1/0", "--workload", "device.py:device", *words, workers=True)
        assert "Traceback" not in done.stderr + done.stdout
        assert done.returncode == (2 if words else 0)
    done = in_process("replay", "s.sqlite", "last/x1/0", "--workload", "device.py:device", workers=True)
    assert REASON in done.stdout


def test_a_training_that_poisons_its_device(tmp_path):
    loop = write_loop(tmp_path)
    spec = TrainingSpec(
        loop, (("ends", "poisons"),), per="tensor", layers=("conv", "fc"), faults=(("set:value=1e6", 1.0),)
    )
    deadly = TrialId("param:fc.bias", None, 0)
    others = [TrialId("param:conv.weight", None, k) for k in range(2)]
    rows = ran(spec, [others[0], deadly, others[1]], make_runner=TRAINING.runner)
    assert (rows[deadly].end_reason, "device-side assert" in rows[deadly].error) == ("crash", True)
    assert "\n" not in rows[deadly].error
    plain = ran(
        TrainingSpec(loop, per="tensor", layers=("conv", "fc"), faults=spec.faults), others, make_runner=TRAINING.runner
    )
    assert [rows[t].end_reason for t in others] == [plain[t].end_reason for t in others]


# -- workers that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_is_a_crash_only_if_two_workers_die_of_it(folder, jobs):
    spec = PvfSpec("device.py:deadly", at=("first.bias", "last.bias"), per="tensor")
    once, always = TrialId("first.bias", 1, 0), TrialId("last.bias", 1, 0)
    heard = Heard()
    rows = ran(
        spec,
        [once, TrialId("first.bias", 1, 1), always],
        heard,
        jobs=jobs,
        worker_settings=WorkerSettings(engine="plain"),
    )
    assert "crash" not in ended(rows[once])
    assert (ended(rows[always]), rows[always].error) == ({"crash"}, "worker: crash")
    assert len([line for line in heard.lines if "signal 9" in line]) == 3
    assert len([line for line in heard.lines if "recorded as a crash" in line]) == 1


def test_memory_that_runs_out_is_tried_again_alone(folder):
    spec = PvfSpec("device.py:greedy", at=("first.bias", "last.bias"), per="tensor")
    once, always = TrialId("first.bias", 1, 0), TrialId("last.bias", 1, 0)
    rows = ran(
        spec, [once, always, TrialId("first.bias", 1, 1)], jobs=2, worker_settings=WorkerSettings(engine="plain")
    )
    assert "exception" not in ended(rows[once])
    assert ended(rows[always]) == {"exception"}
    assert rows[always].error.startswith("OutOfMemoryError: CUDA out of memory")


def test_memory_that_runs_out_in_this_process(folder):
    tries = []
    model = nn.Linear(4, 3)
    golden = model.bias.detach().clone()

    def run(model, batch):
        if bool((model.bias.detach() != golden).any()):
            tries.append(1)
            if len(tries) == 1:
                raise MemoryError
        return model(batch)

    workload = unsilent.Workload(model, [torch.randn(5, 4)], run=run)
    result = unsilent.pvf(workload, at="bias", trials=1, engine="plain")
    assert result.rows[0].due == 0
    assert len(tries) == 2


class Stub(Runner):
    """A runner of trials that cost nothing, of which those of target ``bad`` end it in a given way."""

    def __init__(self, how, pack, spec, **_):
        super().__init__(spec)
        self.how, self.max_trials_together = how, pack
        self.bad = False

    def make_baseline(self):
        return SimpleNamespace(campaign="c", fingerprint={}, golden_seconds=1e-3)

    def run_all(self, trials, alone=False):
        if alone:
            assert len(trials) == 1
        if self.how == "together" and any(t.target == "bad" for t in trials):
            raise ProcessUnusable("poisoned", known=True)
        for trial in trials:
            self.bad |= trial.target == "bad"
            self.unverified_row_count += 1
            yield PvfTrialRow(trial, "[]", b"\0", 0, 0.0, "", 1e-3)

    def verify_restored_state(self):
        if self.bad and self.how == "unknown":
            raise ProcessUnusable("a fault-free run raises")
        if self.bad:
            os.kill(os.getpid(), 9)
        self.unverified_row_count = 0

    def lost_trial_row(self, trial, ended, seconds, reason):
        assert seconds >= 0
        return PvfTrialRow(trial, "[]", bytes([ended]), 1, 0.0, reason, seconds)


@pytest.mark.parametrize(
    ("how", "pack", "reason"),
    [("together", 4, "poisoned"), ("unknown", 1, "a fault-free run raises"), ("killed", 1, "worker: crash")],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_trial_that_ended_its_worker_is_found(how, pack, reason, jobs):
    """Also where several ran together, or were not proven yet."""
    trials = [TrialId("bad" if k in (5, 11) else "good", 1, k) for k in range(16)]
    rows = ran(PvfSpec("stub"), trials, make_runner=partial(Stub, how, pack), jobs=jobs)
    for row in rows.values():
        assert (set(row.outcome_codes), row.error) == (
            ({Outcome.CRASH}, reason) if row.trial.target == "bad" else ({0}, "")
        )


# -- what user code does to its process -----------------------------------------------------------------------------------


def net(run):
    """A live workload whose run is wrapped: ``run(model, batch, faulty)`` is called before the model is."""
    model = nn.Linear(4, 3)
    golden = model.bias.detach().clone()

    def wrapped(model, batch):
        run(bool((model.bias.detach() != golden).any()))
        return model(batch)

    return unsilent.Workload(model, [torch.randn(5, 4)], run=wrapped, name="mine")


@pytest.mark.parametrize("only_faulty", [False, True])
def test_a_run_that_forks_and_lets_the_child_return_is_refused(tmp_path, only_faulty):
    def forks(faulty):
        if (faulty or not only_faulty) and (child := os.fork()):
            os.waitpid(child, 0)

    with pytest.raises(UsageError, match="workload 'mine' forks a process and lets the child return.*os._exit"):
        unsilent.pvf(net(forks), at="bias", trials=3, engine="plain", store=tmp_path / "s.sqlite")
    with PvfStore(tmp_path / "s.sqlite") if only_faulty else nullcontext() as store:
        assert store is None or not store.stored_trial_ids()


def test_threads_are_put_back_and_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(process_side_effects, "_all", set())
    stop, seen = threading.Event(), []

    def sets_threads(faulty):
        seen.append(torch.get_num_threads())
        torch.set_num_threads(2)
        if len(seen) == 1:
            threading.Thread(target=stop.wait).start()

    try:
        result = unsilent.pvf(net(sets_threads), at="bias", trials=3, engine="plain")
    finally:
        stop.set()
    assert set(seen) == {1}
    assert any("'mine' changes torch's number of threads to 2" in note for note in result.notes)
    assert any("'mine' starts a thread that keeps running" in note for note in result.notes)
    again = unsilent.pvf(net(lambda faulty: None), at="bias", trials=3, engine="plain")
    assert not any("thread" in note for note in again.notes), "what another workload did"


def test_what_another_workload_left_untold_is_not_said_of_this_one():
    process_side_effects.add_workload_note("did this before")
    assert not any("did this" in note for note in unsilent.pvf(net(lambda faulty: None), at="bias", trials=3).notes)


def test_threads_that_only_a_fault_sets_are_said(monkeypatch):
    monkeypatch.setattr(process_side_effects, "_all", set())
    heard = Heard()
    spec = PvfSpec("mine", at=("bias",), per="tensor")
    with live_executor(
        spec, net(lambda faulty: faulty and torch.set_num_threads(2)), heard, WorkerSettings("plain")
    ) as executor:
        executor.establish_baseline()
        assert len([row for rows in executor.run([TrialId("bias", 1, 0)]) for row in rows]) == 1
    assert heard.lines == [
        "Workload 'mine' changes torch's number of threads to 2; the number is set back to 1 after each call."
    ]


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (lambda golden, faulty, batch: {}[0] if (golden != faulty).any() else [False] * 5, "raises KeyError on faulty"),
        (lambda golden, faulty, batch: bool((golden != faulty).any()), "returns one value for a batch of 5"),
    ],
)
def test_a_judge_that_answers_another_question_is_said(monkeypatch, judge, said):
    monkeypatch.setattr(process_side_effects, "_all", set())
    workload = unsilent.Workload(nn.Linear(4, 3), [torch.randn(5, 4)], judge=judge, name="mine")
    heard, spec = Heard(), PvfSpec("mine", at=("bias",), per="tensor")
    with live_executor(spec, workload, heard, WorkerSettings("plain")) as executor:
        found = executor.establish_baseline()
        list(executor.run([TrialId("bias", 1, 0)]))
    assert any(said in note for note in (*found.notes, *heard.lines))


def test_a_training_that_forks_in_each_step_is_refused(tmp_path):
    spec = TrainingSpec(write_loop(tmp_path), (("ends", "forks"),), per="tensor")
    with pytest.raises(UsageError, match="forks a process and lets the child return"), running(spec):
        pass


def test_a_fault_whose_run_raises_still_has_a_receipt():
    def run(model, batch):
        if bool((scores := model(batch)).abs().max() > 1e20):
            raise ArithmeticError
        return scores

    workload = unsilent.Workload(nn.Sequential(nn.Linear(4, 3)), [torch.randn(5, 4)], run=run)
    runner = TrialRunner(PvfSpec("mine", at=("op:*",), fault=HUGE), workload, worker_settings=WorkerSettings("plain"))
    trial = TrialId(next(iter(runner.targets)), 1, 0)
    assert ended(runner.run(trial)) == {"exception"}
    assert len(runner.answer("receipt", trial).applied_faults) == 1
