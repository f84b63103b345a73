"""Dropout that goes with the sample: in a batch whose rows are permuted, each row keeps the mask it had before.

Ordinary dropout gives the k-th row the k-th mask, so permuting a batch deals other masks to the samples, and the permutation
is no longer a mere change of the order in which sums are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_order: ContextVar[Tensor | None] = ContextVar("_order", default=None)


@contextmanager
def rows_permuted_by(order: Tensor | None) -> Iterator[None]:
    """Inside, row i of every batch is row ``order[i]`` of the batch as it came (None: as it came)."""
    token = _order.set(order)
    try:
        yield
    finally:
        _order.reset(token)


class RowDropout(nn.Module):
    """Zeroes elements with probability ``p`` in training; the first dimension of its input is the sample."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        # A tensor of its own, not empty_like: the draws must not depend on the memory layout of x.
        kept = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        if (order := _order.get()) is not None:
            kept = kept[order]
        return x * kept / (1 - self.p)

    def extra_repr(self) -> str:
        """For the print of a model."""
        return f"p={self.p:g}"
