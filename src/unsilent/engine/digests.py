"""Hashes of what an operation is given and what it gives: of all bits of tensors, and of numbers that Python gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsilent.engine.tape import flatten
from unsilent.outcomes.tensors import words_of
from unsilent.sites.memory import content_of, drop_repeated_dimensions
from unsilent.sites.training.updates import local


def own_generator(values: Sequence[Any]) -> bool:
    """Whether an operation was given a generator other than torch's global ones."""
    generators = [v for v in values if isinstance(v, torch._C.Generator)]
    defaults = (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))
    return any(all(g is not d for d in defaults) for g in generators)


def digest(values: Sequence[Any]) -> int:
    """xxh3-64 of dtypes, shapes and all bits of tensors, and of other values as text; below all modes, so that nobody sees it."""
    result = xxhash.xxh3_64()
    with no_dispatch():
        for value in values:
            if not isinstance(value, Tensor):
                result.update(exact_value_bytes(value) + b"\0")
                continue
            tensor = local(value).detach()
            result.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            for part in _parts(tensor):
                result.update(words_of(drop_repeated_dimensions(part)).contiguous().cpu().numpy().data)
    return int(result.intdigest())


def tensors_hasher(tensors: Iterable[Tensor]) -> Any:
    """xxh3-64, to be gone on with, of the bytes of all elements."""
    result = xxhash.xxh3_64()
    for tensor in tensors:
        result.update(content_of(tensor))
    return result


def digest_unordered(tensor: Tensor) -> int:
    """64 bits that stand for the elements of a tensor, bit for bit, in whatever order they lie: a sum over a mix of each.

    The same for a view, a transpose, or rows in another order; another, but for a chance of 2^-64, where elements differ.
    """
    total = 0
    with no_dispatch():
        for part in _parts(local(tensor).detach()):
            words = words_of(part).cpu().numpy().ravel()
            words = words.view(f"u{words.itemsize}").astype(np.uint64)
            # The finaliser of SplitMix64: neighbours among floats must not add up to the same.
            words += np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                words ^= words >> np.uint64(shift)
                words *= np.uint64(factor)
            words ^= words >> np.uint64(31)
            total += int(words.sum(dtype=np.uint64)) + words.size
    return total % 2**64


def digest_all(hashes: Sequence[int]) -> int:
    """One hash for several hashes; 0 for none."""
    return int(xxhash.xxh3_64_intdigest(repr(hashes).encode())) if hashes else 0


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided memory that a tensor consists of; nothing of one without memory that can be read."""
    if tensor.is_meta or is_traceable_wrapper_subclass(tensor) or not tensor.numel() or tensor.is_nested:
        return []
    if tensor.layout == torch.sparse_coo:
        return [part for part in (tensor._indices(), tensor._values()) if part.numel()]
    if tensor.layout != torch.strided or tensor._is_zerotensor():
        return []
    tensor = tensor.resolve_conj().resolve_neg()
    return [tensor.int_repr() if tensor.is_quantized else tensor]


def digest_given(args: Any, kwargs: dict[str, Any]) -> int:
    """Hash of the arguments that Python passes to an operation besides tensors."""
    return digest([value for value in flatten((*args, *kwargs.values())) if not isinstance(value, Tensor)])


def exact_value_bytes(value: Any) -> bytes:
    """Numbers to the last bit; things without a text of their own (their address differs) by their type."""
    if isinstance(value, float):
        return value.hex().encode()
    if value is None or isinstance(value, (bool, int, complex, str, torch.dtype, torch.device, torch.layout)):
        return repr(value).encode("utf-8", "replace")
    return type(value).__name__.encode()
