"""Numbers that decide quietly, tensors without memory, judges that write, and weights that change between trials."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unsilent
from exactness.faults import Trial, draw
from exactness.here import SEED, Base, Table, at, numbers, seeded
from exactness.listening import insist
from exactness.oracle import Row, row
from unsilent.basics.errors import InjectionError, UsageError
from unsilent.engine import PlainEngine, make_engine
from unsilent.engine.cached import CachedEngine
from unsilent.faults import Fault
from unsilent.outcomes.base import JudgeVerdict

pytestmark = pytest.mark.slow

TABLE = Table()


@TABLE.trap((8, 16), (3, 16))
class Poisson(Base):
    """A rate of zero draws nothing, so the stream of random numbers shifts only under a fault."""

    def between(self, y: Tensor) -> Tensor:
        rate = functional.relu(y - 60).nan_to_num(0, 0, 0).clamp(max=1e4)
        return y + torch.poisson(rate) + torch.rand(64)


def signs(engine: PlainEngine) -> Sequence[Trial]:
    """The numbers that decide the sign of the zero, set so that it is -0 and +0."""
    one, minus = 0x3F800000, 0xBF800000
    found = []
    for values in ([one, one], [one, minus], [minus, one]):
        places, bits = np.array([1, 2]), np.array(values, np.uint32)
        found.append(at(Fault("op:first#addmm.0/fwd/out", "float32", (8, 64), places, "set", bits, step=0)))
    return found


@TABLE.trap((8, 16), directed=signs)
class ComplexItem(Base):
    """Python reads a complex number and heeds the sign of a zero in it."""

    def between(self, y: Tensor) -> Tensor:
        number = torch.complex(-1 - y[0, 0].abs() * 0, y[0, 1].relu() * torch.sign(y[0, 2]) * 0.0).item()
        assert isinstance(number, complex)
        return y * cmath.phase(number)


@TABLE.trap((8, 16))
class Tangents(Base):
    """Forward-mode derivatives: torch stands in for tangents of zero by tensors without memory."""

    def between(self, y: Tensor) -> Tensor:
        def layer(v: Tensor) -> Tensor:
            return functional.linear(v, self.last.weight).tanh()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch imports for it is deprecated
            slope = torch.func.jvp(layer, (y,), (torch.ones_like(y),))[1]
        return y + slope.sum(1, keepdim=True)


@pytest.mark.parametrize("name", TABLE)
def test_a_trap_gives_the_bits_of_the_plain_run(name: str) -> None:
    found, _ = TABLE[name].spring()
    found.check()
    assert found.changed >= found.trials / 3
    assert found.corrupted == found.sites


def test_a_tensor_of_zeros_without_memory_is_no_site() -> None:
    workload = TABLE["tangents"].make()
    sites = [r.site for r in make_engine(workload, engine="plain").select_regions(["op:*"])]
    assert "op:first#addmm.0/fwd/out" in sites
    assert not [s for s in sites if "zerotensor" in s]


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_model_made_under_inference_mode_is_told_to_the_user(engine: str) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UsageError, match="inference_mode"):
        make_engine(unsilent.Workload(model, [numbers(3, 4)], judge="tolerance"), engine=engine)


# -- rows ------------------------------------------------------------------------------------------------------


def rows(engine: PlainEngine, trials: Sequence[Sequence[Fault]]) -> list[Row]:
    """What a campaign would store of trials that are given together."""
    return [row(outcome) for outcome in engine.trials(trials)]


def alone(engine: PlainEngine, trials: Sequence[Sequence[Fault]]) -> list[Row]:
    """What a campaign would store of trials that are given one by one."""
    return [r for faults in trials for r in rows(engine, [faults])]


class TwoOutputs(Base):
    """Of two outputs, a fault changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"main": super().forward(x), "side": self.side(x)}


def writing_judge(golden: dict[str, Tensor], faulty: dict[str, Tensor], batch: Tensor) -> JudgeVerdict:
    """Scales the faulty output in place, which is its own in the plain engine."""
    if faulty is not golden:
        for value in faulty.values():
            value.mul_(1.01)
    off = sum((faulty[k] / (1.01 if faulty is not golden else 1.0) - golden[k]).abs().amax(1) for k in golden)
    assert isinstance(off, Tensor)
    return JudgeVerdict((off > 0.5).numpy(), off.double().numpy())


