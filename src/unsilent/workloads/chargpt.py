"""`chargpt`: a small character-level GPT on the help texts that ship with Python; see `help_texts`.

A decoder-only transformer after Radford et al. (2019): causal scaled dot-product attention, pre-norm, learned
positions, and an output head tied to the token embedding.

Invariant: a later token never changes the output at an earlier position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.help_texts import ALPHABET, CONTEXT, CharacterModel, character_workload
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import Goal, Progress, accuracy_of, no_progress, outputs


class CharGpt(nn.Module):
    """Token ids int64 [n, t], t <= 64 -> scores of the next character [n, t, 97]."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, width)
        self.positions = nn.Parameter(torch.randn(1, CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET) + 1, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(hidden)))
        return out


def _accuracy(model: nn.Module, windows: Tensor, following: Tensor) -> float:
    return accuracy_of(outputs(model, list(windows.split(64))).argmax(2), following)


MODEL = CharacterModel(
    name="chargpt",
    version=1,
    description="character GPT, tied embedding and head, contexts of 64 characters",
    build=CharGpt,
    components={
        "embedding": ("embedding.*", "positions"),
        "attention": ("blocks.*.attention.*",),
        "mlp": ("blocks.*.mlp.*",),
        "norm": ("blocks.*.norm?.*", "norm.*"),
    },
    goal=Goal("next-character accuracy", 0.45),
    score=_accuracy,
)


def chargpt(*, eval: int = 32, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out contexts [eval, 64]; its answer is the most likely next character."""
    return character_workload(MODEL, eval, seed, progress)
