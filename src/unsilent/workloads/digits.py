"""`digits-cnn`, `digits-vit`, `digits-efficientnet` and `digits-mobilenet`: small classifiers of scikit-learn's digits.

Source of the data: the 1,797 8x8 images that ship with scikit-learn (UCI "Optical Recognition of Handwritten Digits", test part).
Invariant: the split into training and held-out images depends on nothing but the data.

`DigitsCnn` is the quickest workload: convolution, batch norm, ReLU and residual blocks as in He et al. (CVPR 2016),
scaled down to 8x8 images. `DigitsVit` has patches, class token, pre-norm blocks with scaled dot-product attention and
GELU MLPs, after Dosovitskiy et al. (ICLR 2021), with 2x2 patches. The other two are in `inverted_residuals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unsilent.workloads.base import SHIFTED, Workload
from unsilent.workloads.cache import TrainedWeightsRecipe, digest_of_parts, load_or_train
from unsilent.workloads.clean_inputs import CleanInputs, ImageAlteration, altered_copies, split_originals
from unsilent.workloads.inverted_residuals import DigitsEfficientNet, DigitsMobileNet
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import (
    FittedModel,
    Goal,
    Progress,
    Schedule,
    accuracy_of,
    check_option_range,
    fit,
    model_info,
    no_progress,
    outputs,
)

DESCRIPTION = "scikit-learn digits (UCI handwritten digits, 8x8 grey), 1,347 training and 450 held-out images"
LEVELS = 16
"""Number of steps of grey between black and white."""
CLEAN = ImageAlteration(rotation=5, shift=0.25, brightness=0.05, noise=0.02)
UNUSUAL = ImageAlteration(rotation=12, shift=0.6, brightness=0.2, noise=0.08)
CITATION = "Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"


class Digits(NamedTuple):
    """Images float32 [n, 1, 8, 8] in -1 … 1 and labels int64 [n], each for training and held out."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    hash: str


@cache
def digits() -> Digits:
    """The digits, split into training and held-out data.

    They are read once per process and must not be written to.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = (bunch.images / 8.0 - 1.0).astype(np.float32)[:, None]
    labels = bunch.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=450, stratify=labels, random_state=0)
    train, test, train_labels, test_labels = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    every = digest_of_parts(*(part.numpy().tobytes() for part in (train, train_labels, test, test_labels)))
    return Digits(train, train_labels, test, test_labels, every)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut; [n, c_in, h, w] -> [n, c_out, h/stride, w/stride]."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))
        return out


class DigitsCnn(nn.Module):
    """A residual CNN: images [n, 1, 8, 8] -> class scores [n, 10]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = ResidualBlock(width, width)
        self.block2 = ResidualBlock(width, 2 * width, stride=2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block2(self.block1(self.stem(x))))
        return out


class DigitsVit(nn.Module):
    """A vision transformer: images [n, 1, 8, 8] -> class scores [n, 10]."""

    def __init__(self, width: int = 48, depth: int = 3, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (8 // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return out


@dataclass(frozen=True, kw_only=True)
class DigitsClassifierSpec(FittedModel):
    """The specification of one classifier of the digits: images [n, 1, 8, 8] -> scores [n, 10]."""

    schedule: Schedule


INVERTED_RESIDUAL_COMPONENTS: dict[str, str | Sequence[str]] = {
    **{part: f"{part}.*" for part in ("stem", "features", "head")},
    **{part: f"blocks.*.{part}.*" for part in ("expand", "depthwise", "project")},
}
CLASSIFIERS = {
    "digits-cnn": DigitsClassifierSpec(
        version=1,
        description="small residual CNN on handwritten digits",
        build=DigitsCnn,
        schedule=Schedule(epochs=12, batch=64, rate=0.01),
        goal=Goal("accuracy", 0.97),
        components={part: f"{part}.*" for part in ("stem", "block1", "block2", "head")},
    ),
    "digits-vit": DigitsClassifierSpec(
        version=1,
        description="small vision transformer on handwritten digits",
        build=DigitsVit,
        schedule=Schedule(epochs=30, batch=64, rate=0.003, decay=0.05),
        goal=Goal("accuracy", 0.95),
        components={
            "embedding": ("patches.*", "class_token", "positions"),
            "attention": ("blocks.*.attention.*",),
            "mlp": ("blocks.*.mlp.*",),
            "norm": ("blocks.*.norm?.*", "norm.*"),
            "head": ("head.*",),
        },
    ),
    "digits-efficientnet": DigitsClassifierSpec(
        version=1,
        description="small EfficientNet (squeeze-and-excitation, SiLU) on handwritten digits",
        build=DigitsEfficientNet,
        schedule=Schedule(epochs=12, batch=64, rate=0.01),
        goal=Goal("accuracy", 0.95),
        components=INVERTED_RESIDUAL_COMPONENTS | {"excite": "blocks.*.excite.*"},
    ),
    "digits-mobilenet": DigitsClassifierSpec(
        version=1,
        description="small MobileNetV2 (depthwise convolutions, ReLU6) on handwritten digits",
        build=DigitsMobileNet,
        schedule=Schedule(epochs=12, batch=64, rate=0.01),
        goal=Goal("accuracy", 0.95),
        components=INVERTED_RESIDUAL_COMPONENTS,
    ),
}


def clean_copies(part: str, original: int, copies: int) -> Tensor:
    """Copies of one held-out image, [copies, 1, 8, 8].

    All copies but the first are altered. For the part `SHIFTED` all are strongly altered.
    """
    image, shifted = (digits().test[original] + 1) / 2, part == SHIFTED
    how = UNUSUAL if shifted else CLEAN
    return 2 * altered_copies(image, copies, how, LEVELS, [1, original], plain_first=not shifted) - 1


def classifier(*, name: str, eval: int = 128, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The workload of a trained classifier on the first ``eval`` held-out images [eval, 1, 8, 8].

    The answer of the model is the most likely digit.
    """
    spec, data = CLASSIFIERS[name], digits()
    check_option_range(name, "eval", eval, len(data.test), "held-out images")

    def sample(rows: Tensor) -> tuple[Tensor, Tensor]:
        return data.train[rows], data.train_labels[rows]

    def train(model: nn.Module) -> float:
        count, description = len(data.train), f"training {name}"
        fit(model, sample, count, cross_entropy, spec.schedule, seed=seed, description=description, progress=progress)
        return accuracy_of(outputs(model, [data.test]).argmax(1), data.test_labels)

    recipe = TrainedWeightsRecipe(name, spec.version, {"seed": seed}, data.hash)
    model, accuracy = load_or_train(recipe, spec.build, train, spec.goal, seed=seed)
    return Workload(
        model,
        [data.test[:eval].clone()],
        labels=[data.test_labels[:eval]],
        judge="top1",
        name=name,
        input_range=(-1.0, 1.0),
        components=spec.components,
        clean=CleanInputs(name, split_originals(range(eval, len(data.test))).__getitem__, clean_copies, batch=128),
        info=model_info(spec, DESCRIPTION, accuracy, model, eval, CITATION),
    )
