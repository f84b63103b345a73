"""Folders that the ``Trainer`` of transformers writes: the model's files and the training state's ``torch.save`` files.

Follows transformers 5.23. The model is in safetensors, or in ``pytorch_model*.bin``; the others are ``optimizer.pt``,
``scheduler.pt``, ``scaler.pt`` and ``rng_state.pth`` (with several processes ``rng_state_0.pth`` and so on). The optimizer's
numbers are not replaced by names: it has two groups of parameters, and safetensors does not keep their order, so no name is
certain.
"""

from __future__ import annotations

import re

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats import safetensors_file
from unsilent.checkpoints.formats.torch_pickle import KeyPath
from unsilent.checkpoints.formats.torch_zip import ArchiveValue, read_archive, with_names
from unsilent.checkpoints.stored_tensors import StoredTensor

NAME = "transformers"
_STATES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")
_RNG = re.compile(r"rng_state(?:_(?P<rank>\d{1,6}))?\.pth", re.ASCII)
_MODEL = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin", re.ASCII)


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a folder of the ``Trainer``."""
    return files.is_folder and any(_keys(name) is not None for name in files.names())


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of the model and of the training's state."""
    names = files.names()
    safe = safetensors_file.tensors(files) if safetensors_file.matches(files) else []
    values: list[ArchiveValue] = []
    for name in sorted(names, key=lambda name: (_keys(name) != (), name)):
        keys = _keys(name)
        if keys is not None and not (safe and keys == ()):  # transformers loads safetensors if both exist
            values += (value._replace(path=(*keys, *value.path)) for value in read_archive(files, name)[1])
    result: dict[str, StoredTensor] = {}
    for tensor in (*safe, *with_names(values, in_order=False)):
        if tensor.name in result:
            raise UsageError(f"{files.root} has {tensor.name!r} in two files; give one file")
        result[tensor.name] = tensor
    return list(result.values())


def _keys(name: str) -> KeyPath | None:
    """The keys under which a file's values are listed (none for the model); None if the file is not read."""
    if _MODEL.fullmatch(name):
        return ()
    if rng := _RNG.fullmatch(name):
        return ("rng",) if rng["rank"] is None else ("rng", f"rank_{rng['rank']}")
    return (name.partition(".")[0],) if name in _STATES else None
