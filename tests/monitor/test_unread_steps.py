"""Steps that are only counted and checked at once: the training has the same bits, and the steps that are read all signals."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from monitor.test_monitor import STEPS, assert_nothing_left, assert_same_run, of_kind, run
from monitor.trainings import TRAININGS, plain
from unsilent.events.event_kinds import Alarm, Ended, MonitorFailed, SamplingChanged, Verdict
from unsilent.monitor import Monitor, MonitorStop, sampling
from unsilent.monitor.signals.collector import LONGEST_CHECK, TIMED
from unsilent.monitor.signals.row import SignalRow


@pytest.fixture
def one_in_three(monkeypatch):
    """Steps are read from the second one on, one in three; which ones is returned."""
    monkeypatch.setattr(sampling, "FIRST_COST", 0.0)
    monkeypatch.setattr(sampling, "FIRST_COST_EACH", 0.0)
    monkeypatch.setattr(sampling, "share_at_longest", lambda *_: math.inf)
    monkeypatch.setattr(sampling, "fitting_rows", lambda *_: 3)
    read, plain_read = [], SignalRow.read

    def noted(row, count):
        read.append(row.step)
        return plain_read(row, count)

    monkeypatch.setattr(SignalRow, "read", noted)
    return read


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_bits_of_one_without_a_monitor(name, one_in_three):
    events, every = [], []
    found = run(TRAININGS[name], 2 * STEPS, events, strict=True)
    assert_same_run(run(TRAININGS[name], 2 * STEPS), found)
    assert of_kind(events, (Alarm, Verdict, MonitorFailed)) == []
    assert_nothing_left()
    steps = list(one_in_three)
    assert len(steps) > 3
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} <= {3, 4}
    run(TRAININGS[name], 2 * STEPS, every, sampling="fixed:1", strict=True)
    assert of_kind(events, Ended)[0].steps == of_kind(every, Ended)[0].steps
    assert of_kind(events, Ended)[0].unseen_count == of_kind(every, Ended)[0].unseen_count


def test_the_start_line_says_what_is_not_read_and_a_later_one_from_when_on_rules_judge(one_in_three):
    events = []
    run(plain, 30, events, strict=True)
    start, changed = of_kind(events, SamplingChanged)
    assert (start.interval, changed.interval) == (0, 12)
    assert str(start).startswith(
        "step 0: no tensor is read so far (a loss that is not finite, and the norm of gradients that clip_grad_norm_ computes"
    )
    assert "one step in 3 is read" in changed.reason
    assert f"judge from about step {changed.step + 60} on" in changed.reason


def test_a_flip_between_two_steps_is_found_if_the_second_one_is_read_and_it_is_the_turn_of_the_tensor(one_in_three):
    def spoil(training, number):
        if number in (110, 113, 116, 119):
            parameter = training.model.first.weight
            parameter.detach().view(-1).view(torch.int32).numpy()[0] ^= 1 << 29

    events = []
    run(plain, 130, events, spoil, strict=True, rule="update-rms")
    assert {110, 113, 116, 119} <= set(one_in_three)
    (alarm,) = of_kind(events, Alarm)
    assert (alarm.tensor, alarm.step in (110, 113, 116, 119)) == ("first.weight", True)


def clip_by_two_calls(parameters, most):
    """What `clip_grad_norm_` does, as programs write it that need the norm of several devices first."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([one.grad for one in parameters])
    nn.utils.clip_grads_with_norm_(iter(parameters), most, norm)
    nn.utils.get_total_norm([one.grad for one in parameters])  # of what is left, which is no norm to judge
    return norm


