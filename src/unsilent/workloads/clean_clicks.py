"""Clean requests for `dlrm`, for detectors: further synthetic ones, or the held-out rows of a CSV that are not evaluated.

The unusual requests have dense features that are half as far again from their mean. Synthetic ones ask for rare categories more
often; those of a CSV combine categories of different rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unsilent.workloads.base import CLEAN_PARTS, SHIFTED, CleanSource
from unsilent.workloads.clean_inputs import CleanInputs, split_originals
from unsilent.workloads.clicks import POPULARITY, Clicks, more_synthetic_requests

BATCH = 512
SPREAD = 1.5
"""Factor on the dense features of unusual requests."""
FLATTER = 0.7
"""Exponent of Zipf's law for the categories of unusual requests."""
LARGEST = 10.0
"""As far from its mean as a dense feature of a CSV can be, in standard deviations."""


def clean_requests(clicks: Clicks, first_free: int) -> CleanSource:
    """The ``clean`` argument of the workload; rows from ``first_free`` on are neither trained on nor evaluated."""
    return _further_requests if clicks.by_popularity else _held_out_requests(clicks, first_free)


def _further_requests(part: str, samples: int) -> list[dict[str, Tensor]]:
    """As many as are wanted, drawn batch by batch."""
    unusual = part == SHIFTED
    batches = []
    for start in range(0, samples, BATCH):
        dense, sparse = more_synthetic_requests(
            (CLEAN_PARTS.index(part), start),
            BATCH,
            popularity=FLATTER if unusual else POPULARITY,
            spread=SPREAD if unusual else 1.0,
        )
        count = min(BATCH, samples - start)
        batches.append({"dense": dense[:count].clone(), "sparse": sparse[:count].clone()})
    return batches


def _held_out_requests(clicks: Clicks, first_free: int) -> CleanInputs:
    originals = split_originals(range(first_free, len(clicks.labels)))

    def make(part: str, original: int, copies: int) -> dict[str, Tensor]:
        row = slice(original, original + 1)
        if part != SHIFTED:
            return {"dense": clicks.dense[row], "sparse": clicks.sparse[row]}
        tables = len(clicks.tables)
        others = np.random.default_rng(original).choice(originals[SHIFTED].numpy(), tables)
        dense = (SPREAD * clicks.dense[row]).clamp(-LARGEST, LARGEST)
        return {"dense": dense, "sparse": clicks.sparse[torch.from_numpy(others), torch.arange(tables)][None]}

    return CleanInputs("dlrm", originals.__getitem__, make, batch=BATCH, most_copies=1)
