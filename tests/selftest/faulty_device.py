"""Faults of a device for the self-test, and the table of those that it finds.

``PYTHONPATH=src:tests python -m selftest.faulty_device RECORDING`` prints the table of docs/howto/test-device.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unsilent.faults import Fault
from unsilent.selftest.known_answers import known_answers
from unsilent.selftest.recording import load_recording
from unsilent.selftest.running import execute_tests
from unsilent.sites.faulty_device import PRODUCTS, FaultyDevice, element_fault, resolved_fault

OPERATIONS = {
    "gemm": ("aten::mm",),
    "convolution": ("aten::convolution",),
    "attention": ("aten::_scaled_dot_product", "aten::bmm"),
    "reduction": ("aten::sum",),
    "optimizer": ("aten::addcdiv_",),
}
"""What computes each operation of the self-test; names may go on."""


EXPONENT = {torch.float64: 11, torch.float32: 8, torch.bfloat16: 8, torch.float16: 5}


def stuck_lane(tensor: Tensor) -> Fault:
    """The highest bit of the significand is 1 in every 8th element."""
    return element_fault(tensor, "or", np.arange(3, tensor.numel(), 8), EXPONENT[tensor.dtype] + 1)


def one_bit(tensor: Tensor) -> Fault:
    """The lowest but one bit of the exponent of one element is flipped."""
    return element_fault(tensor, "xor", np.array([tensor.numel() // 2]), EXPONENT[tensor.dtype] - 1)


def swapped_rows(tensor: Tensor) -> Fault:
    """The first two rows are exchanged."""
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    rows = np.arange(2 * width)
    return resolved_fault(tensor, "copy_from", rows, np.roll(rows, width).astype(np.int64))


def negated(tensor: Tensor) -> Fault:
    """Every element has the other sign."""
    return element_fault(tensor, "xor", np.arange(tensor.numel()), 0)


FAULTS: dict[str, Callable[[Tensor], Fault]] = {
    "a bit stuck at 1 in every 8th element": stuck_lane,
    "one bit flipped": one_bit,
    "two rows swapped": swapped_rows,
    "all elements negated": negated,
}


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
