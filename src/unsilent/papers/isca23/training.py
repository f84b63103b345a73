"""The training of the published injections, with eight workers that run one after the other.

Each worker runs a forward and a backward pass of its own, with its own batch statistics; losses are divided by the whole batch
and gradients add up. So worker ``w`` is ``micro_step=w`` of a `Step` around it. Everything random (order of the images,
augmentation, dropout) depends only on the seed, the epoch, the step and the worker, so a step can be run again from a snapshot,
bit for bit.

The following is taken from the sources: images normalised by the mean and deviation of all their numbers; flips left-right and
up-down; a crop of 32 x 32 after 6 zeros on each side, one for all images of a worker; Adam with Keras's epsilon 1e-7 (plain SGD
for ``resnet18_sgd``) under a linear decay of its rate. Moving statistics are variables that TensorFlow keeps separately on each
replica and averages if they are read outside of one, so each worker has its own, in training and in evaluation. One point is
our interpretation, as the sources leave it open: the rate has decayed by the steps of all earlier epochs. Three points of the
artifact are not reproduced: its two passes of a faulty step (the first, which reads golden values, also updates its
statistics), its random numbers, and its Adam epsilon, which torch adds after the bias correction and Keras before.

`digits_as_images` replaces CIFAR-10 if no file is available: scikit-learn's handwritten digits, enlarged. They share only the
shapes and the number of classes with CIFAR-10. A published injection corrupts the same place of the same operation, in a
network that learns other images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, cat, nn
from torch.nn.functional import cross_entropy, pad

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults import Fault
from unsilent.papers.isca23.geometry import IMAGE
from unsilent.papers.isca23.injections import STEPS, WORKERS
from unsilent.papers.isca23.layer_lists import NETWORKS
from unsilent.papers.isca23.log import PublishedStepRecord
from unsilent.papers.isca23.mapping import images_per_worker
from unsilent.papers.isca23.networks import (
    DROPOUT,
    PublishedDenseNet,
    PublishedEfficientNet,
    PublishedResNet18,
    draw_weights,
)
from unsilent.sites.training.step import StepInjection
from unsilent.workloads.digits import digits
from unsilent.workloads.saved_files import state_dict_misfit


def untrained_network(name: str = "resnet18", *, width: int = 64, seed: int = 123) -> nn.Module:
    """An untrained network in training mode, with weights from Glorot's truncated normal distribution.

    Args:
        name: ``resnet18``, ``resnet18_nobn`` (no batch norm), ``resnet18_sgd`` (no dropout), ``densenet`` or ``effnet``.
        width: 64 as published. A smaller width reduces all channels in proportion, for tests.
    """
    if name not in NETWORKS:
        raise unknown_name_error("published network", name, NETWORKS)
    if width < 2:
        raise UsageError(f"width is {width}; expected 2 or more (64 in the published networks)")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _network(name, width)
        draw_weights(model)
    return model.train()


def _network(name: str, width: int) -> nn.Module:
    if name == "densenet":
        return PublishedDenseNet(width)
    if name == "effnet":
        return PublishedEfficientNet(width)
    return PublishedResNet18(width, norm=name != "resnet18_nobn", dropout=0.0 if name == "resnet18_sgd" else DROPOUT)


DECAY: Mapping[str, tuple[int, float]] = {
    "resnet18": (4000, 1e-4),
    "resnet18_nobn": (5000, 1e-4),
    "resnet18_sgd": (2000, 1e-3),
    "densenet": (5000, 1e-4),
    "effnet": (2000, 5e-4),
}
"""Number of steps over which the learning rate decays, and its final value, by network."""
MARGIN = 6
EVALUATED = 1000
"""Number of images in a batch of the evaluation; each worker evaluates an eighth of it."""
_SHUFFLE, _AUGMENT, _DROPOUT = range(3)


@dataclass(frozen=True)
class NormalisedImages:
    """Images with labels, and the mean and deviation that normalise them.

    Images are uint8 [n, 32, 32, 3], labels int64 [n].
    """

    images: Tensor
    labels: Tensor
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of the chosen rows.

        They are float32 [m, 3, 32, 32] and int64 [m].
        """
        scaled = (self.images[chosen].double() - self.mean) / self.deviation
        return scaled.float().permute(0, 3, 1, 2).contiguous(), self.labels[chosen]


