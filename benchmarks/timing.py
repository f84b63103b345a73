"""CPU time on a noisy machine: methods interleaved in shuffled rounds, ratios within a round, medians and quartiles.

Two questions are asked of it. `interleave`: what a call costs. `paired`: what the same faults cost under several methods;
the ratio of the totals then has an interval from resampling the faults.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Item = TypeVar("Item")
Times = NDArray[np.float64]
RESAMPLES = 4000


class Figure(NamedTuple):
    """``seconds``: median CPU time of a call. ``ratio``: median of call / baseline call of its round; quartiles beside it."""

    seconds: float
    ratio: float
    low: float
    high: float
    rounds: int


def interleave(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Figure]:
    """Time every method ``calls`` times a round; the first one is the baseline of the ratios."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method()
    order = list(methods)
    rng = random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            start = clock()
            for _ in range(calls):
                methods[name]()
            times[name].append((clock() - start) / calls)
    baseline = times[next(iter(methods))]
    figures = {}
    for name, seconds in times.items():
        ratios = [s / b for s, b in zip(seconds, baseline, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[name] = Figure(statistics.median(seconds), middle, low, high, rounds)
    return figures


def table(title: str, figures: Mapping[str, Figure]) -> str:
    """The figures as text."""
    lines = [title, f"{'':34}{'CPU ms':>10}{'ratio':>8}   quartiles"]
    lines += [
        f"{name:34}{f.seconds * 1e3:10.3f}{f.ratio:8.3f}   {f.low:.3f} – {f.high:.3f}" for name, f in figures.items()
    ]
    return "\n".join(lines)


class Ratio(NamedTuple):
    """A ratio of totals with the limits of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} – {self.high:.2f})"


class Strata(NamedTuple):
    """Items drawn stratum by stratum: the number of each one's stratum, [items], and the probability of every stratum."""

    of: NDArray[np.int64]
    probability: Times

    def mean(self, values: Times) -> float:
        """Expected value of an item drawn from all."""
        return float(sum(p * values[self.of == s].mean() for s, p in enumerate(self.probability)))

    def resampled(self, values: Times, seed: int) -> Times:
        """Such means of bootstrap samples within every stratum, [resamples]; equal seeds pick equal items."""
        rng, total = np.random.default_rng(seed), np.zeros(RESAMPLES)
        for stratum, probability in enumerate(self.probability):
            own = values[self.of == stratum]
            total += probability * own[rng.integers(len(own), size=(RESAMPLES, len(own)))].mean(1)
        return total


def clock(device: str) -> Callable[[], float]:
    """CPU time of this process; on a GPU the wall time once all work is done."""
    if device == "cpu":
        return time.process_time

    def wall() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return wall


def paired(
    methods: Mapping[str, Callable[[Item], object]],
    items: Sequence[Item],
    *,
    block: int = 4,
    only: Mapping[str, int] | None = None,
    device: str = "cpu",
) -> dict[str, Times]:
    """Seconds of every method on every item, [items].

    Methods take turns, in shuffled order, at blocks of items: a trial of a campaign comes after trials of its own kind
    too, and would find the caches filled by another method otherwise. ``only``: methods that get no more than so many
    items, the first of every block in turn (their array is shorter).
    """
    now, rng = clock(device), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method(items[0])
    order = list(methods)
    for start in range(0, len(items), block):
        rng.shuffle(order)
        for name in order:
            most = (only or {}).get(name)
            for item in items[start : start + block] if most is None else items[start : start + 1]:
                if most is not None and len(times[name]) >= most:
                    continue
                begun = now()
                methods[name](item)
                times[name].append(now() - begun)
    return {name: np.array(seconds) for name, seconds in times.items()}


def ratio(top: Times, bottom: Times, once: float = 0.0, trials: int = 1000, strata: Strata | None = None) -> Ratio:
    """Mean of ``top`` over mean of ``bottom``, paired; ``once``: seconds that ``bottom`` pays once in so many trials."""
    strata = strata or Strata(np.zeros(len(top), dtype=np.int64), np.ones(1))
    charge = once / trials
    tops, bottoms = strata.resampled(top, seed=0), strata.resampled(bottom, seed=0) + charge
    low, high = np.quantile(tops / bottoms, [0.025, 0.975])
    return Ratio(strata.mean(top) / (strata.mean(bottom) + charge), float(low), float(high))
