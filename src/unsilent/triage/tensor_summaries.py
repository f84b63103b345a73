"""Summaries of the elements of recorded tensors, which replace the tensors themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError, first_line

if TYPE_CHECKING:
    from torch import Tensor

GENERATORS = "generators"


@dataclass(frozen=True)
class TensorSummary:
    """Counts and sizes of the elements of one tensor.

    Attributes:
        is_number: Whether its elements are floating-point numbers.
        elements: Number of elements.
        nonfinite: Number of elements that are NaN or infinite.
        largest: Largest magnitude of the finite ones.
        others: Root mean square of the finite elements except one of the largest magnitude.
        low, high: Smallest and largest finite element.
        digest: Digest of the tensor's bits.
    """

    is_number: bool
    elements: int
    nonfinite: int
    largest: float
    others: float
    low: float
    high: float
    digest: int


@dataclass(frozen=True)
class RecordedTensors:
    """Summaries of all tensors in a file, and its other values.

    Attributes:
        tensors: Summaries by the keys that lead to each tensor; states of generators are left out.
        values: Other numbers and texts in the file, by their keys.
    """

    tensors: Mapping[str, TensorSummary]
    values: Mapping[str, Any]


def read_recorded_tensors(path: Path) -> RecordedTensors:
    """Summaries of the tensors in a batch or state file.

    Raises ``UsageError`` if it cannot be read.
    """
    from torch import Tensor

    from unsilent.basics.nested import leaves_in
    from unsilent.recovery.tensor_files import read_tensors

    tensors: dict[str, TensorSummary] = {}
    values: dict[str, Any] = {}
    try:
        for keys, leaf in leaves_in(read_tensors(path)):
            name = "/".join(keys)
            if keys[:1] == (GENERATORS,):
                continue
            if isinstance(leaf, Tensor):
                tensors[name] = _summary(leaf)
            else:
                values[name] = leaf
    except (
        RuntimeError,
        RecursionError,
        MemoryError,
    ) as error:  # for a dtype that has no arithmetic, or a nested tensor
        raise UsageError(
            f"{path} cannot be read: {first_line(error)[:200]}; give a file that a monitor wrote"
        ) from None
    return RecordedTensors(tensors, values)


def _summary(tensor: Tensor) -> TensorSummary:
    import torch

    from unsilent.recovery.digests import digests_of

    digest = int(digests_of([tensor])[0])
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    numbers = numbers.reshape(-1).double()
    finite = numbers[torch.isfinite(numbers)]
    nonfinite = numbers.numel() - finite.numel()
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if not finite.numel():
        return TensorSummary(is_number, tensor.numel(), nonfinite, 0.0, 0.0, 0.0, 0.0, digest)
    magnitudes = finite.abs()
    largest, place = magnitudes.max(0)
    magnitudes[place] = 0
    scale = float(magnitudes.max()) or 1.0  # so that no square overflows
    others = scale * math.sqrt(float((magnitudes / scale).square().sum()) / max(1, finite.numel() - 1))
    low, high = float(finite.min()), float(finite.max())
    return TensorSummary(is_number, tensor.numel(), nonfinite, float(largest), others, low, high, digest)
