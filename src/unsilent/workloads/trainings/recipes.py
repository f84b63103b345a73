"""Shared parts of the built-in trainings: options with checks, optimizers by name, the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.workloads.layers import TransformerBlock
from unsilent.workloads.model_fitting import check_option_range
from unsilent.workloads.trainings.dropout import RowDropout
from unsilent.workloads.trainings.loop import Training
from unsilent.workloads.trainings.sources import RowBatches

WARM_UP = 0.1
"""Share of a run in which the learning rate increases."""
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


class BuiltInTrainingOptions(NamedTuple):
    """Options that every built-in training has."""

    steps: int
    batch: int
    optimizer: str
    rate: float
    dropout: float
    amp: str
    device: str


def make_training(
    name: str,
    options: BuiltInTrainingOptions,
    *,
    rows: int,
    take: Callable[[Tensor], Any],
    clip: float = 0.0,
    augment: Callable[[Any, torch.Generator], Any] | None = None,
    settings: Mapping[str, Any],
    **parts: Any,
) -> Training:
    """A built-in training on batches that ``take`` returns for row numbers below ``rows``.

    ``parts``: further arguments of `Training`, namely model, loss, evaluate and info. Raises ``UsageError`` for invalid
    options.
    """
    steps, batch, optimizer, rate, dropout, amp, device = options
    if not 0 <= dropout < 1:
        raise UsageError(
            f"workload {name!r}: option 'dropout' is {dropout:g}; expected a probability of at least 0 and below 1"
        )
    return Training(
        name=name,
        optimizer=optimizer_factory(name, optimizer, rate),
        schedule=schedule_factory(steps),
        batches=RowBatches(rows, batch, take),
        augment=augment,
        clip=checked_clip_norm(name, clip),
        amp=amp,
        steps=steps,
        device=device,
        streams=effective_streams(augment is not None, dropout),
        settings={**settings, "batch": batch, "optimizer": optimizer, "rate": rate, "dropout": dropout},
        **parts,
    )


def optimizer_factory(name: str, kind: str, rate: float) -> Callable[[nn.Module], Optimizer]:
    """A function that makes the optimizer of the given name, in the form that `Training` takes."""
    if kind not in OPTIMIZERS:
        raise unknown_name_error(f"optimizer of workload {name!r}", kind, OPTIMIZERS)
    return lambda model: OPTIMIZERS[kind](model.parameters(), lr=rate)


def schedule_factory(steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A function that makes a schedule with linear warm-up and cosine decay to 1 % of the learning rate."""
    warm = max(1, round(steps * WARM_UP))

    def share(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2

    return lambda optimizer: LambdaLR(optimizer, share)


def add_dropout(layers: nn.Sequential, p: float) -> None:
    """Insert a dropout after the second layer of a sequence, without renaming the other layers."""
    layers[1] = nn.Sequential(layers[1], RowDropout(p))


def add_dropout_to_blocks(blocks: nn.Sequential, p: float) -> None:
    """Add a dropout to the end of the MLP in every transformer block."""
    for block in blocks:
        assert isinstance(block, TransformerBlock)
        block.mlp.append(RowDropout(p))


def randomly_shifted_images(images: Tensor, generator: torch.Generator, fill: float) -> Tensor:
    """Images [n, c, h, w], each shifted at random by -1, 0 or 1 pixel in both directions.

    ``fill`` is the value of new pixels at the border.
    """
    n, _, h, w = images.shape
    top, left = torch.randint(3, (2, n, 1), generator=generator)
    rows, columns = torch.arange(h) + top, torch.arange(w) + left
    bordered = pad(images, (1, 1, 1, 1), value=fill)
    moved = bordered[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def check_transformer_size(name: str, width: int, depth: int, heads: int = 4) -> None:
    """Raise ``UsageError`` if no transformer can have this width, depth and number of heads."""
    check_option_range(name, "width", width, 1024, "embedding size, a multiple of 4")
    check_option_range(name, "depth", depth, 64, "transformer blocks")
    if width % heads:
        raise UsageError(f"workload {name!r}: option 'width' is {width}; expected a multiple of its {heads} heads")


def checked_clip_norm(name: str, clip: float) -> float | None:
    """The largest norm of all gradients together, or None for 0, which means no clipping.

    Raises ``UsageError`` for a value that is not allowed.
    """
    if not (math.isfinite(clip) and clip >= 0):
        raise UsageError(f"workload {name!r}: option 'clip' is {clip:g}; expected a norm above 0, or 0 for no clipping")
    return clip or None


def effective_streams(augment: bool, dropout: float) -> Sequence[str]:
    """The names of the seeds that have an effect."""
    return ("init", "order", *(["augment"] if augment else []), *(["dropout"] if dropout else []), "within")
