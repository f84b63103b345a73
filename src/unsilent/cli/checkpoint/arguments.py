"""Functions shared by the commands on checkpoint files: arguments, opening and progress."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Option

if TYPE_CHECKING:
    from unsilent.checkpoints.stored_tensors import StoredTensor

NO_CHECKPOINT = "no checkpoint was named; give a checkpoint file, or the folder of a sharded one"


def whole_checkpoint(value: Any) -> Path:
    """The path of a checkpoint; raises ``UsageError`` for a file that only lists a checkpoint's files."""
    path = Path(value)
    if path.name.endswith(".safetensors.index.json") or path.name == ".metadata":
        raise UsageError(
            f"{path} lists the files of a checkpoint that is a folder; expected all of it: give the folder {path.parent}"
        )
    return path


CHECKPOINT = Option(
    "A checkpoint file, or the folder of a sharded one.", "", parser=whole_checkpoint, metavar="CHECKPOINT",
    missing_error=NO_CHECKPOINT,
)  # fmt: skip


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a checkpoint for a ``with`` block.

    If it cannot be read, the error names an interrupted edit if there was one.
    """
    from unsilent.checkpoints.checkpoint import Checkpoint
    from unsilent.checkpoints.editing import refuse_interrupted
    from unsilent.cli.file_sorts import refuse_other_files

    refuse_other_files(path, {"store": f"unsilent report {path}, or unsilent diff for two of them"})
    try:
        with Checkpoint(path) as checkpoint:
            yield checkpoint
    except UsageError:
        refuse_interrupted(path)
        raise


def size_of(tensors: Iterable[StoredTensor]) -> int:
    """The total size of tensors in bytes."""
    return sum(t.nbytes for t in tensors)


@contextmanager
def bytes_shown(total: int, what: str, quiet: bool) -> Iterator[Any]:
    """A progress bar for reading many bytes; yields the function that adds bytes to it."""
    if quiet or total < 2**28 or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
