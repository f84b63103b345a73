"""Click data for DLRM: the data class, and a synthetic data set labelled by a teacher model.

The synthetic set has Criteo's schema (13 dense features, 26 categorical ones) and Zipf-distributed categories. Its
labels come from a random teacher with a dense part, a sparse part and products of categories, so that there is
something to learn. If the labels were independent of the features, every small deviation would flip a decision, or none
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.workloads.cache import digest_of_parts

DENSE, SPARSE = 13, 26
POPULARITY = 1.3
"""Exponent of Zipf's law for the categories."""


@dataclass(frozen=True)
class Clicks:
    """Click data in shuffled order, of which the last fifth is held out.

    ``dense`` float32 [n, d], ``sparse`` int64 [n, k] with ``sparse[:, i] < tables[i]``, ``labels`` float32 [n] of
    0 and 1. ``hash`` identifies the content.
    """

    dense: Tensor
    sparse: Tensor
    labels: Tensor
    tables: tuple[int, ...]
    description: str
    hash: str
    by_popularity: tuple[NDArray[np.int64], ...] = ()
    """Categories of each table, most popular first; only for synthetic data."""

    @property
    def training_row_count(self) -> int:
        """Number of training rows."""
        return len(self.labels) * 4 // 5


@cache
def synthetic_clicks(rows: int = 80_000) -> Clicks:
    """The synthetic click data.

    On average half of the labels are 1. The arrays are shared and must not be written to.
    """
    rng = np.random.default_rng(20240501)
    tables = tuple(int(size) for size in np.geomspace(10, 10_000, SPARSE).round())
    dense = rng.standard_normal((rows, DENSE))
    sparse = np.empty((rows, SPARSE), np.int64)
    logit = dense @ rng.normal(0, 0.3, DENSE) + 0.5 * dense[:, 0] * dense[:, 1]
    hidden, by_popularity = [], []
    for i, size in enumerate(tables):
        # Popular categories get arbitrary indices, as with hashing.
        by_popularity.append(rng.permutation(size))
        sparse[:, i] = by_popularity[i][_popularity_ranks(rng, size, rows, POPULARITY)]
        hidden.append(rng.standard_normal((size, 2))[sparse[:, i]])
        logit += 0.3 * hidden[-1][:, 0]
    for i in range(0, SPARSE, 2):
        logit += 0.3 * hidden[i][:, 1] * hidden[i + 1][:, 1]
    logit = 2.5 * (logit - np.median(logit)) / logit.std()
    labels = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    description = f"synthetic clicks with a random teacher, Criteo schema, {rows:,} rows, a fifth held out"
    result = clicks(dense.astype(np.float32), sparse, labels, tables, description)
    return replace(result, by_popularity=tuple(by_popularity))


def more_synthetic_requests(
    seed: Sequence[int], rows: int, *, popularity: float = POPULARITY, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Further requests without labels for the model of `synthetic_clicks`.

    Returns dense [rows, 13] and sparse [rows, 26].

    Args:
        popularity: Exponent of Zipf's law; with a smaller exponent, rare categories are less rare.
        spread: Standard deviation of the dense features.
    """
    rng, data = np.random.default_rng(seed), synthetic_clicks()
    dense = (spread * rng.standard_normal((rows, DENSE))).astype(np.float32)
    sparse = [names[_popularity_ranks(rng, len(names), rows, popularity)] for names in data.by_popularity]
    return torch.from_numpy(dense), torch.from_numpy(np.stack(sparse, 1))


def _popularity_ranks(rng: np.random.Generator, size: int, rows: int, exponent: float) -> NDArray[np.int64]:
    """Random ranks from 0 to size - 1 by Zipf's law, int64 [rows]."""
    share = 1 / np.arange(1, size + 1) ** exponent
    return rng.choice(size, rows, p=share / share.sum())


def clicks(
    dense: NDArray[np.float32],
    sparse: NDArray[np.int64],
    labels: NDArray[np.float32],
    tables: tuple[int, ...],
    description: str,
    source: str = "",
) -> Clicks:
    """Click data from arrays that are already shuffled.

    ``source`` is the hash of the data that the arrays were made from; empty if the arrays themselves are hashed.
    """
    source = source or digest_of_parts(dense.tobytes(), sparse.tobytes(), labels.tobytes())
    dense_t, sparse_t, labels_t = (torch.from_numpy(np.ascontiguousarray(part)) for part in (dense, sparse, labels))
    return Clicks(dense_t, sparse_t, labels_t, tables, description, source)
