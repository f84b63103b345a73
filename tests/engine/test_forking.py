"""Forks give what whole runs give: the same losses, accuracies and bits; and they end early only where that is exact."""

from __future__ import annotations

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.engine.forking import ForkEngine, GoldenTraining
from unsilent.engine.forking.forks import EndReason, FaultFreeBand, held_out_score
from unsilent.engine.forking.golden import metric_of, state_hash
from unsilent.faults import fault_model
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.outcomes.training import TrainingCurves, classify_training
from unsilent.sites.training.step import StepInjection
from unsilent.workloads import load_training
from unsilent.workloads.trainings import Seeds

STEPS = 30
FAULTS = {
    "large": UnresolvedFault("op:stem.0#convolution.0/grad_wt/out", fault_model("set:value=1e9"), seed=1),
    "not-finite": UnresolvedFault("op:stem.0#convolution.0/fwd/out", fault_model("set:value=nan"), seed=1),
    "small": UnresolvedFault("op:stem.0#convolution.0/grad_wt/out", fault_model("bitflip:bits=3"), seed=2),
    "none": UnresolvedFault("op:(run)#_log_softmax.0/fwd/second", fault_model("bitflip"), seed=2),
}


@pytest.fixture(scope="module")
def golden():
    return GoldenTraining(load_training("train-resnet", {"steps": str(STEPS)}), Seeds.same_for_all(0), memory=1 << 18)


def whole(step, fault, lasts=1):
    """The same run without forks."""
    workload = load_training("train-resnet", {"steps": str(STEPS)})
    state = workload.start(Seeds.same_for_all(0))
    losses, metric, hashes = [], [], []
    for now in range(STEPS):
        with StepInjection(state.model, [fault] if step <= now < step + lasts else [], state.optimizers):
            record = workload.step(state)
        losses.append(record.loss)
        metric.append(metric_of(record))
        hashes.append(state_hash(state))
    return losses, metric, hashes, held_out_score(workload.evaluate(state))


@pytest.mark.parametrize("step", [0, 1, 7, STEPS - 1])
@pytest.mark.parametrize("name", ["large", "small"])
@pytest.mark.slow
def test_a_fork_is_the_whole_run(golden, name, step):
    assert golden.snapshot_interval > 1
    found = ForkEngine(golden).run(step, [FAULTS[name]])
    losses, metric, _, test = whole(step, FAULTS[name])
    assert found.ending.losses.tobytes() == np.array(losses[step:]).tobytes()
    assert found.ending.metric.tobytes() == np.array(metric[step:]).tobytes()
    assert found.ending.test_accuracy == test
    assert (found.steps_run, found.reason, len(found.applied_faults)) == (STEPS - step, EndReason.END, 1)


@pytest.mark.parametrize("lasts", [3, None])
@pytest.mark.slow
def test_a_fault_lasts_for_some_steps(golden, lasts):
    step = STEPS - 8
    fault = UnresolvedFault("op:stem.0#convolution.0/grad_wt/out", fault_model("set:value=0.5"), seed=2)
    found = ForkEngine(golden).run(step, [fault], lasts=lasts)
    losses, _, _, test = whole(step, fault, STEPS if lasts is None else lasts)
    assert found.ending.losses.tobytes() == np.array(losses[step:]).tobytes()
    assert found.ending.test_accuracy == test
    once = whole(step, fault)[0]
    assert once[: step + 2] == losses[: step + 2]
    assert once[step + 2 :] != losses[step + 2 :]


def test_a_fault_that_lasts_is_not_over_where_the_bits_are_golden(golden):
    same = UnresolvedFault("op:stem.0#convolution.0/grad_wt/out", fault_model("scale:factor=1"), seed=2)
    assert ForkEngine(golden).run(5, [same], lasts=4).steps_run == 4
    assert ForkEngine(golden).run(STEPS - 3, [same], lasts=None).steps_run == 3


def clean_ending(golden, step):
    """What the fault-free run did from a step on."""
    return TrainingCurves(golden.metric[step:], golden.losses[step:], held_out_score(golden.evaluation), same_bits=True)


def test_it_ends_where_the_loss_is_lost(golden):
    found = ForkEngine(golden).run(5, [FAULTS["not-finite"]])
    assert (found.steps_run, found.reason) == (1, EndReason.NOT_FINITE)
    assert classify_training(clean_ending(golden, 5), found.ending) == "immediate-nan"


def test_it_ends_where_the_bits_are_golden_again(golden):
    zero = UnresolvedFault("op:stem.0#convolution.0/grad_wt/out", fault_model("scale:factor=1"), seed=2)
    found = ForkEngine(golden).run(5, [zero])
    assert (found.steps_run, found.reason, found.ending.same_bits) == (1, EndReason.SAME_BITS, True)
    assert found.ending.losses.tobytes() == golden.losses[5:].tobytes()
    assert classify_training(clean_ending(golden, 5), found.ending) == "masked-bitwise"


def test_forks_leave_no_trace(golden):
    engine = ForkEngine(golden)
    first = engine.run(9, [FAULTS["small"]])
    engine.run(3, [FAULTS["not-finite"]])
    again = engine.run(9, [FAULTS["small"]])
    assert first.ending.losses.tobytes() == again.ending.losses.tobytes()
    clean = golden.workload.start(Seeds.same_for_all(0))
    for _ in range(9):
        golden.workload.step(clean)
    assert state_hash(golden.state_before_step(9)) == state_hash(clean)


def test_a_horizon_ends_it_within_the_band(golden):
    wide = FaultFreeBand(np.full(STEPS, np.inf), 4)
    found = ForkEngine(golden, band=wide).run(5, [FAULTS["small"]])
    assert (found.steps_run, found.reason) == (4, EndReason.HORIZON)
    assert len(found.ending.losses) == STEPS - 5
    never = FaultFreeBand(np.full(STEPS, -1.0), 4)
    assert ForkEngine(golden, band=never).run(5, [FAULTS["small"]]).reason == EndReason.END


def test_what_is_watched_is_told_of_each_step(golden):
    def watch(state):
        return np.array([float(p.detach().abs().max()) for p in state.model.parameters()])

    found = ForkEngine(golden, watch).run(STEPS - 3, [FAULTS["large"]])
    assert found.measurements.shape == (3, len(list(golden._state.model.parameters())))
    assert np.isfinite(found.measurements).all()


def test_steps_that_are_not_there(golden):
    for step in (-1, STEPS):
        with pytest.raises(UsageError, match=f"step is {step}; expected 0 to {STEPS - 1}"):
            golden.state_before_step(step)
    with pytest.raises(UsageError, match="expected at least 1"):
        GoldenTraining(golden.workload, Seeds.same_for_all(0), 0)
