"""`cifar-resnet20` … `56`: the CIFAR ResNets of He et al. with weights and images from the user.

Architecture: He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), section 4.2, with parameter-free
shortcuts (option A: every other pixel, new channels zero). Parameter names as in the widely shared weights of
akamaster/pytorch_resnet_cifar10, whose files (keys prefixed ``module.`` inside ``state_dict``) load unchanged. Inputs
are normalised with the ImageNet mean and deviation that these weights were trained with.

Invariant: weights that do not fit the images are refused, because a campaign on a model that guesses measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unsilent.basics.errors import UsageError
from unsilent.workloads.base import SHIFTED, Workload
from unsilent.workloads.clean_inputs import CleanInputs, ImageAlteration, altered_copies, split_originals
from unsilent.workloads.model_fitting import (
    Goal,
    accuracy_of,
    check_option_range,
    isolated_training,
    outputs,
    parameter_count,
)
from unsilent.workloads.saved_files import read_images, read_weights, state_dict_misfit

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
LEVELS = 255
CLEAN = ImageAlteration(rotation=4, shift=1.5, brightness=0.1, noise=0.005, mirrored=True)
UNUSUAL = ImageAlteration(rotation=10, shift=3, brightness=0.3, noise=0.03, mirrored=True)
CITATION = "He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016"


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an option-A shortcut; [n, c_in, h, w] -> [n, c_out, h/stride, w/stride]."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.stride, self.grown = stride, c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.stride != 1 or self.grown:
            before = self.grown // 2
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.grown - before))
        out: Tensor = (inner + x).relu()
        return out


class CifarResNet(nn.Module):
    """A CIFAR ResNet: normalised images [n, 3, 32, 32] -> class scores [n, classes].

    ``depth`` has the form 6 k + 2.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks = (depth - 2) // 6
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.linear(x.mean((2, 3)))
        return out


def _stage(c_in: int, c_out: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *(BasicBlock(c_in if i == 0 else c_out, c_out, stride if i == 0 else 1) for i in range(blocks))
    )


# Long because it checks the user's files before anything is measured with them.
def cifar_resnet(
    *,
    depth: int,
    weights: str,
    data: str,
    eval: int = 64,  # noqa: A002 - option name
    batch: int = 64,
    min_accuracy: float | None = None,
) -> Workload:
    """The workload of a CIFAR ResNet with the user's weights, on ``eval`` of the user's images.

    The answer of the model is the most likely class.

    Args:
        weights: ``.safetensors``, or a file of ``torch.save`` with a state dict (also under the key ``state_dict``).
        data: ``.npz`` with ``images`` uint8 [n, 32, 32, 3] and ``labels`` [n].
        eval: Number of images in all batches, drawn once from the whole file.
        batch: Images per batch.
        min_accuracy: Accuracy on all images below which the weights are refused; default: 3 times chance.

    Raises:
        UsageError: a file cannot be read or does not fit, or the accuracy is too low.
    """
    name = f"cifar-resnet{depth}"
    state = read_weights(weights)
    head = state.get("linear.weight")
    classes = len(head) if head is not None and head.ndim == 2 else 10
    images, labels = read_images(data, classes)
    check_option_range(name, "eval", eval, len(images), f"images in {data}")
    check_option_range(name, "batch", batch, len(images), f"images in {data}")
    # Building a model draws random weights, so the caller's random generators are restored.
    with isolated_training(0):
        model = CifarResNet(depth, classes).eval()
        _fit_in(model, state, depth, weights)
        accuracy = accuracy_of(outputs(model, [normalised(part) for part in images.split(250)]).argmax(1), labels)
    floor = 3 / classes if min_accuracy is None else min_accuracy
    advice = f"check that {weights} was trained for {data}, or skip this check with the option min_accuracy=0"
    Goal("accuracy", floor, advice, UsageError).check(name, accuracy)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    picks, originals = order[:eval], split_originals(order[eval:])

    def clean_copies(part: str, original: int, copies: int) -> Tensor:
        image, shifted = images[original].permute(2, 0, 1).float() / LEVELS, part == SHIFTED
        how = UNUSUAL if shifted else CLEAN
        altered = altered_copies(image, copies, how, LEVELS, [2, original], plain_first=not shifted)
        return normalised((altered * LEVELS).round().to(torch.uint8).permute(0, 2, 3, 1))

    return Workload(
        model,
        list(normalised(images[picks]).split(batch)),
        labels=list(labels[picks].split(batch)),
        judge="top1",
        name=name,
        input_range=input_range(),
        components={part: f"{part}.*" for part in ("layer1", "layer2", "layer3")}
        | {"stem": ("conv1.*", "bn1.*"), "linear": "linear.*"},
        clean=CleanInputs(name, originals.__getitem__, clean_copies, batch),
        info={
            "description": f"CIFAR ResNet-{depth}, option-A shortcuts",
            "data": f"{Path(data).name}, {len(images):,} images",
            "weights": Path(weights).name,
            "accuracy": {"name": "accuracy", "value": accuracy},
            "parameters": parameter_count(model),
            "samples": eval,
            "citation": CITATION,
        },
    )


def normalised(images: Tensor) -> Tensor:
    """Images uint8 [n, 32, 32, 3] as float32 [n, 3, 32, 32], normalised by the ImageNet mean and deviation."""
    scaled = (images.float() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    return scaled.permute(0, 3, 1, 2).contiguous()


def input_range() -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each channel of a normalised image, [3, 1, 1] each."""
    black, white = normalised(torch.tensor([0, LEVELS], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 1, 3))
    return black, white


def _fit_in(model: nn.Module, state: Mapping[str, Tensor], depth: int, path: str) -> None:
    """Copy ``state`` into ``model``.

    If a key does not fit, the error names the first such key and the depth that would fit.
    """
    model_state = model.state_dict()
    problem = state_dict_misfit(model_state, state, "the model")
    if problem:
        result = {int(m[1]) for m in (re.match(r"layer1\.(\d+)\.", key) for key in state) if m}
        fits = 6 * (max(result) + 1) + 2 if result else depth
        hint = f"; it looks like cifar-resnet{fits}" if fits != depth else ""
        raise UsageError(f"{path} does not fit cifar-resnet{depth}: it {problem}{hint}")
    model.load_state_dict({**model_state, **state})
