"""Application of faults to tensors during a run, with a record of the faults that did not fit.

The input is a resolved `Fault`, or an `UnresolvedFault` whose elements are drawn once the tensor exists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unsilent.faults import Fault
from unsilent.faults.naming import SiteName
from unsilent.faults.receipts import AppliedFault
from unsilent.faults.sampling import Ints
from unsilent.faults.slices import CONVOLUTION, IMAGE_OPERATIONS
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites.addresses import flat_elements
from unsilent.sites.corrupting import copied, corrupt, corruptible, misfit, overlaps
from unsilent.sites.memory import dtype_name
from unsilent.sites.memory_ownership import distinct_elements
from unsilent.sites.operands import operation_name
from unsilent.sites.output_windows import OperandRerun, dependent_outputs

# For operations on images and sequences (convolution, batch and group norm, pooling) the order of axes is NHWC for
# activations and HWIO for kernels. All other tensors keep their order, with the last axis fastest; in products this is
# also the axis of output features.


class AxisOrder(NamedTuple):
    """Order of the axes of a corrupted tensor and of the output that it affects.

    Attributes:
        order: Axes of the corrupted tensor, slowest first (None: unchanged).
        output: Axes of the output.
    """

    order: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None


FLAT = AxisOrder()
"""Unchanged order of the axes."""


def axes_of(func: Any, site: SiteName, ndim: int, transposed: bool = False) -> AxisOrder:
    """The order of axes of an operation's tensors, for faults at a site.

    Args:
        ndim: Number of axes of the operation's image tensors.
        transposed: Whether the operation is a transposed convolution, whose kernel is [in, out, …].
    """
    name = operation_name(func)
    if ndim < 3 or not any(part in name for part in (CONVOLUTION, *IMAGE_OPERATIONS)):
        return FLAT
    image = (0, *range(2, ndim), 1)
    if CONVOLUTION not in name:
        return AxisOrder(image, image) if not site.operand.partition(".")[2] else FLAT
    kernel = (*range(2, ndim), *((0, 1) if transposed else (1, 0)))
    output = kernel if site.phase == "grad_wt" else image
    if site.operand.startswith("out"):
        return AxisOrder(output, output) if site.operand == "out" else FLAT
    is_kernel = site.operand == "second" and site.phase in ("fwd", "grad_in")
    return AxisOrder(kernel if is_kernel else image, output)


FaultOrDraw = Fault | UnresolvedFault


class CorruptedTensor(NamedTuple):
    """A corrupted tensor and the outputs that see the corruption (None: all)."""

    tensor: Tensor
    reach: Ints | None


class _Unfit(Exception):
    """A fault does not fit the tensor that it was drawn for."""


class Landings:
    """Faults of one run that were applied, and faults that did not fit.

    Attributes:
        applied_faults: Faults that were applied, in order.
        misfits: Faults that did not fit their tensors, each with the reason.
    """

    def __init__(self) -> None:
        self.applied_faults: list[AppliedFault] = []
        self.misfits: list[tuple[FaultOrDraw, str]] = []
        self._landed: set[int] = set()

    @property
    def count(self) -> int:
        """Number of faults that were applied."""
        return len(self._landed)

    def has_landed(self, wanted: FaultOrDraw) -> bool:
        """Whether a fault was applied."""
        return id(wanted) in self._landed

    def why(self, wanted: FaultOrDraw) -> str:
        """Why a fault that was met could not be applied; empty if it was never met."""
        return next((why for misfit, why in reversed(self.misfits) if misfit is wanted), "")

    def refuse(self, wanted: FaultOrDraw, why: str) -> None:
        """Record that a fault does not fit, with the reason."""
        self.misfits.append((wanted, why))

    def corrupt(
        self,
        site: SiteName,
        wanted: FaultOrDraw,
        tensor: Tensor,
        copy: bool,
        axes: AxisOrder = FLAT,
        use: OperandRerun | None = None,
    ) -> CorruptedTensor | None:
        """Corrupt a tensor in place, or a copy of it if ``copy``.

        Args:
            site: Full name of the site of the tensor.
            axes: Order of the axes of the tensor and of the output.
            use: Rerun of the operation with another tensor; None if the tensor is not an operand or a rerun is not possible.

        Returns:
            The corrupted tensor, or None if the fault does not fit; the reason is then recorded.

        Raises:
            UsageError: the fault requests elements that the tensor does not have (an index out of range, or too many elements).
        """
        if why := self._misfit(wanted, tensor):
            self.refuse(wanted, why)
            return None
        try:
            faults = self._faults(wanted, tensor, axes, use)
        except _Unfit as unfit:
            self.refuse(wanted, str(unfit))
            return None
        faults = tuple(f if f.site == site.text else replace(f, site=site.text) for f in faults)
        corrupted = copied(tensor) if copy else tensor
        self.applied_faults += [corrupt(corrupted, fault) for fault in faults]
        self._landed.add(id(wanted))
        return CorruptedTensor(corrupted, faults[0].reach if faults else None)

    def _misfit(self, wanted: FaultOrDraw, tensor: Tensor) -> str:
        if id(wanted) in self._landed:
            return "it was reached twice"
        if not corruptible(tensor):
            result = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            return f"the tensor, {result}, has no memory of its own or a dtype whose bits cannot be corrupted"
        return misfit(tensor, wanted) if isinstance(wanted, Fault) else ""

    def _faults(
        self, wanted: FaultOrDraw, tensor: Tensor, axes: AxisOrder, use: OperandRerun | None
    ) -> tuple[Fault, ...]:
        """The resolved faults for a tensor, with the outputs that see them."""
        if isinstance(wanted, Fault):
            if wanted.reach is not None and use is None:
                raise _Unfit(
                    "a reach is possible only for an operand of an operation that overwrites none of its inputs"
                )
            return (wanted,)
        shape = tuple(tensor.shape)
        elements = None if wanted.index is None else flat_elements(wanted.index, wanted.site, shape)
        if elements is None:
            elements = distinct_elements(tensor) if overlaps(tensor) else None  # each memory cell counts as one element
        order = None if elements is not None else axes.order
        faults = wanted.resolve_for_tensor(dtype_name(tensor.dtype), shape, elements, order)
        if wanted.window is None:
            return faults
        if use is None:
            raise _Unfit(
                "an output window is possible only for an operand of an operation that overwrites none of its inputs"
            )
        seen = [dependent_outputs(use, tensor, fault.elements) for fault in faults]
        if not all(mask.any() for mask in seen) and bool(use.golden.isnan().any()):
            raise _Unfit("the golden output contains NaN, so it cannot be determined which outputs use the operand")
        return tuple(
            replace(fault, reach=_reach(wanted, mask, axes.output or tuple(range(mask.ndim))))
            for fault, mask in zip(faults, seen, strict=True)
        )


def _reach(wanted: UnresolvedFault, dependents: NDArray[np.bool_], order: tuple[int, ...]) -> Ints | None:
    """The sorted flat positions of the outputs that see a fault; None if all of them do."""
    result = wanted.affected_outputs(dependents.transpose(order), len(order) - 1)
    if result is None:
        return None
    shape = tuple(dependents.shape[axis] for axis in order)
    index: list[Ints] = [np.empty(0, np.int64)] * len(order)
    for axis, places in zip(order, np.unravel_index(result, shape), strict=True):
        index[axis] = places
    return np.sort(np.ravel_multi_index(tuple(index), dependents.shape))
