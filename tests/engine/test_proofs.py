"""The proof of the engine with shortcuts: whatever a tape gets wrong, in company or alone, changed or masked, it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unsilent
from exactness.listening import insist
from unsilent.basics.errors import UnsilentError
from unsilent.engine import PlainEngine, make_engine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import same_outputs
from unsilent.engine.tape import Diverged, Holders
from unsilent.engine.tape_replay import Replayer
from unsilent.engine.validation_sample import ValidationSamples
from unsilent.engine.walk import TrialEntry
from unsilent.faults import Fault

DEAD = 8
"""Neurons that the ReLU holds at zero, so that a small fault in them is masked."""
Run = Callable[[PlainEngine, Sequence[Sequence[Fault]]], None]
Wrong = Callable[[Replayer, Holders], Holders]


class Net(nn.Module):
    """Two layers, of which the first neurons are dead."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 32)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
            self.first.bias[:DEAD] = -100

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def workload(batches: int = 1) -> unsilent.Workload:
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(8, 16, generator=generator) for _ in range(batches)]
    return unsilent.Workload(Net().eval(), given, judge="tolerance", name="net")


def made(batches: int = 1) -> CachedEngine:
    """An engine that takes every shortcut it has, by its own leave or not."""
    engine = make_engine(workload(batches))
    assert isinstance(engine, CachedEngine)
    assert not engine.fallback_reasons
    insist(engine)
    return engine


def trials(kind: str, masked: bool, step: int = 0) -> list[list[Fault]]:
    """Eight trials, all of them masked or none."""
    site, shape = ("param:first.bias", (64,)) if kind == "param" else ("op:first#addmm.0/fwd/out", (8, 64))
    operation, bits = ("xor", 1) if masked else ("set", 0x42480000)
    places = [i if masked else DEAD + i for i in range(8)]
    if kind == "op":
        places = [64 * i + place for i, place in enumerate(places)]
    where = {} if kind == "param" else {"step": step}
    return [
        [Fault(site, "float32", shape, np.array([p]), operation, np.array([bits], np.uint32), **where)] for p in places
    ]


def packed(engine: PlainEngine, many: Sequence[Sequence[Fault]]) -> None:
    list(engine.trials(many))


def alone(engine: PlainEngine, many: Sequence[Sequence[Fault]]) -> None:
    for faults in many:
        list(engine.trials([faults]))


WAYS = pytest.mark.parametrize(("run", "kind"), [(packed, "op"), (alone, "op"), (alone, "param")])
"""Trials of weights are never run together."""


def nothing(replayer: Replayer, found: Holders) -> Holders:
    """Golden, whatever the fault did."""
    return {}


def one_bit(replayer: Replayer, found: Holders) -> Holders:
    """One bit of the output the other way."""
    value = replayer.tape.output_tensors[0][1].value
    holder = found.get(value, replayer.golden(value)).clone()
    holder.view(torch.int32).flatten()[3] ^= 1
    return {**found, value: holder}


class Break:
    """Makes tapes wrong where ``when(replayer, number of trials in the call)`` says so; ``calls``: of how many trials."""

    def __init__(
        self, patch: pytest.MonkeyPatch, wrong: Wrong, when: Callable[[Replayer, int], bool] = lambda r, n: True
    ) -> None:
        self.calls: list[int] = []
        run = Replayer.run

        def wrapper(replayer: Replayer, starts: Sequence[TrialEntry], packed: bool = True) -> list[Holders | Diverged]:
            self.calls.append(len(starts))
            found = run(replayer, starts, packed)
            if not when(replayer, len(starts)):
                return found
            return [f if isinstance(f, Diverged) else wrong(replayer, f) for f in found]

        patch.setattr(Replayer, "run", wrapper)


def intact(replayer: Replayer, found: Holders) -> Holders:
    """As it should be."""
    return found


@pytest.mark.parametrize("masked", [False, True])
@WAYS
def test_the_trials_here_are_what_they_claim(
    monkeypatch: pytest.MonkeyPatch, run: Run, kind: str, masked: bool
) -> None:
    engine, plain, many = made(), PlainEngine(workload()), trials(kind, masked)
    assert [same_outputs(plain.golden[0], plain.output(0, faults)) for faults in many] == [masked] * len(many)
    watched = Break(monkeypatch, intact)
    run(engine, many)
    assert watched.calls == ([len(many)] if run is packed else [1] * len(many))
    engine.check_intact()
    assert len(watched.calls) == (2 if run is packed else len(many) + 1), "the proof did not run the tape"
    assert watched.calls[-1] == watched.calls[0], "the proof ran a trial in other company"


