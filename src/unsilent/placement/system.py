"""Description of a hierarchical machine: levels of components, and the links between them.

A machine is a list of levels, outermost first: ``count`` components in each component of the level outside. A message between two
components of a level leaves one through its link and enters the other through its link, and passes the links of all levels inside
on the way. Bandwidths are in bytes per second in one direction, latencies in seconds per message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import parse_toml

MOST_BYTES = 2**20
"""Largest size in bytes of a TOML file or a saved topology."""
MOST_DEVICES = 2**16
LINKS = ("nvlink", "pci", "network")
"""Kinds of links that NCCL's tuning model distinguishes."""
GPUS = ("v100", "a100", "h100")
"""GPUs that NCCL's tuning model distinguishes."""
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_BANDWIDTHS = {
    f"{prefix}{unit}/s": scale * size
    for prefix, scale in _PREFIXES.items()
    for unit, size in (("B", 1.0), ("b", 0.125))
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([A-Za-zµ/]*)", re.ASCII | re.IGNORECASE)
_KEYS = ("name", "source", "gpu", "level")
_LEVEL_KEYS = ("name", "count", "bandwidth", "latency", "shared_by", "link")


@dataclass(frozen=True)
class Level:
    """One level of a machine.

    Attributes:
        name: Name of one component, like ``node``.
        count: Number of components in each component of the level outside.
        bandwidth: Bandwidth of one link out of a component, bytes per second in each direction.
        latency: Latency of one message between two components, in seconds.
        shared_by: Number of devices of a component that share one of its links; 0 for all of them (one NIC for a node).
        link: One of `LINKS`, for NCCL's tuning model.
    """

    name: str
    count: int
    bandwidth: float
    latency: float
    shared_by: int = 0
    link: str = "network"


@dataclass(frozen=True)
class System:
    """A hierarchical machine.

    Attributes:
        levels: Levels, outermost first.
        source: Source of the figures.
        gpu: One of `GPUS` or empty, for NCCL's tuning model.
    """

    name: str
    levels: tuple[Level, ...]
    source: str = ""
    gpu: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of components per level, in each component of the level above."""
        return tuple(level.count for level in self.levels)

    @property
    def devices(self) -> int:
        """Number of devices in the whole machine."""
        return prod(self.counts)

    def inside(self, level: int) -> int:
        """Number of devices in one component of a level."""
        return prod(self.counts[level + 1 :])

    def sharing(self, level: int) -> int:
        """Number of devices that share one link out of a component of a level."""
        return self.levels[level].shared_by or self.inside(level)


_NET = Level("node", 2, 12.5e9, 9.6e-6)
_ASSUMED = (
    "assumed figures (of the kind of hardware, not of a measurement); measure your own with unsilent placement measure"
)
PRESETS = {
    "a100": System("a100", (_NET, Level("gpu", 16, 270e9, 3.4e-6, link="nvlink")), _ASSUMED, "a100"),
    "v100": System("v100", (_NET, Level("gpu", 8, 135e9, 3.4e-6, link="nvlink")), _ASSUMED, "v100"),
    "h100-nvl": System("h100-nvl", (
        replace(_NET, bandwidth=50e9), Level("pair", 4, 50e9, 5.7e-6, shared_by=1, link="pci"),
        Level("gpu", 2, 300e9, 3.4e-6, link="nvlink")), _ASSUMED, "h100"),
}  # fmt: skip
"""Nodes by name: 16 A100 on NVSwitch, 8 V100 on NVLink, 4 pairs of H100 NVL with a bridge; ``a100:4`` means four nodes."""


def parse_system(content: bytes, where: str) -> System:
    """Parse the TOML description of a machine.

    ``where`` names the description in the one-line ``UsageError``.
    """
    record = parse_toml(content, where)
    for key in record:
        if key not in _KEYS:
            raise unknown_name_error(f"key in {where}:", key, _KEYS)
    rows = record.get("level")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{where} has no levels; expected at least one table [[level]], outermost first")
    levels = [_level(row, f"{where}: level {number}", number == len(rows)) for number, row in enumerate(rows, 1)]
    name, source, gpu = record.get("name", where), record.get("source", "figures of the file"), record.get("gpu", "")
    if not isinstance(name, str) or not isinstance(source, str):
        raise UsageError(f"{where}: name and source are texts; found {name!r} and {source!r}")
    if gpu and gpu not in GPUS:
        raise unknown_name_error(f"gpu in {where}:", str(gpu), GPUS)
    return checked_system(System(str(name), tuple(levels), str(source), gpu), f"{where}: ")


def _level(row: Mapping[str, Any], where: str, innermost: bool) -> Level:
    for key in row:
        if key not in _LEVEL_KEYS:
            raise unknown_name_error(f"key in {where}:", key, _LEVEL_KEYS)
    if missing := [key for key in ("name", "count", "bandwidth") if key not in row]:
        raise UsageError(f"{where} has no {missing[0]}; expected name, count and bandwidth")
    name, count, shared = row["name"], row["count"], row.get("shared_by", 0)
    for key, value, least in (("count", count, 1), ("shared_by", shared, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(
                f"{where} ({name}): {key} is {value!r}; expected a whole number of {max(1, least)} or more"
            )
    link = row.get("link", "nvlink" if innermost else "network")
    if link not in LINKS:
        raise unknown_name_error(f"link in {where}:", str(link), LINKS)
    bandwidth = _quantity(row["bandwidth"], _BANDWIDTHS, f"{where} ({name}): bandwidth", "25GB/s or 200Gb/s")
    latency = _quantity(row.get("latency", "0us"), _TIMES, f"{where} ({name}): latency", "5us")
    if bandwidth <= 0:
        raise UsageError(f"{where} ({name}): bandwidth is {row['bandwidth']!r}; expected more than 0")
    return Level(str(name), count, bandwidth, latency, shared, link)


_LEAST, _MOST = 1e-15, 1e18
"""Smallest and largest number of bytes per second, and of seconds."""


def _quantity(quantity: object, units: Mapping[str, float], name: str, example: str) -> float:
    match = _QUANTITY.fullmatch(quantity.strip()) if isinstance(quantity, str) else None
    if match is None:
        raise UsageError(f"{name} is {quantity!r}; expected a number with its unit, like {example}")
    if match[2] not in units:
        raise UsageError(
            f"{name} has the unknown unit {match[2]!r}; expected one of {', '.join(units)}, like {example}"
        )
    value = float(match[1]) * units[match[2]]
    if not _LEAST <= value <= _MOST and float(match[1]) != 0:
        raise UsageError(f"{name} is {quantity!r}, which no machine has; expected something like {example}")
    return value


def checked_system(system: System, where: str = "") -> System:
    """The machine itself, after a check.

    Raises ``UsageError`` if its levels do not fit together.
    """
    names = [level.name for level in system.levels]
    if len(set(names)) < len(names):
        raise UsageError(f"{where}two levels have the same name: {', '.join(names)}; give each its own")
    if system.devices > MOST_DEVICES:
        raise UsageError(f"{where}the system has {system.devices:,} devices; expected at most {MOST_DEVICES:,}")
    for number, level in enumerate(system.levels):
        inside = system.inside(number)
        if level.shared_by and inside % level.shared_by:
            raise UsageError(
                f"{where}level {level.name}: shared_by is {level.shared_by}, which does not divide the {inside} devices of "
                "one component"
            )
    return system


def system_toml(system: System) -> str:
    """The TOML description of a machine, which `parse_system` reads."""
    lines = [f"name = {json.dumps(system.name)}", f"source = {json.dumps(system.source)}"]
    lines += [f"gpu = {json.dumps(system.gpu)}"] if system.gpu else []
    for level in system.levels:
        lines += [
            "", "[[level]]", f"name = {json.dumps(level.name)}", f"count = {level.count}",
            f'bandwidth = "{level.bandwidth / 1e9:.6g}GB/s"', f'latency = "{level.latency * 1e6:.6g}us"',
            *([f"shared_by = {level.shared_by}"] if level.shared_by else []), f'link = "{level.link}"',
        ]  # fmt: skip
    return "\n".join(lines) + "\n"