@pytest.mark.parametrize("kind", ["param:*", "op:*", "input:*"])
@pytest.mark.parametrize("run", [rows, alone])
def test_a_judge_that_writes_into_the_faulty_output_gives_the_rows_of_the_plain_run(kind: str, run: Any) -> None:
    def make() -> unsilent.Workload:
        return unsilent.Workload(seeded(TwoOutputs()), [numbers(8, 16)], judge=writing_judge, name="writes")

    fast, plain = make_engine(make()), PlainEngine(make())
    assert isinstance(fast, CachedEngine)
    insist(fast)
    trials = [t.faults for t in draw(plain.select_regions([kind]), 40, SEED)]
    assert run(fast, trials) == rows(plain, trials)
    fast.check_intact()


# -- weights that change --------------------------------------------------------------------------------------


def in_place(model: Base) -> None:
    with torch.no_grad():
        model.first.weight.mul_(1.5)


def load(model: Base) -> None:
    model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})


def optimise(model: Base) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(numbers(8, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CHANGES = (in_place, load, optimise)


def make_weights(model: Base) -> unsilent.Workload:
    return unsilent.Workload(model, [numbers(8, 16), numbers(3, 16)], judge="tolerance", name="weights")


class Model(Base):
    """An ordinary one."""

    def between(self, y: Tensor) -> Tensor:
        return y.relu()


@pytest.fixture
def model() -> Base:
    found = seeded(Model())
    assert isinstance(found, Base)
    return found


def trials_of(engine: PlainEngine, kind: str) -> list[tuple[Fault, ...]]:
    found: list[Trial] = draw(engine.select_regions([kind]), 12, SEED)
    return [t.faults for t in found]


@pytest.mark.parametrize("kind", ["param:*", "op:*", "input:*"])
@pytest.mark.parametrize("run", [rows, alone])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_between_trials_are_those_of_the_next_ones(
    model: Base, change: Callable[[Base], None], run: Any, kind: str
) -> None:
    fast = make_engine(make_weights(model))
    insist(fast)
    trials = trials_of(fast, kind)
    before = run(fast, trials)
    change(model)
    after = run(fast, trials)
    assert after != before
    assert after == rows(PlainEngine(make_weights(model)), trials)
    fast.check_intact()


@pytest.mark.parametrize("kind", ["param:*", "op:*"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_while_trials_come_are_those_of_the_next_ones(
    model: Base, change: Callable[[Base], None], kind: str
) -> None:
    fast, split = make_engine(make_weights(model)), 5
    insist(fast)
    trials = trials_of(fast, kind)
    expected = rows(PlainEngine(make_weights(model)), trials)[:split]
    found = []
    for outcome in fast.trials(trials):
        found.append(row(outcome))
        if len(found) == split:
            change(model)
    expected += rows(PlainEngine(make_weights(model)), trials[split:])
    assert found == expected
    fast.check_intact()


def through_data(model: Base) -> None:
    model.first.weight.data.mul_(1.5)


def through_numpy(model: Base) -> None:
    weight = model.first.weight.detach().numpy()
    weight *= 1.5


def other_memory(model: Base) -> None:
    model.first.weight.data = model.first.weight.data * 1.5


def other_parameter(model: Base) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 1.5)


def other_module(model: Base) -> None:
    model.last = nn.Linear(64, 32)


def hooked(model: Base) -> None:
    model.first.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    "change",
    [through_data, through_numpy, other_memory, other_parameter, other_module, hooked],
    ids=lambda f: f.__name__,
)
def test_a_change_that_leaves_no_trace_is_found_by_the_proof(model: Base, change: Callable[[Base], None]) -> None:
    fast = make_engine(make_weights(model))
    insist(fast)
    trials = trials_of(fast, "op:*")
    list(fast.trials(trials))
    change(model)
    list(fast.trials(trials))
    with pytest.raises((InjectionError, UsageError)):
        fast.check_intact()


# -- little memory ---------------------------------------------------------------------------------------------


class MadeAgain(nn.Module):
    """A golden value that depends on a weight of one trial is needed by another, when it has to be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(x)
        dead = functional.relu(first - 200)
        return self.layer(dead) * self.scale + first.tanh()


def test_golden_values_made_again_in_company_hold_no_fault() -> None:
    def make() -> unsilent.Workload:
        return unsilent.Workload(seeded(MadeAgain()), [numbers(64, 64)], judge="tolerance", name="again")

    roomy = make_engine(make())
    assert isinstance(roomy, CachedEngine)
    tight, plain = make_engine(make(), memory=roomy.plan.minimum), PlainEngine(make())
    insist(tight)
    trials = []
    for i in range(8):
        flip = Fault(
            "param:layer.weight", "float32", (64, 64), np.array([i * 65]), "xor", np.array([1 << 22], np.uint32)
        )
        two = Fault("param:scale", "float32", (64,), np.array([i]), "set", np.array([0x40000000], np.uint32))
        trials += [[flip], [two]]
    assert rows(tight, trials) == rows(plain, trials)
    tight.check_intact()
