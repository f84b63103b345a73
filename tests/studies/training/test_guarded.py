"""Corrupted steps under a guard: what is large is noticed and leaves nothing, what is small is missed and said to be."""

from __future__ import annotations

import contextlib
import functools
import json

import numpy as np
import pytest

from campaigns.faulty_loop import running, write_loop
from monitor.segments import executed_again, oldest_kept
from unsilent.basics.errors import UsageError
from unsilent.campaigns.spec import TrialId
from unsilent.engine.forking.golden import state_hash
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.guard import Guard, GuardStop
from unsilent.guard.bounds import WARM_UP
from unsilent.guard.workload import Counters, guard_training
from unsilent.sites.training.step import StepInjection
from unsilent.studies.training import guarding
from unsilent.studies.training.fault_sampler import SampledFault
from unsilent.studies.training.guarding import ALARM_WAIT_STEPS, run_guarded_trial
from unsilent.studies.training.spec import InjectionPoint, TrainingSpec
from unsilent.workloads import load_training
from unsilent.workloads.trainings import Seeds

pytestmark = pytest.mark.slow

STEPS = 24
GRADIENT = "op:fc#addmm.0/grad_wt/out"
KINDS = {"adamw": (), "sgd": (("optimizer", "sgd"),), "scaled": (("amp", "bfloat16"),)}


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    return write_loop(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module", params=KINDS)
def runner(request, loop):
    with running(TrainingSpec(loop, KINDS[request.param])) as found:
        yield found


@pytest.fixture(scope="module")
def adamw(loop):
    with running(TrainingSpec(loop)) as found:
        yield found


def fault(step, model, site=GRADIENT, seed=1):
    return SampledFault(InjectionPoint(step, site, "", "", model), (UnresolvedFault(site, fault_model(model), seed),))


def corrupt(runner, *what, **more):
    return run_guarded_trial(runner.golden, fault(*what, **more), runner._history)


def rest(runner):
    """What the training gives when it goes on from where the guarded one stopped."""
    state, golden = runner.golden._state, runner.golden
    begun, losses = state.step, []
    assert state_hash(state) == golden.hashes[begun - 1]
    while state.step < golden.steps:
        losses.append(golden.workload.step(state).loss)
        assert state_hash(state) == golden.hashes[state.step - 1]
    return begun, losses


@pytest.mark.parametrize("step", [11, 17, STEPS - 1])
@pytest.mark.parametrize("model", ["set:value=-1e12", "set:value=1e30,count=40"])
def test_a_large_fault_leaves_nothing(runner, step, model):
    found = corrupt(runner, step, model)
    assert (found.end_reason, found.detected_after, found.bit_identical) == ("recovered", 0, True)
    assert found.steps_run == step + 1 - oldest_kept(step) + executed_again(step)
    assert "fc.weight/" in found.alarm
    assert [hit.fault.site for hit in found.applied_faults] == [GRADIENT]
    begun, losses = rest(runner)
    assert begun == step + 1
    assert losses == runner.golden.losses[begun:].tolist()
    assert runner.golden.evaluation.loss == runner.workload.evaluate(runner.golden._state).loss


@pytest.mark.parametrize("step", [0, 1, 2, STEPS - 1])
def test_what_is_no_number_is_noticed_from_the_first_step_on(adamw, step):
    found = corrupt(adamw, step, "set:value=nan")
    assert (found.end_reason, found.detected_after, found.bit_identical) == ("recovered", 0, True)
    assert found.steps_run == step + 1 - oldest_kept(step) + executed_again(step)
    assert rest(adamw)[0] == step + 1


@pytest.mark.parametrize("step", [0, 1, WARM_UP - 1, WARM_UP, WARM_UP + 1])
def test_large_values_are_noticed_once_enough_steps_are_known(adamw, step):
    """A guard that began with the run has seen as many steps as there were before; early faults are noticed when bounds hold."""
    found = corrupt(adamw, step, "set:value=1e12")
    if step >= WARM_UP - 1:
        assert (found.end_reason, found.bit_identical) == ("recovered", True)
    else:
        assert found.end_reason in ("missed", "stopped")
        assert found.detected_after is None or found.detected_after > 2
        assert not found.bit_identical


@pytest.mark.parametrize("step", [12, STEPS - 2, STEPS - 1])
def test_a_small_fault_is_missed(runner, step):
    found = corrupt(runner, step, "bitflip:bits=3")
    assert (found.end_reason, found.detected_after, found.bit_identical, found.alarm) == ("missed", None, False, "")
    assert found.steps_run == step - oldest_kept(step) + min(1 + ALARM_WAIT_STEPS, STEPS - step)
    assert len(found.applied_faults) == 1


@pytest.mark.filterwarnings("ignore:variables of the loop are not restored")  # what was injected is noted
@pytest.mark.parametrize("model", ["set:value=1e12", "set:value=nan", "bitflip:bits=3"])
@pytest.mark.parametrize("step", [0, 3, 14])
def test_the_guard_is_one_that_watched_from_the_start(adamw, loop, step, model):
    """A whole run under a guard, without forks and without what was noted of golden."""
    drawn, alarms = fault(step, model), []
    workload = load_training(loop, {})
    state = workload.start(Seeds.same_for_all(0))
    guard = Guard(state.model, state.optimizers, Counters(state), on_alarm=alarms.append)
    corrupted = []

    def one():
        if state.step == step and not corrupted:
            with StepInjection(state.model, drawn.faults, state.optimizers) as around:
                workload.step(state)
            corrupted.extend(around.applied_faults)
        else:
            workload.step(state)

    with contextlib.suppress(GuardStop):
        while state.step < STEPS:
            guard.step(one)
    guard.close()
    found = corrupt(adamw, step, model)
    assert found.bit_identical == (bool(alarms) and state_hash(state) == adamw.golden.hashes[-1])
    assert len(alarms) == (found.detected_after is not None)
    for alarm in alarms:
        assert alarm.step == step + found.detected_after
        assert found.alarm.partition(":")[2] == alarm.summary.partition(":")[2]


def test_a_bound_that_is_passed_twice_stops(adamw, monkeypatch):
    monkeypatch.setattr(guarding, "guard_training", functools.partial(guard_training, factor=1.0001))
    found = corrupt(adamw, 13, "set:value=1e12")
    assert (found.end_reason, found.bit_identical) == ("stopped", False)
    assert found.applied_faults == ()  # before the fault: clean steps pass such a bound
    assert found.detected_after < 0


def test_an_alarm_that_comes_late_recovers_nothing(adamw, monkeypatch):
    monkeypatch.setattr(guarding, "guard_training", functools.partial(guard_training, factor=1.5))
    found = corrupt(adamw, 13, "set:value=0.1,rate=0.1", site="param:fc.weight")
    assert found.detected_after > 2
    assert found.end_reason in ("stopped", "missed")
    assert not found.bit_identical
    assert len(found.applied_faults) == 1


def test_guards_leave_no_trace(adamw):
    plain = [TrialId("random", None, k) for k in range(4)]
    before = [adamw.run(one).reproducible_values() for one in plain]
    for one in plain:
        row = adamw.run(one._replace(target="guarded:random"))
        assert adamw.run(row.trial).reproducible_values() == row.reproducible_values()
        assert row.injection == adamw.run(one).injection
        assert row.faults == adamw.run(one).faults
        assert row.injected_max == adamw.run(one).injected_max
        assert [len(a) for a in (row.losses, row.metric, row.history_magnitudes)] == [0, 0, 0]
        assert np.isnan([row.test_accuracy, row.test_loss, row.churn]).all()
        assert row.end_reason in ("recovered", "missed", "stopped")
    assert [adamw.run(one).reproducible_values() for one in plain] == before


def test_a_row_tells_of_the_alarm(loop):
    with running(TrainingSpec(loop, faults=(("set:value=-2e20", 1.0),), phases=("grad_wt",))) as runner:
        trials = [TrialId("guarded:random", None, k) for k in range(12)]
        rows = [row for row in map(runner.run, trials) if row.injection.step >= WARM_UP]
        assert rows
        for row in rows:
            assert (row.end_reason, row.detected_after, row.bit_identical) == ("recovered", 0, True)
            step = row.injection.step
            assert row.steps_run == step + 1 - oldest_kept(step) + executed_again(step)
            assert row.injected_max == pytest.approx(2e20)
            assert f"{row.injection.layer}.weight/exp_avg (max) is" in row.error
            assert json.loads(row.faults)[0]["site"] == row.injection.site


# -- what goes wrong ----------------------------------------------------------------------------------------------------


def test_what_the_step_raises_under_a_guard_is_an_outcome(loop):
    spec = TrainingSpec(loop, (("ends", "raises"),), per="tensor", layers=("fc",), faults=(("set:value=1e6", 1.0),))
    with running(spec) as runner:
        one, other = (TrialId(f"guarded:param:fc.{name}", None, 0) for name in ("bias", "weight"))
        before = runner.run(other).reproducible_values()
        row = runner.run(one)
        assert (row.end_reason, row.detected_after, row.bit_identical, row.steps_run) == ("raised", None, False, 0)
        assert "ArithmeticError: the loss itself raises" in row.error
        assert runner.run(other).reproducible_values() == before
        assert runner.run(one).reproducible_values() == row.reproducible_values()  # the guard let go of the model


def test_an_optimizer_without_history_cannot_be_guarded(loop):
    with running(TrainingSpec(loop, (("optimizer", "plain"), ("norm", "False")))) as runner:
        before = runner.run(TrialId("random", None, 0)).reproducible_values()
        with pytest.raises(UsageError, match="SGD keeps no momentum or moments, so there is nothing to watch; use"):
            runner.run(TrialId("guarded:random", None, 0))
        assert runner.run(TrialId("random", None, 0)).reproducible_values() == before
