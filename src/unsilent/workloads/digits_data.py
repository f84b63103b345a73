"""scikit-learn's handwritten digits, split once and for all, and the workload any classifier of them makes.

Source: the 1,797 8x8 images that ship with scikit-learn (UCI "Optical Recognition of Handwritten Digits", test part).
Invariant: the split depends on nothing but the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.cache import Recipe, digest, trained
from unsilent.workloads.training import (
    Goal,
    Progress,
    Schedule,
    check_count,
    fit,
    outputs,
    parameter_count,
    share_right,
)

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


@dataclass(frozen=True)
class Classifier:
    """What tells one classifier of the digits from another: images [n, 1, 8, 8] -> scores [n, 10]."""

    name: str
    version: int
    """Raised whenever the model or its training changes."""
    description: str
    build: Callable[[], nn.Module]
    schedule: Schedule
    goal: Goal
    components: Mapping[str, str | Sequence[str]]

    def workload(self, samples: int, seed: int, progress: Progress) -> Workload:
        """The trained model on the first ``samples`` held-out images; its answer is the most likely digit."""
        data = digits()
        check_count(self.name, "eval", samples, len(data.test), "held-out images")

        def train(model: nn.Module) -> float:
            fit(
                model,
                lambda rows: (data.train[rows], data.train_labels[rows]),
                len(data.train),
                nn.functional.cross_entropy,
                self.schedule,
                seed=seed,
                description=f"training {self.name}",
                progress=progress,
            )
            return share_right(outputs(model, [data.test]).argmax(1), data.test_labels)

        recipe = Recipe(self.name, self.version, {"seed": seed}, data.hash)
        model, accuracy = trained(recipe, self.build, train, self.goal, seed=seed)
        return Workload(
            model,
            [data.test[:samples].clone()],
            judge="top1",
            name=self.name,
            components=self.components,
            info={
                "description": self.description,
                "data": DESCRIPTION,
                "accuracy": {"name": self.goal.metric, "value": accuracy},
                "parameters": parameter_count(model),
                "samples": samples,
                "citation": CITATION,
            },
        )
