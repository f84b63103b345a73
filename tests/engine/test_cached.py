"""The engine with shortcuts against the plain one, bit for bit, on models made to trip a tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

import unsilent
from conftest import few
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.engine import make_engine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine, acting_in, same_outputs
from unsilent.engine.recorder import UNSEEN, record
from unsilent.faults import Fault, fault_model

FAULTS = ("bitflip", "bitflip:bits=exponent", "bitflip:bits=30", "bitflip:count=5", "zero:run=3", "bitflip:bits=0")


def seeded(module: nn.Module) -> nn.Module:
    """With weights that do not depend on what ran before."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module.eval()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Base(nn.Module):
    """Two linear layers; what happens between them is the point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(torch.relu(self.first(x))))

    def between(self, y: Tensor) -> Tensor:
        return y


class InPlace(Base):
    """Residual adds and activations in place, on views as well."""

    def between(self, y: Tensor) -> Tensor:
        z = y * 2
        y += z
        y[:, 3:7].mul_(0.5)
        z.relu_().add_(y[:, :1])
        y.copy_(z + y)
        return y.view(-1, 4, 8).transpose(1, 2).reshape(y.shape)


class SelfOverlap(Base):
    """An operation that reads and writes the same memory through two views."""

    def between(self, y: Tensor) -> Tensor:
        y[:, :16] += y[:, 16:]
        y[:, 16:] *= y[:, :16]
        return y


class Branching(Base):
    """Python reads a number and takes another way."""

    def between(self, y: Tensor) -> Tensor:
        return y * 3 if y.sum().item() > 40 else torch.tanh(y)


class Counting(Base):
    """A shape that depends on data."""

    def between(self, y: Tensor) -> Tensor:
        chosen = y[y > 0.8]
        return y + chosen.mean() + chosen.numel()


class Listing(Base):
    """``tolist`` and ``numpy`` raise no dispatch event."""

    def between(self, y: Tensor) -> Tensor:
        largest = max(y[0].tolist())
        y = y + torch.from_numpy(np.sort(y.detach().numpy(), axis=1).copy())
        return y * largest


class Numbers(Base):
    """Everything is computed in numpy: nothing is seen, and the tape must not be trusted."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.last.weight.detach()
        y = torch.from_numpy(torch.relu(self.first(x)).detach().numpy() @ w.numpy().T)
        return y + self.last.bias


class Random(Base):
    """Draws random numbers, on corrupted input as well."""

    def between(self, y: Tensor) -> Tensor:
        noise = torch.rand_like(y)
        return y + torch.bernoulli(torch.sigmoid(y)) * noise + nn.functional.dropout(y, 0.5, training=True)


class Tied(nn.Module):
    """An embedding that is the output layer as well, read through a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        return self.head(x) + (x @ self.embedding.weight.t())[..., :40]


class Flat(nn.Module):
    """All weights are views of one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(6 * 32 + 32 * 5))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.flat[: 6 * 32].view(32, 6), self.flat[6 * 32 :].view(5, 32)
        return nn.functional.linear(torch.relu(nn.functional.linear(x, one)), two)


class Convolutions(nn.Module):
    """Ordinary, strided, dilated, grouped, depthwise, transposed; channels that are no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            nn.Conv2d(32, 40, 3, stride=2, padding=1, bias=False), nn.GELU(),
            nn.Conv2d(40, 40, 3, groups=40, padding=1), nn.Conv2d(40, 48, 1, groups=2), nn.MaxPool2d(2),
            nn.Conv2d(48, 32, 3, dilation=2, padding=2), nn.ConvTranspose2d(32, 20, 2, stride=2), nn.GroupNorm(4, 20),
        )  # fmt: skip
        self.head = nn.Linear(20, 48)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layers(x)
        return {"logits": self.head(y.mean((2, 3))), "features": [y, y.amax(1)]}


class Recurrent(nn.Module):
    """A GRU, attention and a residual, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x.transpose(0, 1))
        return self.last(self.layer(y.transpose(0, 1)).mean(1))


class AcrossSamples(Base):
    """Samples see each other: sorted, normalised and shifted over the batch."""

    def between(self, y: Tensor) -> Tensor:
        y = (y - y.mean(0)) / (y.std(0) + 1)
        return y.roll(1, 0) + y.cumsum(0) * 0.1 + y.sort(0).values


class Constant(Base):
    """Tensors made on the fly, an attribute that is no buffer, and an output that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.plain_attribute = numbers(32)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.first(x)) + self.plain_attribute + torch.tensor([1.5] * 32).add_(1)
        out = torch.zeros(x.shape[0], 5)
        out[:, 1:] = self.last(y)[:, 1:]
        return out, self.last.bias.detach().expand(x.shape[0], 5)


class Fused(nn.Module):
    """The fused path of attention asks whether query is key."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def vectors() -> list[Tensor]:
    return [numbers(7, 6), numbers(4, 6) * 2]


