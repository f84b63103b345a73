"""What is measured: ResNet-18 in two shapes, both 11.2 M parameters, for 3x32x32 inputs; and a small GPT.

``cifar``: 3x3 stem, no pooling. ``light``: 7x7 stem with stride 2, and pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.workloads.layers import TransformerBlock


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.short = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet18(nn.Module):
    """He et al. 2015, Table 1, 18 layers; ``stem`` is ``cifar`` or ``light``."""

    def __init__(self, stem: str, classes: int = 10) -> None:
        super().__init__()
        if stem == "cifar":
            self.stem: nn.Module = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        else:
            self.stem = nn.Sequential(
                nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            )
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = nn.Sequential(*(nn.Sequential(Block(i, w, s), Block(w, w, 1)) for i, w, s in widths))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def calibrated(stem: str, batch: int = 64) -> tuple[nn.Module, Tensor]:
    """A model with random weights whose batch norms have seen noise, and one batch of it."""
    torch.manual_seed(0)
    model = ResNet18(stem)
    x = torch.randn(batch, 3, 32, 32)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    return model.eval(), x


class Gpt(nn.Module):
    """Six causal pre-norm transformer blocks, 1.3 M parameters; token ids [n, t] -> scores [n, t, vocabulary]."""

    def __init__(
        self, width: int = 128, depth: int = 6, heads: int = 4, context: int = 32, vocabulary: int = 512
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, context, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions[:, : tokens.shape[1]])))


def gpt(batch: int = 16, context: int = 32) -> tuple[nn.Module, Tensor]:
    """A model with random weights, and one batch of random tokens."""
    torch.manual_seed(0)
    model = Gpt(context=context)
    return model.eval(), torch.randint(model.embedding.num_embeddings, (batch, context))
