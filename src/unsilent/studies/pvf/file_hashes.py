"""Hashes of the files that a campaign of ``unsilent pvf`` is made from, by which a card finds them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.faults.fault_texts import function_file
from unsilent.studies.pvf.spec import PvfSpec

PART_BYTES = 2**20


def named_files(spec: PvfSpec) -> dict[str, Path]:
    """The files and folders that a campaign is made from, by option."""
    place, colon, _ = spec.workload.rpartition(":")
    workload = None
    if spec.workload.startswith("hf:"):
        workload = spec.workload[3:]
    elif spec.workload.endswith(".pt2"):
        workload = spec.workload
    elif colon and place.endswith(".py"):
        workload = place
    names = {
        "workload": workload,
        "fault": function_file(spec.fault),
        **{name: getattr(spec, name) for name in PvfSpec.FILES},
    }
    return {name: Path(path).expanduser() for name, path in names.items() if path}


def file_hashes(spec: PvfSpec) -> dict[str, str]:
    """`content_hash` of each of these files that is there: a workload that is a Python object has none."""
    return {name: content_hash(path) for name, path in named_files(spec).items() if path.exists()}


def content_hash(path: Path) -> str:
    """SHA-256, in hex, of a file, or of the names and hashes of all files in a folder; raises ``UsageError``."""
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            for file in sorted(files_in(path)):
                digest.update(f"{content_hash(file)} {file.relative_to(path).as_posix()}\n".encode())
            return digest.hexdigest()
        with path.open("rb") as opened:  # it may be too large to be in memory
            while piece := opened.read(PART_BYTES):
                digest.update(piece)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from None
    return digest.hexdigest()


def files_in(folder: Path) -> Iterator[Path]:
    """All files of a folder and of those in it; pipes and links to nothing are none."""
    return (path for path in folder.rglob("*") if path.is_file())
