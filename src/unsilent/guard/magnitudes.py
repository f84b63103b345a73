"""Computation of magnitudes of many tensors at once, on their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from unsilent.detectors.series import Floats

SMALL = 2048
"""Largest number of elements of a tensor that is read together with others."""


def is_read(tensor: Tensor) -> bool:
    """Whether a tensor has real or complex floating-point elements."""
    return tensor.is_floating_point() or tensor.is_complex()


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, detached and as real numbers.

    For a DTensor this is its local shard, for a sparse tensor its values. A complex number becomes two real numbers.
    """
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@torch.no_grad()
def norms_and_largest(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms of n dense tensors, followed by their largest magnitudes, float64[2 n].

    The result is on the device of the first tensor; NaN stays NaN.

    A norm is infinite only if an element is: if squares overflow, it is computed in another way.
    """
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    norms, largest = _norms(filled), largest_magnitudes(filled)
    if norms.device.type == "cpu":
        _replace_overflows(norms.numpy(), largest.numpy(), filled)
    return torch.cat([norms, largest])


def _replace_overflows(norms: Floats, largest: Floats, tensors: Sequence[Tensor]) -> None:
    """Recompute norms that overflowed although all elements are finite; limited to the range of float64."""
    for place in np.flatnonzero(np.isinf(norms) & np.isfinite(largest)).tolist():
        most = float(largest[place])
        norm = float(torch.linalg.vector_norm(tensors[place] / most, dtype=torch.float64))
        norms[place] = min(most * norm, np.finfo(np.float64).max)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms, float64[n] on the device of the first tensor; types that may overflow are accumulated in wider ones."""
    device = tensors[0].device
    # On a CPU wider sums would cost three times as much, so only the norms that overflow are computed again.
    is_cpu = device.type == "cpu"
    narrow = {torch.float16} if is_cpu else {torch.float16, torch.bfloat16, torch.float32}
    norms: list[Tensor] = [tensors[0]] * len(tensors)
    if is_cpu and all(t.numel() <= SMALL and t.dtype is torch.float32 for t in tensors):
        return _small_norms(tensors)
    for is_narrow in (False, True):
        places = [place for place, tensor in enumerate(tensors) if (tensor.dtype in narrow) is is_narrow]
        if places:
            wider: dict[str, Any] = {"dtype": torch.float32 if is_cpu else torch.float64} if is_narrow else {}
            norms_found = torch._foreach_norm([tensors[place] for place in places], 2, **wider)
            for place, norm in zip(places, norms_found, strict=True):
                norms[place] = norm
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float64) for norm in norms]
    return torch.stack(norms).to(torch.float64)


def _small_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of small float32 tensors on the CPU, computed in one call."""
    flat = _flatten_dense_tensors(list(tensors)).numpy()
    starts = np.cumsum([0, *(tensor.numel() for tensor in tensors[:-1])])
    return torch.from_numpy(np.sqrt(np.add.reduceat(np.square(flat, dtype=np.float64), starts)))


class ReusedSum:
    """Adds tensors in reused memory, because allocating new memory takes as long as adding."""

    def __init__(self) -> None:
        self._memory = torch.zeros(0)

    @torch.no_grad()
    def take(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of the tensors; the next call overwrites it."""
        first = parts[0]
        kinds = {(type(part), part.shape, part.dtype, part.device, part.layout) for part in parts}
        is_plain = type(first) is Tensor and first.device.type == "cpu" and not first.is_sparse
        if len(parts) == 1 or len(kinds) > 1 or not is_plain:
            return sum(parts[1:], first)
        if self._memory.dtype != first.dtype or self._memory.numel() < first.numel():
            self._memory = first.new_empty(first.numel())
        result = torch.add(parts[0], parts[1], out=self._memory[: first.numel()].view(first.shape))
        for part in parts[2:]:
            result += part
        return result


@torch.no_grad()
def largest_magnitudes(tensors: Sequence[Tensor], squares: Sequence[bool] = ()) -> Tensor:
    """The largest magnitude of each tensor, float64[n] on the device of the first; NaN if an element is.

    ``squares``: tensors that are averages of squares. On the CPU, if one of these has a negative element, its smallest element is
    returned in place of its largest magnitude.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    device = tensors[0].device
    if device.type == "cpu":
        return _largest_on_cpu(tensors, np.array(squares or [False] * len(tensors)))
    norms = list(torch._foreach_norm(list(tensors), float("inf")))
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float64) for norm in norms]
    return torch.stack(norms).to(torch.float64)


def _largest_on_cpu(tensors: Sequence[Tensor], squares: NDArray[np.bool_]) -> Tensor:
    """The largest magnitudes on the CPU, without norms, which take fifteen times as long."""
    least, most = np.zeros(len(tensors)), np.zeros(len(tensors))
    small, sizes, rest, ends = [], [], [], list[Tensor]()
    for number, tensor in enumerate(tensors):
        size = tensor.numel()
        if 0 < size <= SMALL and tensor.dtype is torch.float32:
            small.append(number)
            sizes.append(size)
        elif size:
            rest.append(number)
            ends += torch.aminmax(tensor)
    if small:
        # One call for all, because a small tensor costs as much as a call.
        flat = _flatten_dense_tensors([tensors[number] for number in small]).numpy()
        starts = np.cumsum([0, *sizes[:-1]])
        least[small], most[small] = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
    if rest:
        ends = [end.to(torch.float64) for end in ends] if len({end.dtype for end in ends}) > 1 else ends
        least[rest], most[rest] = torch.stack(ends).to(torch.float64).view(-1, 2).numpy().T
    return torch.from_numpy(np.where(squares & (least < 0), least, np.maximum(-least, most)))
