"""A monitor around training loops of every kind: it changes no bit, leaves nothing behind, and survives its own errors."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from monitor.trainings import TRAININGS, Training, batch, loss_of, plain, same_bits, scaled, state_of
from unsilent.basics.errors import UsageError
from unsilent.detectors.series import load_recording
from unsilent.events.event_kinds import Alarm, Ended, MonitorFailed, SamplingChanged, Started, StepSummary, Verdict
from unsilent.guard import Guard
from unsilent.launch.attach import AutomaticMonitor
from unsilent.monitor import Monitor, MonitorStop, actions, backward_hooks
from unsilent.monitor.actions import NO_SKIP, AlarmAction
from unsilent.monitor.exchange import Exchange
from unsilent.monitor.rule_streams import RuleStreams
from unsilent.monitor.settings import MonitorSettings
from unsilent.monitor.signals import collector as collector_module
from unsilent.monitor.signals import layers
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.signals.state_watch import StateWatch

STEPS = 12
QUIET = {"sampling": "fixed:1", "fingerprint": "full", "strict": True}
PLAIN = torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.update


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


def run(make, steps=STEPS, events=None, spoil=None, **options):
    """Losses and final state; without options not monitored. ``spoil`` is called with the training and the number of a step."""
    training = make()
    losses = []
    sinks = () if events is None else (events.append,)
    monitor = Monitor(training.model, training.optimizers, sinks=sinks, **options) if options else None
    try:
        for number in range(steps):
            if spoil:
                spoil(training, number)
            losses.append(training.step(number))
    finally:
        if monitor:
            monitor.close()
    return losses, state_of(training), monitor


def assert_same_run(one, other):
    assert np.array_equal(one[0], other[0], equal_nan=True)
    assert same_bits(one[1], other[1])


def assert_nothing_left(training=None):
    assert (torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.update) == PLAIN
    if training is not None:
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in training.model.modules())
        assert not any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in training.optimizers)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("options", [QUIET, {"sampling": "fixed:3", "strict": True}, {**QUIET, "mode": "strict"}])
def test_a_monitored_training_has_the_bits_of_one_without_and_no_alarm(name, options):
    events = []
    found = run(TRAININGS[name], events=events, **options)
    assert_same_run(run(TRAININGS[name]), found)
    assert [type(event) for event in events if isinstance(event, (Alarm, Verdict, MonitorFailed))] == []
    assert events[-1].steps >= STEPS - 4  # the scaler leaves some out
    assert_nothing_left()


def test_steps_are_counted_and_every_kind_of_series_is_read():
    events, training = [], TRAININGS["micro-batches"]()
    with Monitor(training.model, training.optimizers, sinks=[events.append], watch="first:output", **QUIET) as monitor:
        for number in range(5):
            training.step(number)
    (started,), (ended,) = of_kind(events, Started), of_kind(events, Ended)
    assert set(started.series) == {"gradient", "loss", "norm-input-gradient", "update", "value"}
    assert (ended.steps, ended.unseen, ended.how, monitor.alarms) == (5, (), "done", [])
    read = [one for one in monitor.series if one.feature in ("gradient", "norm-input-gradient", "value")]
    assert ended.unjudged == len(read)  # five values are too few for robust-z
    assert {one.score for one in of_kind(events, StepSummary)} == {None}
    assert [one.interval for one in of_kind(events, SamplingChanged)] == [1]
    assert 0 < monitor.cost < 1
    assert_nothing_left(training)


def test_changes_of_the_loss_scale_raise_nothing():
    events = []
    run(lambda: scaled(torch.bfloat16), steps=60, events=events, sampling="fixed:1", preset="all", strict=True)
    assert [a.summary for a in of_kind(events, Alarm) if a.level == "alarm"] == []


@pytest.mark.parametrize("mode", ["lagged", "strict"])
def test_a_fault_in_a_gradient_raises_one_alarm(mode):
    def spoil(training, number):
        if number == 30:
            hooks.append(training.model.first.weight.register_hook(lambda g: g * 1e9))
        elif hooks:
            hooks.pop().remove()

    hooks, events = [], []
    run(plain, 40, events, spoil, mode=mode, **QUIET)
    alarms = of_kind(events, Alarm)
    assert (alarms[0].step, alarms[0].feature, alarms[0].tensor) == (30, "gradient", "first.weight")
    assert (alarms[0].series_flagged, alarms[0].series_judged > 2) == (
        2,
        True,
    )  # the L2 norm, and the largest magnitude
    assert [one.health for one in of_kind(events, StepSummary) if one.step == 30] == ["warning"]
    assert [one.step for one in of_kind(events, StepSummary)][-1] == 39
    verdicts = of_kind(events, Verdict)
    assert [(v.step, v.suspect, v.reason, v.action) for v in verdicts] == [(30, 0, "one rank", "log")]


def test_a_large_gradient_of_finite_elements_is_not_called_infinite():
    """Its norm in float32 would be."""
    torch.manual_seed(0)
    model, events = nn.Linear(64, 64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with Monitor(model, optimizer, sinks=[events.append], rule="nonfinite", **QUIET):
        for number in range(4):
            optimizer.zero_grad()
            (model(torch.ones(2, 64)).sum() * (1e25 if number == 2 else 1)).backward()
            assert torch.isfinite(model.weight.grad).all()
            assert torch.isinf(model.weight.grad.norm()) == (number == 2)
            optimizer.step()
    assert of_kind(events, Alarm) == []
    assert max(one.gradient_norm for one in of_kind(events, StepSummary)) < np.inf


def test_what_a_rule_goes_on_finding_is_reported_once_and_hides_nothing_else():
    def spoil(training, number):
        if number in (20, 30):
            training.model.first.weight.register_hook(lambda g: g * torch.nan)

    events = []
    run(plain, 40, events, spoil, rule="nonfinite", sampling="fixed:1")
    assert [a.step for a in of_kind(events, Alarm)] == [20, 21]  # first one gradient, then all other series


def warned_once(training, number):
    """A warning of the rule below in step 20, an alarm in none."""
    if number == 20:
        handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * 3)[1])


@pytest.mark.parametrize(("act_on", "is_stopped"), [("alarm", False), ("warning", True)])
def test_warnings_are_acted_on_where_that_is_asked_for(act_on, is_stopped):
    events = []
    rule = "robust-z:threshold=1000,largest_factor=1e9,warm_up=5,early=5,early_factor=2,warning_share=0.03"
    try:
        run(plain, 40, events, warned_once, rule=rule, sampling="fixed:1", on_alarm="stop", act_on=act_on)
        stopped = False
    except MonitorStop:
        stopped = True
    assert {a.level for a in of_kind(events, Alarm)} == {"warning"}
    assert stopped is is_stopped


# -- when a step is over -------------------------------------------------------------------------------------------


def updates_of(events):
    return [(a.step, a.feature, a.tensor) for a in of_kind(events, Alarm)]


@pytest.mark.parametrize("at", [30, 39])
@pytest.mark.parametrize("name", ["two-optimizers", "adversarial"])
@pytest.mark.parametrize("which", [0, 1])
def test_an_update_is_one_of_its_own_step_whatever_optimizer_makes_it(name, which, at):
    training, events = TRAININGS[name](), []
    optimizer = training.optimizers[which]
    own_parameters = set(optimizer.param_groups[0]["params"])
    options = {"rule": ("nonfinite",), "sampling": "fixed:1", "strict": True}
    with Monitor(training.model, training.optimizers, sinks=[events.append], **options):
        for number in range(at + 1):
            if number == at:  # such an update makes it infinite
                optimizer.param_groups[0]["lr"] = torch.inf
            training.step(number)
    per_step = 2 if name == "adversarial" else 1  # the second optimizer comes first there
    own = per_step * at + (per_step - 1) * (1 - which)
    first = of_kind(events, Alarm)[0]
    assert (first.step, first.feature) == (own, "update")
    assert events[-1].steps == per_step * (at + 1)
    assert first.tensor in {n for n, p in training.model.named_parameters() if p in own_parameters}


def test_values_of_a_forward_pass_after_a_step_are_of_the_next_one():
    training, read_at = TRAININGS["adversarial"](), []
    with Monitor(
        training.model, training.optimizers, watch=("judge.0:input",), rule=("nonfinite",), sampling="fixed:1"
    ) as monitor:
        number = next(n for n, one in enumerate(monitor.series) if one.feature == "value")
        judge = monitor._judge.judge

        def keep(row):
            signals = row.read(len(monitor.series))
            read_at.append((row.step, float(signals.values[number + 1])))
            return judge(row)

        monitor._judge.judge = keep
        make, judge_net = training.model["make"], training.model["judge"]
        expected = []
        for step in range(4):
            for optimizer, scale in zip(training.optimizers, (1.0, 100.0), strict=True):
                optimizer.zero_grad()
                x = make(batch(step)) * scale
                judge_net(x).mean().backward()
                expected.append(float(x.detach().abs().max()))
                optimizer.step()
    assert [step for step, _ in read_at] == list(range(8))
    assert [value for _, value in read_at] == pytest.approx(expected)


def scaled_training(loss_at, scale=10):
    """With a loss scaler; ``loss_at`` gives the loss of a step in place of the plain one."""
    training = plain()
    (optimizer,) = training.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**scale, growth_interval=5)

    def step(number):
        optimizer.zero_grad()
        loss = loss_at(number, loss_of(training.model, batch(number)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return training._replace(step=step)


@pytest.mark.parametrize("mode", ["lagged", "strict"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_found_although_a_scaler_leaves_every_step_out(mode, bad):
    events = []
    make = lambda: scaled_training(lambda n, loss: loss * bad if n >= 20 else loss)  # noqa: E731
    run(make, 30, events, mode=mode, rule=("nonfinite",), sampling="fixed:1", strict=True)
    assert updates_of(events) == [(20, "loss", "")]
    assert events[-1].steps == 30


def test_steps_that_a_scaler_leaves_out_are_steps_and_raise_nothing():
    events = []
    make = lambda: scaled_training(lambda n, loss: loss * 1000, scale=125)  # noqa: E731
    run(make, 60, events, preset="all", sampling="fixed:1", strict=True)
    assert [a.summary for a in of_kind(events, Alarm) if a.level == "alarm"] == []
    assert events[-1].steps == 60


def without_backward():
    """Gradients by torch.autograd.grad."""
    training = plain()
    parameters = list(training.model.parameters())

    def step(number):
        loss = loss_of(training.model, batch(number))
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        training.optimizers[0].step()
        return loss.item()

    return training._replace(step=step)


def test_a_training_without_backward_passes_is_judged_by_the_rest(caplog):
    golden, events = run(without_backward, 60), []

    def spoil(training, number):
        if number == 50:
            training.model.first.weight.detach().numpy()[0, 0] += 1

    run(without_backward, 60, events, spoil, fingerprint="full", sampling="fixed:1", rule=("nonfinite",))
    assert len([r for r in caplog.records if "no backward pass of this model was recognised" in r.getMessage()]) == 1
    assert [(a.feature, a.tensor) for a in of_kind(events, Alarm)] == [("fingerprint", "first.weight")]
    assert 50 <= events[-1].steps <= 60
    assert {name.split()[0] for name in events[-1].unseen} >= {"gradient", "loss"}
    assert not any(name.startswith("update") for name in events[-1].unseen)
    caplog.clear()
    assert_same_run(golden, run(without_backward, 60, sampling="fixed:1", strict=True))


def test_torch_func_between_two_steps_is_no_part_of_the_training():
    def spoil(training, number):
        if number % 4 == 3:
            model, inputs = training.model, batch(number)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            loss = lambda w, x: torch.func.functional_call(model, w, x).square().sum()  # noqa: E731
            torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, inputs)
            torch.func.vmap(lambda x: torch.func.functional_call(model, weights, x))(inputs)

    options = {"watch": ("first:output", "layers.0:input", "last:gradient"), "sampling": "fixed:1", "strict": True}
    events = []
    assert_same_run(run(plain), run(plain, STEPS, events, spoil, **options))
    assert events[-1].steps == STEPS
    assert not events[-1].unseen


@pytest.mark.slow
@pytest.mark.parametrize("make", [without_backward, lambda: in_backward()])
def test_rows_do_not_grow_where_backward_passes_are_unusual(make):
    training = make()
    with Monitor(training.model, training.optimizers, fingerprint="full", sampling="fixed:1") as monitor:
        sizes = []
        for number in range(100):
            training.step(number)
            row = monitor._collector._row
            sizes.append(len(row._parts) + len(row._compared) + len(monitor._collector._arrived))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert monitor._collector.step > 80


def in_backward():
    """An optimizer for each parameter, whose step is made as soon as the gradient is there."""
    torch.manual_seed(0)
    training = plain()
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in training.model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step(number):
        loss = loss_of(training.model, batch(number))
        loss.backward()
        return loss.item()

    return training._replace(optimizers=list(optimizers.values()), step=step)


@pytest.mark.parametrize("mode", ["lagged", "strict"])
def test_optimizers_that_make_their_steps_in_the_backward_pass(mode):
    golden = run(in_backward)
    assert_same_run(golden, run(in_backward, **{**QUIET, "mode": mode}))
    events = []

    def spoil(training, number):
        if number == 30:
            huge_gradient(30)(training, number)
        if number == 35:
            training.model.last.weight.detach().numpy()[0, 0] += 1

    run(in_backward, 40, events, spoil, **{**QUIET, "mode": mode})
    found = {(a.step, a.feature) for a in of_kind(events, Alarm)}
    assert {(30, "gradient"), (35, "fingerprint")} <= found
    assert events[-1].steps == 40


# -- values that are infinite by design ------------------------------------------------------------------------------


class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)


def masked():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(4, 6), "mask": Masked(), "last": nn.Linear(6, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number):
        optimizer.zero_grad()
        loss = model["last"](model["mask"](model["first"](batch(number))).softmax(-1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(model, [optimizer], step)


@pytest.mark.parametrize("rules", [("nonfinite",), ("robust-z", "nonfinite")])
def test_a_value_that_is_never_finite_hides_no_other_one(rules, caplog):
    def spoil(training, number):
        if number == 30:
            weight = training.model["last"].weight
            handle = weight.register_hook(lambda g: (handle.remove(), g * torch.nan)[1])

    events, watched = [], ("mask:output", "first:output")
    run(masked, 31, events, spoil, watch=watched, rule=rules, sampling="fixed:1", fingerprint="off", strict=True)
    assert {(a.step, a.feature, a.tensor) for a in of_kind(events, Alarm)} <= {
        (30, "gradient", "last.weight"),
        (30, "update", "last.weight"),
    }
    assert of_kind(events, Alarm)
    assert len(of_kind(events, Verdict)) == 1
    (told,) = [r.getMessage() for r in caplog.records if "not finite in one of the first" in r.getMessage()]
    assert "mask:output" in told
    assert "first:output" not in told


def test_a_value_that_was_finite_is_judged():
    def spoil(training, number):
        if number == 20:
            training.model["first"].weight.data.fill_(torch.nan)

    events = []
    run(masked, 21, events, spoil, watch=("first:output",), rule=("nonfinite",), sampling="fixed:1", fingerprint="off")
    (judged,) = of_kind(events, Alarm)
    assert judged.step == 20


# -- its own errors ------------------------------------------------------------------------------------------------


def explode(*args, **named):
    raise ZeroDivisionError("planted")


PLACES = {
    "gradients": (collector_module, "norms_and_largest"),
    "norm layers": (layers, "read_input_gradient"),
    "values": (layers, "tensors_in"),
    "fingerprints": (StateWatch, "take"),
    "comparison": (StateWatch, "compare"),
    "rules": (RuleStreams, "judge"),
    "exchange": (Exchange, "begin"),
    "agreement": (Exchange, "end"),
    "end of a step": (AlarmAction, "end_step"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["lagged", "strict"])
def test_an_error_of_the_monitor_ends_the_monitor_alone(place, mode, monkeypatch, caplog):
    golden, events = run(plain), []

    def spoil(training, number):
        if number == 6:
            monkeypatch.setattr(*PLACES[place], explode)

    found = run(plain, STEPS, events, spoil, mode=mode, sampling="fixed:1", watch="first:output")
    assert_same_run(golden, found)
    (failed,) = of_kind(events, MonitorFailed)
    assert "planted" in failed.error
    assert len(of_kind(events, Ended)) == 1
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [("switched off" in e.getMessage()) for e in errors] in ([True], [True, False])
    assert_nothing_left()


@pytest.mark.parametrize(
    ("owner", "name"), [(backward_hooks, "_scale_of"), (backward_hooks, "tensors_in"), (SignalRow, "discard_values")]
)
def test_an_error_around_a_loss_scaler_ends_the_monitor_alone(owner, name, monkeypatch):
    def make():
        training = scaled()
        training.model.first.weight.register_hook(lambda g: g * torch.inf)  # each update is left out
        return training

    golden, events = run(make), []
    monkeypatch.setattr(owner, name, explode)
    found = run(make, STEPS, events, sampling="fixed:1")
    assert_same_run(golden, found)
    assert [event.error for event in of_kind(events, MonitorFailed)] == ["ZeroDivisionError: planted"]
    assert_nothing_left()


@pytest.mark.parametrize("place", PLACES)
def test_a_strict_monitor_raises_its_own_errors(place, monkeypatch):
    training = plain()
    monitor = Monitor(training.model, training.optimizers, sampling="fixed:1", watch="first:output", strict=True)
    training.step(0)
    training.step(1)
    monkeypatch.setattr(*PLACES[place], explode)
    with pytest.raises(ZeroDivisionError, match="planted"):
        training.step(2)
    monkeypatch.undo()
    monitor.close()
    assert_nothing_left(training)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_sink_that_fails_is_left_out(first, caplog):
    class Sink:
        calls = 0

        def __call__(self, event):
            self.calls += 1
            if self.calls > first:
                explode()

    training, sink, events = plain(), Sink(), []
    with Monitor(training.model, training.optimizers, sinks=[sink, events.append]):
        losses = [training.step(number) for number in range(STEPS)]
    assert losses == run(plain)[0]
    assert len([record for record in caplog.records if "no events for Sink" in record.getMessage()]) == 1
    assert isinstance(events[-1], Ended)
    assert events[-1].steps == STEPS


def test_a_strict_monitor_raises_errors_of_sinks():
    training = plain()
    with pytest.raises(ZeroDivisionError):
        Monitor(training.model, training.optimizers, sinks=[explode], strict=True)
    assert_nothing_left(training)
    Monitor(training.model, training.optimizers).close()


def test_a_recording_that_cannot_be_written_is_no_error_of_the_job(tmp_path, caplog):
    training = plain()
    with Monitor(training.model, training.optimizers, record=tmp_path / "run.npz"):
        training.step(0)
        (tmp_path / "run.npz").mkdir()
    assert "the monitor failed" in caplog.text
    assert_nothing_left(training)


def test_a_recording_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    training = plain()
    with pytest.raises(UsageError, match=r"cannot write the recording to .*missing"):
        Monitor(training.model, training.optimizers, record=tmp_path / "missing" / "run.npz")
    assert_nothing_left(training)


def test_recordings_never_replace_anything(tmp_path):
    path, training = tmp_path / "run.npz", plain()
    for steps in (1, 2, 3):
        with Monitor(training.model, training.optimizers, record=path, sampling="fixed:1"):
            for number in range(steps):
                training.step(number)
    kept = {one.name: len(load_recording(one).seconds) for one in tmp_path.iterdir()}
    assert kept == {"run.npz": 3, "run.1.npz": 1, "run.2.npz": 2}
    path.write_text("my notes")
    with pytest.raises(UsageError, match="holds something else than a recording; give another file"):
        Monitor(training.model, training.optimizers, record=path)
    assert path.read_text() == "my notes"
    assert_nothing_left(training)


def test_an_error_in_the_loop_passes_and_nothing_is_left():
    training = plain()

    def loop():
        with Monitor(training.model, training.optimizers, **QUIET):
            training.step(0)
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert_nothing_left(training)
    assert_same_run(run(plain), run(plain))


# -- several monitors ------------------------------------------------------------------------------------------------


def test_two_monitors_in_one_process():
    golden = [run(TRAININGS[name]) for name in ("plain", "rms-norm")]
    trainings = [TRAININGS[name]() for name in ("plain", "rms-norm")]
    monitors = [Monitor(one.model, one.optimizers, **QUIET) for one in trainings]
    losses = [[one.step(number) for one in trainings] for number in range(STEPS)]
    monitors[0].close()
    assert torch.autograd.backward is not PLAIN[0]
    monitors[1].close()
    for number, training in enumerate(trainings):
        assert golden[number][0] == [pair[number] for pair in losses]
        assert same_bits(golden[number][1], state_of(training))
        assert monitors[number]._collector.step == STEPS
        assert_nothing_left(training)


def test_trainings_in_several_threads_do_not_mix():
    names = ("plain", "rms-norm")
    golden, found = [run(TRAININGS[name], 30) for name in names], {}
    built = {name: TRAININGS[name]() for name in names}  # here, as they draw from the generator of the process
    together = threading.Barrier(2, timeout=60)

    def train(name):
        def spoil(training, number):
            together.wait()

        found[name] = run(lambda: built[name], 30, None, spoil, **QUIET)

    trainings = [threading.Thread(target=train, args=(name,)) for name in names]
    for thread in trainings:
        thread.start()
    for thread in trainings:
        thread.join()
    for name, one in zip(names, golden, strict=True):
        assert_same_run(one, found[name])
        monitor = found[name][2]
        assert (monitor._collector.step, monitor._collector.backwards, monitor.alarms) == (30, 30, [])
    assert_nothing_left()


def test_a_training_in_another_thread_than_its_monitor_is_heard_from_its_second_step_on():
    training = plain()
    with Monitor(training.model, training.optimizers, **QUIET) as monitor:
        thread = threading.Thread(target=lambda: [training.step(number) for number in range(STEPS)])
        thread.start()
        thread.join()
        assert monitor._collector.step == STEPS - 1


def test_a_monitor_ends_with_what_it_watches():
    training, events = plain(), []
    Monitor(training.model, training.optimizers, sinks=[events.append], **QUIET)
    training.step(0)
    gone = [weakref.ref(part) for part in (training.model, *training.optimizers)]
    del training
    gc.collect()
    assert [part() for part in gone] == [None, None]
    assert (type(events[-1]), events[-1].steps) == (Ended, 1)
    assert_nothing_left()


def test_attaching_twice_is_refused():
    one, other = plain(), plain()
    with Monitor(one.model, one.optimizers):
        with pytest.raises(UsageError, match="Net has a monitor already"):
            Monitor(one.model, other.optimizers)
        with pytest.raises(UsageError, match="AdamW has a monitor already"):
            Monitor(other.model, one.optimizers)
    with Monitor(one.model, one.optimizers):
        one.step(0)
    assert_nothing_left(one)


def test_options_are_those_of_the_command_line():
    settings = MonitorSettings(
        rule="nonfinite", watch="first:output", sampling=4, budget=1, save_to="states", on_alarm="save"
    )
    assert (settings.rule, settings.watch, settings.sampling) == (("nonfinite",), ("first:output",), "fixed:4")
    assert (settings.save_to, repr(settings.budget)) == (Path("states"), "1.0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "1"}, "budget= is '1'; expected a number"),
        ({"budget": 7}, "budget= is 7; expected a percentage"),
        ({"sampling": 1.5}, "sampling= is 1.5; expected auto, or fixed:R"),
        ({"rule": 3}, "rule= is 3; expected texts"),
        ({"rules": "nonfinite"}, "unknown option of a monitor 'rules'; did you mean 'rule'?"),
        ({"settings": MonitorSettings(), "mode": "strict"}, "settings and mode were both given"),
        ({"on_alarm": "no"}, "unknown on_alarm='no'. Known: log,"),
        ({"on_alarm": "skip"}, "on_alarm= is 'skip', but mode= is 'lagged'"),
        ({"on_alarm": "save"}, "on_alarm= is 'save', but there is no folder for the states; give save_to="),
        ({"save_to": "states"}, "save_to= is given, but on_alarm= is 'log'"),
        ({"act_on": "no"}, "unknown act_on='no'"),
        ({"log_normal": 3}, "log_normal= is 3; expected true or false"),
        ({"metrics_port": -1}, "metrics_port= is -1; expected 0 or more"),
        ({"metrics_port": "a"}, "metrics_port= is 'a'; expected a whole number"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(options, said):
    training = plain()
    with pytest.raises(UsageError) as raised:
        Monitor(training.model, training.optimizers, **options)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)
    assert_nothing_left(training)


def test_a_model_and_optimizers_that_do_not_belong_together_are_refused():
    one, other = plain(), plain()
    with pytest.raises(UsageError, match="no parameter of AdamW belongs to this Net"):
        Monitor(one.model, other.optimizers)
    with pytest.raises(UsageError, match=r"Monitor\(AdamW, Net\) was given"):
        Monitor(one.optimizers[0], one.model)


@pytest.mark.parametrize("optimizers", [[], None, [nn.Linear(1, 1)]])
def test_what_is_no_optimizer_is_refused(optimizers):
    with pytest.raises((UsageError, TypeError)):
        Monitor(nn.Linear(1, 1), optimizers)
    assert_nothing_left()


def test_a_program_with_a_monitor_of_its_own_gets_no_other_one():
    automatic = AutomaticMonitor(MonitorSettings())
    automatic.start()
    try:
        training = plain()
        with Monitor(training.model, training.optimizers):
            training.step(0)
    finally:
        automatic.stop()
    assert (automatic.monitors, automatic.failed, automatic.refused) == (0, False, None)
    assert_nothing_left(training)


# -- actions -----------------------------------------------------------------------------------------------------------


def huge_gradient(at):
    """Corrupts the gradient of one step."""

    def spoil(training, number):
        if number == at:
            handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * 1e9)[1])

    return spoil


def test_a_step_that_is_left_out_changes_nothing_but_goes_on():
    training, events = plain(), []
    states, gradients = [], []
    with Monitor(training.model, training.optimizers, mode="strict", on_alarm="skip", sinks=[events.append], **QUIET):
        for number in range(45):
            huge_gradient(30)(training, number)
            training.step(number)
            states.append(state_of(training))
            gradients.append([p.grad is not None for p in training.model.parameters()])
    assert same_bits(states[29], states[30])
    assert not same_bits(states[30], states[31])
    assert all(all(one) for one in gradients)
    assert {event.step for event in of_kind(events, Alarm)} == {30}
    (verdict,) = of_kind(events, Verdict)
    assert (verdict.action, verdict.outcome) == ("skip", "the optimizer step is left out")


def test_all_optimizers_of_a_step_are_left_out():
    training = TRAININGS["two-optimizers"]()
    with Monitor(training.model, training.optimizers, mode="strict", on_alarm="skip", **QUIET):
        for number in range(31):
            before = state_of(training)
            huge_gradient(30)(training, number)
            training.step(number)
    assert same_bits(before, state_of(training))


def test_a_step_with_a_closure_cannot_be_left_out():
    training, events = TRAININGS["closure"](), []
    with Monitor(
        training.model, training.optimizers, mode="strict", on_alarm="skip", sinks=[events.append], rule="nonfinite"
    ):
        training.step(0)
        handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * torch.nan)[1])
        training.step(1)
        training.step(2)
    assert {v.outcome for v in of_kind(events, Verdict)} == {NO_SKIP}


class FailsOnce(torch.optim.SGD):
    """Raises an error in step 30."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 31:
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_step_that_is_left_out_and_fails_gives_its_gradients_back_where_it_is_repeated(is_repeated):
    training = plain(make=lambda parameters: FailsOnce(parameters, lr=1e-2))
    (optimizer,), weight = training.optimizers, training.model.first.weight
    with Monitor(training.model, optimizer, mode="strict", on_alarm="skip", **QUIET) as monitor:
        for number in range(30):
            training.step(number)
        before = state_of(training)
        huge_gradient(30)(training, 30)
        with pytest.raises(MemoryError):
            training.step(30)
        if is_repeated:
            optimizer.step()
            assert weight.grad.abs().max() > 1e3
            assert same_bits(before, state_of(training))  # it was left out again
        training.step(31)
        assert weight.grad.abs().max() < 1e3
        assert len(monitor.verdicts) == 1


