"""Reading ``.pt``, ``.th`` and ``.safetensors`` of the user's own: tensors and plain containers, nothing else is unpickled."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import open_plain


def read_saved(path: str | Path, kind: str) -> Any:
    """The object in a file of ``torch.save`` or safetensors, on the CPU; ``kind`` names it in errors ("weights").

    Raises ``UsageError`` when it cannot be read, is damaged, or would have to run code.
    """
    from safetensors.torch import load_file

    where = Path(path).expanduser()
    with open_plain(path) as file:
        _check_archive(str(path), file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks on old pickle protocols; what counts is what was loaded
            if where.suffix == ".safetensors":
                return load_file(where)
            return torch.load(where, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise UsageError(
            f"{path} is damaged or holds more than tensors; it is not loaded because loading it could run code"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UsageError(f"{path} is not a valid {kind} file: {first_line(error)}") from None


def state_dict_misfit(own: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str) -> str:
    """Why a state dict does not fit a model's ``own``, in words; empty where all does. ``what``: the model."""
    for key, tensor in own.items():
        # Early torch versions did not count batches, and evaluation does not use the count.
        if key not in state and not key.endswith("num_batches_tracked"):
            return f"lacks {key!r}"
        if key in state and state[key].shape != tensor.shape:
            return f"has {key!r} as {list(state[key].shape)}, expected {list(tensor.shape)}"
    surplus = next((key for key in state if key not in own), None)
    return "" if surplus is None else f"has {surplus!r}, which {what} lacks"


def _check_archive(path: str, file: BinaryIO) -> None:
    """Raise ``UsageError`` for an archive with compressed members: torch writes none, and they may unpack to anything."""
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [info for info in archive.infolist() if info.compress_type or info.compress_size != info.file_size]
    except Exception:  # no archive, or a damaged one: torch says what is wrong with it
        return
    if packed:
        raise UsageError(f"{path} holds compressed parts, which torch.save never writes; save it again with torch.save")
