"""Hashes of the tensors of a state in memory, by the names that a checkpoint file has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsilent.checkpoints.hashes import TensorHash, hash_elements
from unsilent.checkpoints.names import optimizer_names, unique_names
from unsilent.errors import UsageError
from unsilent.nested import leaves_in
from unsilent.sites.memory import content_of, dtype_name


def hashes_in_memory(state: Mapping[str, Any]) -> dict[str, TensorHash]:
    """The hash of every tensor by the name that a checkpoint file has for it.

    Raises ``UsageError`` for a tensor that cannot be compared with a file.
    """
    try:
        found = [(path, value) for path, value in leaves_in(state) if isinstance(value, (Tensor, int, float))]
    except RecursionError:
        raise UsageError(
            "the state contains itself, so it cannot be compared with a file; save a copy without that"
        ) from None
    names = unique_names([path for path, _ in found], [not isinstance(value, Tensor) for _, value in found])
    tensors = {name: value for name, (_, value) in zip(names, found, strict=True) if isinstance(value, Tensor)}
    renamed = optimizer_names(names, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return {renamed.get(name, name): _hash(name, tensor) for name, tensor in tensors.items()}


def _hash(name: str, tensor: Tensor) -> TensorHash:
    """The hash of a tensor's bytes as they are in memory: of a conjugate or negative view, those before it is taken."""
    if obstacle := _obstacle(tensor):
        raise UsageError(f"{name} of the state is {obstacle}")
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()  # as files list it
    if plain.is_conj():
        plain = plain.conj()
    if plain.is_neg():
        plain = torch._neg_view(plain)
    return hash_elements([content_of(plain)], dtype_name(plain.dtype), tuple(tensor.shape))


def _obstacle(tensor: Tensor) -> str:
    """What a tensor is that cannot be compared with a file, and what to do; empty for all others."""
    if hasattr(tensor, "to_local") or hasattr(tensor, "local_shards"):
        return (
            "spread over ranks, and one file cannot hold it; gather it first "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) and save it on one rank"
        )
    if tensor.device.type == "meta":
        return "on the device meta, which has no values; load or initialise it first"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{str(tensor.layout).removeprefix('torch.')}, which cannot be compared with a file; save it as a dense tensor"
    return ""
