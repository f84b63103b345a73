"""A convolution's input gradient, computed like accelerators do: from an output gradient with inserted zeros.

Accelerators convolve the output's gradient with stride 1, with zeros around it and, if the forward convolution has strides,
between its elements.

A fault in these zeros does not correspond to an element of the gradient. Only elements that depend on a corrupted element are
computed in this way; all others keep the bits from autograd's kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, conv3d

from unsilent.basics.errors import InjectionError
from unsilent.faults.naming import SiteName
from unsilent.sites.calling import OperationCall
from unsilent.sites.corrupting import copied
from unsilent.sites.memory import WORDS
from unsilent.sites.operands import operation_name

_CONVOLUTIONS = {1: conv1d, 2: conv2d, 3: conv3d}


class DilatedGradient:
    """The geometry of one convolution's input gradient.

    Args:
        call: Convolution with its settings.
        first: First operand of the convolution, [N, C, …].
        kernel: Kernel of the convolution, [O, C, …].
    """

    def __init__(self, call: OperationCall, first: Tensor, kernel: Tensor) -> None:
        _, args, _ = call
        dims = kernel.ndim - 2
        self._stride, self._padding, self._dilation = (_value_for_each_dimension(args[i], dims) for i in (3, 4, 5))
        reach = [(k - 1) * d for k, d in zip(kernel.shape[2:], self._dilation, strict=True)]
        self._size = [n + r for n, r in zip(first.shape[2:], reach, strict=True)]
        self._start = [r - p for r, p in zip(reach, self._padding, strict=True)]
        self._kernel = kernel.flip(*range(2, kernel.ndim)).transpose(0, 1)
        self._convolution = _CONVOLUTIONS[dims]
        if min(self._start) < 0:
            raise InjectionError(
                f"the convolution has no stuffed operand, because its padding {self._padding} is larger than its kernel"
            )

    @staticmethod
    def misfit(call: OperationCall, site: SiteName) -> str:
        """Why a site cannot have an operand with inserted zeros; empty if it can."""
        func, args, _ = call
        if operation_name(func) != "convolution" or (site.phase, site.operand) != ("grad_in", "first"):
            return "only grad_in/first of a convolution can be a stuffed operand"
        if args[6] or args[8] != 1:
            return "only a convolution with groups=1 that is not transposed has an operand with inserted zeros"
        return ""

    def dilate(self, gradient: Tensor) -> Tensor:
        """The output gradient [N, O, …] with zeros inserted between and around its elements."""
        stuffed = gradient.new_zeros(*gradient.shape[:2], *self._size)
        stuffed[self._places(gradient)] = gradient
        self._golden = stuffed.clone()
        return stuffed

    def faulty_input_gradient(self, stuffed: Tensor, golden: Tensor) -> Tensor:
        """The golden input gradient with the elements that depend on changed elements recomputed."""
        words = WORDS[stuffed.element_size()]
        changed = stuffed.view(words) != self._golden.view(words)
        probe = torch.zeros_like(stuffed).masked_fill_(changed, torch.nan)
        depends = self._run(probe, torch.ones_like(self._kernel)).isnan()
        result = copied(golden.contiguous())
        result[depends] = self._run(stuffed, self._kernel)[depends].to(result.dtype)
        return result

    def _run(self, stuffed: Tensor, kernel: Tensor) -> Tensor:
        return self._convolution(stuffed, kernel, dilation=tuple(self._dilation))

    def _places(self, gradient: Tensor) -> tuple[slice, ...]:
        ends = [a + s * (n - 1) + 1 for a, s, n in zip(self._start, self._stride, gradient.shape[2:], strict=True)]
        inner = [slice(a, e, s) for a, e, s in zip(self._start, ends, self._stride, strict=True)]
        return slice(None), slice(None), *inner


def _value_for_each_dimension(value: int | list[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
