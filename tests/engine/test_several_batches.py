"""Batches of one structure: what is found out about one holds for the others, and values are held once they are used often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unsilent
from engine.test_cached import numbers, seeded
from unsilent.engine import cached, make_engine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine, acting_in, same_outputs
from unsilent.engine.sample_rows import RowPlan
from unsilent.faults import Fault, fault_model


class Convolutions(nn.Module):
    """Convolutions wide enough for blocks of channels, with a batch norm and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second, self.last = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.last((y + torch.relu(self.second(y))).mean((2, 3)))


class ReadsTwice(nn.Module):
    """One weight is read by two operations, and values between them are read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        between = torch.tanh(self.shared(x))
        return self.last(torch.tanh(self.shared(between))) + between


def engines(model: nn.Module, batches: Sequence[Any], **options: Any) -> tuple[CachedEngine, PlainEngine]:
    workload = unsilent.Workload(seeded(model), list(batches), judge="tolerance")
    fast = make_engine(workload, **options)
    assert isinstance(fast, CachedEngine)
    return fast, make_engine(workload, engine="plain")


def draw(engine: PlainEngine, addresses: Sequence[str], trials: int) -> list[tuple[Fault, ...]]:
    model = fault_model("bitflip:bits=exponent")
    regions = engine.select_regions(addresses)
    return [model.draw((regions[k % len(regions)],), np.random.default_rng(k)) for k in range(trials)]


def compare(fast: CachedEngine, plain: PlainEngine, trials: Sequence[Sequence[Fault]]) -> int:
    """Outputs of every trial, alone and in company, must be those of a plain run; how many differ from golden."""
    changed = 0
    for faults in trials:
        for batch in [b for b in range(len(plain.batches)) if acting_in(b, faults)]:
            expected = plain.output(batch, faults)
            assert same_outputs(expected, fast.output(batch, faults)), [f.describe() for f in faults]
            changed += not same_outputs(expected, plain.golden[batch])
    for one, other in zip(fast.trials(trials), plain.trials(trials), strict=True):
        assert (one.codes.tobytes(), one.severity, one.error) == (other.codes.tobytes(), other.severity, other.error)
    fast.check_intact()
    return changed


def later(monkeypatch: pytest.MonkeyPatch, passes: int = cached.PASSES_BEFORE_HOLDING) -> None:
    """Have values held only after so many passes, however small they are."""
    monkeypatch.setattr(cached, "HELD_AT_ONCE", 0)
    monkeypatch.setattr(cached, "PASSES_BEFORE_HOLDING", passes)


def held_by_batch(engine: CachedEngine) -> list[bool]:
    return [bool(r.kept) for r in engine.replayers if r is not None]


def test_a_batch_that_is_part_of_a_larger_tensor_has_memory_of_its_own() -> None:
    images = numbers(24, 3, 16, 16)
    fast, plain = engines(Convolutions(), images.split(8))
    for engine in (fast, plain):
        assert [b.untyped_storage().nbytes() for b in engine.batches] == [8 * 3 * 16 * 16 * 4] * 3
        assert all(torch.equal(b, part) for b, part in zip(engine.batches, images.split(8), strict=True))
    fast.prepare_for_transient_faults()
    assert [any(r.row_plan.sizes.values()) for r in fast.replayers if r is not None] == [True] * 3


def test_a_tensor_that_repeats_its_memory_is_left_as_it_is() -> None:
    fast, _ = engines(nn.Linear(6, 5), [numbers(1, 6).expand(4, 6)])
    assert fast.batches[0].stride() == (0, 1)


@pytest.mark.parametrize("addresses", [["param:*"], ["op:*"], ["input:*"]])
def test_batches_that_are_not_held_yet_give_the_bits_of_a_plain_run(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, 10**9)
    fast, plain = engines(Convolutions(), [numbers(8, 3, 16, 16) * k for k in (1, 2, 3)])
    assert compare(fast, plain, draw(plain, addresses, 12)) > 0
    assert held_by_batch(fast) == [True, False, False]
    assert not fast.diverged_count


def test_a_batch_is_held_after_some_passes_and_one_in_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch, 3)
    fast, plain = engines(Convolutions(), [numbers(8, 3, 16, 16) * k for k in (1, 2, 3)])
    trials = draw(plain, ["param:*"], 8)
    seen = []
    for faults in trials:
        assert fast.trial(faults).codes.tobytes() == plain.trial(faults).codes.tobytes()
        seen.append(sum(held_by_batch(fast)))
    assert seen[0] == 1
    assert set(np.diff(seen)) <= {0, 1}
    assert held_by_batch(fast) == [True] * 3
    assert all(r is not None and r.kept.keys() == r.planned for r in fast.replayers)
    assert compare(fast, plain, trials) > 0


def test_rows_are_tried_once_for_batches_of_one_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[RowPlan] = []
    agreeing = RowPlan._agreeing
    monkeypatch.setattr(RowPlan, "_agreeing", lambda plan, *rest: tried.append(plan) or agreeing(plan, *rest))
    fast, _ = engines(Convolutions(), [numbers(8, 3, 16, 16), numbers(8, 3, 16, 16) * 2, numbers(5, 3, 16, 16)])
    fast.prepare_for_transient_faults()
    plans = [r.row_plan for r in fast.replayers if r is not None]
    assert {id(p) for p in tried} == {id(plans[0]), id(plans[2])}
    assert plans[0].sizes == plans[1].sizes != plans[2].sizes
    assert any(plans[0].sizes.values())


def test_batches_that_take_another_way_are_of_another_structure() -> None:
    class Scaled(nn.Module):
        """The numbers of a batch are arguments of an operation."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(self.layer(x), max=2.0 if x.shape[0] == 4 and x.is_contiguous() else 3.0)

    fast, _ = engines(Scaled(), [numbers(4, 6), numbers(4, 6) * 2, numbers(6, 4).t()])
    structures = [r.structure for r in fast.replayers if r is not None]
    assert structures[0] == structures[1] != structures[2]


