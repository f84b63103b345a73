"""Which tensors of a training's checkpoint belong to a section that is corrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.names import BUFFERS
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.faults.population import Region


def _is_weight(tensor: StoredTensor) -> bool:
    return tensor.section == "model" and not tensor.name.endswith(BUFFERS)


BELONGS: Mapping[str, Callable[[StoredTensor], bool]] = {
    "weights": _is_weight,
    "statistics": lambda tensor: tensor.name.endswith(("running_mean", "running_var")),
    "first_moment": lambda tensor: tensor.name.endswith(("/exp_avg", "/momentum_buffer")),
    "second_moment": lambda tensor: tensor.name.endswith("/exp_avg_sq"),
    "scheduler": lambda tensor: tensor.is_number and tensor.section in ("scheduler", "optimizer"),
}
"""Section of the file -> whether a tensor or number belongs to it."""


def regions_of(checkpoint: Checkpoint, section: str) -> list[Region]:
    """Regions of a section to corrupt: its floating-point tensors, or numbers; none where the training has no such state."""
    return [
        Region(tensor.site, tensor.dtype, tensor.shape)
        for tensor in checkpoint.tensors.values()
        if BELONGS[section](tensor) and not tensor.reason_not_editable and tensor.codec.kind == "float" and tensor.numel
    ]
