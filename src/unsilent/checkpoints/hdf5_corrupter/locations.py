"""Locations in the notation of hdf5_corrupter, where a text selects all datasets whose paths begin with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import without_shared_bytes
from unsilent.checkpoints.stored_tensors import StoredTensor


def editable_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """The editable tensors and numbers that are not empty, in the file's order; a tied weight only once."""
    result = [t for t in checkpoint.tensors.values() if not t.reason_not_editable and t.numel]
    if not result:
        raise UsageError(f"{checkpoint.path} holds no tensor that can be edited; give another checkpoint")
    return without_shared_bytes(result)


def tensors_below(
    checkpoint: Checkpoint, tensors: Sequence[StoredTensor], locations: Iterable[str]
) -> list[StoredTensor]:
    """The tensors at each location, in the order of the locations.

    A tensor at two locations is listed twice, so that it is drawn twice as often.

    Raises ``UsageError`` for a location that selects nothing.
    """
    result = []
    for location in locations:
        selected = [tensor for tensor in tensors if is_below(tensor, location)]
        if not selected:
            raise unknown_name_error(f"location in {checkpoint.path}:", location[:80], [t.name for t in tensors])
        result += selected
    return result


def is_below(tensor: StoredTensor, location: str) -> bool:
    """Whether a tensor's name begins with a location.

    For example, ``/model/conv1`` selects ``model/conv1.weight`` and ``model/conv10.weight``.

    A ``/`` at its end also matches the ``.`` of another format: ``/model/conv1/`` selects only ``model/conv1.weight``.
    """
    wanted = location.removeprefix("/")
    forms = (wanted, f"{wanted[:-1]}.") if wanted.endswith("/") else (wanted,)
    names = (tensor.stored_as, tensor.name, tensor.name.partition("/")[2])
    return any(name.startswith(forms) for name in names)
