"""Placement of a model, its inputs and copies of its outputs on a device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import Path, map_tensors
from unsilent.basics.sizes import parse_whole_number
from unsilent.sites.modules import copied

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_device(device: str) -> str:
    """The device to use for a device name such as ``cuda`` or ``auto``.

    ``auto`` means CUDA if it is available. Raises ``UsageError`` for a device that is not available.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and parse_whole_number(index) is None):
        raise UsageError(f"unknown device {device!r}; expected auto, cpu, cuda or cuda:0")
    if kind == "cuda" and (not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            f"device {device!r} does not exist here ({torch.cuda.device_count()} CUDA devices); choose device cpu"
        )
    return device


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype for a value of the option ``--dtype``."""
    if dtype not in DTYPES:
        from unsilent.basics.errors import unknown_name_error

        raise unknown_name_error("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def place_model(model: nn.Module, device: str, dtype: str | None) -> nn.Module:
    """The model on the device, with floating-point tensors in ``dtype``.

    The result is the model itself if nothing has to change, else a copy. The user's model is never moved or rounded.
    """
    if not device.startswith("cpu"):
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    wanted = None if dtype is None else torch_dtype(dtype)
    tensors = [*model.parameters(), *model.buffers()]
    if all(_fits(t, torch.device(device), wanted) for t in tensors):
        return model
    return copied(model).to(device=torch.device(device), dtype=wanted)


def _fits(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    index = device.index or 0
    here = tensor.device.type == device.type and (tensor.device.index or 0) == index
    return here and (dtype is None or not tensor.dtype.is_floating_point or tensor.dtype == dtype)


def place(value: Any, device: str, dtype: str | None) -> Any:
    """A nested input with its tensors on the device and floating-point tensors in ``dtype``.

    A part of a larger tensor, for example from ``images.split(64)``, is copied, so that its memory belongs to this
    input alone.
    """

    def placed(path: Path, tensor: Tensor) -> Tensor:
        wanted = torch_dtype(dtype) if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        result = tensor.to(device=torch.device(device), dtype=wanted)
        return result.clone() if _is_part(result) else result

    return map_tensors(value, placed)


def _is_part(tensor: Tensor) -> bool:
    """Whether a contiguous tensor occupies only a part of its storage."""
    dense = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
    return dense and not tensor.requires_grad and tensor.untyped_storage().nbytes() > tensor.nbytes


def clone(value: Any) -> Any:
    """A deep copy of an output that later runs cannot write into."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict) and type(value) is dict:
        return {k: clone(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(clone(v) for v in value)
    return copy.deepcopy(value)


def environment(device: str = "cpu") -> str:
    """The device and software on which the bits of an output depend, as text."""
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context in which torch uses ``count`` CPU threads.

    The bits of sums depend on this number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
