"""Weights and image files of the user's own, read with nothing trusted.

Invariant: weight files are never unpickled beyond tensors (``weights_only=True``), arrays never unpickled at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.workloads.npz import read_npz
from unsilent.workloads.saved_files import read_saved


def read_images(path: str, classes: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n] of a ``.npz``; anything else is a ``UsageError``."""
    wanted = ("images", "labels")
    arrays = read_npz(path, "'images' and 'labels'", only=wanted)
    for name in wanted:
        if name not in arrays:
            raise UsageError(f"{path} has no array {name!r}; expected a .npz with 'images' and 'labels'")
    images, labels = (arrays[name] for name in wanted)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3) or not len(images):
        raise UsageError(f"{path}: 'images' is {images.dtype} {list(images.shape)}; expected uint8 [n, 32, 32, 3]")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise UsageError(f"{path}: 'labels' is {labels.dtype} {list(labels.shape)}; expected integers [{len(images)}]")
    if labels.min() < 0 or labels.max() >= classes:
        raise UsageError(
            f"{path}: labels range from {labels.min()} to {labels.max()}; the weights have classes 0 to {classes - 1}"
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def read_weights(path: str) -> dict[str, Tensor]:
    """Name -> tensor of a weights file, without a ``module.`` prefix; anything else is a ``UsageError``."""
    whole = read_saved(path, "weights")
    if isinstance(whole, Mapping) and isinstance(whole.get("state_dict"), Mapping):
        whole = whole["state_dict"]
    if not isinstance(whole, Mapping) or not all(isinstance(tensor, Tensor) for tensor in whole.values()):
        raise UsageError(
            f"{path} holds no state dict (name -> tensor), neither at the top level nor under 'state_dict'"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in whole.items()}
