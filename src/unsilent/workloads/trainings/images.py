"""`train-resnet` with its variants, and `train-vit`: classifiers of digits or of the user's CIFAR images.

The residual network is `digits.DigitsCnn`, or for CIFAR the network of He et al. without its weights. ``-nobn`` has a
bias in place of each batch norm. Its residual branches are initialised with zero (after Zhang, Dauphin & Ma, ICLR
2019), so that it trains without batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import call_model
from unsilent.workloads.cache import digest_of_parts
from unsilent.workloads.cifar_resnet import CITATION as RESNET_CITATION
from unsilent.workloads.cifar_resnet import BasicBlock, CifarResNet, normalised
from unsilent.workloads.digits import CITATION, DESCRIPTION, DigitsCnn, DigitsVit, ResidualBlock, digits
from unsilent.workloads.layers import Bias
from unsilent.workloads.model_fitting import check_option_range
from unsilent.workloads.saved_files import read_images
from unsilent.workloads.trainings.base import Bools, Evaluation
from unsilent.workloads.trainings.dropout import RowDropout
from unsilent.workloads.trainings.evaluating import make_evaluation, predictions_from_scores
from unsilent.workloads.trainings.loop import Training
from unsilent.workloads.trainings.recipes import (
    BuiltInTrainingOptions,
    add_dropout,
    add_dropout_to_blocks,
    check_transformer_size,
    make_training,
    randomly_shifted_images,
)

HELD_OUT = 6
"""One of this many user images is held out, like 10,000 of 60,000 in CIFAR."""
LEAST = 60
EVALUATED = 250
DARK = "darkest quarter"


class ImageData(NamedTuple):
    """Images float32 [n, c, h, w] and labels int64 [n].

    ``black``: the value of a black pixel.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    black: float
    description: str
    citation: str
    hash: str


@dataclass(frozen=True)
class Variant:
    """One variant of the residual network.

    ``rate``: the highest learning rate.
    """

    optimizer: str
    rate: float
    norm: bool = True


VARIANTS = {
    "train-resnet": Variant("adam", 0.004),
    "train-resnet-nobn": Variant("adam", 0.008, norm=False),
    "train-resnet-sgd": Variant("sgd", 0.05),
}


def train_resnet(
    *,
    variant: str = "train-resnet",
    steps: int = 1200,
    batch: int = 32,
    width: int | None = None,
    depth: int | None = None,
    optimizer: str | None = None,
    rate: float | None = None,
    dropout: float = 0.15,
    clip: float = 1.0,
    shift: bool = True,
    amp: str = "none",
    device: str = "cpu",
    data: str | None = None,
) -> Training:
    """The training of a residual network on digits, or on the images of ``data``.

    Args:
        width: Width of the network for digits (default: 8).
        depth: Depth of the CIFAR network, 6 k + 2 (default: 8).
        optimizer, rate: Optimizer and learning rate; default: those of the variant.
        data: ``.npz`` with ``images`` uint8 [n, 32, 32, 3] and ``labels`` [n]; the last sixth is held out.
    """
    chosen = VARIANTS[variant]
    if (data is None and depth is not None) or (data is not None and width is not None):
        absent_option, available_option = ("depth", "width") if data is None else ("width", "depth")
        kind = "digits'" if data is None else "CIFAR"
        raise UsageError(
            f"workload {variant!r}: the {kind} network has no option {absent_option!r}; set {available_option!r} instead"
        )
    size, layers = 8 if width is None else width, 8 if depth is None else depth
    check_option_range(variant, "width", size, 1024, "channels of the first layer")
    if layers % 6 != 2 or layers < 8:
        raise UsageError(f"workload {variant!r}: option 'depth' is {layers}; expected 8, 14, 20 … (6 k + 2)")

    def build() -> nn.Module:
        model: nn.Module
        if data is None:
            model = DigitsCnn(size)
            add_dropout(model.head, dropout)
        else:
            model = CifarResNet(layers)
            model.add_module("linear", nn.Sequential(RowDropout(dropout), model.linear))
        return model if chosen.norm else without_norm(model)

    optimizer, rate = optimizer or chosen.optimizer, chosen.rate if rate is None else rate
    options = BuiltInTrainingOptions(steps, batch, optimizer, rate, dropout, amp, device)
    description = "residual network" + ("" if chosen.norm else " without batch norm")
    pictures = _digits() if data is None else _own_images(data)
    settings = {"width": size} if data is None else {"depth": layers}
    return _classifier(variant, description, build, pictures, options, clip, shift, settings)


