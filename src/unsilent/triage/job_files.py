"""Finds files of known kinds in the folder of a job, without following links or changing anything."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.events.incident_folder import FOLDER

MOST_FILES, DEEPEST = 100_000, 10
_LOG_RANK = re.compile(r"rank[_-]?(\d{1,4})(?!\d)", re.ASCII)
_NUMBER = re.compile(r"\d{1,4}", re.ASCII)
_ATTEMPT = re.compile(r"attempt_(\d{1,6})", re.ASCII)
_TRACE = re.compile(r"(?:trace-rank\d+|.+\.pt\.trace)\.json(?:\.gz)?")
_DUMP = re.compile(r"(?:flight-rank|dump_|nccl_trace_rank_)(\d{1,4})(?:\.json)?", re.ASCII)
_CONFIGURATION = re.compile(r"(?:config[\w-]*|hparams)\.(?:json|ya?ml)")
_MANIFEST = ".manifest.json"


def files_below(folder: Path) -> list[Path]:
    """Plain files in a folder and its subfolders, except hidden ones and incidents.

    Raises ``UsageError`` if there are too many.
    """
    result: list[Path] = []
    for name, folders, files in os.walk(folder):
        here = Path(name)
        is_deepest = len(here.relative_to(folder).parts) >= DEEPEST
        folders[:] = sorted(
            name
            for name in folders
            if not is_deepest and name != FOLDER and (name == ".hydra" or not name.startswith("."))
        )
        paths = (here / name for name in sorted(files))
        result += [path for path in paths if path.is_file() and not path.is_symlink()]
        if len(result) > MOST_FILES:
            raise UsageError(f"{folder} has more than {MOST_FILES:,} files; give the folder of one job")
    return result


def logs_in(files: Sequence[Path]) -> dict[int | None, list[Path]]:
    """Logs by rank from the last attempt of torchrun, with None for logs without a rank in their name."""
    result: dict[tuple[int, int | None], list[Path]] = defaultdict(list)
    for path in files:
        attempt = next((int(match[1]) for part in path.parts if (match := _ATTEMPT.fullmatch(part))), -1)
        if path.name in ("stdout.log", "stderr.log") and _NUMBER.fullmatch(path.parent.name):
            result[attempt, int(path.parent.name)].append(path)
        elif path.suffix == ".log" or (path.suffix == ".txt" and path.name.startswith("log_rank")):
            named = _LOG_RANK.search(path.name)
            result[attempt, int(named[1]) if named else None].append(path)
    last = max((attempt for attempt, _ in result), default=-1)
    return {rank: paths for (attempt, rank), paths in result.items() if attempt == last}


def dumps_in(files: Sequence[Path]) -> dict[int, Path]:
    """The latest dump of the flight recorder of each rank."""
    named = ((match, path) for path in files if (match := _DUMP.fullmatch(path.name)))
    return {int(match[1]): path for match, path in sorted(named, key=lambda named_dump: named_dump[1].stat().st_mtime)}


def traces_in(files: Sequence[Path]) -> list[Path]:
    """Profiler traces in the folder that holds the latest one."""
    traces = [path for path in files if _TRACE.fullmatch(path.name)]
    last = max(traces, key=lambda path: path.stat().st_mtime, default=Path())
    return [path for path in traces if path.parent == last.parent]


def configuration_in(files: Sequence[Path]) -> Path | None:
    """The configuration file of hydra, or else the one nearest to the top folder."""
    named = [path for path in files if _CONFIGURATION.fullmatch(path.name) and path.parent.name != ".hydra"]
    hydra = [path for path in files if path.parts[-2:] == (".hydra", "config.yaml")]
    return min(hydra or named, key=lambda path: (len(path.parts), path), default=None)


def manifests_in(files: Sequence[Path]) -> dict[Path, Path]:
    """Manifests by their checkpoint, for checkpoints that exist."""
    named = {path.with_name(path.name.removesuffix(_MANIFEST)): path for path in files if path.name.endswith(_MANIFEST)}
    return {
        checkpoint: path for checkpoint, path in named.items() if checkpoint.exists() and not checkpoint.is_symlink()
    }
