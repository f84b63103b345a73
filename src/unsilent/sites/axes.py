"""Order in which runs go through tensors of an operation: along channels, as accelerators lay activations and kernels out.

Activations are taken as NHWC and kernels as HWIO for operations on images and sequences (convolution, batch and group norm,
pooling); all else is taken as it lies, its last axis fastest: for products that is the axis of output features, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unsilent.faults.naming import SiteName
from unsilent.faults.slices import CONVOLUTION, IMAGE_OPERATIONS
from unsilent.sites.operands import operation_name


class AxisOrder(NamedTuple):
    """Order of the axes of a corrupted tensor and of the output that sees it.

    Attributes:
        order: Axes of the corrupted tensor, slowest first (None: as they are).
        output: Axes of the output.
    """

    order: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None


FLAT = AxisOrder()
"""Axes in the order in which they lie."""


def axes_of(func: Any, site: SiteName, ndim: int, transposed: bool = False) -> AxisOrder:
    """The axes of an operation's tensors as a site of it means them.

    Args:
        ndim: Number of axes of its image tensors.
        transposed: Whether a convolution is transposed, whose kernel then is [in, out, …].
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
