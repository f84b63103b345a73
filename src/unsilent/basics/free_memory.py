"""Memory that this process can still allocate, and peak memory of another process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""Limits from this value on mean "no limit": version 1 control groups then give a huge number."""


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still allocate, limited by machine and control groups; None if unknown.

    Args:
        root: Folder that contains ``proc`` and ``sys``.
    """
    result = [*_machine(root), *_control_groups(root)]
    return max(0, min(result)) if result else None


def peak_memory_bytes(pid: int) -> int | None:
    """Peak memory of a process in bytes; None if unknown."""
    return next((1024 * value for key, value in _table(Path(f"/proc/{pid}/status")) if key == "VmHWM"), None)


def _machine(root: Path) -> Iterator[int]:
    for key, value in _table(root / "proc/meminfo"):
        if key == "MemAvailable":
            yield value * 1024


def _control_groups(root: Path) -> Iterator[int]:
    """Number of bytes left in each control group of this process and in the groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents) if ".." not in group.parts else (Path(),):
            yield from _left(mount / folder, *names)


def _left(folder: Path, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    """Memory limit minus use, in bytes; file cache that can be freed does not count as used."""
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None or limit >= _UNLIMITED:
        return
    cache = next((value for key, value in _table(folder / "memory.stat") if key == cache_name), 0)
    yield limit - max(0, used - cache)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or its value is "max"
        return None


def _table(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number in each line of a file such as ``/proc/meminfo``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            yield words[0], int(words[1])
