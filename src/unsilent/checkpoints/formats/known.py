"""The known checkpoint formats, and recognition of a checkpoint's format.

Another package registers a `Format` as an entry point of the group ``unsilent.formats``; it is tried after the formats of this
package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from unsilent.basics.entry_points import FORMATS as GROUP
from unsilent.basics.entry_points import installed_parts, load_part, wrong_part_error
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
    """One checkpoint format: its name, and functions that recognise and list it.

    Attributes:
        name: Name in reports.
        matches: Returns whether files have this format; on any content, it may raise only ``UsageError``.
        tensors: Returns all tensors and numbers in the order of the file; raises ``UsageError`` for damaged files.
    """

    name: str
    matches: Callable[[CheckpointFiles], bool]
    tensors: Callable[[CheckpointFiles], list[StoredTensor]]


_MODULES = (torch_zip, dcp, deepspeed, trainer_folder, safetensors_file, torch_legacy, orbax, hdf5, keras_archive)
FORMATS = tuple(Format(module.NAME, module.matches, module.tensors) for module in _MODULES)
"""All formats, in the order in which they are tried."""


def format_of(files: CheckpointFiles, formats: Iterable[Format] = ()) -> Format:
    """The format of a checkpoint, among the given formats or all known ones.

    Raises ``UsageError`` if the checkpoint has none of them.
    """
    names: list[str] = []
    problems: list[str] = []
    for known in formats or all_formats(problems):
        if known.matches(files):
            return known
        names.append(known.name)
    noun = "folder" if files.is_folder else "file"
    raise UsageError(
        "; ".join(
            [f"{files.root} is no {noun} of a known checkpoint format; expected one of {', '.join(names)}", *problems]
        )
    )


def all_formats(problems: list[str] | None = None) -> Iterator[Format]:
    """Yield the formats of this package, then those of other packages, which are imported only when reached.

    Args:
        problems: Gets a sentence on each format that cannot be imported.
    """
    yield from FORMATS
    for entry in installed_parts(GROUP).values():
        try:
            module = load_part("checkpoint format", entry)
            if not isinstance(module, Format):
                raise wrong_part_error(entry, f"a {type(module).__name__}", "a Format")
            yield module
        except UsageError as error:
            if problems is not None:
                problems.append(str(error))
