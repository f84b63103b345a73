"""The number of samples in a batch, by one rule for the whole package.

- A tensor has one sample per row, the size of its first dimension.
- A tuple or a dict holds the inputs of one call. The first input that has samples gives their number.
- A list of tensors with one dtype and one number of dimensions has one sample per tensor, like images of different sizes, and a
  list of dicts has one per dict. Any other list holds inputs of one call, like ``[images, labels]`` of a data loader.

The outermost list of a batch of `unsilent.workloads.base.call_model` holds the inputs of the call (`as_inputs`).

Tensors of equal form may be samples or inputs, so the number of samples is checked with the model's output
(`check_samples`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import parts_of, tensors_in
from unsilent.outcomes.tensors import leaves
from unsilent.report.text import count_text


def count_samples(batch: Any) -> int:
    """The number of samples in a batch, by the rule of this module.

    Raises ``UsageError`` if the batch has no tensor with a dimension.
    """
    count = _count(batch)
    if count is None:
        raise UsageError(
            f"a batch of type {type(batch).__name__} has no tensor with a dimension; expected tensors with samples in the first "
            "dimension, or a list with one tensor per sample"
        )
    return count


def check_samples(batch: Any, output: Any) -> None:
    """Raise ``UsageError`` if the model's output shows that the samples of the batch were miscounted.

    The output then has as many samples as the other possible reading of the batch, and not as many as were counted.
    """
    ours, others = count_samples(batch), _other_count(batch)
    if others is not None and _has(output, others) and not _has(output, ours):
        raise UsageError(
            f"a batch was read as {count_text(ours, 'sample')}, but the model answers with {others}; give the inputs of one call "
            "as a tuple or a dict, or the samples as a list that is one input: ([sample, …],)"
        )


def take_samples(batch: Any, samples: Tensor) -> Any:
    """A copy of the batch with only the samples whose numbers int64[n] are given.

    Parts of the batch that do not have one entry per sample are returned unchanged.
    """
    count = count_samples(batch)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[samples.to(value.device)] if value.ndim and len(value) == count else value
        if holds_samples(value):
            return [value[i] for i in samples.tolist()] if len(value) == count else value
        if isinstance(value, Mapping):
            return {key: take(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [take(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    return take(batch)


def _count(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if holds_samples(value):
        return len(value)
    return next((n for _, part in parts_of(value) or () if (n := _count(part)) is not None), None)


def holds_samples(value: Any) -> bool:
    """Whether a value is a list with one item per sample."""
    if not isinstance(value, list) or not value:
        return False
    return _are_alike(value) or all(
        isinstance(item, Mapping) and next(tensors_in(item), None) is not None for item in value
    )


def _are_alike(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items are tensors of the same dtype and number of dimensions, at least one."""
    if not all(isinstance(item, Tensor) and item.ndim for item in items):
        return False
    return len({(item.dtype, item.ndim) for item in items}) == 1


def _other_count(value: Any) -> int | None:
    """The number of samples in the other possible reading of a batch.

    In that reading, tensors of equal form are samples instead of inputs, or inputs instead of samples. None if the
    batch can be read in one way only.
    """
    if isinstance(value, list) and value and _are_alike(value):
        return len(value[0])
    if isinstance(value, tuple) and len(value) > 1 and _are_alike(value):
        return len(value)
    parts = None if isinstance(value, Tensor) else parts_of(value)
    first = next((part for _, part in parts or () if _count(part) is not None), None)
    return None if first is None else _other_count(first)


def _has(output: Any, samples: int) -> bool:
    """Whether an output has this many samples, as items of a list or as rows of a tensor."""
    if isinstance(output, list) and len(output) == samples:
        return True
    return any(tensor.ndim and len(tensor) == samples for tensor in leaves(output))
