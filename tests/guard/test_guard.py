"""A guard around plain loops: a planted fault leaves nothing, a clean run raises no alarm, what stays is told."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from conftest import few
from monitor.segments import executed_again
from unsilent.basics.errors import UsageError
from unsilent.guard import Guard, GuardStop
from unsilent.guard.guard_plan import SNAPSHOT_INTERVAL

STEPS = 40
# Loops here count the iterations that were begun, to know where to inject; the count is not put back, which a guard reports.
pytestmark = pytest.mark.filterwarnings("ignore::unsilent.guard.RepeatabilityWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


MAKE = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


class Loader:
    """Draws while it loads, as transforms do."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS // 2):
            x = torch.randn(8, 1, 4, 4, generator=generator)
            yield x + 0.1 * torch.randn_like(x), x.flatten(1)[:, :3].argmax(1)


def corrupt(model, where, value):
    """A fault in a gradient, or in a batch-norm statistic by way of an activation."""
    if where == "statistic":
        model.norm.running_var[0] = value
    else:
        model.get_parameter(where).grad.view(-1)[0] = value


def run(name, faults=(), guarded=True, **options):
    """``faults``: (how often a batch was begun, where, value)."""
    torch.manual_seed(0)
    model = Net()
    optimizer = MAKE[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    guard = Guard(model, optimizer, scheduler, **options) if guarded else None
    begun = 0
    try:
        for _ in range(2):
            loader = Loader()
            for x, y in guard.iterate(loader) if guard else loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                for when, where, value in faults:
                    if when == begun:
                        corrupt(model, where, value)
                optimizer.step()
                scheduler.step()
                begun += 1
    finally:
        if guard:
            guard.close()
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    return state, guard, begun


@pytest.fixture(scope="module")
def golden():
    return {name: run(name, guarded=False)[0] for name in MAKE}


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", MAKE)
def test_a_clean_run_has_the_bits_of_an_unguarded_one_and_no_alarm(golden, name):
    state, guard, begun = run(name)
    assert same(state, golden[name])
    assert (guard.alarms, guard.recoveries, begun) == ([], 0, STEPS)
    assert guard.overhead.steps == STEPS
    assert guard.overhead.check > 0
    assert guard.overhead.snapshot > 0


VALUES = [1e6, -1e17, float("inf"), float("nan")]
PLACES = [(25, "fc.weight"), (13, "conv.weight"), (20, "statistic"), (39, "fc.bias")]
TRANSIENT = [
    (name, every, value, *place)
    for name, every, value, place in itertools.product(MAKE, (1, SNAPSHOT_INTERVAL), VALUES, PLACES)
]
EACH_WITH_BOTH = [
    (name, SNAPSHOT_INTERVAL, VALUES[(number + shift) % 4], *place)
    for shift, name in enumerate(("adamw", "sgd"))
    for number, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("name", "every", "value", "when", "where"), few(TRANSIENT, *EACH_WITH_BOTH, several=True))
def test_a_transient_fault_leaves_nothing(golden, name, every, value, when, where):
    state, guard, begun = run(name, [(when, where, value)], snapshot_interval=every)
    assert same(state, golden[name])
    assert guard.recoveries == 1
    (alarm,) = guard.alarms
    assert alarm.step == when
    assert begun == STEPS + executed_again(when % (STEPS // 2), every)  # states are forgotten at the end of an epoch
    assert {"statistic": "norm.running_var"}.get(where, where) in alarm.tensor


@pytest.mark.parametrize("name", few(["adam", "sgd"], "adam"))
@pytest.mark.parametrize("when", few([0, 13, 19, 20, 38, 39], 0, 19, 39))
def test_a_step_that_is_read_late_is_undone_all_the_same(golden, name, when):
    """Read after the next step, or when the loop ends: the oldest state is still the one before the fault."""
    for value, where in [(float("nan"), "fc.weight"), (float("inf"), "statistic")]:
        state, guard, begun = run(name, [(when, where, value)], delayed_check=True)
        assert same(state, golden[name])
        (alarm,) = guard.alarms
        assert alarm.step == when
        assert STEPS + 2 <= begun <= STEPS + 4 * SNAPSHOT_INTERVAL
        assert guard.overhead.steps == STEPS


def test_late_and_at_once_learn_the_same_and_stop_alike(golden):
    state, guard, _ = run("adam", delayed_check=True)
    assert same(state, golden["adam"])
    assert not guard.alarms
    at_once = run("adam", [(25, "fc.weight", 1e9)])[1].alarms[0]
    assert run("adam", [(25, "fc.weight", 1e9)], delayed_check=True)[1].alarms[0].summary == at_once.summary
    with pytest.raises(GuardStop) as raised:
        run("sgd", [(n, "fc.weight", 1e9) for n in range(15, 60)], delayed_check=True)
    assert raised.value.first.step == 15


def test_steps_that_are_functions_are_settled_before_they_are_saved():
    ends = []
    for fault in (None, 1e12):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        guard, hits = Guard(model, optimizer, delayed_check=True), []

        def step(optimizer=optimizer, model=model, hits=hits, fault=fault):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            hits.append(fault)
            if len(hits) == 15 and fault:
                optimizer.state[model.weight]["exp_avg"][0, 0] = fault

        for _ in range(15):
            guard.step(step)
        assert not guard.alarms
        guard.check_pending_steps()
        assert len(guard.alarms) == (fault is not None)
        guard.check_pending_steps()
        ends.append([p.detach().clone() for p in model.parameters()])
        guard.close()
    assert same(*ends)


def test_in_the_first_steps_only_what_is_not_finite_is_noticed(golden):
    state, guard, _ = run("adam", [(2, "fc.weight", float("inf"))])
    assert same(state, golden["adam"])
    assert guard.recoveries == 1
    with pytest.raises(GuardStop, match="step 10"):  # told when bounds hold, too late to undo
        run("adam", [(2, "fc.weight", 1e6)])


def test_what_passes_makes_no_room_for_more():
    """Faults that grow in steps that each pass their bound: the bound grows slowly, and the last is caught."""
    _, guard, _ = run("sgd", [(12, "fc.weight", 10.0), (20, "fc.weight", 500.0), (28, "fc.weight", 1e6)])
    assert [alarm.step for alarm in guard.alarms][-1] >= 20
    assert guard.alarms


def test_two_faults_apart_and_one_that_stays(golden):
    state, guard, _ = run("sgd", [(15, "fc.weight", 1e9), (45, "conv.weight", 1e9)])
    assert same(state, golden["sgd"])
    assert guard.recoveries == 2
    permanent = [(n, "fc.weight", 1e9) for n in range(15, 60)]
    with pytest.raises(GuardStop, match="although the last 8 iterations ran again") as raised:
        run("sgd", permanent)
    assert raised.value.exit_code == 17
    assert raised.value.first.step == 15


def test_states_may_be_kept_further_apart_later():
    model = nn.Linear(3, 1)
    optimizer, executed = torch.optim.Adam(model.parameters()), []
    with Guard(model, optimizer, snapshot_interval=2) as guard:
        for number in guard.iterate(range(60)):
            executed.append(number)
            if len(executed) == 10:
                guard.lengthen(16)
            model(torch.ones(1, 3) * number).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(executed) == 50:
                model.weight.data[0, 0] = float("inf")
    assert executed[:50] == list(range(50))
    assert executed[50] <= 49 - 16
    assert executed[-1] == 59


def test_small_faults_pass(golden):
    """Said in the documentation: what is no larger than a factor times what is usual is not seen."""
    state, guard, _ = run("adam", [(25, "fc.weight", 1e-3)])
    assert not same(state, golden["adam"])
    assert not guard.alarms


def test_bounds_and_places_are_options(golden):
    state, guard, _ = run(
        "adam", [(25, "fc.weight", 50.0)], bounds={"fc.weight/exp_avg": 1.0}, snapshot_location="file"
    )
    assert same(state, golden["adam"])
    assert guard.recoveries == 1
    assert guard.alarms[0].baseline == 1.0
    alarms = []
    run("adam", [(25, "fc.weight", 1e9)], on_alarm=alarms.append, snapshot_location="host", snapshot_gradients=False)
    assert len(alarms) == 1
    assert "(max) is" in str(alarms[0])


def test_what_cannot_be_guarded_is_refused():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    guard = Guard(model, optimizer)
    with pytest.raises(UsageError, match="has a guard already"):
        Guard(model, optimizer)
    with pytest.raises(UsageError, match="this Adam has a guard already"):
        Guard(nn.Sequential(model), optimizer)
    guard.close()
    Guard(model, [optimizer]).close()
    with pytest.raises(UsageError, match="expected 'all', 'alone' or a process group"):
        Guard(model, optimizer, ranks="some")
    with pytest.raises(UsageError, match="expected a module and a torch optimizer"):
        Guard(model, None)
    plain = nn.Linear(2, 2)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    guard = Guard(plain, sgd)
    batches = guard.iterate([torch.ones(1, 2)] * 2)
    plain(next(batches)).sum().backward()
    sgd.step()
    with pytest.raises(UsageError, match="SGD keeps no momentum or moments"):
        next(batches)


def forked(steps, learnt=None, probe=1e9):
    """A guarded run of which only the last step is faulty; the guard sees ``steps`` steps, and what was learnt before."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 1, 4, 4)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    reader = Guard(model, optimizer)
    rows, names = [], []
    for _ in range(12):
        step()
        names = reader.names()
        rows.append(reader.magnitudes())
    reader.close()
    with contextlib.closing(Guard(model, optimizer)) as guard:
        if learnt:
            guard.learn(*learnt(names, rows))
        for _ in range(steps):
            guard.step(step)
        hit = []

        def faulty():
            step()
            if not hit:
                hit.append(optimizer.state[model.fc.weight]["exp_avg"].view(-1)[0].fill_(probe))

        guard.step(faulty)
    return guard, names, rows


def test_a_guard_begins_with_what_was_learnt_before():
    guard, names, rows = forked(0)
    assert not guard.alarms  # nothing is known yet, and 1e9 is finite
    assert "fc.weight/exp_avg" in names
    assert "norm.running_var" in names
    guard, *_ = forked(0, lambda names, rows: (names, np.array(rows)))
    (alarm,) = guard.alarms
    assert (alarm.tensor, alarm.rule, alarm.step) == ("fc.weight/exp_avg", "calibrated", 0)
    assert alarm.baseline == pytest.approx(100 * max(r[names.index("fc.weight/exp_avg")] for r in rows))
    # By name, whatever the order; a tensor of too few clean steps has no bound.
    guard, *_ = forked(0, lambda names, rows: (names[::-1], np.array(rows)[:, ::-1]))
    assert [a.baseline for a in guard.alarms] == [alarm.baseline]

    def late(names, rows):
        return names, np.where(np.arange(12)[:, None] < 4, np.nan, np.array(rows))

    guard, *_ = forked(0, late)
    assert not guard.alarms
    # The steps before and its own ones count together.
    guard, *_ = forked(2, late)
    assert len(guard.alarms) == 1


def test_a_guard_that_learnt_has_the_bounds_of_one_that_saw_the_steps():
    _, seen, _ = run("adam", [(25, "fc.weight", 1e9)])
    rows, names = [], []

    class Reading(Guard):
        def _check(self, late=None):
            alarm = super()._check(late)
            rows.append(self.magnitudes())
            names[:] = self.names()
            return alarm

    torch.manual_seed(0)
    model, steps = Net(), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    learner = Reading(model, optimizer)
    for _ in range(2):
        for x, y in learner.iterate(Loader()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            steps += 1
    learner.close()
    fresh = Guard(model, optimizer)
    fresh.learn(names, np.array(rows[:25]))
    fresh._check_steps.update_watched_tensors(lambda: False)
    passed = fresh._check_steps.bounds.first_exceeded(
        np.where(np.array(names) == "fc.weight/exp_avg", 1e8, 0.0), range(len(names))
    )
    assert passed.bound == seen.alarms[0].baseline
    with pytest.raises(UsageError, match="expected .steps, names., with every name once"):
        fresh.learn(names, np.zeros((3, 2)))
    with pytest.raises(UsageError, match="infinite or negative"):
        fresh.learn(["a"], np.array([[np.inf]]))
    fresh.close()


def test_a_model_with_moving_statistics_alone_is_restored():
    """A learned input before a normalisation layer without parameters: the model has state, but no parameter."""

    def train(faulty):
        torch.manual_seed(0)
        batches = [torch.randn(8, 4) for _ in range(30)]
        model, scale = nn.Sequential(nn.BatchNorm1d(4, affine=False)), nn.Parameter(torch.arange(1.0, 5.0))
        optimizer = torch.optim.Adam([scale], lr=0.01)
        guard = Guard(model, optimizer)
        for number, batch in guard.iterate(enumerate(batches)):
            optimizer.zero_grad()
            model(scale * batch).pow(3).sum().backward()
            optimizer.step()
            if faulty and number == 17 and not guard.alarms:
                model[0].running_var[1] = 1e30
        return guard.recoveries, [scale.detach(), *model.buffers()]

    (none, golden), (one, restored) = train(False), train(True)
    assert (none, one) == (0, 1)
    assert all(map(torch.equal, golden, restored))
