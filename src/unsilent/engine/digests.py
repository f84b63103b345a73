"""Hashes of the arguments and results of operations, which cover every bit of tensors and numbers."""

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
    """Whether an operation was given a generator that is not one of torch's global generators."""
    generators = [v for v in values if isinstance(v, torch._C.Generator)]
    defaults = (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))
    return any(all(g is not d for d in defaults) for g in generators)


def digest(values: Sequence[Any]) -> int:
    """xxh3-64 hash of tensors (dtype, shape, all bits) and of other values as text.

    The hash is computed below all dispatch modes, so that none of them sees it.
    """
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
    """An xxh3-64 hash object that has hashed the bytes of all elements.

    More bytes can be added to it.
    """
    result = xxhash.xxh3_64()
    for tensor in tensors:
        result.update(content_of(tensor))
    return result


def digest_unordered(tensor: Tensor) -> int:
    """A 64-bit hash of the elements of a tensor that does not depend on their order.

    The hash is the same for a view, a transpose, or rows in another order. Different elements give the same hash with
    a chance of 2^-64.
    """
    total = 0
    with no_dispatch():
        for part in _parts(local(tensor).detach()):
            words = words_of(part).cpu().numpy().ravel()
            words = words.view(f"u{words.itemsize}").astype(np.uint64)
            # The finaliser of SplitMix64, so that neighbouring floats do not give equal sums.
            words += np.uint64(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                words ^= words >> np.uint64(shift)
                words *= np.uint64(factor)
            words ^= words >> np.uint64(31)
            total += int(words.sum(dtype=np.uint64)) + words.size
    return total % 2**64


def digest_all(hashes: Sequence[int]) -> int:
    """One hash that combines several hashes, or 0 for no hash."""
    return int(xxhash.xxh3_64_intdigest(repr(hashes).encode())) if hashes else 0


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold the memory of a tensor.

    Empty for a tensor whose memory cannot be read.
    """
    if tensor.is_meta or is_traceable_wrapper_subclass(tensor) or not tensor.numel() or tensor.is_nested:
        return []
    if tensor.layout == torch.sparse_coo:
        return [part for part in (tensor._indices(), tensor._values()) if part.numel()]
    if tensor.layout != torch.strided or tensor._is_zerotensor():
        return []
    tensor = tensor.resolve_conj().resolve_neg()
    return [tensor.int_repr() if tensor.is_quantized else tensor]


def digest_given(args: Any, kwargs: dict[str, Any]) -> int:
    """Hash of the arguments of an operation that are not tensors."""
    return digest([value for value in flatten((*args, *kwargs.values())) if not isinstance(value, Tensor)])


def exact_value_bytes(value: Any) -> bytes:
    """Bytes that represent a value exactly for a hash.

    An object that is not a plain value is represented by its type, because its text may contain an address.
    """
    if isinstance(value, float):
        return value.hex().encode()
    if value is None or isinstance(value, (bool, int, complex, str, torch.dtype, torch.device, torch.layout)):
        return repr(value).encode("utf-8", "replace")
    return type(value).__name__.encode()