def train(spoil, clip=nn.utils.clip_grad_norm_, scaler=None, steps=60, value=1e15, **options):
    """Events of a training that clips its gradients; ``spoil`` is called with step and model after each backward pass."""
    torch.manual_seed(0)
    model, events = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Monitor(model, optimizer, sinks=[events.append], strict=True, **options):
        for step in range(steps):
            optimizer.zero_grad()
            loss = 100 * model(torch.randn(16, 8)).square().mean()
            loss = loss * math.nan if spoil == "loss" and step == 40 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if spoil == "gradient" and step == 40:
                model[0].weight.grad[0, 0] = value
            if clip:
                clip(model.parameters(), 1.0)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return events


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, clip_by_two_calls])
def test_a_gradient_that_changes_after_the_backward_pass_and_is_clipped_away_is_found_at_once(clip):
    (alarm,) = of_kind(train("gradient", clip), Alarm)
    assert (alarm.step, alarm.rule, alarm.feature) == (40, "robust-z", "norm before clipping")
    assert str(alarm).startswith("step 40: norm before clipping (number) is 1e+15, baseline ")
    assert of_kind(train("gradient", clip=None), Alarm) == []  # nobody has computed a norm
    (alarm,) = of_kind(train("gradient", clip, value=1e30), Alarm)  # the norm that torch computes overflows
    assert str(alarm).startswith("step 40: norm before clipping (number) is inf (nonfinite)")


@pytest.mark.parametrize("options", [{}, {"sampling": "fixed:1"}, {"sampling": "fixed:1", "mode": "strict"}])
def test_the_job_stops_before_the_step_that_would_use_it(options):
    with pytest.raises(MonitorStop, match="after an alarm in step 40"):
        train("gradient", on_alarm="stop", **options)


def test_a_loss_that_is_not_finite_is_found_at_once_and_reported_once():
    alarms = of_kind(train("loss", clip=None), Alarm)
    assert [(one.step, one.feature, one.rule) for one in alarms] == [(40, "loss", "nonfinite")]


def test_what_no_rule_asks_for_is_not_checked():
    assert of_kind(train("gradient", rule="update-rms"), Alarm) == []
    assert of_kind(train("loss", rule="update-rms"), Alarm) == []


def test_a_loss_scaler_that_finds_its_factor_raises_nothing():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    assert of_kind(train("", scaler=scaler), Alarm) == []


def test_a_verdict_on_a_step_that_is_not_read_names_what_was_found():
    events = train("gradient")
    verdict = of_kind(events, Verdict)[0]
    assert verdict.tensor == "norm before clipping number"


def test_what_the_first_check_takes_is_not_multiplied(monkeypatch):
    """One step in some is timed, and stands for all of them; the first one loads what later ones have."""
    assert seconds_of_checks(monkeypatch, 10) == 0.0


def test_a_check_that_another_program_interrupts_does_not_stand_for_all(monkeypatch):
    assert 0 < seconds_of_checks(monkeypatch, TIMED) <= 2 * TIMED * LONGEST_CHECK


