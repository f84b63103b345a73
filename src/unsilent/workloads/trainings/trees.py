"""Batches: nestings of tuples, lists and dicts whose tensors have the sample first."""

from __future__ import annotations

from typing import Any

from unsilent.nested import tensors_in


def row_count(batch: Any) -> int:
    """The samples of a batch: the common first dimension of its tensors; 0 where they have none in common."""
    counts = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
    return counts.pop() if len(counts) == 1 else 0