FAST = ("in place", "tied", "convolutions", "fused")
MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "in place": (InPlace, vectors()),
    "self overlap": (SelfOverlap, vectors()),
    "branching": (Branching, vectors()),
    "counting": (Counting, vectors()),
    "listing": (Listing, vectors()),
    "numpy": (Numbers, vectors()),
    "random": (Random, vectors()),
    "tied": (Tied, [torch.arange(24).reshape(4, 6)]),
    "flat": (Flat, vectors()),
    "convolutions": (Convolutions, [numbers(8, 3, 16, 16), numbers(3, 3, 16, 16)]),
    "recurrent": (Recurrent, [numbers(6, 9, 6)]),
    "fused": (Fused, [numbers(4, 6, 16)]),
    "across samples": (AcrossSamples, vectors()),
    "constant": (Constant, vectors()),
}


def engines(name: str) -> tuple[CachedEngine, PlainEngine]:
    make, batches = MODELS[name]
    workload = unsilent.Workload(seeded(make()), batches, judge="tolerance", name=name)
    fast = make_engine(workload)
    assert isinstance(fast, CachedEngine)
    return fast, make_engine(workload, engine="plain")


def end(run: Callable[[], Any]) -> Any:
    """An output, or what was raised."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def draw(engine: PlainEngine, addresses: Sequence[str], trials: int) -> list[tuple[Fault, ...]]:
    regions = engine.select_regions(addresses)
    models = [m for m in map(fault_model, FAULTS) if all(m.capacity((r,)) for r in regions)] or [fault_model("bitflip")]
    return [
        models[k % len(models)].draw(regions if k % 3 else (regions[k % len(regions)],), np.random.default_rng(k))
        if models[k % len(models)].capacity((regions[k % len(regions)],)) > 8
        else fault_model("bitflip").draw((regions[k % len(regions)],), np.random.default_rng(k))
        for k in range(trials)
    ]


def compare(fast: CachedEngine, plain: PlainEngine, trials: Sequence[Sequence[Fault]]) -> int:
    """Outputs of every trial, alone and in company; how many differ from golden."""
    changed = 0
    for faults in trials:
        for batch in [b for b in range(len(plain.batches)) if acting_in(b, faults)]:
            expected = end(lambda b=batch, f=faults: plain.output(b, f))
            found = end(lambda b=batch, f=faults: fast.output(b, f))
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected, [f.describe() for f in faults]
                continue
            assert same_outputs(expected, found), [f.describe() for f in faults]
            changed += not same_outputs(expected, plain.golden[batch])
    together = list(fast.trials(trials))
    for one, other in zip(together, plain.trials(trials), strict=True):
        assert (one.codes.tobytes(), one.severity, one.error) == (other.codes.tobytes(), other.severity, other.error)
    fast.check_intact()
    return changed


@pytest.mark.parametrize("name", few(MODELS, *FAST))
def test_parameter_faults_give_the_bits_of_a_plain_run(name: str) -> None:
    fast, plain = engines(name)
    trials = draw(plain, ["param:*"], 60)
    assert compare(fast, plain, trials) > 10


@pytest.mark.parametrize("name", few(MODELS, *FAST))
@pytest.mark.parametrize(
    "address", few(["op:*", "op:*/fwd/first", "op:*/fwd/second", "input:*"], "op:*", "op:*/fwd/second")
)
def test_transient_faults_give_the_bits_of_a_plain_run(name: str, address: str) -> None:
    fast, plain = engines(name)
    assert compare(fast, plain, draw(plain, [address], 24)) > 0


def test_what_cannot_be_seen_is_found_out_and_run_plainly() -> None:
    class Hidden(Base):
        """The last layer is computed behind the back of every dispatch mode."""

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            with no_dispatch():
                z = y @ self.last.weight.detach().t()
            return z + self.last.bias

    workload = unsilent.Workload(seeded(Hidden()), vectors(), judge="tolerance")
    fast, plain = make_engine(workload), make_engine(workload, engine="plain")
    assert isinstance(fast, CachedEngine)
    assert "something other than operations" in fast.fallback_reasons[0]
    assert "2 of 2 batches run completely for every trial" in fast.notes[0]
    assert compare(fast, plain, draw(plain, ["param:*"], 20)) > 5


def test_a_model_that_cannot_be_recorded_runs_plainly_and_says_why() -> None:
    class Growing(Base):
        def between(self, y: Tensor) -> Tensor:
            z = torch.empty(0)
            torch.add(y, 1, out=z)
            return z

    workload = unsilent.Workload(seeded(Growing()), vectors(), judge="tolerance")
    fast, plain = make_engine(workload), make_engine(workload, engine="plain")
    assert isinstance(fast, CachedEngine)
    assert fast.fallback_reasons == dict.fromkeys((0, 1), "(root)#add.0 changes the size of existing memory")
    assert (
        compare(
            fast,
            plain,
            draw(
                plain,
                [
                    "param:*",
                ],
                10,
            ),
        )
        > 0
    )


def test_changed_weights_are_noticed_and_recorded_again() -> None:
    model = seeded(InPlace())
    fast = make_engine(unsilent.Workload(model, vectors(), judge="tolerance"))
    trials = draw(fast, ["param:*"], 12)
    list(fast.trials(trials))
    before = fast.fingerprint()
    with torch.no_grad():
        model.first.weight.mul_(1.5)
    again = list(fast.trials(trials))
    assert fast.fingerprint() != before
    fresh = make_engine(unsilent.Workload(model, vectors(), judge="tolerance"), engine="plain")
    assert [o.codes.tobytes() for o in again] == [o.codes.tobytes() for o in fresh.trials(trials)]


def test_numbers_from_nowhere_are_told_with_the_operation_that_meets_them() -> None:
    engine = make_engine(unsilent.Workload(seeded(Numbers()), vectors(), judge="tolerance"))
    assert isinstance(engine, CachedEngine)
    for why in engine.fallback_reasons.values():
        assert "the model uses numbers that no operation computed, first read by (root)#add.0" in why
        assert "after Python read a tensor ((root)#numpy)" in why
    assert len(engine.fallback_reasons) == len(vectors())


def test_a_memory_budget_below_the_minimum_says_how_much_is_needed() -> None:
    workload = unsilent.Workload(seeded(Convolutions()), [numbers(8, 3, 16, 16)], judge="tolerance", run=logits)
    with pytest.raises(UsageError, match="1 batch needs 1.5 KiB for outputs and constants; give at least 1.5 KiB"):
        make_engine(workload, memory=10)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_values_that_are_not_held_are_made_again(share: float) -> None:
    workload = unsilent.Workload(seeded(Convolutions()), [numbers(8, 3, 16, 16)], judge="tolerance", run=logits)
    fast, plain = make_engine(workload), make_engine(workload, engine="plain")
    assert isinstance(fast, CachedEngine)
    room = fast.plan.minimum + int(share * (fast.plan.unlimited_bytes - fast.plan.minimum))
    tight = make_engine(workload, memory=room)
    assert isinstance(tight, CachedEngine)
    held = sum(v.untyped_storage().nbytes() for v in tight.replayers[0].kept.values())  # type: ignore[union-attr]
    assert held <= room
    assert tight.plan.held <= room
    assert (
        compare(
            tight,
            plain,
            [
                *draw(plain, ["param:*"], 20),
            ],
        )
        > 5
    )
    assert (
        compare(
            tight,
            plain,
            [
                *draw(plain, ["op:*"], 20),
            ],
        )
        > 5
    )


def logits(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch)["logits"]
    return output


def test_a_wrong_shortcut_is_found_by_the_proof() -> None:
    fast, _ = engines("in place")
    trials = draw(fast, ["param:*"], 12)
    list(fast.trials(trials))
    fast.check_intact()
    (replayer, *_) = [r for r in fast.replayers if r is not None]
    last = replayer.tape.nodes[-1]
    last.func = torch.ops.aten.addmm.default
    original, last.args = last.args, last.args
    last.kwargs = {"beta": 2.0}
    fast.ledger.costs.clear()  # the plain run would be as cheap for so small a model
    try:
        list(fast.trials(trials))
        with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
            fast.check_intact()
    finally:
        last.kwargs, last.args = {}, original


def test_random_numbers_of_the_user_are_left_alone() -> None:
    fast, _ = engines("random")
    trials = draw(fast, ["param:*"], 6)
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    for faults in trials:
        for batch, replayer in enumerate(fast.replayers):
            assert replayer is not None
            with fast.parameters.inject(faults):
                fast._take(batch, replayer, [faults])
    assert torch.equal(state, torch.random.get_rng_state())


def test_recording_leaves_nothing_behind() -> None:
    before = {name: vars(Tensor).get(name) for name in UNSEEN}

    class Raising(Base):
        def between(self, y: Tensor) -> Tensor:
            if y.shape[0] > 100:
                raise ArithmeticError
            return y

    engine = make_engine(unsilent.Workload(seeded(Raising()), vectors(), judge="tolerance"))
    with pytest.raises(ArithmeticError):
        record(lambda: engine.model(numbers(101, 6)), engine.model, [])
    assert before == {name: vars(Tensor).get(name) for name in UNSEEN}
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