def seconds_of_checks(monkeypatch, steps):
    """What checks of so many steps are said to take by a clock that goes by a second each time it is looked at."""
    clock = iter(range(10**6))
    monkeypatch.setattr("unsilent.monitor.signals.collector.time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(sampling.SamplingControl, "may_begin", lambda _: False)
    training = plain()
    with Monitor(training.model, training.optimizers) as monitor:
        for number in range(steps):
            training.step(number)
        return monitor._collector.seconds["checks"]


def calls_of(run):
    """How many functions of Python are called."""
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_step_that_is_not_read_calls_few_functions():
    """Between large operations each call takes microseconds, as what it needs has left the caches of the processor."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        step()
    bare = min(calls_of(step) for _ in range(3))
    with Monitor(model, optimizer):
        step()
        added = min(calls_of(step) for _ in range(3)) - bare
    assert 0 < added <= 20


def alarms_beside(when, own=None, other=None, losses=(1,), is_scaled=False, **options):
    """Alarms of a training beside that of a model with as many parameters, which the program clips as well.

    ``when``: when the pass of the other model comes, seen from that of the own one and its step; ``own``: what a gradient becomes
    in step 40; ``other``: what the loss of the other model is multiplied with then; ``losses``: what the own loss is multiplied
    with from step 40 on, in one pass for each number.
    """
    torch.manual_seed(0)
    model, stranger = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2))
    optimizer, events = torch.optim.Adam(model.parameters(), lr=1e-3), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=is_scaled)

    def pass_of_stranger(step):
        stranger.zero_grad()
        (stranger(torch.randn(16, 8)).square().mean() * (other if other and step == 40 else 1)).backward()

    def clip(parameters):
        nn.utils.clip_grad_norm_(parameters, 1.0)

    with Monitor(model, optimizer, sinks=[events.append], strict=True, **options):
        for step in range(60):
            if when == "before":
                pass_of_stranger(step)
                clip(stranger.parameters())
            optimizer.zero_grad()
            for factor in losses if step >= 40 else (1,):
                scaler.scale(
                    100 * model(torch.randn(16, 8)).square().mean() * factor
                ).backward()  # too large for the first factors
            if own and step == 40:
                model[0].weight.grad[0, 0] = own
            if when == "between":
                pass_of_stranger(step)
            scaler.unscale_(optimizer)
            clip(model.parameters())
            if when == "between":
                clip(stranger.parameters())
            scaler.step(optimizer)
            scaler.update()
            if when == "after":
                pass_of_stranger(step)
                clip(stranger.parameters())
    return [(one.step, one.feature, one.rule) for one in of_kind(events, Alarm)]


beside = pytest.mark.parametrize("when", ["before", "between", "after"])


@beside
def test_norms_of_another_model_with_as_many_parameters_do_not_hide_those_of_this_one(when):
    assert alarms_beside(when, own=1e15) == [(40, "norm before clipping", "robust-z")]


@beside
@pytest.mark.parametrize("factor", [1e9, math.nan])
def test_loss_and_norm_of_another_model_are_not_judged(when, factor):
    assert alarms_beside(when, other=factor, on_alarm="stop") == []


def test_finite_losses_of_another_model_do_not_make_each_step_an_alarm():
    found = alarms_beside("before", losses=[math.nan])
    assert [one for one in found if one[1] == "loss"] == [(40, "loss", "nonfinite")]


@pytest.mark.parametrize("losses", [[math.nan, 1], [1, math.nan]])
def test_a_finite_loss_of_the_same_step_does_not_make_each_step_an_alarm(losses):
    model = nn.Linear(1, 1)  # whose parameters stay finite, as no optimizer uses the gradients
    optimizer, events = torch.optim.SGD(model.parameters(), lr=0.0), []
    with Monitor(model, optimizer, sinks=[events.append], strict=True):
        for step in range(20):
            for factor in losses if step >= 10 else [1]:
                (model(torch.ones(1, 1)).sum() * factor).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert [(one.step, one.rule) for one in of_kind(events, Alarm)] == [(10, "nonfinite")]


def test_a_pass_of_another_model_does_not_hide_that_a_loss_scaler_finds_its_factor():
    assert alarms_beside("between", is_scaled=True) == []


def test_a_loss_that_reaches_other_parameters_than_those_before_is_checked():
    heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
    optimizer, events = torch.optim.SGD(heads.parameters(), lr=0.0), []
    with Monitor(heads, optimizer, sinks=[events.append], strict=True):
        for step in range(20):
            optimizer.zero_grad()
            (heads[step % 2](torch.ones(1, 4)).sum() * (math.nan if step == 15 else 1)).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert [(one.step, one.feature) for one in of_kind(events, Alarm)] == [(15, "loss")]


def test_norms_of_two_parts_of_a_model_with_as_many_parameters_are_compared_apart():
    """A norm that is unusual for the first part would be a small one of the second part."""
    parts = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
    optimizer, events = torch.optim.SGD(parts.parameters(), lr=0.0), []
    with Monitor(parts, optimizer, sinks=[events.append], strict=True):
        for step in range(120):
            optimizer.zero_grad()
            parts[0](torch.randn(8, 4)).square().mean().backward()
            (parts[1](torch.randn(8, 4)).square().mean() * 1e6).backward()
            if step == 110:
                parts[0].weight.grad[0, 0] = 1e4
            for part in parts:
                nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
    assert [(one.step, one.feature) for one in of_kind(events, Alarm)] == [(110, "norm before clipping")]
