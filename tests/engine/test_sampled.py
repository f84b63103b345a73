"""Trials that are evaluated on some samples: many in one pass over the tape, against whole runs of the plain engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unsilent
from conftest import few
from engine.test_cached import FAST, MODELS, Base, draw, numbers, seeded
from unsilent.basics.errors import UnsilentError
from unsilent.engine import make_engine
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.engine.sampled_trials import SampledTrial, group_size, outcomes_together
from unsilent.engine.sampled_walk import without_shared_samples
from unsilent.faults import Fault
from unsilent.outcomes.base import Outcome

Trials = list[tuple[tuple[Fault, ...], Any]]


class Wide(nn.Module):
    """Rows of all operations lie in lines of memory, but for those of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu_()
        return self.last((y + self.first(x)).mean((2, 3)))


class DerivedWeight(Base):
    """A weight is computed from parameters before any sample is seen."""

    def between(self, y: Tensor) -> Tensor:
        return torch.nn.functional.linear(y, self.last.weight.t() @ self.last.weight / 10)


class MixesLate(nn.Module):
    """A token changes the samples that hold it, and through the similarities of all samples the others as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 32)

    def forward(self, ids: Tensor) -> Tensor:
        each = nn.functional.normalize(self.tokens(ids).mean(1), dim=1)
        return each @ each.t()


class FlatToo(Base):
    """A second output without a row for each sample."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"scores": y, "flat": y.reshape(-1)}


class Codebook(nn.Module):
    """A corrupted sample may look up a row that is not there, which ends the run of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.book, self.last = nn.Linear(6, 32), nn.Embedding(64, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        place = (self.first(x).relu().sum(1) * 0.2).round().long()
        return self.last(self.book(place))


SAMPLED = {
    **MODELS,
    "mixes late": (MixesLate, [torch.randint(40, (12, 3), generator=torch.Generator().manual_seed(2))]),
    "flat too": (FlatToo, [numbers(7, 6), numbers(4, 6)]),
    "codebook": (Codebook, [numbers(16, 6)]),
    "wide": (Wide, [numbers(16, 3, 16, 16), numbers(5, 3, 16, 16)]),
    "derived weight": (DerivedWeight, [numbers(7, 6), numbers(4, 6)]),
}


def engines(name: str) -> tuple[CachedEngine, PlainEngine]:
    make, batches = SAMPLED[name]
    workload = unsilent.Workload(seeded(make()), batches, judge="tolerance", name=name)
    fast = make_engine(workload, sampled=True)
    assert isinstance(fast, CachedEngine)
    return fast, make_engine(workload, engine="plain")


def sampled(engine: PlainEngine, count: int) -> Trials:
    """Faults in parameters, each with some samples of a batch; every fifth has all of the batch."""
    chance, result = np.random.default_rng(5), []
    for k, faults in enumerate(draw(engine, ["param:*"], count)):
        batch = int(chance.integers(len(engine.batches)))
        size = engine.samples[batch]
        some = size if k % 5 == 4 else int(chance.integers(1, max(2, size // 2 + 1)))
        samples = np.sort(chance.choice(size, some, replace=False)).astype(np.int64)
        result.append((tuple(replace(f, step=batch) for f in faults), samples))
    return result


def outcomes(engine: PlainEngine, trials: Trials) -> list[tuple[bytes, float, str]]:
    found = engine.trials([faults for faults, _ in trials], [samples for _, samples in trials])
    return [(one.codes.tobytes(), one.severity, one.error) for one in found]


@pytest.mark.parametrize(
    "name", few(SAMPLED, "wide", "mixes late", "flat too", "codebook", "derived weight", "across samples", *FAST)
)
def test_sampled_trials_end_as_in_whole_runs(name: str) -> None:
    fast, plain = engines(name)
    trials = sampled(plain, 60)
    expected = outcomes(plain, trials)
    assert outcomes(fast, trials) == expected
    assert [outcomes(fast, [trial])[0] for trial in trials[:10]] == expected[:10]
    fast.check_intact()
    for (_, samples), (codes, _, _) in zip(trials, expected, strict=True):
        assert len(codes) - codes.count(Outcome.SPARED) == len(samples)


def test_only_the_samples_of_a_trial_are_computed() -> None:
    """All of them go through one pass: none needs a whole run, although many share samples."""
    fast, plain = engines("wide")
    trials = [
        SampledTrial(faults, samples)
        for faults, samples in sampled(plain, 60)
        if len(samples) <= plain.samples[faults[0].step or 0] // 2
    ]
    assert len(trials) > 30
    assert len(outcomes_together(fast, list(trials))) == len(trials)
    assert group_size(fast) == 128


def test_trials_that_need_the_whole_batch_are_left_to_a_whole_run() -> None:
    fast, plain = engines("across samples")
    trials = [SampledTrial(faults, samples[:1]) for faults, samples in sampled(plain, 24)]
    early = [n for n, trial in enumerate(trials) if any(f.site.startswith("param:first") for f in trial.faults)]
    assert early
    assert not set(early) & outcomes_together(fast, list(trials)).keys()  # an operation after it mixes samples


def relative_to_the_batch(golden: Tensor, faulty: Tensor, batch: object) -> Tensor:
    moved = (golden - faulty).abs().amax(1)
    return moved > 0.5 * moved.nan_to_num(0, 0, 0).max()


def test_a_judge_of_ones_own_sees_whole_batches() -> None:
    workload = unsilent.Workload(seeded(Wide()), [numbers(16, 3, 16, 16)], judge=relative_to_the_batch, name="own")
    fast, plain = make_engine(workload, sampled=True), make_engine(workload, engine="plain")
    trials = sampled(plain, 40)
    assert outcomes(fast, trials) == outcomes(plain, trials)
    assert any("whole batches, because a judge of your own" in note for note in fast.notes)


def test_no_sample_is_twice_in_one_list() -> None:
    tags = [(trial, sample) for trial in range(5) for sample in range(trial % 3 + 1)]
    lists = without_shared_samples(tags)
    assert sorted(tag for one in lists for tag in one) == tags
    assert all(len({s for _, s in one}) == len(one) for one in lists)
    assert len(lists) == 5  # sample 0 is in all of them


def test_proofs_find_rows_with_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that computes other bits is found at the next proof."""
    from unsilent.engine import sampled_walk

    fast, plain = engines("wide")
    right = sampled_walk.SampledWalk._run_rows

    def wrong(self: Any, node: Any, tags: Any, calls: Sequence[int]) -> Any:
        made = right(self, node, tags, calls)
        for rows in made.values():
            rows.words ^= 1 << 21
        return made

    monkeypatch.setattr(sampled_walk.SampledWalk, "_run_rows", wrong)
    early = [one for one in sampled(plain, 60) if one[0][0].site.startswith("param:first")]
    outcomes(fast, [(faults, samples[:1]) for faults, samples in early])
    with pytest.raises(UnsilentError, match="other bits than a plain run"):
        fast.check_intact()


def test_an_operation_that_raises_for_one_trial_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from unsilent.engine import sampled_trials

    fast, plain = engines("wide")
    trials = [(faults, samples[:1]) for faults, samples in sampled(plain, 20)]
    expected = outcomes(plain, trials)
    right, calls = sampled_trials.classify, []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) % 3 == 1:
            raise RuntimeError("a judge that cannot read this")
        return right(*given)

    monkeypatch.setattr(sampled_trials, "classify", failing)
    assert outcomes(fast, trials) == expected
