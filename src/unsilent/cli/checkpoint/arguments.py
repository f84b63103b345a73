"""Shared parts of commands on checkpoint files: the argument that names one, how it is opened, printed lines."""

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


def whole_checkpoint(given: Any) -> Path:
    """The path of a checkpoint; raises ``UsageError`` for the file of a folder that lists the others."""
    path = Path(given)
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
    """A checkpoint; the error of one that cannot be read says so where an edit of it was interrupted."""
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
    """Bytes of the elements of tensors."""
    return sum(t.nbytes for t in tensors)


@contextmanager
def bytes_shown(total: int, what: str, quiet: bool) -> Iterator[Any]:
    """A bar on a terminal while much is read, in bytes; yields what is called with numbers of bytes."""
    if quiet or total < 2**28 or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
