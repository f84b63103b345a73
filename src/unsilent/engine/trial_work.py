"""What a trial is expected to cost, counted instead of measured, so that it is the same on every machine and for every engine.

The work of an evaluation is the multiplications and additions of its matrix products and convolutions, and the bytes that
operations write. Seconds are those of one core of a usual server; only their ratio matters, and to within a factor of two.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from unsilent.engine.tape import flatten
from unsilent.sites.dispatch_mode import DispatchMode

FLOPS_PER_SECOND = 1.5e11
BYTES_PER_SECOND = 1e10
TRIAL_SECONDS = 3e-4
"""To draw a fault, inject it, run the operations that read it, judge, undo and store."""
OPERATION_SECONDS = 1e-6
"""An operation of the evaluation in a trial: a call from Python takes fifty times as long, but is shared by many trials."""
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Operations that multiply matrices: which of their arguments these are."""


class WorkCounter(DispatchMode):
    """Active around evaluations: counts ``operations``, ``flops`` and ``written_bytes``."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.flops, self.written_bytes = 0, 0.0, 0.0

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors = [part for part in flatten(result) if isinstance(part, Tensor)]
        self.operations += 1
        self.written_bytes += sum(t.numel() * t.element_size() for t in tensors)
        self.flops += _flops(func.name().partition("::")[2].partition(".")[0], args, tensors)
        return result

    def trial_seconds(self, batches: int) -> float:
        """Of a trial, whatever it evaluates; ``batches``: that were evaluated."""
        return TRIAL_SECONDS + OPERATION_SECONDS * self.operations / batches

    def sample_seconds(self, samples: int) -> float:
        """Of each sample that a trial evaluates; ``samples``: that were evaluated."""
        return (self.flops / FLOPS_PER_SECOND + self.written_bytes / BYTES_PER_SECOND) / samples


def _flops(name: str, args: tuple[Any, ...], results: list[Tensor]) -> float:
    """Multiplications and additions of one operation; 0 for all but products."""
    if not results or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return 0.0
    if "convolution" in name:
        return 2.0 * float(results[0].numel() * prod(args[1].shape[1:]))
    if name in _PRODUCTS:
        left, right = (args[k] for k in _PRODUCTS[name])
        return 2.0 * float(left.numel() * right.shape[-1])
    if name.startswith("_scaled_dot_product"):
        return 4.0 * float(args[0].numel() * args[1].shape[-2])
    return 0.0
