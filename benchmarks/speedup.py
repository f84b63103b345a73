"""How much cheaper a trial of the fast engine is than a plain one on the same faults, beside what is possible at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.bound import Bound
from benchmarks.subjects import (
    LAWS,
    Faults,
    Subject,
    draw,
    draw_by_tensor,
    engines,
    ignoring,
    peer_methods,
    regions,
    setup_seconds,
)
from benchmarks.timing import Ratio, Strata, Times, clock, paired, ratio
from unsilent.engine.cached import CachedEngine

CAMPAIGN = 1000
"""Trials that the set-up is charged to."""
PACK = 32
"""Trials that are given to the engine together."""


@dataclass(frozen=True)
class Speedup:
    """One subject under one law. ``shares``: of the forward, by fault."""

    subject: str
    law: str
    times: dict[str, Times]
    strata: Strata
    setup: float
    shares: Times
    diverged: int
    packs: dict[str, Times]
    """Seconds of packs of neuron trials, one at a time and together; empty for weights, which never run together."""

    def _ratio(self, once: float) -> Ratio:
        plain, auto = self.times["Unsilent, plain"], self.times["Unsilent, auto"]
        return ratio(plain, auto, once, CAMPAIGN, self.strata)

    @property
    def alone(self) -> Ratio:
        """Plain over fast, without the set-up."""
        return self._ratio(0.0)

    @property
    def charged(self) -> Ratio:
        """The same with the set-up spread over a campaign."""
        return self._ratio(self.setup)

    @property
    def bound(self) -> float:
        """Speedup if a trial cost just the operations that depend on its fault, all of them and whole."""
        return 1 / self.strata.mean(self.shares)

    def _mean(self, seconds: Times) -> float:
        return self.strata.mean(seconds) if len(seconds) == len(self.shares) else float(seconds.mean())

    def text(self) -> str:
        """A table."""
        forward = float(np.median(self.times["forward"]))
        lines = [f"\n{self.subject}: {self.law}; {len(self.shares)} faults"]
        lines += [f"{'CPU of a trial, ms':34}{'n':>5}{'mean':>10}{'mean / forward':>16}"]
        lines += [
            f"  {name:32}{len(t):5}{self._mean(t) * 1e3:10.3f}{self._mean(t) / forward:16.3f}"
            for name, t in self.times.items()
        ]
        facts = {
            "speedup, plain / auto": self.alone,
            f"with set-up ({self.setup:.2f} s) over {CAMPAIGN} trials": self.charged,
            f"whole dependents ({1 / self.bound:.3f} of the forward)": f"{self.bound:.2f}",
            "speedup / that of whole dependents, and with set-up": f"{self.alone.value / self.bound:.2f}, "
            f"{self.charged.value / self.bound:.2f}",
        }
        if self.packs:
            together = self.packs["together"]
            facts[f"{PACK} trials together, ms a trial"] = f"{together.mean() / PACK * 1e3:.3f}"
            facts["one at a time / together"] = str(ratio(self.packs["alone"], together))
        lines += [f"  {name:48}{value}" for name, value in facts.items()]
        if self.diverged:
            lines.append(f"  {self.diverged} evaluations left the tape and were run plainly")
        return "\n".join(lines)


def first_excess(engine: CachedEngine, faults: Faults, device: str) -> float:
    """What the first trial of a kind costs more than the same once more: what an engine measures only when it is needed."""
    now = clock(device)
    marks = [now()]
    for _ in range(2):
        engine.trial(faults)
        marks.append(now())
    return max(0.0, (marks[1] - marks[0]) - (marks[2] - marks[1]))


def together(engine: CachedEngine, places: Sequence[Any], law: str, packs: int, device: str) -> dict[str, Times]:
    """Seconds of packs of trials, given one by one and together."""
    drawn = draw(places, packs * PACK, law, seed=2)
    items = [drawn[i : i + PACK] for i in range(0, len(drawn), PACK)]

    def alone(pack: list[Faults]) -> None:
        for faults in pack:
            engine.trial(faults)

    def at_once(pack: list[Faults]) -> None:
        list(engine.trials(pack))

    return paired({"alone": alone, "together": at_once}, items, block=1, device=device)


def measure(subject: Subject, rounds: int, device: str) -> list[Speedup]:
    """A subject under every law."""
    workload = subject.workload()
    setup = setup_seconds(workload, device)
    plain, auto = engines(workload, device)
    for reason in auto.fallback_reasons.values():
        print(f"{subject.name} is not on a tape: {reason}")
    bound = Bound(auto, device=device)
    found = []
    for law in LAWS:
        faults, strata = draw_by_tensor(regions(plain, law), rounds * subject.times, law.law)
        charged = setup + first_excess(auto, faults[0], device)
        before = auto.diverged_count
        model, x = plain.model, plain.batches[0]
        own = {
            "forward": ignoring(lambda model=model, x=x: model(x)),
            "hand-written": ignoring((peers.hand_neuron if law.neurons else peers.hand)(model, x)),
        }
        others = peer_methods(subject, law) if device == "cpu" else {}
        ours = {"Unsilent, plain": plain.trial, "Unsilent, auto": auto.trial}
        with torch.no_grad():
            times = paired(
                {**own, **others, **ours}, faults, only=dict.fromkeys([*own, *others], rounds), device=device
            )
        shares = np.array([bound.share(f) for f in faults])
        left = auto.diverged_count - before
        packs = together(auto, regions(plain, law), law.law, max(3, rounds // 3), device) if law.neurons else {}
        found.append(Speedup(subject.name, law.title, times, strata, charged, shares, left, packs))
        print(found[-1].text(), flush=True)
    return found
