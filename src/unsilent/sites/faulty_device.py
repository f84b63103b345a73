"""Simulation of a device that computes wrongly: results of some operations are corrupted, always or sometimes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsilent.faults import Fault
from unsilent.faults.codecs import codec
from unsilent.sites.corrupting import corrupt
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.memory import dtype_name

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
"""Names of matrix products and convolutions, forward and backward."""
MORE_THAN = 16
"""Number of elements that a corrupted result must exceed."""
OperationShape = tuple[str, tuple[int, ...]]
"""Name of an operation and the shape of its result."""


def element_fault(tensor: Tensor, operation: str, elements: np.ndarray[Any, Any], bit_from_top: int) -> Fault:
    """A fault in these elements of a tensor: ``xor``, ``or`` or ``and`` with one bit, counted from the sign."""
    layout = codec(dtype_name(tensor.dtype))
    bit = layout.word_dtype.type(1 << (8 * layout.word_dtype.itemsize - 1 - bit_from_top))
    return resolved_fault(tensor, operation, elements, np.full(len(elements), bit, layout.word_dtype))


def resolved_fault(
    tensor: Tensor, operation: str, elements: np.ndarray[Any, Any], operands: np.ndarray[Any, Any]
) -> Fault:
    """A fault in these elements of a tensor with the given operation and operands."""
    shape = tuple(tensor.shape)
    return Fault("op:device", dtype_name(tensor.dtype), shape, elements.astype(np.int64), operation, operands)


class FaultyDevice(DispatchMode):
    """Corrupts results of some operations with a given probability while it is active.

    Args:
        fault: Function that returns the fault for a result.
        probability: Probability of a fault each time that one of the operations is computed.
        operations: Beginnings of the names of the operations.
        seed: Seed of the draws.

    Attributes:
        is_on: Whether operations are corrupted; while False they are counted in ``seen``.
        only: Name and result shape of the only operation that is corrupted; None: all.
        hits_left: Number of faults until the device computes correctly again; None: no limit.
        seen: Number of times that each operation ran while the device was off.
        hits: Number of faults so far.
    """

    def __init__(
        self, fault: Callable[[Tensor], Fault], probability: float, operations: Sequence[str] = PRODUCTS, seed: int = 0
    ) -> None:
        super().__init__()
        self._fault, self.probability, self._operations = fault, probability, tuple(operations)
        self._rng = np.random.default_rng(seed)
        self.is_on = True
        self.only: OperationShape | None = None
        self.hits_left: int | None = None
        self.seen: Counter[OperationShape] = Counter()
        self.hits = 0

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not func._schema.name.startswith(self._operations) or self.hits_left == 0:
            return result
        outputs = result if isinstance(result, (tuple, list)) else [result]
        output = next((tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.is_floating_point()), None)
        if output is None or output.numel() <= MORE_THAN:
            return result
        key = (func._schema.name, tuple(output.shape))
        if not self.is_on:
            self.seen[key] += 1
        elif self.only in (None, key) and self._rng.random() < self.probability:
            with torch.no_grad():
                corrupt(output, self._fault(output))
            self.hits += 1
            self.hits_left = None if self.hits_left is None else self.hits_left - 1
        return result
