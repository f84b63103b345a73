"""Hashes of tensors in memory, by the names that they have in a checkpoint file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import leaves_in, map_tensors, tensors_in
from unsilent.checkpoints.formats.torch_pickle import key_text
from unsilent.checkpoints.hashes import TensorHash, hash_elements
from unsilent.checkpoints.names import unique_names, with_parameter_names
from unsilent.sites.memory import content_of, dtype_name


def with_own_values(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with conjugate and negative views replaced by copies, because their values differ from their bytes.

    Raises ``UsageError`` for a state that contains itself.
    """
    try:
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors_in(state)):
            return cast(Mapping[str, Any], map_tensors(state, lambda _, tensor: tensor.resolve_conj().resolve_neg()))
    except RecursionError:
        raise UsageError(
            "the state contains itself, so it cannot be compared with a file; save a copy without that"
        ) from None
    return state


def hashes_in_memory(state: Mapping[str, Any]) -> dict[str, TensorHash]:
    """The hash of every tensor, by its name in a checkpoint file.

    Raises ``UsageError`` for a tensor that cannot be compared with a file.
    """
    entries = [entry for entry in leaves_in(state, key_text=key_text) if isinstance(entry[1], (Tensor, int, float))]
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for _, value in entries]
    names = unique_names([path for path, _ in entries], shapes)
    named = zip(with_parameter_names(names, shapes, [value for _, value in entries]), entries, strict=True)
    return {name: _hash(name, value) for name, (_, value) in named if isinstance(value, Tensor)}


def _hash(name: str, tensor: Tensor) -> TensorHash:
    """The hash of a tensor's bytes."""
    if obstacle := _obstacle(tensor):
        raise UsageError(f"{name} of the state is {obstacle}")
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.int_repr()  # the form that files store
    return hash_elements([content_of(plain)], dtype_name(plain.dtype), tuple(tensor.shape))


def _obstacle(tensor: Tensor) -> str:
    """The reason why a tensor cannot be compared with a file, with advice; empty if it can."""
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
