"""A device that computes wrongly: faults of the package's own record, put into what operations give, always or now and then.

``PYTHONPATH=src:tests python -m selftest.faulty_device RECORDING`` prints the table of docs/howto/test-device.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from unsilent.faults import Fault
from unsilent.faults.codecs import codec
from unsilent.selftest.known_answers import known_answers
from unsilent.selftest.recording import load_recording
from unsilent.selftest.running import execute_tests
from unsilent.sites import corrupt
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.memory import dtype_name

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
"""Products of matrices and convolutions, forward and backward."""
OPERATIONS = {
    "gemm": ("aten::mm",),
    "convolution": ("aten::convolution",),
    "attention": ("aten::_scaled_dot_product", "aten::bmm"),
    "reduction": ("aten::sum",),
    "optimizer": ("aten::addcdiv_",),
}
"""What computes each operation of the self-test; names may go on."""


def resolved(tensor: Tensor, operation: str, elements: np.ndarray, operands: np.ndarray) -> Fault:
    return Fault(
        "op:device", dtype_name(tensor.dtype), tuple(tensor.shape), elements.astype(np.int64), operation, operands
    )


def masks(tensor: Tensor, bit_from_top: int, elements: np.ndarray, operation: str) -> Fault:
    layout = codec(dtype_name(tensor.dtype))
    bit = layout.word_dtype.type(1 << (8 * layout.word_dtype.itemsize - 1 - bit_from_top))
    return resolved(tensor, operation, elements, np.full(len(elements), bit, layout.word_dtype))


EXPONENT = {torch.float64: 11, torch.float32: 8, torch.bfloat16: 8, torch.float16: 5}


def stuck_lane(tensor: Tensor) -> Fault:
    """The highest bit of the significand is 1 in every 8th element."""
    return masks(tensor, EXPONENT[tensor.dtype] + 1, np.arange(3, tensor.numel(), 8), "or")


def one_bit(tensor: Tensor) -> Fault:
    """The lowest but one bit of the exponent of one element is flipped."""
    return masks(tensor, EXPONENT[tensor.dtype] - 1, np.array([tensor.numel() // 2]), "xor")


def swapped_rows(tensor: Tensor) -> Fault:
    """The first two rows are exchanged."""
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    rows = np.arange(2 * width)
    return resolved(tensor, "copy_from", rows, np.roll(rows, width).astype(np.int64))


def negated(tensor: Tensor) -> Fault:
    """Every element has the other sign."""
    return masks(tensor, 0, np.arange(tensor.numel()), "xor")


FAULTS: dict[str, Callable[[Tensor], Fault]] = {
    "a bit stuck at 1 in every 8th element": stuck_lane,
    "one bit flipped": one_bit,
    "two rows swapped": swapped_rows,
    "all elements negated": negated,
}


class FaultyDevice(DispatchMode):
    """Corrupts what some operations give, each time with a probability."""

    def __init__(self, fault: Callable[[Tensor], Fault], probability: float, operations: Sequence[str], seed: int = 0):
        super().__init__()
        self._fault, self._probability, self._operations = fault, probability, tuple(operations)
        self._rng = np.random.default_rng(seed)
        self.hits = 0

    def _dispatched(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if func._schema.name.startswith(self._operations) and self._rng.random() < self._probability:
            outputs = result if isinstance(result, (tuple, list)) else [result]
            output = next(one for one in outputs if isinstance(one, Tensor) and one.is_floating_point())
            if output.numel() > 16:
                corrupt(output, self._fault(output))
                self.hits += 1
        return result


def rounds(count: int) -> Callable[[], bool]:
    left = iter(range(count - 1, -1, -1))
    return lambda: not next(left)


def print_table(recording: str) -> None:
    tests, _ = known_answers("cpu")
    step = load_recording(recording, "cpu")
    print("| fault | how often | known answers: wrong | rows with a wrong answer | recorded step: wrong |")
    print("|---|---|---|---|---|")
    every = tuple(name for names in OPERATIONS.values() for name in names)
    for name, fault in FAULTS.items():
        for probability in (1.0, 0.3):
            with FaultyDevice(fault, probability, every):
                counts = execute_tests(tests, rounds(20))
            with FaultyDevice(fault, probability, PRODUCTS):
                (recorded,) = execute_tests([step], rounds(20))
            wrong, total = sum(c.wrong for c in counts), sum(c.executions for c in counts)
            rows = sum(c.wrong > 0 for c in counts)
            print(
                f"| {name} | {probability:.0%} | {wrong} of {total} | {rows} of {len(counts)} "
                f"| {recorded.wrong} of {recorded.executions} |"
            )


if __name__ == "__main__":
    print_table(sys.argv[1])
