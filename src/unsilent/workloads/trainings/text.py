"""`train-chargpt`: a character GPT on the help texts that ship with Python; see `workloads.chargpt`.

A row is a piece of 64 characters from a random place, so the order of the data is the choice of the places. Its answer at every
position is the most likely next character.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.errors import UsageError
from unsilent.workloads.base import call_model
from unsilent.workloads.chargpt import ALPHABET, CONTEXT, CharGpt, load_help_texts, loss
from unsilent.workloads.model_fitting import check_option_range
from unsilent.workloads.trainings.base import Bools, Evaluation, Ints
from unsilent.workloads.trainings.evaluating import make_evaluation
from unsilent.workloads.trainings.loop import Training
from unsilent.workloads.trainings.recipes import BuiltInTrainingOptions, add_dropout_to_blocks, make_training

NAME = "train-chargpt"
EVALUATED = 32
"""Held-out contexts, spread over the text."""


def train_chargpt(
    *,
    steps: int = 1200,
    batch: int = 8,
    width: int = 32,
    depth: int = 2,
    optimizer: str = "adamw",
    rate: float = 0.006,
    dropout: float = 0.1,
    clip: float = 1.0,
    amp: str = "none",
    device: str = "cpu",
) -> Training:
    """A decoder-only transformer; dropout at the end of each MLP."""
    check_option_range(NAME, "width", width, 1024, "embedding size, a multiple of 4")
    check_option_range(NAME, "depth", depth, 64, "transformer blocks")
    if width % 4:
        raise UsageError(f"workload {NAME!r}: option 'width' is {width}; expected a multiple of its 4 heads")
    data, offsets = load_help_texts(), torch.arange(CONTEXT + 1)
    places = len(data.train) - CONTEXT
    check_option_range(NAME, "batch", batch, places, "contexts per step")
    starts = torch.linspace(0, len(data.test) - CONTEXT - 1, EVALUATED).long()
    held_out = data.test[starts[:, None] + offsets]
    groups = character_groups(held_out[:, 1:].flatten().numpy())

    def take(rows: Tensor) -> tuple[Tensor, Tensor]:
        window = data.train[rows[:, None] + offsets]
        return window[:, :-1], window[:, 1:]

    def build() -> nn.Module:
        model = CharGpt(width, depth)
        add_dropout_to_blocks(model.blocks, dropout)
        return model

    def step_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = call_model(model, batch[0])
        return loss(scores, batch[1]), {"accuracy": (scores.detach().argmax(2) == batch[1]).float().mean()}

    def evaluate(model: nn.Module) -> Evaluation:
        place = next(model.parameters()).device
        scores = call_model(model, held_out[:, :-1].to(place)).cpu()
        result = float(loss(scores, held_out[:, 1:]))
        return make_evaluation(result, scores.argmax(2), held_out[:, 1:].contiguous(), groups, classes=False)

    return make_training(
        NAME,
        BuiltInTrainingOptions(steps, batch, optimizer, rate, dropout, amp, device),
        rows=places,
        take=take,
        clip=clip,
        settings={"width": width, "depth": depth, "data": data.hash},
        model=build,
        loss=step_loss,
        evaluate=evaluate,
        info={
            "description": "character GPT on Python's help texts",
            "data": "help topics of this Python version (pydoc_data.topics), every tenth paragraph held out",
            "citation": "Python Software Foundation, The Python Language Reference (PSF licence)",
        },
    )


def character_groups(tokens: Ints) -> dict[str, Bools]:
    """Groups of characters by kind: each token is in exactly one."""
    marks = {"space": str.isspace, "small letter": str.islower, "capital": str.isupper, "digit": str.isdigit}
    named = [next((kind for kind, is_it in marks.items() if is_it(c)), "punctuation") for c in ALPHABET]
    of_token = np.array([*named, "unknown character"])[tokens]
    return {kind: of_token == kind for kind in (*marks, "punctuation") if (of_token == kind).any()}