def test_only_so_many_states_are_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(actions, "MOST_SAVED", 2)

    def spoil(training, number):
        if number in (20, 24, 28, 32):
            handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * 1e9)[1])

    events = []
    run(plain, 36, events, spoil, on_alarm="save", save_to=tmp_path, **QUIET)
    outcomes = [verdict.outcome for verdict in of_kind(events, Verdict)]
    assert len(outcomes) > 2
    assert [outcome == actions.NO_SAVE for outcome in outcomes] == [False] * 2 + [True] * (len(outcomes) - 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_saved_state_never_replaces_another_one(tmp_path):
    training = plain()
    first, second = (actions.save_state(tmp_path, training.model, training.optimizers, 3, 0) for _ in range(2))
    assert first == second
    assert {one.name for one in tmp_path.iterdir()} == {"step-3-rank-0.pt", "step-3-rank-0.1.pt"}


def test_a_saved_state_is_the_live_one(tmp_path):
    training = plain()
    with Monitor(training.model, training.optimizers, on_alarm="save", save_to=tmp_path / "states", **QUIET):
        for number in range(33):
            huge_gradient(30)(training, number)
            if number == 31:
                live = state_of(training)
            training.step(number)
    (path,) = (tmp_path / "states").iterdir()
    assert path.name == "step-30-rank-0.pt"
    saved, other = torch.load(path, weights_only=True), plain()
    other.model.load_state_dict(saved["model"])
    other.optimizers[0].load_state_dict(saved["optimizers"][0])
    assert same_bits(state_of(other), live)


@pytest.mark.parametrize(("place", "code"), [("gradient", 16), ("weight", 17)])
@pytest.mark.parametrize("mode", ["lagged", "strict"])
def test_a_job_is_stopped_with_the_exit_code_of_the_proof(place, code, mode):
    last = 0

    def spoil(training, number):
        nonlocal last
        last = number
        if place == "gradient":
            huge_gradient(30)(training, number)
        elif number == 30:
            training.model.first.weight.detach().numpy()[0, 0] += 1

    with pytest.raises(MonitorStop) as raised:
        run(plain, 40, None, spoil, on_alarm="stop", mode=mode, **QUIET)
    assert raised.value.exit_code == code
    assert last == (30 if mode == "strict" else 31)
    assert_nothing_left()


def test_an_alarm_in_the_last_step_stops_the_job_as_well():
    with pytest.raises(MonitorStop, match="in step 39"):
        run(plain, 40, None, huge_gradient(39), on_alarm="stop", **QUIET)
    assert_nothing_left()


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_grows_with_the_number_of_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def sizes(part, seen=None, depth=4):
        """Lengths of all containers that the monitor leads to."""
        seen = set() if seen is None else seen
        if id(part) in seen or depth < 0:
            return 0
        seen.add(id(part))
        if isinstance(part, dict):
            return len(part) + sum(sizes(value, seen, depth - 1) for value in part.values())
        if isinstance(part, (list, tuple, set)) or type(part).__name__ == "deque":
            return len(part) + sum(sizes(value, seen, depth - 1) for value in part)
        if type(part).__module__.startswith("unsilent.monitor"):
            own = getattr(part, "__dict__", {})
            return sum(sizes(value, seen, depth - 1) for value in own.values())
        return 0

    found = []
    with Monitor(model, optimizer, sinks=[], sampling="fixed:4") as monitor:
        for number in range(600):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            if number in (200, 400, 599 - 599 % 4):
                found.append(sizes(monitor))
    assert len(set(found[:2])) == 1
    assert found[-1] <= found[0] + 16  # pieces of the present row


def test_backward_passes_without_a_step_are_told(caplog):
    training = plain()
    with Monitor(training.model, training.optimizers):
        for number in range(3):
            loss_of(training.model, batch(number)).backward()
    assert "no step of an optimizer was seen" in caplog.text


def test_sampling_is_reported(monkeypatch):
    from unsilent.monitor import monitor as module
    from unsilent.monitor import sampling

    monkeypatch.setattr(sampling, "fitting_intervals", lambda now, costs, budget: sampling.SampleIntervals(8, 8, 16))
    monkeypatch.setattr(sampling, "share_at_longest", lambda *_: 0.0)
    monkeypatch.setattr(sampling, "FIRST_COST", -1.0)
    events = []
    found = run(plain, 40, events, strict=True)
    assert_same_run(run(plain, 40), found)
    start, changed = of_kind(events, SamplingChanged)
    assert (start.interval, changed.interval) == (0, 16)
    assert 16 <= events[-1].longest_wait <= 16 + 3  # parts of the state have other turns after the change
    assert found[2].intervals == module.SampleIntervals(8, 8, 16)


def test_steps_are_executed_again_only_where_that_is_asked_for():
    training = plain()
    with Monitor(training.model, training.optimizers) as monitor:
        with pytest.raises(UsageError, match="expected 'rerun'"):
            monitor.step(training.step, 0)
        with Guard(training.model, training.optimizers):  # a guard may be used beside a monitor
            training.step(0)
