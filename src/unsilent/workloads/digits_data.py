"""scikit-learn's handwritten digits, split once and for all into training and held-out images.

Source: the 1,797 8x8 images that ship with scikit-learn (UCI "Optical Recognition of Handwritten Digits", test part).
Invariant: the split depends on nothing but the data.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unsilent.workloads.cache import digest

DESCRIPTION = "scikit-learn digits (UCI handwritten digits, 8x8 grey), 1,347 training and 450 held-out images"
CITATION = "Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"


class Digits(NamedTuple):
    """Images float32 [n, 1, 8, 8] in -1 … 1 and labels int64 [n], for training and held out."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    hash: str


@cache
def digits() -> Digits:
    """The split digits; read once per process, never to be written to."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = (bunch.images / 8.0 - 1.0).astype(np.float32)[:, None]
    labels = bunch.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    train, test, train_labels, test_labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    every = digest(*(part.numpy().tobytes() for part in (train, train_labels, test, test_labels)))
    return Digits(train, train_labels, test, test_labels, every)
