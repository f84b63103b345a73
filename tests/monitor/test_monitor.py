"""A monitor around training loops of every kind: it changes no bit, leaves nothing behind, and survives its own errors."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from monitor.trainings import TRAININGS, batch, loss_of, plain, same_bits, scaled, state_of
from unsilent.errors import UsageError
from unsilent.monitor import Guard, Monitor, MonitorStop, actions, backward_hooks
from unsilent.monitor.actions import AlarmAction
from unsilent.monitor.attach import AutomaticMonitor
from unsilent.monitor.events import Alarm, Ended, MonitorFailed, SamplingChanged, Started, Verdict
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
    with Monitor(
        training.model, training.optimizers, sinks=[events.append], values=("first:output",), **QUIET
    ) as monitor:
        for number in range(5):
            training.step(number)
    (started,), (ended,) = of_kind(events, Started), of_kind(events, Ended)
    assert set(started.series) == {"gradient", "loss", "norm-input-gradient", "update", "value"}
    assert (ended.steps, ended.unseen, monitor.alarms) == (5, (), [])
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
    verdicts = of_kind(events, Verdict)
    assert [(v.step, v.suspect, v.reason, v.action) for v in verdicts] == [(30, 0, "one rank", "log")]


def test_a_rule_that_goes_on_finding_something_is_reported_once():
    def spoil(training, number):
        if number in (20, 30):
            training.model.first.weight.register_hook(lambda g: g * torch.nan)

    events = []
    run(plain, 40, events, spoil, rules=("nonfinite",), sampling="fixed:1")
    assert [(a.step, a.rule) for a in of_kind(events, Alarm)] == [(20, "nonfinite")]
    assert len(of_kind(events, Verdict)) == 1


def warned_once(training, number):
    """A warning of the rule below in step 20, an alarm in none."""
    if number == 20:
        handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * 3)[1])


@pytest.mark.parametrize(("act_on", "is_stopped"), [("alarm", False), ("warning", True)])
def test_warnings_are_acted_on_where_that_is_asked_for(act_on, is_stopped):
    events = []
    rule = "robust-z:threshold=1000,largest_factor=1e9,warm_up=5,early=5,early_factor=2,warning_share=0.03"
    try:
        run(plain, 40, events, warned_once, rules=(rule,), sampling="fixed:1", on_alarm="stop", act_on=act_on)
        stopped = False
    except MonitorStop:
        stopped = True
    assert {a.level for a in of_kind(events, Alarm)} == {"warning"}
    assert stopped is is_stopped


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

    found = run(plain, STEPS, events, spoil, mode=mode, sampling="fixed:1", values=("first:output",))
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
    monitor = Monitor(training.model, training.optimizers, sampling="fixed:1", values=("first:output",), strict=True)
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
    with Monitor(training.model, training.optimizers, record=tmp_path / "missing" / "run.npz"):
        training.step(0)
    assert "the monitor failed" in caplog.text
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
    together = threading.Barrier(2, timeout=60)

    def train(name):
        def spoil(training, number):
            together.wait()

        found[name] = run(TRAININGS[name], 30, None, spoil, **QUIET)

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
        training.model, training.optimizers, mode="strict", on_alarm="skip", sinks=[events.append], rules=("nonfinite",)
    ):
        training.step(0)
        handle = training.model.first.weight.register_hook(lambda g: (handle.remove(), g * torch.nan)[1])
        training.step(1)
        training.step(2)
    assert [v.outcome for v in of_kind(events, Verdict)] == [
        "logged; the optimizer computes gradients during its step, so that no step can be left out"
    ]


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
    events = []
    found = run(plain, 30, events, strict=True)
    assert_same_run(run(plain, 30), found)
    (changed,) = of_kind(events, SamplingChanged)
    assert changed.interval == 16
    assert events[-1].longest_wait == 16
    assert found[2].intervals == module.SampleIntervals(8, 8, 16)


def test_steps_are_executed_again_only_where_that_is_asked_for():
    training = plain()
    with Monitor(training.model, training.optimizers) as monitor:
        with pytest.raises(UsageError, match="expected 'rerun'"):
            monitor.step(training.step, 0)
        with Guard(training.model, training.optimizers):  # a guard may be used beside a monitor
            training.step(0)
