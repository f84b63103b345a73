"""Training of the built-in models: one short seeded loop that does not change the caller's process.

Invariants: the same seed gives the same bits on the same kind of CPU; threads, global random state and gradient mode of
the caller are restored; a score below the declared floor is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.workloads.base import call_model

THREADS = 1
"""Number of threads of a training. One thread is as fast as several for such small models, and many times faster if
other processes compete for the cores. The trained bits then do not depend on the number of cores.
"""


class Progress(Protocol):
    """A function that is called with the progress of a long computation."""

    def __call__(self, description: str, done: float, total: float) -> None:
        """Report that ``done`` of ``total`` units are finished.

        This is called often, so it must return at once.
        """
        ...


def no_progress(description: str, done: float, total: float) -> None:
    """A `Progress` that reports nothing."""


@dataclass(frozen=True)
class Schedule:
    """Settings of AdamW under a one-cycle learning rate with the peak ``rate``."""

    epochs: int
    batch: int
    rate: float
    decay: float = 0.01


@dataclass(frozen=True)
class Goal:
    """The score that a trained model must reach on held-out data.

    ``metric`` must be at least ``floor``.
    """

    metric: str
    floor: float
    advice: str = "this torch build does not train the model correctly; please report it"
    error: type[UnsilentError] = UnsilentError

    def check(self, workload: str, reached: float) -> None:
        """Raise an error if ``reached`` is below the goal or NaN."""
        if not reached >= self.floor:
            raise self.error(
                f"workload {workload!r} reached {self.metric} {reached:.4f}, "
                f"expected at least {self.floor:g}: {self.advice}"
            )


@contextmanager
def isolated_training(seed: int) -> Iterator[None]:
    """Context with one thread, seeded global randomness and gradients.

    The caller's settings are restored on exit.
    """
    threads = torch.get_num_threads()
    state = torch.random.get_rng_state()
    try:
        torch.set_num_threads(THREADS)
        # Only the CPU generator: torch.manual_seed would also reseed the caller's accelerators.
        torch.default_generator.manual_seed(seed)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(state)


def fit(
    model: nn.Module,
    sample: Callable[[Tensor], tuple[Any, Tensor]],
    count: int,
    loss: Callable[[Any, Tensor], Tensor],
    schedule: Schedule,
    *,
    seed: int,
    description: str,
    progress: Progress = no_progress,
) -> None:
    """Train ``model`` in place and leave it in eval mode without gradients.

    Args:
        sample: Maps int64 indices [batch] into the training set to ``(model input, target)``.
        count: Size of the training set.
        loss: Function from model output and target to a scalar loss.
        seed: Seed of the order of the samples.
        description: Description that is passed to ``progress``.
    """
    order = torch.Generator().manual_seed(seed)
    size = min(schedule.batch, count)
    # A last incomplete batch is left out: batch norm cannot train on one sample.
    whole = count // size * size
    steps = schedule.epochs * (whole // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate, weight_decay=schedule.decay)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=schedule.rate, total_steps=steps + 1)
    model.train()
    done = 0
    for _ in range(schedule.epochs):
        for rows in torch.randperm(count, generator=order)[:whole].split(size):
            inputs, target = sample(rows)
            optimizer.zero_grad()
            loss(call_model(model, inputs), target).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cycle.step()
            done += 1
            progress(description, done, steps)
    optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def outputs(model: nn.Module, inputs: list[Any]) -> Tensor:
    """The outputs of a model for several batches, joined along the first dimension."""
    return torch.cat([call_model(model, batch) for batch in inputs])


def accuracy_of(decisions: Tensor, labels: Tensor) -> float:
    """Share of equal entries in two tensors of the same shape."""
    return int((decisions == labels).sum()) / labels.numel()


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve: P(score of a positive > score of a negative), where ties count half.

    Args:
        labels: [n], 0 or 1, both present.
        scores: [n], any real numbers.
    """
    from scipy.stats import rankdata

    positive = np.asarray(labels) > 0
    ranks = rankdata(np.asarray(scores))
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def check_option_range(workload: str, option: str, value: int, available: int, what: str) -> int:
    """The value if it is between 1 and ``available``.

    Raises a ``UsageError`` that names the option otherwise.
    """
    if not 1 <= value <= available:
        raise UsageError(f"workload {workload!r}: option {option!r} is {value}; expected 1 to {available} ({what})")
    return value


def import_transformers(workload: str, module: str = "transformers") -> Any:
    """Import a module of transformers by its name.

    The types of the caller then do not depend on whether the extra is installed.

    Raises:
        UsageError: transformers is not installed; ``workload`` needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"workload {workload!r} needs transformers; pip install 'unsilent[transformers]'") from None


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """The specification of a built-in model that is trained on first use.

    Attributes:
        version: Version number, raised whenever the data, the model or its training change.
        build: Function that makes the model with fresh weights.
    """

    version: int
    description: str
    build: Callable[[], nn.Module]
    goal: Goal
    components: Mapping[str, str | Sequence[str]]


def model_info(
    spec: FittedModel, data: str, reached: float, model: nn.Module, samples: int, citation: str
) -> dict[str, Any]:
    """The ``info`` of a workload whose model was trained to a goal."""
    return {
        "description": spec.description,
        "data": data,
        "accuracy": {"name": spec.goal.metric, "value": reached},
        "parameters": parameter_count(model),
        "samples": samples,
        "citation": citation,
    }


def parameter_count(model: nn.Module) -> int:
    """Number of elements of all parameters; tied parameters count once."""
    return sum(p.numel() for p in model.parameters())