def train_vit(
    *,
    steps: int = 1200,
    batch: int = 32,
    width: int = 32,
    depth: int = 2,
    optimizer: str = "adamw",
    rate: float = 0.004,
    dropout: float = 0.1,
    clip: float = 1.0,
    shift: bool = True,
    amp: str = "none",
    device: str = "cpu",
) -> Training:
    """The training of a vision transformer on digits, with dropout at the end of each MLP."""
    name = "train-vit"
    check_transformer_size(name, width, depth)

    def build() -> nn.Module:
        model = DigitsVit(width, depth)
        add_dropout_to_blocks(model.blocks, dropout)
        return model

    options = BuiltInTrainingOptions(steps, batch, optimizer, rate, dropout, amp, device)
    settings = {"width": width, "depth": depth}
    return _classifier(name, "vision transformer", build, _digits(), options, clip, shift, settings)


def _classifier(
    name: str,
    description: str,
    build: Callable[[], nn.Module],
    pictures: ImageData,
    options: BuiltInTrainingOptions,
    clip: float,
    shift: bool,
    settings: dict[str, int],
) -> Training:
    """The training of a classifier on given images."""
    check_option_range(name, "batch", options.batch, len(pictures.train), "training images")
    groups = {DARK: _darkest(pictures.test)}

    def augment(rows: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return randomly_shifted_images(rows[0], generator, pictures.black), rows[1]

    def evaluate(model: nn.Module) -> Evaluation:
        place = next(model.parameters()).device
        scores = torch.cat([call_model(model, part.to(place)) for part in pictures.test.split(EVALUATED)]).cpu()
        loss = float(cross_entropy(scores, pictures.test_labels))
        return make_evaluation(loss, predictions_from_scores(scores), pictures.test_labels, groups)

    return make_training(
        name,
        options,
        rows=len(pictures.train),
        take=lambda rows: (pictures.train[rows], pictures.train_labels[rows]),
        clip=clip,
        augment=augment if shift else None,
        settings={**settings, "shift": shift, "data": pictures.hash},
        model=build,
        loss=loss_and_accuracy,
        evaluate=evaluate,
        info={
            "description": f"{description} on {pictures.description}",
            "data": pictures.description,
            "citation": pictures.citation,
        },
    )


def loss_and_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy and accuracy of a classifier on one batch."""
    scores = call_model(model, batch[0])
    return cross_entropy(scores, batch[1]), {"accuracy": (scores.detach().argmax(1) == batch[1]).float().mean()}


def without_norm(model: nn.Module) -> nn.Module:
    """The model with every batch norm replaced by a bias.

    The last convolution of each residual branch is initialised with zeros.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, Bias(child.num_features))
        if isinstance(module, (ResidualBlock, BasicBlock)):
            nn.init.zeros_(module.conv2.weight)
    return model


def _digits() -> ImageData:
    d = digits()
    return ImageData(d.train, d.train_labels, d.test, d.test_labels, -1.0, DESCRIPTION, CITATION, d.hash)


def _own_images(path: str) -> ImageData:
    """The user's images.

    Raises ``UsageError`` if there are too few.
    """
    images, labels = read_images(path, 10)
    if len(images) < LEAST:
        raise UsageError(f"{path} has {len(images)} images; a training needs at least {LEAST}")
    cut = len(images) - len(images) // HELD_OUT
    ready = normalised(images)
    text = f"{Path(path).name}, {cut:,} training and {len(images) - cut:,} held-out images"
    content = digest_of_parts(images.numpy().tobytes(), labels.numpy().tobytes())
    return ImageData(ready[:cut], labels[:cut], ready[cut:], labels[cut:], 0.0, text, RESNET_CITATION, content)


def _darkest(images: Tensor) -> Bools:
    """Whether each image belongs to the darkest quarter of the images."""
    light = images.mean((1, 2, 3)).numpy()
    mask = np.zeros(len(light), np.bool_)
    mask[np.argsort(light, kind="stable")[: len(light) // 4]] = True
    return mask
