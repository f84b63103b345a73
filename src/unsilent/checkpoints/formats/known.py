"""The known formats, and which of them a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats import (
    dcp,
    deepspeed,
    hdf5,
    keras_archive,
    orbax,
    safetensors_file,
    torch_legacy,
    torch_zip,
    trainer_folder,
)
from unsilent.checkpoints.stored_tensors import StoredTensor


class Format(NamedTuple):
    """One format.

    Attributes:
        name: As reports show it.
        matches: Whether files are of it; must raise ``UsageError`` at most, on any content.
        tensors: All tensors and numbers in the order of the file; raises ``UsageError`` for damaged files.
    """

    name: str
    matches: Callable[[CheckpointFiles], bool]
    tensors: Callable[[CheckpointFiles], list[StoredTensor]]


_MODULES = (torch_zip, dcp, deepspeed, trainer_folder, safetensors_file, torch_legacy, orbax, hdf5, keras_archive)
FORMATS = tuple(Format(module.NAME, module.matches, module.tensors) for module in _MODULES)
"""In the order in which they are tried."""


def format_of(files: CheckpointFiles) -> Format:
    """The format of a checkpoint; raises ``UsageError`` where it has none of them."""
    for known in FORMATS:
        if known.matches(files):
            return known
    what = "folder" if files.is_folder else "file"
    raise UsageError(
        f"{files.root} is no {what} of a known checkpoint format; expected one of {', '.join(known.name for known in FORMATS)}"
    )
