"""`digits-vit`: a small vision transformer on handwritten digits.

Patches, class token, pre-norm blocks with scaled dot-product attention and GELU MLPs, after Dosovitskiy et al. (ICLR
2021), scaled down to 8x8 images in 2x2 patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.digits_data import Classifier
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.training import Goal, Progress, Schedule, silent


class DigitsVit(nn.Module):
    """Images [n, 1, 8, 8] -> class scores [n, 10]."""

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


CLASSIFIER = Classifier(
    name="digits-vit",
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
)


def digits_vit(*, eval: int = 128, seed: int = 0, progress: Progress = silent) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out images [eval, 1, 8, 8]; its answer is the most likely digit."""
    return CLASSIFIER.workload(eval, seed, progress)
