"""`digits-cnn`: a small residual network on handwritten digits, the quickest workload there is.

Convolution, batch norm, ReLU and residual blocks as in He et al. (CVPR 2016), scaled down to 8x8 images.
"""

from __future__ import annotations

from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.digits_data import Classifier
from unsilent.workloads.training import Goal, Progress, Schedule, silent


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
    """Images [n, 1, 8, 8] -> class scores [n, 10]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = ResidualBlock(width, width)
        self.block2 = ResidualBlock(width, 2 * width, stride=2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block2(self.block1(self.stem(x))))
        return out


CLASSIFIER = Classifier(
    name="digits-cnn",
    version=1,
    description="small residual CNN on handwritten digits",
    build=DigitsCnn,
    schedule=Schedule(epochs=12, batch=64, rate=0.01),
    goal=Goal("accuracy", 0.97),
    components={part: f"{part}.*" for part in ("stem", "block1", "block2", "head")},
)


def digits_cnn(*, eval: int = 128, seed: int = 0, progress: Progress = silent) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out images [eval, 1, 8, 8]; its answer is the most likely digit."""
    return CLASSIFIER.workload(eval, seed, progress)
