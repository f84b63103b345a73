"""`train-chargpt` and `train-llama`: language models trained on Python's help texts; see `workloads.help_texts`.

A row is a piece of 64 characters from a random place, so the seed of the order chooses the places. The answer of the
model at every position is the most likely next character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import unknown_name_error
from unsilent.workloads.base import call_model
from unsilent.workloads.character_models import HEADS, CharGpt, character_llama
from unsilent.workloads.help_texts import ALPHABET, CITATION, CONTEXT, DESCRIPTION, load_help_texts, loss
from unsilent.workloads.model_fitting import check_option_range
from unsilent.workloads.trainings.base import Bools, Evaluation, Ints
from unsilent.workloads.trainings.evaluating import make_evaluation
from unsilent.workloads.trainings.loop import Training
from unsilent.workloads.trainings.recipes import (
    BuiltInTrainingOptions,
    add_dropout_to_blocks,
    check_transformer_size,
    make_training,
)

EVALUATED = 32
"""Number of held-out contexts, which are spread over the text."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
    """The training of a decoder-only transformer, with dropout at the end of each MLP."""
    check_transformer_size("train-chargpt", width, depth, HEADS)

    def build() -> nn.Module:
        model = CharGpt(width, depth)
        add_dropout_to_blocks(model.blocks, dropout)
        return model

    options = BuiltInTrainingOptions(steps, batch, optimizer, rate, dropout, amp, device)
    settings = {"width": width, "depth": depth}
    return text_training("train-chargpt", options, build, clip, settings, "character GPT on Python's help texts")


def train_llama(
    *,
    steps: int = 1200,
    batch: int = 4,
    width: int = 64,
    depth: int = 2,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    rate: float = 0.003,
    clip: float = 1.0,
    amp: str = "none",
    device: str = "cpu",
) -> Training:
    """The training of a Llama of transformers, built from its configuration.

    It has RMSNorm, rotary positions, SwiGLU and no biases. With ``dtype=bf16`` parameters, activations, gradients and
    moments are bfloat16, as in a model that was cast as a whole; ``dtype=fp32,amp=bfloat16`` is autocast on float32
    parameters.
    """
    name = "train-llama"
    check_transformer_size(name, width, depth, HEADS)
    if dtype not in DTYPES:
        raise unknown_name_error(f"dtype of workload {name!r}", dtype, DTYPES)

    def build() -> nn.Module:
        model = character_llama(name, width, depth)
        for parameter in model.parameters():  # not the frequencies of the rotary positions
            parameter.data = parameter.data.to(DTYPES[dtype])
        return model

    options = BuiltInTrainingOptions(steps, batch, optimizer, rate, 0.0, amp, device)
    settings = {"width": width, "depth": depth, "dtype": dtype}
    return text_training(name, options, build, clip, settings, f"Llama in {dtype} on Python's help texts")


def text_training(
    name: str,
    options: BuiltInTrainingOptions,
    build: Callable[[], nn.Module],
    clip: float,
    settings: Mapping[str, Any],
    description: str,
) -> Training:
    """The training of a model that maps token ids int64 [n, 64] to scores [n, 64, 97].

    The output may also be an object with ``logits``.
    """
    data, offsets = load_help_texts(), torch.arange(CONTEXT + 1)
    places = len(data.train) - CONTEXT
    check_option_range(name, "batch", options.batch, places, "contexts per step")
    # Contexts are spread over the text, as neighbouring ones are nearly the same.
    starts = torch.linspace(0, len(data.test) - CONTEXT - 1, EVALUATED).long()
    held_out = data.test[starts[:, None] + offsets]
    groups = character_groups(held_out[:, 1:].flatten().numpy())

    def take(rows: Tensor) -> tuple[Tensor, Tensor]:
        window = data.train[rows[:, None] + offsets]
        return window[:, :-1], window[:, 1:]

    def scores_of(model: nn.Module, tokens: Tensor) -> Tensor:
        output = call_model(model, tokens)
        scores: Tensor = getattr(output, "logits", output)
        return scores.float()

    def step_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = scores_of(model, batch[0])
        return loss(scores, batch[1]), {"accuracy": (scores.detach().argmax(2) == batch[1]).float().mean()}

    def evaluate(model: nn.Module) -> Evaluation:
        place = next(model.parameters()).device
        scores = scores_of(model, held_out[:, :-1].to(place)).cpu()
        result = float(loss(scores, held_out[:, 1:]))
        return make_evaluation(result, scores.argmax(2), held_out[:, 1:].contiguous(), groups, classes=False)

    return make_training(
        name,
        options,
        rows=places,
        take=take,
        clip=clip,
        settings={**settings, "data": data.hash},
        model=build,
        loss=step_loss,
        evaluate=evaluate,
        info={
            "description": description,
            "data": DESCRIPTION,
            "citation": CITATION,
        },
    )


def character_groups(tokens: Ints) -> dict[str, Bools]:
    """Groups of characters by kind; each token belongs to exactly one group."""
    marks = {"space": str.isspace, "small letter": str.islower, "capital": str.isupper, "digit": str.isdigit}
    named = [next((kind for kind, is_it in marks.items() if is_it(c)), "punctuation") for c in ALPHABET]
    of_token = np.array([*named, "unknown character"])[tokens]
    return {kind: of_token == kind for kind in (*marks, "punctuation") if (of_token == kind).any()}
