"""Two tensors bit for bit: the numbers of what differs between them (see `unsilent.basics.fault_trace`)."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from unsilent.basics.fault_trace import OutputDifference
from unsilent.outcomes.tensors import words_of

CHUNK = 1 << 22
"""Elements that are compared at a time: what is held in float64 stays below 100 MB."""
_NARROW = tuple(d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d).startswith("torch.float8_e"))
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_NARROW)


def change(golden: Tensor, faulty: Tensor) -> OutputDifference:
    """Difference between two tensors of one dtype and shape, on the CPU."""
    if golden.dtype.is_complex:  # numbers by part, elements whole
        parts = change(torch.view_as_real(golden), torch.view_as_real(faulty))
        return replace(parts, changed=int((words_of(golden) != words_of(faulty)).any(-1).sum()))
    numeric, result = golden.dtype in _NUMBERS, OutputDifference()
    ones, twos = golden.reshape(-1), faulty.reshape(-1)
    for start in range(0, len(ones), CHUNK):
        left, right = ones[start : start + CHUNK], twos[start : start + CHUNK]
        unequal = words_of(left) != words_of(right)
        if unequal.any():
            result = _joined(
                result, _change(left[unequal], right[unequal]) if numeric else OutputDifference(int(unequal.sum()))
            )
    return result


def _change(golden: Tensor, faulty: Tensor) -> OutputDifference:
    """Difference of the changed elements alone."""
    before, after = golden.double(), faulty.double()
    known = before.isfinite() & after.isfinite()
    apart = (after - before).abs()
    rated = known & (before != 0)
    return OutputDifference(
        len(before),
        _largest((apart / before.abs())[rated]),
        _largest(apart[known]),
        int((known & (before == 0) & (after != 0)).sum()),
        int((before.isfinite() & ~after.isfinite()).sum()),
    )


def _largest(values: Tensor) -> float | None:
    return min(float(values.max()), sys.float_info.max) if values.numel() else None


def _joined(a: OutputDifference, b: OutputDifference) -> OutputDifference:
    def most(x: float | None, y: float | None) -> float | None:
        return max((v for v in (x, y) if v is not None), default=None)

    return OutputDifference(
        a.changed + b.changed,
        most(a.relative, b.relative),
        most(a.absolute, b.absolute),
        a.from_zero + b.from_zero,
        a.nonfinite + b.nonfinite,
    )
