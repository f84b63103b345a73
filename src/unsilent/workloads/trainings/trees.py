"""Batches: nestings of tuples, lists and dicts whose tensors have the sample first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with every tensor changed; other values as they are."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(item, change) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(item, change) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(item, change) for item in batch)
    return batch


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nesting."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tensors(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from tensors(item)


def row_count(batch: Any) -> int:
    """The samples of a batch: the common first dimension of its tensors; 0 where they have none in common."""
    counts = {len(tensor) for tensor in tensors(batch) if tensor.ndim}
    return counts.pop() if len(counts) == 1 else 0
