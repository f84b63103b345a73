"""Dropout whose masks belong to the samples, also if the rows of a batch are permuted or shared by ranks.

Ordinary dropout gives the k-th row the k-th mask. Permuting a batch would then give the samples different masks, and
would change more than the order of sums. Each rank would also give its rows the masks of the first rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn


class ChosenRows(NamedTuple):
    """The rows of a batch that are used.

    Row i is row ``numbers[i]`` of the original batch, which has ``batch_size`` rows.
    """

    numbers: Tensor
    batch_size: int


_chosen: ContextVar[ChosenRows | None] = ContextVar("_chosen", default=None)


@contextmanager
def rows_chosen_by(rows: ChosenRows | None) -> Iterator[None]:
    """Context in which every batch consists of the given rows of the original batch.

    None: all rows in the original order.
    """
    token = _chosen.set(rows)
    try:
        yield
    finally:
        _chosen.reset(token)


class RowDropout(nn.Module):
    """Dropout with probability ``p`` and one mask for each sample of the original batch.

    The first dimension of the input is the sample.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        # A tensor of its own, not empty_like: the draws must not depend on the memory layout of x.
        rows = _chosen.get()
        shape = x.shape if rows is None else (rows.batch_size, *x.shape[1:])
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        if rows is not None:
            mask = mask[rows.numbers]
        return x * mask / (1 - self.p)

    def extra_repr(self) -> str:
        """The text in the printed form of a model."""
        return f"p={self.p:g}"
