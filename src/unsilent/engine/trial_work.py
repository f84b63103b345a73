"""The expected cost of a trial, from counted work instead of measured time.

The cost is the same on every machine and with every engine. The work of an evaluation consists of the multiplications
and additions of its matrix products and convolutions, and of the bytes that operations write. Only the ratio of the
seconds matters, to within a factor of two.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from unsilent.engine.tape import flatten
from unsilent.sites.dispatch_mode import DispatchMode


class DeviceSpeed(NamedTuple):
    """The assumed speed of a kind of device.

    Attributes:
        flops, bytes_written: Floating-point operations and written bytes per second.
        trial: Seconds to draw a fault, inject it, run the operations that read it, judge, undo and store.
        operation: Seconds of an operation in a trial; a call from Python takes longer, but many trials share it.
    """

    flops: float
    bytes_written: float
    trial: float
    operation: float


SPEEDS = {"cpu": DeviceSpeed(1.5e11, 1e10, 3e-4, 1e-6), "cuda": DeviceSpeed(1e13, 1e12, 1e-3, 1e-5)}
"""Speeds by kind of device: of one core of a server, measured on five models; of a CUDA device, assumed."""
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Operations that multiply matrices, with the indices of the arguments that are matrices."""


class WorkCounter(DispatchMode):
    """Counts the work of evaluations: ``operations``, ``flops`` and ``written_bytes``."""

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

    def trial_seconds(self, device: str, batches: int) -> float:
        """Fixed seconds of a trial that do not depend on its samples.

        ``batches``: number of batches that were counted.
        """
        speed = SPEEDS[device]
        return speed.trial + speed.operation * self.operations / batches

    def sample_seconds(self, device: str, samples: int) -> float:
        """Seconds for each sample that a trial evaluates.

        ``samples``: number of samples that were counted.
        """
        speed = SPEEDS[device]
        return (self.flops / speed.flops + self.written_bytes / speed.bytes_written) / samples


def _flops(name: str, args: tuple[Any, ...], results: list[Tensor]) -> float:
    """Multiplications and additions of one operation, or 0 for an operation other than a product."""
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