@pytest.mark.parametrize(("masked", "wrong"), [(False, nothing), (False, one_bit), (True, one_bit)])
@WAYS
def test_a_wrong_tape_is_found(
    monkeypatch: pytest.MonkeyPatch, run: Run, kind: str, masked: bool, wrong: Wrong
) -> None:
    engine, many = made(), trials(kind, masked)
    Break(monkeypatch, wrong)
    run(engine, many)
    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        engine.check_intact()


@pytest.mark.parametrize("wrong", [nothing, one_bit])
def test_a_tape_that_is_wrong_in_company_alone_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    engine, many = made(), trials("op", masked=False)
    Break(monkeypatch, wrong, when=lambda replayer, together: together > 1)
    alone(engine, many)
    engine.check_intact()
    packed(engine, many)
    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        engine.check_intact()


def test_a_tape_that_is_wrong_for_lone_trials_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, many = made(), trials("op", masked=False)
    Break(monkeypatch, nothing, when=lambda replayer, together: together == 1)
    packed(engine, many)
    engine.check_intact()
    alone(engine, many)
    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        engine.check_intact()


def test_each_batch_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(batches=3)
    Break(monkeypatch, one_bit, when=lambda replayer, together: replayer is engine.replayers[1])
    packed(engine, [*trials("op", False, step=0), *trials("op", False, step=2)])
    engine.check_intact()
    packed(engine, trials("param", masked=False))
    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        engine.check_intact()


@pytest.mark.parametrize("run", [packed, alone])
@pytest.mark.parametrize("masked", [False, True])
def test_one_wrong_kind_among_right_ones_is_found_in_the_end(
    monkeypatch: pytest.MonkeyPatch, run: Run, masked: bool
) -> None:
    engine = made()

    def one_kind(replayer: Replayer, found: Holders) -> Holders:
        return one_bit(replayer, found) if masked == (not found) else found

    Break(monkeypatch, one_kind, when=lambda replayer, together: (together > 1) == (run is packed))

    def proofs(many: int) -> None:
        for _ in range(many):
            for state in (False, True):
                packed(engine, trials("op", state))
                alone(engine, trials("op", state))
            engine.check_intact()

    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        proofs(40)


@pytest.mark.parametrize("error", [ArithmeticError("no"), Diverged("another way")])
def test_a_tape_that_fails_where_it_did_not_is_found(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    engine = made()
    packed(engine, trials("op", masked=False))

    def failing(replayer: Replayer, starts: Sequence[TrialEntry], packed: bool = True) -> list[Holders | Diverged]:
        raise error

    monkeypatch.setattr(Replayer, "run", failing)
    with pytest.raises(UnsilentError, match="shortcuts returned other bits"):
        engine.check_intact()


def test_a_proof_covers_what_came_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    packed(engine, trials("op", masked=False))
    engine.check_intact()
    watched = Break(monkeypatch, one_bit)
    engine.check_intact()
    assert not watched.calls


def test_every_trial_is_as_likely_to_be_a_witness() -> None:
    witnesses, rounds = ValidationSamples(), 4000
    counted: Counter[int] = Counter()
    company = trials("op", masked=False)[:4]
    for _ in range(rounds):
        for place in range(4):
            witnesses.add(0, company, place, True)
        (witness,) = witnesses.take()
        counted[witness.group_index] += 1
        assert witness.faults is company[witness.group_index]
        assert not list(witnesses.take())
    assert all(abs(n - rounds / 4) < rounds / 16 for n in counted.values())
    assert len(counted) == 4


def test_every_kind_of_trial_is_a_witness_now_and_then() -> None:
    witnesses, company = ValidationSamples(), trials("op", masked=False)[:2]
    found: Counter[tuple[int, int, int]] = Counter()
    for _ in range(200):
        for _ in range(50):  # one kind comes up far more often
            witnesses.add(0, company, 0, True)
        witnesses.add(0, company, 1, False)
        witnesses.add(0, company[:1], 0, True)
        witnesses.add(1, company, 0, True)
        taken = list(witnesses.take())
        assert sorted(w.batch for w in taken) == [0, 1]
        found.update((w.batch, len(w.group_faults), w.group_index) for w in taken)
    assert found[1, 2, 0] == 200
    assert min(found[0, 2, 0], found[0, 2, 1], found[0, 1, 0]) > 30
