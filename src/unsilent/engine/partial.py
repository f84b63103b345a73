"""Computing only a block of output channels, because a weight affects only one output channel.

A block of a convolution or a matrix product is another call of the kernel, and may give other bits. So every block of
every operation is computed once from golden values, compared and timed. An operation is run in blocks only if all
blocks agree and a block is cheaper. Single columns, unaligned blocks, float64, depthwise convolutions and fewer than 16
outputs do not agree in general and are never tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.tape import Node, StorageWindow, Tape

BLOCK = 16
NUMBERS_NOT = (float("nan"), float("inf"), float("-inf"), 3e38)
_OUTPUTS: Mapping[str, Mapping[int, int]] = {
    "aten::convolution": {1: 0, 2: 0},
    "aten::addmm": {0: -1, 2: 1},
    "aten::mm": {1: 1},
}
"""Operation -> argument -> its dimension that corresponds to the outputs (dimension 1 of the result)."""


def blockwise_output_count(node: Node) -> int:
    """Number of outputs of an operation that might be computed in blocks, or 0 if it cannot be."""
    if node.func is None or node.func._schema.name not in _OUTPUTS or len(node.results) != 1:
        return 0
    out = node.results[0]
    if any(w.dtype != torch.float32 for w in (*node.reads, out)) or len(out.shape) < 2:
        return 0
    if node.func._schema.name == "aten::convolution" and (node.args[8] != 1 or node.args[6]):
        return 0
    channels: int = out.shape[1]
    if node.func._schema.name != "aten::convolution" and channels % BLOCK:
        return 0  # result rows are then aligned differently from rows of a block, which affects kernels
    return channels if channels > BLOCK else 0


class BlockwiseOperation:
    """An operation that can be computed in blocks of its outputs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.channels = blockwise_output_count(node)
        roles = _OUTPUTS[node.func._schema.name]
        self._dims = {k: roles[int(slot.key)] for k, slot in enumerate(node.slots) if slot.key in roles}
        self.out: StorageWindow = node.results[0]
        self.seconds = float("inf")
        """Measured CPU time of one block."""

    def compute(self, apply: Any, tensors: Sequence[Tensor], block: int) -> Tensor:
        """One block of the result.

        ``apply(node, tensors)`` runs the operation.
        """
        parts = list(tensors)
        for k, dim in self._dims.items():
            if parts[k].shape[dim] == self.channels:
                parts[k] = parts[k].narrow(dim, block * BLOCK, BLOCK)
        result: Tensor = apply(self.node, parts)
        return result

    def golden_part(self, golden: Tensor, block: int) -> Tensor:
        """One block of a full result, selected by its number."""
        return golden.narrow(1, block * BLOCK, BLOCK)

    def agrees(self, apply: Any, tensors: Sequence[Tensor], golden: Tensor) -> bool:
        """Whether every aligned block has the same bits as in the full result.

        Also measures the time of one block. Golden and random weights are both tested, because sums of round numbers
        are the same in every order.
        """
        count = self.channels // BLOCK
        now = clock(golden.device)
        start = now()
        if not self._equal(apply, tensors, golden):
            return False
        self.seconds = (now() - start) / count
        others = [
            random_test_weights(t, self._dims[k]) if self._dims.get(k) is not None and t.ndim > 1 else t
            for k, t in enumerate(tensors)
        ]
        return self._equal(apply, others, apply(self.node, others))

    def _equal(self, apply: Any, tensors: Sequence[Tensor], whole: Tensor) -> bool:
        return all(
            equal_bits(self.compute(apply, tensors, block), self.golden_part(whole, block))
            for block in range(self.channels // BLOCK)
        )

    def corrupted_blocks(self, value: int, offsets: NDArray[np.int64]) -> set[int] | None:
        """The blocks that depend on the corrupted bytes of a value, or None if the operation cannot run in blocks.

        ``offsets``: places of the bytes in the storage of the value.
        """
        blocks: set[int] = set()
        for k, window in enumerate(self.node.reads):
            if window.value != value:
                continue
            if k not in self._dims or window.shape[self._dims[k]] != self.channels or _overlaps(window):
                return None
            places = offsets // window.dtype.itemsize
            blocks |= set((_coordinates(window, places, self._dims[k]) // BLOCK).tolist())
        return None if any(b >= self.channels // BLOCK for b in blocks) else blocks


def _overlaps(window: StorageWindow) -> bool:
    """Whether an element of memory may occur several times in a window, as in an expanded or unfolded tensor."""
    reach = 0
    for stride, size in sorted(zip(window.stride, window.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _coordinates(window: StorageWindow, offsets: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """Positions along one dimension of the elements at some storage offsets.

    Elements outside of the window are left out. The window must not overlap itself.
    """
    rest = offsets - window.offset
    dim %= len(window.shape)
    result = np.zeros_like(rest)
    inside = rest >= 0
    for d in sorted(range(len(window.shape)), key=lambda d: -window.stride[d]):
        if window.shape[d] < 2:
            continue
        place = rest // window.stride[d]
        inside &= place < window.shape[d]
        rest = rest - place * window.stride[d]
        if d == dim:
            result = place
    return np.asarray(result[inside & (rest == 0)], np.int64)


def random_test_weights(weights: Tensor, dim: int) -> Tensor:
    """Random weights of the same size and memory layout, some of which are infinite or NaN.

    Every fourth output along ``dim`` has one such weight.
    """
    chance = torch.Generator().manual_seed(0)
    scale = weights.nan_to_num(0, 0, 0).abs().mean().clamp(1e-3, 1e3)
    result = torch.empty_like(weights).copy_(torch.randn(weights.shape, generator=chance)) * scale
    rows = result.movedim(dim, 0)
    for i, row in enumerate(rows[::4]):
        place = int(torch.randint(row.numel(), (), generator=chance))
        row[tuple(int(n) for n in np.unravel_index(place, tuple(row.shape)))] = NUMBERS_NOT[i % len(NUMBERS_NOT)]
    return result


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two float32 tensors of one shape hold the same bits."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def candidates(tape: Tape) -> list[Node]:
    """Operations that may be worth computing in blocks, because they read memory that existed before the run."""
    return [n for n in tape.nodes if blockwise_output_count(n) and any(w.value in tape.externals for w in n.reads)]
