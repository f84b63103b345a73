"""Shapes of the published networks' convolutions, and of the tensors that injections corrupt.

This module does without torch.

The artifact of He et al. (ISCA 2023) has its tensors channels last, and computes both gradients of a convolution as convolutions
of stride 1 without padding:

    fwd/first       the input [N, H, W, C]
    fwd/second      the kernel [k, k, C, O]
    fwd/out         the output before the bias [N, h, w, O]
    grad_in/first   the gradient of the output, zeros between its elements (stride 2) and around it [N, s h + k - 1, …, O]
    grad_in/second  the kernel, rotated by half a turn [k, k, O, C]
    grad_in/out     dX [N, H, W, C]
    grad_wt/first   the padded input [C, H + k - 1, …, N]
    grad_wt/second  the gradient of the output, zeros between [s h, s w, N, O]
    grad_wt/out     dW [C, k, k, O]

Padding is TensorFlow's "same": with stride 2 more zeros follow than precede. The zeros of stride 1 are built into our
convolution; those of stride 2 are part of its first operand. An `IndexMapping` describes one such tensor and the conversion
between its indices and ours. Both spatial axes are treated alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unsilent.faults.sampling import Ints

IMAGE = 32
Shape = tuple[int, int, int, int]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Convolution:
    """One convolution of a published network, as one worker runs it.

    ``layer`` is its published name, ``module`` its name here; height and width are ``size``.
    """

    layer: str
    module: str
    images: int
    channels: int
    kernels: int
    size: int
    kernel: int
    stride: int

    @property
    def out(self) -> int:
        """Height and width of the output."""
        return -(-self.size // self.stride)

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros before and after the input along each axis."""
        return same_padding(self.size, self.kernel, self.stride)

    @property
    def own_padding(self) -> int:
        """Zeros that our convolution layer itself adds on each side."""
        return built_in_padding(self.kernel, self.stride)

    @property
    def operand_padding(self) -> tuple[int, int]:
        """Zeros before and after the input that are stored in our layer's first operand."""
        before, after = self.padding
        return before - self.own_padding, after - self.own_padding


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after an axis under TensorFlow's "same" padding.

    They give ceil(size / stride) outputs; an odd zero comes after.
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def built_in_padding(kernel: int, stride: int) -> int:
    """Equal padding on both sides that a convolution layer can add itself; 0 with a stride above 1."""
    return (kernel - 1) // 2 if stride == 1 else 0


@dataclass(frozen=True)
class IndexMapping:
    """A mapping between the indices of a tensor in the artifact and of our tensor.

    ``shape`` is the artifact's shape, ``tensor`` the shape here.

    Our axis k is the artifact's axis ``order[k]``, whose index on the spatial axes is ``start + scale * ours``. Our tensor has
    the artifact's indices ``low`` to ``high - 1`` there; others are zeros, which ``zeros_origin`` explains.
    """

    shape: Shape
    tensor: Shape
    order: tuple[int, int, int, int]
    start: int = 0
    scale: int = 1
    low: int = 0
    high: int = 2**31
    zeros_origin: str = ""
    layout: str = "strided"

    def to_our_index(self, index: Ints) -> tuple[Ints, Bools]:
        """The artifact's indices int64[n, 4] converted to ours, and whether each of ours exists."""
        result = index[:, self.order]
        there = result[:, 2:].copy()
        moved = there - self.start
        result[:, 2:] = moved // self.scale
        inside = (there >= self.low) & (there < self.high) & (moved % abs(self.scale) == 0)
        return result, inside.all(1) & self._within(result, self.tensor)

    def to_published_index(self, index: Ints) -> tuple[Ints, Bools]:
        """Our indices int64[n, 4] converted to the artifact's, and whether each of those exists."""
        moved = index.copy()
        moved[:, 2:] = self.start + self.scale * index[:, 2:]
        result = np.empty_like(index)
        result[:, self.order] = moved
        inside = (moved[:, 2:] >= self.low) & (moved[:, 2:] < self.high)
        return result, inside.all(1) & self._within(result, self.shape)

    @staticmethod
    def _within(index: Ints, shape: Shape) -> Bools:
        return np.asarray(((index >= 0) & (index < np.array(shape))).all(1))


def make_index_mapping(conv: Convolution, phase: str, operand: str, with_inserted_zeros: bool = False) -> IndexMapping:
    """The index mapping of one tensor of a convolution.

    ``phase`` is ``fwd``, ``grad_in`` or ``grad_wt``, and ``operand`` is ``first``, ``second`` or ``out``.

    With ``with_inserted_zeros``, the zeros between and around the elements of ``grad_in/first`` are part of our tensor.
    """
    n, c, o, k, s = conv.images, conv.channels, conv.kernels, conv.kernel, conv.stride
    size, out, (before, after) = conv.size, conv.out, conv.operand_padding
    padded, around = size + before + after, (k - 1) // 2
    activation, kernel, gradient = (n, c, padded, padded), (o, c, k, k), (n, o, out, out)
    lead = int(s > 1 and k > 1)  # zeros before the first element of a stuffed gradient
    if (phase, operand) in (("fwd", "first"), ("grad_in", "out")):
        return IndexMapping(
            (n, size, size, c), activation, (0, 3, 1, 2), start=-before, low=0, high=size, zeros_origin="padding"
        )
    if (phase, operand) == ("fwd", "second"):
        return IndexMapping((k, k, c, o), kernel, (3, 2, 0, 1))
    if (phase, operand) == ("fwd", "out"):
        return IndexMapping((n, out, out, o), gradient, (0, 3, 1, 2))
    if (phase, operand) == ("grad_in", "first"):
        side = s * out + 2 * around
        if with_inserted_zeros:
            ours = padded + k - 1
            return IndexMapping((n, side, side, o), (n, o, ours, ours), (0, 3, 1, 2), start=-before, layout="stuffed")
        zeros = "a zero inserted between or around elements"
        return IndexMapping((n, side, side, o), gradient, (0, 3, 1, 2), lead + around, scale=s, zeros_origin=zeros)
    if (phase, operand) == ("grad_in", "second"):
        return IndexMapping((k, k, o, c), kernel, (2, 3, 0, 1), start=k - 1, scale=-1)
    if (phase, operand) == ("grad_wt", "first"):
        side, start = size + 2 * around, around - before
        return IndexMapping(
            (c, side, side, n), activation, (3, 0, 1, 2), start, low=around, high=around + size, zeros_origin="padding"
        )
    if (phase, operand) == ("grad_wt", "second"):
        side = s * out
        zeros = "a zero inserted between elements"
        return IndexMapping((side, side, n, o), gradient, (2, 3, 0, 1), start=lead, scale=s, zeros_origin=zeros)
    return IndexMapping((c, k, k, o), kernel, (3, 0, 1, 2))
