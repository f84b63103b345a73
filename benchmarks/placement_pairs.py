"""What placement and reduction programs change by prediction, over all pairs of them on four machines; and what a search costs.

    python -m benchmarks.placement_pairs

Assumed: A100 nodes of 16 GPUs (270 GB/s for each GPU) or V100 nodes of 8 (135 GB/s), one card of 12.5 GB/s for each node, no
latency, 2 GiB for each device. Axes: all sets of one to three sizes of at least 2. Reductions: every non-empty set of axes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod

import numpy as np

from unsilent.placement import ranking as module
from unsilent.placement import synthesis
from unsilent.placement.cost import AlphaBeta
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.system import Level, System

MACHINES = ((2, 16), (4, 16), (2, 8), (4, 8))
PAYLOAD = 2**31
ALGORITHMS = ("ring", "tree")


@dataclass(frozen=True)
class Pair:
    """A placement and the axes that are reduced."""

    counts: tuple[int, int]
    algorithm: str
    sizes: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...]
    reduce: tuple[str, ...]
    crosses: bool
    flat: float
    best: float
    program: str

    @property
    def ratio(self):
        return self.flat / self.best


def machine(counts):
    inside = {16: 270e9, 8: 135e9}[counts[1]]
    return System("x", (Level("node", counts[0], 12.5e9, 0.0), Level("gpu", counts[1], inside, 0.0, link="nvlink")))


def axis_sizes(devices, most=3, least=2):
    """All multisets of at most ``most`` factors of at least ``least``, ascending."""
    if devices >= least:
        yield (devices,)
    if most > 1:
        for factor in range(least, int(devices**0.5) + 1):
            if devices % factor == 0:
                yield from ((factor, *rest) for rest in axis_sizes(devices // factor, most - 1, factor))


@lru_cache(maxsize=1)
def pairs():
    """All pairs, each once: axes of equal size are interchangeable."""
    found = {}
    for counts in MACHINES:
        system = machine(counts)
        for algorithm in ALGORITHMS:
            for sizes in axis_sizes(prod(counts)):
                axes = dict(zip("abc", sizes, strict=False))
                for count in range(1, len(axes) + 1):
                    for reduce in combinations(axes, count):
                        for one in rank_placements(
                            system, axes, [Reduction(reduce, PAYLOAD)], AlphaBeta(system, algorithm)
                        ).placements:
                            best = one.programs[0][0]
                            rows = zip(axes, one.placement.matrix, strict=True)
                            key = (counts, algorithm, tuple(sorted((name in reduce, row) for name, row in rows)))
                            factors = one.placement.factors(reduce)
                            found[key] = Pair(
                                counts, algorithm, sizes, one.placement.matrix, reduce, factors[0] > 1, best.flat_seconds,
                                best.seconds, best.text(system),
                            )  # fmt: skip
    return tuple(found.values())


def placement_effect():
    """Largest ratio of flat all-reduces over the same axes, placed in different ways, per machine and algorithm."""
    times = {}
    for pair in pairs():
        times.setdefault((pair.counts, pair.algorithm, pair.sizes, pair.reduce), []).append(pair.flat)
    result = {}
    for (counts, algorithm, *_), values in times.items():
        result[counts, algorithm] = max(result.get((counts, algorithm), 1.0), max(values) / min(values))
    return result


def summary(chosen):
    """Number of pairs, share with a faster program, mean of the ratio over all and over those, and the largest."""
    ratios = np.array([pair.ratio for pair in chosen])
    faster = ratios > 1.001
    return len(ratios), faster.mean(), ratios.mean(), ratios[faster].mean() if faster.any() else 1.0, ratios.max()


def search_costs():
    """Rows of (system, devices, levels of the reduction, programs, placements, pairs, seconds): each search from a cold cache."""
    cases = [((2,) * depth, 2**depth) for depth in (1, 2, 3, 4)]
    cases += [((4, 4, 4), 64), ((8, 8, 8), 512), ((16, 32, 8), 4096), ((16, 16, 16), 4096), ((32, 64, 8), 16384)]
    rows = []
    for counts, devices in cases:
        levels = tuple(Level(f"l{at}", count, 10e9 * 4**at, 1e-6) for at, count in enumerate(counts))
        system = System("x", levels)
        splits = [{"data": devices}] + ([{"data": devices // 8, "tensor": 8}] if devices > 16 else [])
        for axes in splits:
            synthesis.statements.cache_clear()
            module.plans.cache_clear()
            start = time.perf_counter()
            ranking = rank_placements(system, axes, [Reduction(("data",), PAYLOAD)])
            seconds = time.perf_counter() - start
            depth = max(len(one.programs[0][0].levels) for one in ranking.placements)
            number = len(synthesis.statements(depth))
            rows.append(
                (
                    counts,
                    devices,
                    tuple(axes.values()),
                    depth,
                    number,
                    len(ranking.placements),
                    ranking.candidates,
                    seconds,
                )
            )
    return rows


def main():
    print(f"{'pairs':28} {'algorithm':10} {'number':>6} {'faster':>7} {'mean':>6} {'mean of faster':>15} {'most':>6}")
    for algorithm in ALGORITHMS:
        own = [pair for pair in pairs() if pair.algorithm == algorithm]
        groups = {"all machines": own, "… reduced between nodes": [p for p in own if p.crosses],
                  "… inside a node": [p for p in own if not p.crosses]}  # fmt: skip
        groups |= {f"{list(counts)}": [p for p in own if p.counts == counts] for counts in MACHINES}
        for name, chosen in groups.items():
            number, share, mean, of_faster, most = summary(chosen)
            print(f"{name:28} {algorithm:10} {number:6} {share:7.0%} {mean:6.2f} {of_faster:15.2f} {most:6.2f}")
    for (counts, algorithm), ratio in placement_effect().items():
        print(f"effect of the placement on one flat all-reduce: {list(counts)} {algorithm}: up to {ratio:.0f} times")
    print("\nlevels            devices  axes          depth  programs  placements    pairs  seconds")
    for counts, devices, axes, depth, number, placed, candidates, seconds in search_costs():
        print(
            f"{list(counts)!s:17} {devices:7,}  {axes!s:13} {depth:5} {number:9,} {placed:11} {candidates:8,} {seconds:8.2f}"
        )


if __name__ == "__main__":
    main()
