"""Hashes the files that a PVF campaign uses, so that a card can find them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.faults.fault_texts import function_file
from unsilent.studies.pvf.spec import PvfSpec

PART_BYTES = 2**20


def named_files(spec: PvfSpec) -> dict[str, Path]:
    """The files and folders that a campaign uses, by option."""
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
    """The `content_hash` of each existing file or folder that a campaign uses, by option."""
    return {name: content_hash(path) for name, path in named_files(spec).items() if path.exists()}


def content_hash(path: Path) -> str:
    """The SHA-256, in hex, of a file, or of the names and hashes of all files in a folder.

    Raises ``UsageError`` if a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            for file in sorted(files_in(path)):
                digest.update(f"{content_hash(file)} {file.relative_to(path).as_posix()}\n".encode())
            return digest.hexdigest()
        with path.open("rb") as opened:  # the file may be too large for memory
            while piece := opened.read(PART_BYTES):
                digest.update(piece)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from None
    return digest.hexdigest()


def files_in(folder: Path) -> Iterator[Path]:
    """All regular files in a folder and its subfolders."""
    return (path for path in folder.rglob("*") if path.is_file())
