"""CPU time on a noisy machine: methods interleaved in shuffled rounds, ratios within a round, medians and quartiles."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Figure(NamedTuple):
    """``seconds``: median CPU time of a call. ``ratio``: median of call / baseline call of its round; quartiles beside it."""

    seconds: float
    ratio: float
    low: float
    high: float
    rounds: int


def interleave(methods: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, Figure]:
    """Time every method ``calls`` times a round; the first one is the baseline of the ratios."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method()
    order = list(methods)
    rng = random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            start = time.process_time()
            for _ in range(calls):
                methods[name]()
            times[name].append((time.process_time() - start) / calls)
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
