"""Faults in an operand register that only some outputs see.

The operation runs with the golden and with the corrupted operand; outputs that see the fault are taken from the second run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from unsilent.basics.errors import UsageError
from unsilent.faults.sampling import Ints
from unsilent.sites.corrupting import copied, has_plain_memory
from unsilent.sites.memory import TensorMemory, dtype_name


class OperandRerun(NamedTuple):
    """The golden result of an operation, and a function that recomputes it with another operand."""

    golden: Tensor
    rerun: Callable[[Tensor], Tensor]


def dependent_outputs(use: OperandRerun, operand: Tensor, elements: Ints) -> NDArray[np.bool_]:
    """Mask of the outputs that depend on these elements of an operand, bool in the output's shape.

    These are the outputs that become NaN if the elements are NaN, whatever the other factor (0 * NaN is NaN). Fast algorithms
    that share sums among outputs (Winograd, FFT) are switched off for this. Raises ``UsageError`` for operands without NaN.
    """
    memory = TensorMemory(operand)
    if memory.codec.kind != "float":
        raise UsageError(
            f"the outputs that use an operand can be determined only for floating-point operands, found {memory.codec.name}"
        )
    with no_dispatch(), torch.no_grad(), _plainly():
        probe = copied(operand)
        word = memory.codec.encode(np.full(len(elements), np.nan))
        TensorMemory(probe).write(elements, word)
        return np.asarray((use.rerun(probe).isnan() & ~use.golden.isnan()).cpu().numpy())


def splice_outputs(golden: Tensor, corrupted: Tensor, reach: Ints) -> None:
    """Copy the elements of ``corrupted`` at these positions into ``golden``; raises ``UsageError`` if out of range."""
    if golden.shape != corrupted.shape or (reach.size and int(reach[-1]) >= golden.numel()):
        result = f"{dtype_name(golden.dtype)}{list(golden.shape)}"
        raise UsageError(f"the reach has position {int(reach[-1])}, which is outside the output {result}")
    with no_dispatch():
        TensorMemory(golden).write(
            reach, TensorMemory(corrupted.contiguous() if not has_plain_memory(corrupted) else corrupted).read(reach)
        )


@contextmanager
def _plainly() -> Iterator[None]:
    """Context in which convolutions are computed as plain sums, without cuDNN and oneDNN."""
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    with torch.backends.cudnn.flags(enabled=False):
        onednn.enabled = False
        try:
            yield
        finally:
            onednn.enabled = before
