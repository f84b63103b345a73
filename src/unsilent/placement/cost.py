"""Predicted time of collectives on a machine with shared links: latency plus bytes over available bandwidth.

All groups of a step run at the same time. The *flows* of a link are the hops of rings (or chains) of all groups that pass it. Its
*load* is their sum, each weighted with its group's payload as a share of the largest. A step takes as long as its most loaded
link. A ring visits the devices of a group in the order of the machine, so it enters and leaves each component once.

==============================  ===========================================  ==================
collective of n devices         bytes over each hop, of B bytes              hops in turn
==============================  ===========================================  ==================
all-reduce                      2 (n - 1) / n B                              2 (n - 1)
reduce-scatter, all-gather      (n - 1) / n B (B: of the whole)              n - 1
reduce, broadcast (pipelined)   B, along a chain                             n - 1
all-reduce by trees             min(2, m / 2) B over each of m components    2 (n_in - 1 + log2 m …)
==============================  ===========================================  ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from unsilent.basics.lazy_numpy import np, npt
from unsilent.placement.system import System

ROOTED = ("reduce", "broadcast")
ALGORITHMS = ("auto", "ring", "tree")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted time of one collective, run by all its groups at the same time.

    Attributes:
        seconds: Seconds from the start of the first to the end of the last group.
        level: Number of the level whose link takes longest.
        flows: Number of groups that share one link of that level.
        algorithm: Algorithm of the collective.
    """

    seconds: float
    level: int
    flows: int
    algorithm: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of the groups of a step on the links of a machine.

    Attributes:
        size: Number of devices in one group.
        members: Number of components of each level that a group has in each component of the level outside.
        ring: Flows of closed rings over the most loaded link of each level.
        ring_load: Load of the ring, as a multiple of the largest payload.
        chain: Flows of chains over the most loaded link of each level.
        chain_load: Load of the chains.
        trees: Largest load of a link of each level by double trees, as a multiple of the largest payload.
        ring_latency: Mean latency of the hops of a ring, seconds.
        chain_latency: Mean latency of the hops of a chain, seconds.
        tree_latency: Latency from the leaves of a tree to its root, seconds.
    """

    size: int
    members: tuple[int, ...]
    ring: tuple[int, ...]
    ring_load: tuple[float, ...]
    chain: tuple[int, ...]
    chain_load: tuple[float, ...]
    trees: tuple[float, ...]
    ring_latency: float
    chain_latency: float
    tree_latency: float


class CostModel(Protocol):
    """Interface of a model that predicts the time of collectives."""

    @property
    def name(self) -> str:
        """Name of the model for reports."""

    def cost(self, collective: str, traffic: Traffic, payload: float) -> StepCost:
        """Predicted time of a collective.

        ``payload``: bytes of the whole input or result in the group with the largest payload.
        """


def traffic(system: System, groups: npt.NDArray[np.int64], shares: npt.NDArray[np.float64] | None = None) -> Traffic:
    """Count the flows of all groups over the links of a machine.

    Args:
        system: The machine.
        groups: int64[groups, devices of one], ascending within each.
        shares: float64[groups], each group's payload as a share of the largest; ``None`` if all are equal.
    """
    shares = np.ones(len(groups)) if shares is None else shares
    levels = range(len(system.levels))
    after = np.roll(groups, -1, axis=1)
    crosses = np.stack([groups // system.inside(at) != after // system.inside(at) for at in levels])
    counted: list[list[tuple[int, float]]] = []
    for width in (groups.shape[1], groups.shape[1] - 1):  # closed rings, then chains
        counted.append([])
        for at in levels:
            hops = crosses[at][:, :width]
            volumes = np.broadcast_to(shares[:, None], hops.shape)[hops]
            sides = (_most_loaded(side[:, :width][hops] // system.sharing(at), volumes) for side in (groups, after))
            counted[-1].append(max(sides, key=lambda side: side[1]))
    (ring, ring_load), (chain, chain_load) = (zip(*pairs, strict=True) for pairs in counted)
    latencies = np.array([level.latency for level in system.levels])[crosses.argmax(axis=0)]
    members = _members(system, groups[0])
    return Traffic(
        groups.shape[1], members, ring, ring_load, chain, chain_load, tuple(_tree_loads(system, groups, shares, members)),
        float(latencies.mean(axis=1).max()), float(latencies[:, :-1].mean(axis=1).max()), _tree_latency(system, members),
    )  # fmt: skip


def _most_loaded(links: npt.NDArray[np.int64], volumes: npt.NDArray[np.float64]) -> tuple[int, float]:
    """Number of flows and load of the link with the largest load."""
    if not links.size:
        return 0, 0.0
    loads = np.bincount(links, volumes)
    most = int(loads.argmax())
    return int(np.count_nonzero(links == most)), float(loads[most])


def _members(system: System, group: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Number of components per level that a group uses in each component of the level above."""
    counts = [1, *(len(set((group // system.inside(at)).tolist())) for at in range(len(system.levels)))]
    return tuple(math.ceil(inner / outer) for outer, inner in pairwise(counts))


def _tree_loads(
    system: System, groups: npt.NDArray[np.int64], shares: npt.NDArray[np.float64], members: Sequence[int]
) -> list[float]:
    """Largest link load of each level with double trees over the components of each level.

    Each component is represented by its first device.
    """
    loads = [np.zeros(system.devices // system.sharing(at)) for at in range(len(system.levels))]
    for at, count in enumerate(members):
        if count < 2:
            continue
        components = groups // system.inside(at)
        first = np.ones(groups.shape, bool)
        first[:, 1:] = components[:, 1:] != components[:, :-1]
        devices, volumes = groups[first], np.broadcast_to(shares[:, None], groups.shape)[first]
        for passed in range(at, len(loads)):
            links = devices // system.sharing(passed)
            loads[passed] += min(2.0, count / 2) * np.bincount(links, volumes, len(loads[passed]))
    return [float(load.max()) for load in loads]


def _tree_latency(system: System, members: Sequence[int]) -> float:
    """Latency of a chain over the innermost components and binary trees over the outer ones."""
    *outer, (inner, level) = zip(members, system.levels, strict=True)
    return (inner - 1) * level.latency + sum(
        math.ceil(math.log2(count)) * outer_level.latency for count, outer_level in outer
    )


@dataclass(frozen=True)
class AlphaBeta:
    """Cost model: latency of the hops plus bytes over the available bandwidth of the most loaded link.

    Attributes:
        algorithm: ``ring``, ``tree`` (only for all-reduce), or ``auto`` for the faster one.
    """

    system: System
    algorithm: str = "ring"

    @property
    def name(self) -> str:
        """Name of the model for reports."""
        return f"alpha-beta, {self.algorithm}"

    def cost(self, collective: str, traffic: Traffic, payload: float) -> StepCost:
        """Predicted time of a collective, see `CostModel.cost`."""
        n = traffic.size
        if collective in ROOTED:
            return self._cost("chain", traffic.chain_load, traffic.chain, payload, (n - 1) * traffic.chain_latency)
        rounds = 2 if collective == "all-reduce" else 1
        share = rounds * (n - 1) / n * payload
        ring = self._cost("ring", traffic.ring_load, traffic.ring, share, rounds * (n - 1) * traffic.ring_latency)
        if collective != "all-reduce" or self.algorithm == "ring":
            return ring
        tree = self._cost("tree", traffic.trees, traffic.ring, payload, 2 * traffic.tree_latency)
        return tree if self.algorithm == "tree" or tree.seconds < ring.seconds else ring

    def _cost(
        self, algorithm: str, loads: Sequence[float], flows: Sequence[int], volume: float, latency: float
    ) -> StepCost:
        times = [load * volume / level.bandwidth for load, level in zip(loads, self.system.levels, strict=True)]
        level = max(range(len(times)), key=times.__getitem__)
        return StepCost(latency + times[level], level, flows[level], algorithm)
