"""Rows of faulty training runs are what whole runs give that are corrupted by hand, and say why they ended."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from campaigns.faulty_loop import running, write_loop
from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.campaigns.codec import faults_text
from unsilent.campaigns.spec import TrialId
from unsilent.sites.training.step import StepInjection
from unsilent.studies.training.spec import EarlyEndRule, TrainingSpec
from unsilent.workloads import load_training
from unsilent.workloads.trainings import Seeds

STEPS = 24
KINDS = {
    "adamw": (),
    "sgd": (("optimizer", "sgd"),),
    "no norm": (("norm", "False"),),
    "scaled": (("amp", "bfloat16"),),
}
ENTRIES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer", None)}


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    return write_loop(tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="module", params=KINDS)
def runner(request, loop):
    with running(TrainingSpec(loop, KINDS[request.param])) as found:
        yield found


@pytest.fixture
def one(loop):
    """``one(spec fields)``: a runner for this test."""
    held = []

    def make(**fields):
        manager = running(TrainingSpec(loop, **fields))
        held.append(manager)
        return manager.__enter__()

    yield make
    for manager in held:
        manager.__exit__(None, None, None)


def trial(k, target="random"):
    return TrialId(target, None, k)


def biggest(tensors):
    """As a row has it: NaN where there is none, inf where one is no number."""
    found = [np.abs(t.detach().double().numpy()) for t in tensors]
    values = [float("inf") if np.isnan(a).any() else a.max() for a in found]
    return max(values, default=float("nan"))


def remembered(state):
    """The largest of first moments, of second moments, of moving statistics, by hand."""
    names = ENTRIES["adamw" if "AdamW" in type(state.optimizers[0]).__name__ else "sgd"]
    moments = [
        [s[name] for o in state.optimizers for s in o.state.values() if name and s.get(name) is not None]
        for name in names
    ]
    moving = [b for name, b in state.model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    return [biggest(tensors) for tensors in (*moments, moving)]


def by_hand(spec, drawn, steps=STEPS):
    """The whole run without forks, and what it said from the fault on."""
    workload = load_training(spec.workload, dict(spec.options))
    state = workload.start(Seeds.same_for_all(spec.init))
    losses, metric, watched = [], [], []
    first = drawn.injection.step
    for now in range(steps):
        with StepInjection(state.model, drawn.faults if first <= now < first + drawn.lasts else [], state.optimizers):
            record = workload.step(state)
        if now >= first:
            losses.append(record.loss)
            metric.append(record.metrics["accuracy"])
            watched.append(remembered(state))
    return np.array(losses), np.array(metric), np.array(watched), workload.evaluate(state)


@pytest.mark.slow
def test_rows_are_whole_runs_corrupted_by_hand(runner):
    ends = set()
    golden = runner.golden.evaluation
    for k in range(7):
        row, drawn = runner.run(trial(k)), runner.draw(trial(k))
        losses, metric, watched, found = by_hand(runner.spec, drawn)
        ends.add(row.end_reason)
        assert row.injection == drawn.injection
        assert row.losses.tobytes() == losses[: row.steps_run].tobytes()
        assert row.metric.tobytes() == metric[: row.steps_run].tobytes()
        assert len(row.history_magnitudes) == min(3, row.steps_run)
        np.testing.assert_array_equal(row.history_magnitudes, watched[: len(row.history_magnitudes)])
        if row.end_reason == "not-finite":
            assert row.steps_run == 1 + np.flatnonzero(~np.isfinite(losses))[0]
            assert np.isnan([row.test_accuracy, row.test_loss, row.churn]).all()
            continue
        assert np.isfinite(losses).all()
        assert row.test_accuracy == (found.predictions == found.labels).mean()
        assert np.array(row.test_loss).tobytes() == np.array(found.loss).tobytes()
        assert row.churn == (found.predictions != golden.predictions).mean()
        if row.end_reason == "same-bits":
            assert row.bit_identical
            assert losses.tobytes() == runner.golden.losses[row.injection.step :].tobytes()
        else:
            assert (row.end_reason, row.steps_run, row.bit_identical) == ("end", STEPS - row.injection.step, False)
    assert "end" in ends


def test_a_fault_of_a_trial_lasts_as_long_as_asked(one):
    runner = one(per="layer", layers=("fc",), faults=(("set:value=2,from=3,lasts=4", 1.0),))
    row, drawn = runner.run(trial(0, "param:fc")), runner.draw(trial(0, "param:fc"))
    assert (drawn.injection.step, drawn.lasts) == (3, 4)
    assert row.losses.tobytes() == by_hand(runner.spec, drawn)[0].tobytes()
    assert row.losses.tobytes() != by_hand(runner.spec, drawn._replace(lasts=1))[0].tobytes()


def test_golden_is_the_run_without_faults(runner):
    found = runner.establish_baseline()
    workload = load_training(runner.spec.workload, dict(runner.spec.options))
    state = workload.start(Seeds.same_for_all(0))
    records, watched = [], []
    for _ in range(STEPS):
        records.append(workload.step(state))
        watched.append(remembered(state))
    end = workload.evaluate(state)
    assert list(found.losses) == [r.loss for r in records]
    assert list(found.metric) == [r.metrics["accuracy"] for r in records]
    np.testing.assert_array_equal(np.array(found.history_magnitudes, dtype=float), np.array(watched))
    assert (found.test_accuracy, found.test_loss) == ((end.predictions == end.labels).mean(), end.loss)
    assert (found.steps, found.samples) == (STEPS, 80)
    assert found.parameters == sum(p.numel() for p in state.model.parameters())


@pytest.mark.slow
def test_rows_do_not_depend_on_those_before(runner):
    first = [runner.run(trial(k)).reproducible_values() for k in range(5)]
    again = {k: runner.run(trial(k)).reproducible_values() for k in (4, 0, 3, 1, 2)}
    assert first == [again[k] for k in range(5)]


# -- why runs end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "phase", "reason"),
    [
        ("set:value=nan", "fwd", "not-finite"),
        pytest.param("set:value=inf", "grad_wt", "not-finite", marks=pytest.mark.slow),
        ("scale:factor=1", "fwd", "same-bits"),
        pytest.param("set:value=1e3", "grad_wt", "end", marks=pytest.mark.slow),
    ],
)
def test_reasons(one, fault, phase, reason):
    runner = one(faults=((fault, 1.0),), phases=(phase,), layers=("fc",), steps=12)
    rows = [runner.run(trial(k)) for k in range(4)]
    rows = [row for row in rows if row.injection.step < 11]
    assert rows
    assert {row.end_reason for row in rows} == {reason}
    for row in rows:
        first = {"fwd": 1, "grad_wt": 2}[phase]  # a lost gradient shows in the next step's loss
        assert row.steps_run == {"not-finite": first, "same-bits": 1, "end": 12 - row.injection.step}[reason]
        assert row.bit_identical == (reason == "same-bits")
        if reason == "not-finite":
            assert not np.isfinite(row.losses[-1])
            assert row.injected_max == np.inf
            assert np.isinf(row.history_magnitudes[-1]).any()
        if reason == "same-bits":
            assert row.churn == 0
            assert (row.test_accuracy, row.test_loss) == (
                runner.establish_baseline().test_accuracy,
                runner.establish_baseline().test_loss,
            )


@pytest.mark.slow
def test_a_run_inside_the_band_is_given_up(one):
    wide, never = EarlyEndRule(6, 4, (1e9,) * 6, 1.0), EarlyEndRule(6, 4, (0.0,) * 6, 1.0)
    fault = (("bitflip:bits=20", 1.0),)
    whole = one(faults=fault)
    rows = {k: whole.run(trial(k)) for k in range(6)}
    assert any(row.end_reason == "end" and row.steps_run > 8 for row in rows.values())
    inside, outside = one(faults=fault, horizon=wide), one(faults=fault, horizon=never)
    for k, row in rows.items():
        early, late = inside.run(trial(k)), outside.run(trial(k))
        assert late.reproducible_values() == row.reproducible_values()
        assert early.injection == row.injection
        assert early.losses.tobytes() == row.losses[: early.steps_run].tobytes()
        if early.end_reason == "horizon":  # golden is looked at every three steps
            assert 6 <= early.steps_run <= 8
            assert (row.injection.step + early.steps_run) % 3 == 0
            assert (early.test_accuracy, early.churn, early.bit_identical) == (
                inside.establish_baseline().test_accuracy,
                0,
                False,
            )
        else:
            assert early.reproducible_values() == row.reproducible_values()
    assert "horizon" in {inside.run(trial(k)).end_reason for k in range(6)}


def test_what_the_step_raises_is_an_outcome(one):
    runner = one(options=(("ends", "raises"),), per="tensor", layers=("fc",), faults=(("set:value=1e6", 1.0),))
    before = runner.run(trial(0, "param:fc.weight")).reproducible_values()
    row = runner.run(trial(0, "param:fc.bias"))
    assert (row.end_reason, row.steps_run, row.bit_identical) == ("raised", 0, False)
    assert "raised ArithmeticError: the loss itself raises (faulty_loop.py, line" in row.error
    assert "\n" not in row.error
    assert np.isnan([row.test_accuracy, row.test_loss, row.churn, row.injected_max, row.reference_max]).all()
    assert [len(a) for a in (row.losses, row.metric, row.history_magnitudes)] == [0, 0, 0]
    assert runner.run(trial(0, "param:fc.weight")).reproducible_values() == before


# -- what was written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    few(["bitflip:bits=30", "scale:factor=-3,count=2", "set:value=nan", "set:value=-inf", "zero"], "set:value=nan"),
)
def test_what_is_written_to_memory_beside_what_was_there(one, fault):
    """Parameters and moments are read by hand, before and after."""
    runner = one(per="layer", layers=("fc",), faults=((fault, 1.0),), steps=6)
    for target in ("param:fc", "optim:fc"):
        row, drawn = runner.run(trial(1, target)), runner.draw(trial(1, target))
        state = runner.golden.state_before_step(row.injection.step)
        tensor = tensor_of(state, row.injection.site)
        usual = biggest([tensor])
        (hit,) = runner.fork(drawn).applied_faults
        state = runner.golden.state_before_step(row.injection.step)
        with StepInjection(state.model, drawn.faults, state.optimizers):
            corrupted = tensor_of(state, row.injection.site).detach().clone()
        now = corrupted.reshape(-1)[hit.fault.elements.tolist()]
        assert row.reference_max == usual
        assert row.injected_max == biggest([now])
        assert json.loads(row.faults)[0]["site"] == row.injection.site
        assert json.loads(row.faults)[0]["elements"] == hit.fault.elements.tolist()


def tensor_of(state, site):
    name, _, entry = site.partition(":")[2].partition("/")
    parameter = state.model.get_parameter(name)
    return parameter if not entry else state.optimizers[0].state[parameter][entry]


@pytest.mark.slow
def test_what_is_written_to_an_output_beside_what_was_there(one):
    runner = one(faults=(("set:value=-5e5", 1.0),), layers=("fc",), phases=("fwd",))
    for k in range(4):
        row, step = runner.run(trial(k)), runner.draw(trial(k)).injection.step
        state, seen = runner.golden.state_before_step(step), []
        handle = state.model.fc.register_forward_hook(lambda module, inputs, out: seen.append(out))  # noqa: B023
        runner.workload.step(state)
        handle.remove()
        assert row.reference_max == biggest(seen)
        assert row.injected_max == 5e5


def test_very_many_elements_are_told_by_their_digest(one):
    runner = one(per="tensor", layers=("fc",), faults=(("zero:rate=1", 1.0),), steps=4)
    told = json.loads(runner.run(trial(0, "param:fc.weight")).faults)
    assert [len(fault["elements"]) for fault in told] == [432]
    forked = runner.fork(runner.draw(trial(0, "param:fc.weight")))
    found = faults_text([hit.fault for hit in forked.applied_faults] * 200)
    assert json.loads(found).keys() == {"elements", "digest"}
    assert json.loads(found)["elements"] == 432 * 200


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loose", "how"),
    [
        ("unseeded", "run again, its state differs immediately"),
        ("counter", "restored into fresh objects, its state differs 1 step later"),
    ],
)
def test_a_training_that_does_not_come_back_is_refused(loop, loose, how):
    with pytest.raises(UsageError) as raised, running(TrainingSpec(loop, (("loose", loose),))):
        pass
    told = str(raised.value)
    assert f"is not restored bit for bit after 3 steps: {how}: " in told
    assert "conv.weight" in told
    assert "unsilent explain" in told
    assert "\n" not in told


@pytest.mark.parametrize(("steps", "said"), [(0, "expected at least 1"), (-2, "steps is -2")])
def test_steps_that_make_no_sense(loop, steps, said):
    with pytest.raises(UsageError, match=said), running(TrainingSpec(loop, steps=steps)):
        pass


@pytest.mark.slow
def test_a_single_step_can_be_corrupted(one):
    runner = one(steps=1, faults=(("bitflip:bits=22", 1.0),))
    rows = [runner.run(trial(k)) for k in range(5)]
    assert {(row.injection.step, row.steps_run) for row in rows} == {(0, 1)}
    memory = one(steps=1, per="layer")
    assert {t.memory_kind for t in memory.establish_baseline().targets} == {"param"}  # there are no moments yet
    assert memory.run(trial(0, "param:fc")).steps_run == 1


@pytest.mark.slow
def test_a_file_of_an_accelerator_is_part_of_the_campaign(one, tmp_path):
    from importlib import resources

    text = (resources.files("unsilent.faults.hardware") / "nvdla.toml").read_text()
    (tmp_path / "mine.toml").write_text(text)
    first = one(steps=2, accelerator=f"{tmp_path}/mine.toml")
    again = one(steps=2, accelerator=f"{tmp_path}/mine.toml")
    assert again.campaign == first.campaign
    shares = [line for line in text.splitlines() if line.startswith("activeness")]
    assert shares
    (tmp_path / "mine.toml").write_text(text.replace(shares[0], "activeness = 0.0123", 1))
    other = one(steps=2, accelerator=f"{tmp_path}/mine.toml")
    assert [k.weight for k in other.sampler.kinds] != [k.weight for k in first.sampler.kinds]
    assert other.campaign != first.campaign


@pytest.mark.slow
def test_other_questions_are_other_campaigns(one, loop):
    spec = {"steps": 3}
    names = [
        one(**spec, **more).campaign
        for more in ({}, {"seed": 1}, {"init": 1}, {"faults": (("RD", 1.0),), "phases": ("fwd",)})
    ]
    assert len(set(names)) == len(names)
    assert (
        replace(TrainingSpec(loop), workload="/elsewhere/faulty_loop.py:make").identity()
        == TrainingSpec(loop).identity()
    )