def split_and_normalise(images: Tensor, labels: Tensor, train: int) -> tuple[NormalisedImages, NormalisedImages]:
    """Divide images into a training set, the first ``train``, and an evaluation set.

    Images are uint8 [n, 32, 32, 3].

    Both sets are normalised by the mean and deviation of all numbers of the training set.
    """
    counts = sum(np.bincount(part.numpy().reshape(-1), minlength=256) for part in images[:train].split(1000))
    shares, levels = counts / np.sum(counts), np.arange(256.0)
    mean = float(shares @ levels)
    # Images of one colour are not useful, but not an error.
    deviation = max(float(np.sqrt(shares @ (levels - mean) ** 2)), 1e-9)
    rows_of_parts = (slice(train), slice(train, None))
    parts = [NormalisedImages(images[rows], labels[rows], mean, deviation) for rows in rows_of_parts]
    return parts[0], parts[1]


class PublishedTraining:
    """A published training: model, optimizer, and the batch norm statistics of each worker.

    Args:
        name: Name of the published network.
        data: Training images.
        batch: Batch size of all workers together.
        rate: Learning rate at which the decay starts.
    """

    def __init__(
        self, name: str, data: NormalisedImages, *, rate: float, batch: int = 1024, width: int = 64, seed: int = 123
    ) -> None:
        self.model = untrained_network(name, width=width, seed=seed)
        self.data, self.batch, self.share, self.seed = data, batch, images_per_worker(batch), seed
        if self.share == 1 and name in ("densenet", "effnet"):
            raise UsageError(
                f"batch is {batch}; expected {2 * WORKERS} or more, because batch norm of {name} has a single number for "
                "each image and channel where its activations are smallest"
            )
        self._rate, (self._steps, self._end) = rate, DECAY[name]
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=rate)
            if name == "resnet18_sgd"
            else torch.optim.Adam(parameters, lr=rate, eps=1e-7)
        )
        self._norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        self.moving = self._spread()
        self.input_gradients = False

    def load(self, state: Mapping[str, Tensor], path: str) -> None:
        """Load weights, with equal batch norm statistics for all workers.

        Raises ``UsageError`` if they do not fit.
        """
        expected = self.model.state_dict()
        if problem := state_dict_misfit(expected, state, "the published network"):
            raise UsageError(f"{path} {problem}; expected the state dict of the published network, as torch saves it")
        self.model.load_state_dict({**expected, **state})
        self.moving = self._spread()

    def step(
        self,
        epoch: int,
        number: int,
        faults: Sequence[Fault] = (),
        inner_context: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - has no state
    ) -> PublishedStepRecord:
        """Train one step of an epoch, with faults in it.

        ``inner_context`` is entered inside the mode that injects the faults.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(epoch * STEPS + number)
        images, labels = self._batch(epoch, number)
        losses, right = [], 0
        self.model.train()
        corrupted = StepInjection(self.model, faults, [self.optimizer]) if faults else None
        with corrupted or nullcontext(), inner_context:
            self.optimizer.zero_grad()
            for worker in range(WORKERS):
                part = slice(worker * self.share, (worker + 1) * self.share)
                self._use_worker_statistics(worker)
                x = self._augmented(images[part], epoch, number, worker).requires_grad_(self.input_gradients)
                with self._seeded_global_randomness(_DROPOUT, epoch, number, worker):
                    scores = self.model(x)
                loss = cross_entropy(scores, labels[part], reduction="sum") / self.batch
                loss.backward()
                losses.append(float(loss.detach()))
                right += int((scores.argmax(1) == labels[part]).sum())
            self.optimizer.step()
        return PublishedStepRecord(
            epoch, number, sum(losses), right / self.batch, corrupted.receipt if corrupted else None
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from the start of the training."""
        return (self._rate - self._end) * (1 - min(step, self._steps) / self._steps) + self._end

    @torch.no_grad()
    def evaluate(self, data: NormalisedImages) -> tuple[float, float]:
        """Mean loss and accuracy on a data set.

        Each worker evaluates an eighth of every batch with its own batch norm statistics.
        """
        self.model.eval()
        loss, right = 0.0, 0
        for start in range(0, len(data), EVALUATED):
            parts = torch.tensor_split(torch.arange(start, min(start + EVALUATED, len(data))), WORKERS)
            for worker, rows in enumerate(parts):
                if len(rows):
                    self._use_worker_statistics(worker)
                    images, labels = data.rows(rows)
                    scores = self.model(images)
                    loss += float(cross_entropy(scores, labels, reduction="sum"))
                    right += int((scores.argmax(1) == labels).sum())
        return loss / len(data), right / len(data)

    def snapshot(self) -> dict[str, Any]:
        """A copy of the training's whole state, for `restore`."""
        self._use_worker_statistics(0)
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "moving": self.moving}
        return copy.deepcopy(whole)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state in a snapshot, which is not changed."""
        whole = copy.deepcopy(dict(state))
        self.moving = whole["moving"]
        self._use_worker_statistics(0)
        self.model.load_state_dict(whole["model"])
        self.optimizer.load_state_dict(whole["optimizer"])

    def _spread(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Copies of the model's batch norm statistics for each worker."""
        return [[(m.running_mean.clone(), m.running_var.clone()) for m in self._norms] for _ in range(WORKERS)]  # type: ignore[union-attr]

    def _use_worker_statistics(self, worker: int) -> None:
        """Let the model use the batch norm statistics of a worker."""
        for norm, (mean, variance) in zip(self._norms, self.moving[worker], strict=True):
            norm.running_mean, norm.running_var = mean, variance

    def _batch(self, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Normalised images and labels of a step, in the random order of the epoch.

        If the data set is too small, further random orders follow.
        """
        start, rows = number * self.batch, list[Tensor]()
        while (left := self.batch - sum(len(part) for part in rows)) > 0:
            turn, at = divmod(start, len(self.data))
            order = torch.randperm(len(self.data), generator=self._generator(_SHUFFLE, epoch, turn))
            rows.append(order[at : at + left])
            start += len(rows[-1])
        return self.data.rows(torch.cat(rows))

    def _augmented(self, images: Tensor, epoch: int, number: int, worker: int) -> Tensor:
        generator = self._generator(_AUGMENT, epoch, number, worker)
        flips = torch.rand((2, len(images), 1, 1, 1), generator=generator) < 0.5
        images = torch.where(flips[0], images.flip(3), images)
        images = torch.where(flips[1], images.flip(2), images)
        top, left = torch.randint(2 * MARGIN + 1, (2,), generator=generator).tolist()
        return pad(images, (MARGIN,) * 4)[:, :, top : top + IMAGE, left : left + IMAGE].contiguous()

    def _generator(self, *stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(*stream))

    def _seed(self, *stream: int) -> int:
        return int(np.random.SeedSequence([self.seed, *stream]).generate_state(1, np.uint64)[0] >> 1)

    @contextmanager
    def _seeded_global_randomness(self, *stream: int) -> Iterator[None]:
        """Seed torch's global random generator within the context, and restore it afterwards."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed(*stream))
            yield


SCALE = 4
"""Enlargement factor from 8 x 8 to 32 x 32 pixels."""


def digits_as_images() -> tuple[Tensor, Tensor]:
    """The digits data set as colour images with labels, the held-out digits last.

    Images are uint8 [1797, 32, 32, 3], labels int64 [1797].
    """
    known = digits()
    grey = ((cat([known.train, known.test]) + 1) * 127.5).round().byte()  # [n, 1, 8, 8]
    large = grey.repeat_interleave(SCALE, 2).repeat_interleave(SCALE, 3)
    return large.permute(0, 2, 3, 1).repeat(1, 1, 1, 3).contiguous(), cat([known.train_labels, known.test_labels])
