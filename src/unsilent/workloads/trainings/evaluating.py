"""Evaluation of a trained model, by the user's function or by labelled batches and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.error_origin import advise_on_arguments
from unsilent.basics.errors import UsageError
from unsilent.basics.nested import tensors_in
from unsilent.workloads.base import call_model
from unsilent.workloads.trainings.base import Bools, Evaluation, Ints

MoveToDevice = Callable[[Any], Any]
"""Function that puts a batch on the device of the model."""


_NEEDS_SCORES = (
    "evaluate=[(inputs, labels), …] needs a model that takes the inputs alone and returns one row of scores (logits) for each "
    "label; for other models, let evaluate be a function that takes the model and returns an Evaluation"
)


def evaluator(
    name: str, evaluate: Any, loss: Callable[[nn.Module, Any], Any]
) -> Callable[[nn.Module, MoveToDevice], Evaluation]:
    """A function that returns the `Evaluation` of a model in eval mode.

    ``evaluate`` is the argument of `Training`.
    """
    if callable(evaluate):
        return lambda model, placed: _checked_evaluation(name, evaluate(model))
    if isinstance(evaluate, (Tensor, Mapping, str)) or not isinstance(evaluate, Iterable):
        raise UsageError(
            f"training {name!r}: evaluate is {type(evaluate).__name__}; expected a list of batches (inputs, labels) or a "
            "function that takes the model and returns an Evaluation"
        )
    return lambda model, placed: _over(name, model, evaluate, loss, placed)


def predictions_from_scores(scores: Tensor) -> Tensor:
    """Predictions int64 [n] from class scores [n, classes], or from one score [n] that is positive for yes."""
    return scores.argmax(-1) if scores.ndim > 1 and scores.shape[-1] > 1 else (scores.reshape(-1) > 0).long()


def make_evaluation(
    loss: float,
    predictions: Tensor,
    labels: Tensor,
    groups: Mapping[str, Bools] | None = None,
    classes: bool = True,
    **metrics: float,
) -> Evaluation:
    """An evaluation with the accuracy among its metrics and, if ``classes``, one group for each class."""
    answered, right = _ints(predictions), _ints(labels)
    every = {f"class {c}": right == c for c in np.unique(right)} if classes else {}
    accuracy = float((answered == right).mean())
    return Evaluation(loss, {"accuracy": accuracy, **metrics}, answered, right, {**every, **(groups or {})})


def _ints(values: Tensor) -> Ints:
    return values.detach().cpu().long().numpy().reshape(-1)


def _over(
    name: str, model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Any], placed: MoveToDevice
) -> Evaluation:
    total, predictions, labels = 0.0, list[Tensor](), list[Tensor]()
    for source_batch in batches:
        batch = placed(source_batch)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not isinstance(batch[-1], Tensor):
            raise UsageError(
                f"training {name!r}: a held-out batch is a {type(batch).__name__}; expected (inputs, labels); for "
                "other batches, let evaluate be a function that takes the model"
            )
        result = loss(model, batch)
        value = result[0] if isinstance(result, tuple) else result
        try:
            scores = call_model(model, batch[0] if len(batch) == 2 else tuple(batch[:-1]))
        except TypeError as error:
            advise_on_arguments(error, _NEEDS_SCORES)
            raise
        if not isinstance(scores, Tensor) or predictions_from_scores(scores).numel() != batch[-1].numel():
            raise UsageError(
                f"training {name!r}: the model returned {kind_and_shape(scores)} for {batch[-1].numel():,} labels; "
                f"{_NEEDS_SCORES}"
            )
        total += float(value) * (row_count(batch) or 1)
        predictions.append(predictions_from_scores(scores).reshape(-1))
        labels.append(batch[-1].reshape(-1))
    if not labels:
        raise UsageError(f"training {name!r}: evaluate has no held-out batches; give at least one")
    every = torch.cat(labels)
    return make_evaluation(total / len(every), torch.cat(predictions), every)


def kind_and_shape(value: Any) -> str:
    """Type and shape of a value that a user's function returned, as text for an error."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _checked_evaluation(name: str, result: Any) -> Evaluation:
    if not isinstance(result, Evaluation):
        raise UsageError(
            f"training {name!r}: evaluate returned a {type(result).__name__}; expected an Evaluation(loss, metrics, predictions, "
            "labels), see unsilent.workloads.trainings"
        )
    return result


def row_count(batch: Any) -> int:
    """The number of samples in a batch: the first dimension that its tensors share, or 0 if they share none."""
    counts = {len(tensor) for tensor in tensors_in(batch) if tensor.ndim}
    return counts.pop() if len(counts) == 1 else 0
