"""The file of operation records of a run, and the search for the first difference between two files.

Records are written during the run, so a long run needs no more memory. Names and lines are numbered in the order in which they
occur, and stored separately at the end of the run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.basics.lazy_numpy import np
from unsilent.explain.results import RunDivergence, UserCodeLine
from unsilent.explain.sources import DATA, KERNEL, PATH, RANDOM

NUMBERS, HASHES = ("name", "place", "origin", "step", "flags"), ("given", "inputs", "first", "rest")
"""Fields of a record: name and place of an operation …; hashes of its Python arguments, of its tensors, of its first output and
of the others."""
PACKED = struct.Struct(f"<{len(NUMBERS)}I{len(HASHES)}Q")
DRAWS, BACKWARD, UPDATE, OWN = 1, 2, 4, 8
"""Flags: the operation draws random numbers, belongs to a backward pass, belongs to an update, uses the user's own generator."""
_DIFFERENT = ("name", "place", "flags", "step", "given", "first")
_CHUNK = 1 << 16


def find_divergence(folder: Path, first: Mapping[str, Any], second: Mapping[str, Any]) -> RunDivergence | None:
    """The first operation that differs between two runs, or None if all are equal.

    ``first``, ``second``: what the runs reported at their ends (``file``, ``names``, ``places``). A difference in a further
    output only counts if it can have caused a later difference, because the output may be scratch memory of a kernel.
    """
    kind = np.dtype([*((name, "<u4") for name in NUMBERS), *((name, "<u8") for name in HASHES)])
    sizes = [os.path.getsize(folder / run["file"]) // kind.itemsize for run in (first, second)]
    both, suspect = min(sizes), None
    for start in range(0, both, _CHUNK):
        count = min(_CHUNK, both - start)
        a, b = (np.fromfile(folder / r["file"], kind, count, offset=start * kind.itemsize) for r in (first, second))
        unequal = np.zeros(count, bool)
        for name in _DIFFERENT:
            unequal |= a[name] != b[name]
        at = int(unequal.argmax()) if unequal.any() else count
        further = np.flatnonzero(a["rest"][:at] != b["rest"][:at])
        if suspect is None and len(further):
            suspect = (start + int(further[0]), a[further[0]], b[further[0]])
        if at < count:
            caused = suspect is not None and a[at]["inputs"] != b[at]["inputs"]
            index, left, right = suspect if caused and suspect else (start + at, a[at], b[at])
            return _parting(index, left, right, first, second, (sizes[0] - index, sizes[1] - index))
    if sizes[0] == sizes[1]:
        return None
    longer = first if sizes[0] > sizes[1] else second
    left = np.fromfile(folder / longer["file"], kind, 1, offset=both * kind.itemsize)[0]
    return _parting(both, left, None, longer, first, (max(sizes) - both, 0))


def _parting(
    index: int, a: Any, b: Any, records: Mapping[str, Any], other_records: Mapping[str, Any], to_go: tuple[int, int]
) -> RunDivergence:
    """Describe the first difference between two runs.

    ``a``, ``b``: the records; ``b`` is None if that run is over. ``to_go``: numbers of operations that each run has left.
    """
    name, flags = records["names"][a["name"]], int(a["flags"])
    place, origin = _place(records, a["place"]), records["origins"][a["origin"]]
    also, theirs = ("", None) if b is None else (other_records["names"][b["name"]], _place(other_records, b["place"]))
    step, generator, instead = int(a["step"]), "", ""
    if b is None:
        kind = PATH
    elif also != name or place != theirs:
        kind = PATH
        instead = f"{also} at {theirs}" if theirs else also
    elif a["given"] != b["given"] or a["step"] != b["step"]:
        kind = DATA
    elif flags & DRAWS and a["inputs"] == b["inputs"]:
        kind, generator = RANDOM, "own" if flags & OWN else "global"
    else:
        kind = KERNEL if a["inputs"] == b["inputs"] else DATA
    phase = "update" if flags & UPDATE else "backward" if flags & BACKWARD else "forward"
    return RunDivergence(
        index,
        step,
        name,
        phase,
        place,
        None if origin is None else _place(records, origin[1]),
        "" if origin is None else records["names"][origin[0]],
        kind,
        generator,
        instead,
        to_go if kind == PATH else None,
    )


def _place(run: Mapping[str, Any], number: int) -> UserCodeLine | None:
    file, line, function = run["places"][number]
    return UserCodeLine(_shown_path(file), line, function) if line else None


def _shown_path(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def source_read_locations(run: Mapping[str, Any]) -> dict[str, list[tuple[bool, str, UserCodeLine]]]:
    """The places where a run read each source: whether the user's line called it, function, and line."""
    by_name: dict[str, list[tuple[bool, str, UserCodeLine]]] = {}
    for source, call, file, line, function, direct in run["reads"]:
        by_name.setdefault(source, []).append((direct, call, UserCodeLine(_shown_path(file), line, function)))
    return by_name