def of_batch(faults: Sequence[Fault], step: int) -> tuple[Fault, ...]:
    return tuple(replace(fault, step=step) for fault in faults)


def test_golden_values_are_not_made_again_while_a_parameter_is_corrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch, 10**9)
    fast, plain = engines(ReadsTwice(), [numbers(16, 64), numbers(16, 64) * 2], sampled=True)
    chance = np.random.default_rng(0)
    trials, samples = [], []
    for k in range(60):
        regions = plain.select_regions([("param:shared.weight", "param:last.bias")[k % 2]])
        trials.append(of_batch(fault_model("bitflip:bits=exponent").draw(regions, chance), 1))
        samples.append(np.sort(chance.choice(16, 2, replace=False)))
    assert held_by_batch(fast) == [True, False]
    monkeypatch.setattr(fast, "_unheld", {})  # as if memory for them were missing
    found, expected = list(fast.trials(trials, samples)), list(plain.trials(trials, samples))
    assert held_by_batch(fast) == [True, False]
    for one, other in zip(found, expected, strict=True):
        assert (one.codes.tobytes(), one.severity) == (other.codes.tobytes(), other.severity)
    assert len({o.codes.tobytes() for o in expected}) > 10
    fast.check_intact()


def test_a_batch_of_which_some_samples_are_evaluated_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    later(monkeypatch, 10**9)
    fast, plain = engines(ReadsTwice(), [numbers(16, 64) * k for k in (1, 2, 3)], sampled=True)
    faults = of_batch(draw(plain, ["param:*"], 1)[0], 2)
    assert held_by_batch(fast) == [True, False, False]
    list(fast.trials([faults], [np.arange(1)]))
    assert held_by_batch(fast) == [True, False, True]
