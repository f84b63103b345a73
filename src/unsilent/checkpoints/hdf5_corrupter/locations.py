"""Locations as hdf5_corrupter names them: the start of the path of a dataset, compared as text, selects all that begin so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import without_shared_bytes
from unsilent.checkpoints.stored_tensors import StoredTensor


def editable_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """The tensors and numbers with elements that can be edited, in the file's order; a tied one by its first name only."""
    result = [t for t in checkpoint.tensors.values() if not t.reason_not_editable and t.numel]
    if not result:
        raise UsageError(f"{checkpoint.path} holds no tensor that can be edited; give another checkpoint")
    return without_shared_bytes(result)


def tensors_below(
    checkpoint: Checkpoint, tensors: Sequence[StoredTensor], locations: Iterable[str]
) -> list[StoredTensor]:
    """The tensors of every location, one after the other: a tensor of two of them is there twice, and drawn as often.

    Raises ``UsageError`` for a location that selects nothing.
    """
    result = []
    for location in locations:
        selected = [tensor for tensor in tensors if is_below(tensor, location)]
        if not selected:
            raise unknown_name_error(f"location in {checkpoint.path}", location[:80], [t.name for t in tensors])
        result += selected
    return result


def is_below(tensor: StoredTensor, location: str) -> bool:
    """Whether a name of a tensor begins with a location: ``/model/conv1`` has ``model/conv1.weight`` and ``model/conv10.weight``.

    A ``/`` at its end also stands for the ``.`` of another format: ``/model/conv1/`` has ``model/conv1.weight`` alone.
    """
    wanted = location.removeprefix("/")
    forms = (wanted, f"{wanted[:-1]}.") if wanted.endswith("/") else (wanted,)
    names = (tensor.stored_as, tensor.name, tensor.name.partition("/")[2])
    return any(name.startswith(forms) for name in names)
