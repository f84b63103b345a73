"""Small trainings for planted incidents: four networks on handwritten digits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, CLASSES, SIDE = 16, 10, 8


class Batch(NamedTuple):
    """The input of a training step.

    Attributes:
        images: float32[n, 8, 8].
        labels: int64[n].
        offset: float32[], added to all scores. The loss does not depend on it, but its exponential may overflow in float16.
        weights: float32[n], weights of the samples in the loss.
        scale: float32[], scale of the gradients in computations in float16.
    """

    images: Tensor
    labels: Tensor
    offset: Tensor
    weights: Tensor
    scale: Tensor


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().view(-1, SIDE, SIDE) / 16, torch.from_numpy(labels).long()


def draw_batch(seed: int, step: int, rank: int) -> Batch:
    """The random batch of a step on a rank."""
    images, labels = _digits()
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
    chosen = torch.randint(len(images), (BATCH,), generator=generator)
    return Batch(images[chosen], labels[chosen], torch.zeros(()), torch.ones(BATCH), torch.tensor(16.0))


class Convolution(nn.Module):
    """A network of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.features = 16 * (SIDE // 2) ** 2

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(images.unsqueeze(1)))))
        return hidden.flatten(1)


class Transformer(nn.Module):
    """A transformer layer with two heads, over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 32
        self.rows, self.places = nn.Linear(SIDE, self.features), nn.Parameter(torch.randn(SIDE, self.features) * 0.1)
        self.block = nn.TransformerEncoderLayer(self.features, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.rows(images) + self.places)
        return hidden.mean(1)


class Perceptron(nn.Module):
    """A network of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 32
        self.first, self.second = nn.Linear(SIDE**2, 48), nn.Linear(48, self.features)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(images.flatten(1)))))


class Recurrent(nn.Module):
    """A gated recurrent unit (GRU) over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 32
        self.units = nn.GRU(SIDE, self.features, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        last: Tensor = self.units(images)[1][-1]
        return last


BODIES: dict[str, type[Convolution | Transformer | Perceptron | Recurrent]] = {
    "convolution": Convolution, "transformer": Transformer, "mlp": Perceptron, "recurrent": Recurrent,
}  # fmt: skip
"""Classes of models by the name of the workload."""


class Classifier(nn.Module):
    """A network with a layer of class scores and the loss.

    With ``is_narrow``, the loss is computed from the scores in float16.
    """

    def __init__(self, workload: str, is_narrow: bool) -> None:
        super().__init__()
        self.body = BODIES[workload]()
        self.scores = nn.Linear(self.body.features, CLASSES)
        self._is_narrow = is_narrow

    def forward(self, batch: Batch) -> Tensor:
        scores = self.scores(self.body(batch.images)) + batch.offset
        if not self._is_narrow:
            return (functional.cross_entropy(scores, batch.labels, reduction="none") * batch.weights).mean()
        scale = batch.scale  # scale of the gradients in computations in float16
        scores = scaled_gradient(scores, 1 / scale).half()
        exponentials = scores.exp()  # the largest score is not subtracted first, which would prevent the overflow
        probabilities = scaled_gradient(exponentials / exponentials.sum(-1, keepdim=True), scale)
        loss: Tensor = -(probabilities.float().gather(1, batch.labels[:, None]) + 1e-7).log().mean()
        return loss


def scaled_gradient(value: Tensor, scale: Tensor) -> Tensor:
    """Return the value unchanged, and multiply its gradient by ``scale``."""
    result: Tensor = Scaled.apply(value, scale)  # type: ignore[no-untyped-call]
    return result


class Scaled(torch.autograd.Function):
    """The autograd function behind `scaled_gradient`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None
