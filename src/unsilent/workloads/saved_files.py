"""Safe reading of the user's files: ``.pt``, ``.th``, ``.safetensors`` and image files.

Invariant: only tensors and plain containers of weight files are unpickled (``weights_only=True``), and arrays never.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import open_plain
from unsilent.workloads.npz import read_npz


def read_saved(path: str | Path, kind: str) -> Any:
    """The object in a file written by ``torch.save`` or in a safetensors file, on the CPU.

    ``kind`` names the content in errors, for example "weights". Raises ``UsageError`` if the file cannot be read, is
    damaged, or cannot be loaded without running code.
    """
    from safetensors.torch import load_file

    where = Path(path).expanduser()
    with open_plain(path) as file:
        _check_archive(str(path), file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about old pickle protocols, which does not matter here
            if where.suffix == ".safetensors":
                return load_file(where)
            return torch.load(where, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise UsageError(
            f"{path} is damaged or holds more than tensors; it is not loaded because loading it could run code"
        ) from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise UsageError(f"{path} is not a valid {kind} file: {first_line(error)}") from None


def state_dict_misfit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str) -> str:
    """A description of the first entry of a state dict that does not fit the model, or "" if all fit.

    ``expected`` is the model's own state dict, ``what`` the name of the model.
    """
    for key, tensor in expected.items():
        # Early torch versions did not count batches, and evaluation does not use the count.
        if key not in state and not key.endswith("num_batches_tracked"):
            return f"lacks {key!r}"
        if key in state and state[key].shape != tensor.shape:
            return f"has {key!r} as {list(state[key].shape)}, expected {list(tensor.shape)}"
    surplus = next((key for key in state if key not in expected), None)
    return "" if surplus is None else f"has {surplus!r}, which {what} lacks"


def _check_archive(path: str, file: BinaryIO) -> None:
    """Raise ``UsageError`` for an archive with compressed members.

    Torch writes none, and they may unpack to any size.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [info for info in archive.infolist() if info.compress_type or info.compress_size != info.file_size]
    except Exception:  # not an archive, or a damaged one: torch reports the error
        return
    if packed:
        raise UsageError(f"{path} holds compressed parts, which torch.save never writes; save it again with torch.save")


def read_images(path: str, classes: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n] of a ``.npz``.

    Raises ``UsageError`` for any other content.
    """
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
    """The tensors of a weights file by name, without the prefix ``module.``.

    Raises ``UsageError`` for any other content.
    """
    whole = read_saved(path, "weights")
    if isinstance(whole, Mapping) and isinstance(whole.get("state_dict"), Mapping):
        whole = whole["state_dict"]
    if not isinstance(whole, Mapping) or not all(isinstance(tensor, Tensor) for tensor in whole.values()):
        raise UsageError(
            f"{path} holds no state dict (name -> tensor), neither at the top level nor under 'state_dict'; "
            "save one with torch.save(model.state_dict(), FILE)"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in whole.items()}
