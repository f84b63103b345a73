"""Cost model of NCCL's own tuning, with the constants of two versions of NCCL.

Source: ``src/graph/tuning.cc`` of NVIDIA/nccl, commits 01afd20 (2.7.5) and b647562 (2.20.3): time = latency + bytes / bandwidth,
for each algorithm and protocol; the fastest one counts. Bandwidth is that of the most loaded link, shared by the flows of all
groups. Not modelled: limits per channel (the number of channels is not known without the machine), CollNet, NVLS, and the
overhead of network cards that only 2.20.3 adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from unsilent.basics.errors import unknown_name_error
from unsilent.placement.cost import ROOTED, StepCost, Traffic
from unsilent.placement.system import System

PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True)
class Constants:
    """Constants of one version of NCCL.

    Values are listed by protocol in the order of `PROTOCOLS`. Times are in µs, bandwidths in GB/s.

    Attributes:
        commit: Commit of the NCCL repository.
        base: Base latency by algorithm.
        hops: Latency of a hop by kind of link and algorithm.
        tree_factor: Share of the bus bandwidth that trees reach.
        tree_limits: Bandwidth limits of trees with up to two nodes and with more; 0 for no limit.
        a100_tree_limits: Limits of LL128 for trees on A100.
        ll_limits: Bandwidth limits of LL in one node and in several; 0 for no limit.
        a100_limit: Bandwidth limit on A100; 0 for no limit.
        slow_ll: Factor on latencies inside nodes for LL with several nodes.
        extra_inter_steps: Whether an all-reduce over several nodes has two more steps between nodes.
        plateau: Factors on the latency of large ring all-reduces over several nodes, for GPUs before A100 and from A100 on.
        corrections: Corrections of trees, by protocol, for powers of two from 64 bytes on.
    """

    commit: str
    base: dict[str, tuple[float, float, float]]
    hops: dict[str, dict[str, tuple[float, float, float]]]
    tree_factor: float
    tree_limits: tuple[float, float]
    a100_tree_limits: tuple[float, float]
    ll_limits: tuple[float, float]
    a100_limit: float
    slow_ll: float
    extra_inter_steps: bool
    plateau: tuple[float, float]
    corrections: tuple[tuple[float, ...], ...]


VERSIONS = {
    "2.7.5": Constants(
        "01afd20",
        base={"tree": (4.4, 4.4, 0.0), "ring": (3.6, 10.0, 8.4)},
        hops={
            "nvlink": {"tree": (0.52, 1.2, 28.0), "ring": (0.47, 1.9, 3.4)},
            "pci": {"tree": (1.0, 1.9, 28.0), "ring": (1.0, 2.5, 5.7)},
            "network": {"tree": (5.0, 8.5, 50.0), "ring": (2.7, 4.0, 9.6)},
        },
        tree_factor=0.9, tree_limits=(110.0, 80.0), a100_tree_limits=(130.0, 105.0), ll_limits=(0.0, 0.0),
        a100_limit=235.0, slow_ll=1.8, extra_inter_steps=False, plateau=(1.9, 1.9),
        corrections=(
            (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1),
            (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, 1),
            (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .5, .5, .6, .6, .7, .8, .9),
        ),
    ),
    "2.20.3": Constants(
        "b647562",
        base={"tree": (6.8, 14.0, 0.0), "ring": (6.6, 14.0, 8.4)},
        hops={
            "nvlink": {"tree": (0.6, 1.25, 28.0), "ring": (0.6, 1.9, 3.4)},
            "pci": {"tree": (1.0, 1.9, 28.0), "ring": (1.0, 2.5, 5.7)},
            "network": {"tree": (5.0, 8.5, 28.0), "ring": (2.7, 4.0, 14.0)},
        },
        tree_factor=0.92, tree_limits=(0.0, 0.0), a100_tree_limits=(0.0, 0.0), ll_limits=(87.7, 22.5),
        a100_limit=0.0, slow_ll=1.0, extra_inter_steps=True, plateau=(1.9, 1.4),
        corrections=(
            (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
            (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
            (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
        ),
    ),
}  # fmt: skip


class Nccl:
    """Cost model that follows NCCL's tuning model on a machine.

    Args:
        system: The machine. Levels whose link is ``network`` lie between nodes.
        version: One of `VERSIONS`.
        algorithm: ``ring`` or ``tree`` (for all-reduce), or ``auto``.

    Raises:
        UsageError: The version is unknown.
    """

    def __init__(self, system: System, version: str = "2.20.3", algorithm: str = "auto") -> None:
        if version not in VERSIONS:
            raise unknown_name_error("version of NCCL", version, VERSIONS)
        self.name = f"NCCL {version} tuning model, {algorithm}"
        self._system, self._algorithm, self._constants = system, algorithm, VERSIONS[version]
        self._outer = max((at + 1 for at, level in enumerate(system.levels) if level.link == "network"), default=0)

    def cost(self, collective: str, traffic: Traffic, payload: float) -> StepCost:
        """Predicted time of a collective, see `CostModel.cost`."""
        bandwidth, level, flows = min(
            (level.bandwidth / 1e9 / load, at, traffic.ring[at])
            for at, (level, load) in enumerate(zip(self._system.levels, traffic.ring_load, strict=True)) if load
        )  # fmt: skip
        time, name = min(self._times(collective, traffic, payload, bandwidth))
        return StepCost(1e-6 * time, level, flows, name)

    def _times(
        self, collective: str, traffic: Traffic, payload: float, bandwidth: float
    ) -> Iterator[tuple[float, str]]:
        nodes = prod(traffic.members[: self._outer])
        algorithms = ["tree"] if self._algorithm == "tree" else ["ring", "tree"][: 1 + (self._algorithm == "auto")]
        for algorithm in algorithms if collective == "all-reduce" else ["ring"]:
            for number, protocol in enumerate(PROTOCOLS):
                if protocol == "LL128" and self._system.gpu not in ("v100", "a100"):
                    continue  # elsewhere it is not tested, and may corrupt data silently, according to that file
                reached = self.bandwidth(collective, algorithm, number, traffic.size, nodes, bandwidth)
                if algorithm == "tree":
                    table = self._constants.corrections[number]
                    power = int(math.log2(max(payload, 64))) - 6
                    reached *= table[power] if power < len(table) else 1.0
                latency = self.latency(collective, algorithm, number, traffic, nodes, payload)
                yield latency + payload / (1000 * reached), f"{algorithm} {protocol}"

    def bandwidth(self, collective: str, algorithm: str, protocol: int, n: int, nodes: int, bus: float) -> float:
        """Algorithm bandwidth of a collective in GB/s, before NCCL's correction for trees."""
        c, several, a100 = self._constants, nodes > 1, self._system.gpu == "a100"
        if a100 and c.a100_limit:
            bus = min(bus, c.a100_limit)
        if algorithm == "tree":
            limit = (c.a100_tree_limits if a100 and protocol == 1 else c.tree_limits)[nodes > 2]
            bus = min(bus * c.tree_factor, limit or math.inf)
            bus *= (1 / 3.8, 0.915 if several else 7 / 9, 1.0)[protocol]
        elif protocol == 0:
            bus *= 1 / 4 if several or collective in ("all-reduce", "reduce") else 1 / 3
        elif protocol == 1:
            bus *= 0.7 if n < 2 * nodes else 0.92
        if protocol == 0:
            bus = min(bus, c.ll_limits[several] or math.inf)
        if algorithm == "tree":
            return 0.5 * bus
        return bus * n / {"all-reduce": 2 * (n - 1), "reduce": n, "broadcast": n}.get(collective, n - 1)

    def latency(
        self, collective: str, algorithm: str, protocol: int, traffic: Traffic, nodes: int, payload: float
    ) -> float:
        """Latency of a collective in µs."""
        c, n, several = self._constants, traffic.size, nodes > 1
        inside = zip(traffic.members[self._outer :], self._system.levels[self._outer :], strict=True)
        kind = "pci" if any(count > 1 and level.link == "pci" for count, level in inside) else "nvlink"
        intra, inter = c.hops[kind][algorithm][protocol], c.hops["network"][algorithm][protocol]
        if several and protocol == 0:
            intra *= c.slow_ll
        base = c.base[algorithm][protocol]
        if algorithm == "tree":
            return base + 2 * ((n // nodes - 1) * intra + int(math.log2(nodes)) * inter)
        if collective in ROOTED:
            return base + (inter if several else c.hops[kind]["ring"][protocol])
        rounds = 2 if collective == "all-reduce" else 1
        inter_steps = rounds * (nodes - 1) + 2 * (c.extra_inter_steps and rounds == 2 and several)
        result = base + (rounds * (n - 1) - inter_steps) * intra + inter_steps * inter
        large = payload >= n / 16 * 65536
        if protocol == 2 and several and rounds == 2 and large:
            result *= c.plateau[self._system.gpu in ("a100", "h100")]
        return result
