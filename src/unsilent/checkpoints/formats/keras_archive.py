"""``.keras`` files: zip archives with the uncompressed HDF5 file ``model.weights.h5``.

A byte's position is the entry's offset plus its offset in the HDF5 file; the CRC-32 of the entry covers all bytes.
"""

from __future__ import annotations

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.hdf5 import range_tensors
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.checkpoints.zip_directory import STORED, ZipDirectory

NAME = "Keras"
_WEIGHTS = "model.weights.h5"
_MAGIC = b"PK\x03\x04"


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a ``.keras`` file."""
    if files.is_folder or files.size("") < len(_MAGIC) or files.read("", 0, len(_MAGIC)) != _MAGIC:
        return False
    return _WEIGHTS in ZipDirectory(files, "").names


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All weights and the optimizer's state, named by their Keras paths."""
    entry = ZipDirectory(files, "").entries[_WEIGHTS]
    if entry.method != STORED or entry.size != entry.unpacked_size:
        raise UsageError(
            f"{files.root} has its {_WEIGHTS} compressed, expected stored as Keras does; save it again with Keras"
        )
    return range_tensors(files, entry.offset, entry.size, (entry.checksum,))
