"""`chargpt`: a small character-level GPT on the help texts that ship with Python; see `help_texts`.

A decoder-only transformer after Radford et al. (2019): causal scaled dot-product attention, pre-norm, learned
positions, and an output head tied to the token embedding.

Invariant: a later token never changes the output at an earlier position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.workloads.base import Workload
from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.help_texts import (
    ALPHABET,
    CITATION,
    CONTEXT,
    DESCRIPTION,
    clean_contexts,
    fit_to_help_texts,
    held_out_contexts,
    load_help_texts,
)
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import (
    Goal,
    Progress,
    Schedule,
    accuracy_of,
    check_option_range,
    no_progress,
    outputs,
    parameter_count,
)

VERSION = 1
GOAL = Goal("next-character accuracy", 0.45)
STEPS = 1600
SCHEDULE = Schedule(epochs=1, batch=8, rate=0.003, decay=0.05)


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


COMPONENTS = {
    "embedding": ("embedding.*", "positions"),
    "attention": ("blocks.*.attention.*",),
    "mlp": ("blocks.*.mlp.*",),
    "norm": ("blocks.*.norm?.*", "norm.*"),
}


def chargpt(*, eval: int = 32, seed: int = 0, progress: Progress = no_progress) -> Workload:  # noqa: A002 - option name
    """The trained model on ``eval`` held-out contexts [eval, 64]; its answer is the most likely next character."""
    name = "chargpt"
    windows, following = held_out_contexts()
    check_option_range(name, "eval", eval, len(windows), "held-out contexts")

    def train(model: nn.Module) -> float:
        fit_to_help_texts(model, STEPS, SCHEDULE, name=name, seed=seed, progress=progress)
        return accuracy_of(outputs(model, list(windows.split(64))).argmax(2), following)

    recipe = TrainedWeightsRecipe(name, VERSION, {"seed": seed}, load_help_texts().hash)
    model, accuracy = load_or_train(recipe, CharGpt, train, GOAL, seed=seed)
    evaluated = windows[torch.linspace(0, len(windows) - 1, eval).long()]
    return Workload(
        model,
        [evaluated],
        judge="next-token",
        name=name,
        components=COMPONENTS,
        clean=clean_contexts(name, evaluated),
        info={
            "description": "character GPT, tied embedding and head, contexts of 64 characters",
            "data": DESCRIPTION,
            "accuracy": {"name": GOAL.metric, "value": accuracy},
            "parameters": parameter_count(model),
            "samples": eval,
            "citation": CITATION,
        },
    )
