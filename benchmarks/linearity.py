"""Does a campaign cost what its trials cost, and a trial what depends on its fault?

Against the number of trials: a line through building the engine and the trials. Against the position of the fault: each
layer's mean trial beside the operations that depend on it, and their seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import linregress

from benchmarks.bound import Bound
from benchmarks.subjects import SUBJECTS, draw
from benchmarks.timing import clock, paired
from unsilent.engine.cached import CachedEngine

CAMPAIGNS = (250, 500, 1000)
A_LAYER = 12
"""Faults for each layer and 15 rounds."""


class Layer(NamedTuple):
    """``operations`` and ``dependent``: how many depend on a fault in it, and their seconds; ``trial``: mean seconds."""

    name: str
    operations: int
    dependent: float
    trial: float


def fit(x: Sequence[float], y: Sequence[float], unit: str) -> str:
    """A line through points of milliseconds."""
    line = linregress(x, y)
    return f"{line.intercept * 1e3:.3f} ms + {line.slope * 1e3:.4f} ms per {unit}, R² {line.rvalue**2:.4f}"


def by_trials(key: str, device: str) -> str:
    """The cost of campaigns of several lengths, engines built for each; each has faults of its own."""
    workload, now = SUBJECTS[key].workload(), clock(device)
    CachedEngine(workload, device=device)  # what only the first one pays
    sizes, costs = [], []
    lines = [f"\n{SUBJECTS[key].name}: a campaign with its set-up, uniform over elements"]
    for seed, trials in enumerate(t for _ in range(2) for t in CAMPAIGNS):
        start = now()
        engine = CachedEngine(workload, device=device)
        built = now() - start
        faults = draw(engine.select_regions(["param:*.weight"]), trials, seed=seed)
        start = now()
        for fault in faults:
            engine.trial(fault)
        took = now() - start
        sizes.append(trials)
        costs.append(built + took)
        lines.append(f"  {trials:5} trials: {built:6.2f} s + {took:7.2f} s, {took / trials * 1e3:7.3f} ms a trial")
    return "\n".join([*lines, f"  {fit(sizes, costs, 'trial')}"])


def by_position(key: str, rounds: int, device: str) -> str:
    """The cost of a trial against the position of its fault, weights layer by layer."""
    engine = CachedEngine(SUBJECTS[key].workload(), device=device)
    bound = Bound(engine, device=device)
    regions = engine.select_regions(["param:*.weight"])
    each = max(4, A_LAYER * rounds // 15)
    drawn = [draw((r,), each, seed=i) for i, r in enumerate(regions)]
    items = [(i, faults) for k in range(each) for i, faults in enumerate(d[k] for d in drawn)]
    times = paired({"auto": lambda item: engine.trial(item[1])}, items, device=device)["auto"]
    owner = np.array([i for i, _ in items])
    layers = [
        Layer(
            region.site.removeprefix("param:"),
            len(bound.dependents(drawn[i][0])),
            bound.cost(drawn[i][0]),
            float(times[owner == i].mean()),
        )
        for i, region in enumerate(regions)
    ]
    lines = [f"\n{SUBJECTS[key].name}: position of the fault, {each} trials a layer"]
    lines += [f"  {'':34}{'operations':>12}{'their ms':>10}{'trial ms':>10}"]
    shown = layers[:: max(1, len(layers) // 12)]
    lines += [f"  {x.name:34}{x.operations:12}{x.dependent * 1e3:10.3f}{x.trial * 1e3:10.3f}" for x in shown]
    trial = [x.trial for x in layers]
    return "\n".join(
        [
            *lines,
            f"  by operations: {fit([x.operations for x in layers], trial, 'operation')}",
            f"  by their cost: {fit([x.dependent * 1e3 for x in layers], trial, 'ms of operations')}",
        ]
    )


def main(rounds: int, device: str) -> None:
    """Print lines and tables."""
    torch.set_num_threads(1)
    print(by_trials("light", device), flush=True)
    for key in ("light", "gpt"):
        print(by_position(key, rounds, device), flush=True)
