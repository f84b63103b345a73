"""Detects the machine that runs the program, by the GPUs in ``nvidia-smi topo -m`` or its processors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from itertools import pairwise

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_numpy import np
from unsilent.placement.system import Level, System

_NVLINK = 25e9
"""Bytes per second in each direction of one NVLink of generations 2 to 4."""
_KINDS = {"NV": "group", "PIX": "switch", "PXB": "switches", "PHB": "bridge", "NODE": "numa", "SYS": "system"}
"""Kinds of paths, closest first, and the names of the components that such paths form."""
_PATHS = {
    "PIX": (25e9, 5.7e-6),
    "PXB": (25e9, 5.7e-6),
    "PHB": (20e9, 5.7e-6),
    "NODE": (16e9, 5.7e-6),
    "SYS": (10e9, 5.7e-6),
}
"""Assumed bandwidth and latency of paths over PCI; the latency is that of NCCL's tuning model."""
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_SOURCE = "paths of nvidia-smi topo -m with assumed figures; measure your own with unsilent placement measure"


def this_machine() -> System:
    """The machine that runs the program.

    Its levels are those of its GPUs, or one level of processes over gloo if there are no GPUs.
    """
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and re.search(r"^GPU0\b", _ESCAPES.sub("", done.stdout), re.MULTILINE):
            return parse_topology(done.stdout, "nvidia-smi topo -m")
    source = "assumed figures of gloo over loopback; measure your own with unsilent placement measure"
    return System("here", (Level("process", os.cpu_count() or 1, 1e9, 50e-6),), source)


def parse_topology(text: str, where: str) -> System:
    """Parse the output of ``nvidia-smi topo -m`` into the levels of a machine.

    GPUs that are connected by paths of a kind or closer form a component; each kind that joins components is a level.

    Raises:
        UsageError: The text is not such output, or components have different sizes or do not consist of consecutive GPUs.
    """
    paths = _matrix(text, where)
    gpus = range(len(paths))
    if len(paths) == 1:
        return System("here", (Level("gpu", 1, *_PATHS["PHB"], link="pci"),), _SOURCE)
    kinds = [kind for kind in _KINDS if any(_link_kind(paths[a][b]) == kind for a in gpus for b in gpus if a != b)]
    partitions = [_components(paths, kinds[: number + 1]) for number in range(len(kinds))]
    levels: list[Level] = []
    finer: list[list[int]] = [[gpu] for gpu in gpus]
    name = "gpu"
    for kind, components in zip(kinds, partitions, strict=True):
        if len(components) == len(finer):
            continue
        _check_regular(components, where)
        levels.append(_level(name, kind, len(finer) // len(components), paths))
        finer, name = components, _KINDS[kind]
    if len(finer) > 1:
        raise UsageError(
            f"{where}: no path joins GPU{finer[0][0]} and GPU{finer[1][0]}; describe the system in a .toml file"
        )
    return System("here", tuple(reversed(levels)), _SOURCE)


def _matrix(text: str, where: str) -> list[list[str]]:
    """Kinds of the paths between GPUs, as a matrix by their numbers."""
    rows = [
        line.split() for line in _ESCAPES.sub("", text).splitlines() if re.match(r"\s*GPU\d+\s+(X|[A-Z]+\d*)\s", line)
    ]
    rows = [row[1:] for row in (row for row in rows if "X" in row[1:])]
    count = len(rows)
    if not count or any(len(row) < count or row[at] != "X" for at, row in enumerate(rows)):
        raise UsageError(f"{where} is not the output of nvidia-smi topo -m; expected its matrix with a row per GPU")
    for a, row in enumerate(rows):
        for b, path in enumerate(row[:count]):
            if a != b and _link_kind(path) not in _KINDS:
                raise UsageError(
                    f"{where}: unknown path {path[:40]!r} from GPU{a} to GPU{b}; expected one of NV#, {', '.join(_PATHS)}"
                )
    return [row[:count] for row in rows]


def _link_kind(path: str) -> str:
    return "NV" if re.fullmatch(r"NV\d{1,4}", path) else path


def _components(paths: Sequence[Sequence[str]], kinds: Iterable[str]) -> list[list[int]]:
    """Groups of GPUs that are connected by paths of these kinds, directly or through other GPUs."""
    from scipy.sparse.csgraph import connected_components

    allowed = set(kinds)
    joined = np.array([[_link_kind(path) in allowed for path in row] for row in paths])
    count, component = connected_components(joined, directed=False)
    return [np.flatnonzero(component == number).tolist() for number in range(count)]


def _check_regular(components: Sequence[Sequence[int]], where: str) -> None:
    if len(set(map(len, components))) > 1:
        sizes = ", ".join(str(len(component)) for component in components)
        raise UsageError(
            f"{where}: GPUs form components of {sizes}; expected equal sizes; describe the system in a .toml file"
        )
    if any(b - a != 1 for component in components for a, b in pairwise(component)):
        order = ",".join(str(gpu) for component in components for gpu in component)
        raise UsageError(
            f"{where}: GPUs that are close are not numbered consecutively; set CUDA_VISIBLE_DEVICES={order} and describe "
            "the system in a .toml file"
        )


def _level(name: str, kind: str, count: int, paths: Sequence[Sequence[str]]) -> Level:
    if kind != "NV":
        bandwidth, latency = _PATHS[kind]
        return Level(name, count, bandwidth, latency, shared_by=1 if name == "gpu" else 0, link="pci")
    links = min(int(path[2:]) for row in paths for path in row if _link_kind(path) == "NV")
    return Level(name, count, links * _NVLINK, 3.4e-6, link="nvlink")
