"""The first wrong element of a result, and the pattern of all wrong elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from unsilent.report.text import count_text
from unsilent.sites.memory import dtype_name

MOST_NAMED = 2
"""Most rows or columns that are named."""


@dataclass(frozen=True)
class Mismatch:
    """The first wrong element of one execution, and the number of wrong elements.

    Attributes:
        operation: Name of the executed operation, for example ``gemm``; for a recorded step, also that of the tensor.
        dtype: Dtype of the tensor.
        index: Index of the first wrong element, in C order.
        expected, got: Expected and computed value of this element.
        count, size: Number of wrong elements, and of all elements of the tensor.
        layout: Pattern of the wrong elements, for example ``all in row 3``; empty if there is none.
    """

    operation: str
    dtype: str
    index: tuple[int, ...]
    expected: str
    got: str
    count: int
    size: int
    layout: str

    def sentence(self) -> str:
        """A sentence with the first wrong element and the number of wrong elements."""
        where = f"element {list(self.index)}" if self.index else "the number"
        layout = f", {self.layout}" if self.layout else ""
        more = f"; {self.count:,} of {count_text(self.size, 'element')} wrong{layout}"
        return f"{self.operation} in {self.dtype}: {where} is {self.got}, expected {self.expected}{more}"


class Test(Protocol):
    """The interface of a test that compares a computation with its known result.

    Attributes:
        operation: Name of the operation.
        dtype: Dtype of the computation.
    """

    @property
    def operation(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def execute(self) -> Mismatch | None:
        """Execute the computation and compare its result; None if every element is right."""


def mismatch(operation: str, got: Tensor, expected: Tensor, wrong: Tensor) -> Mismatch:
    """The mismatch of a tensor on the CPU.

    ``wrong`` is a bool array of the tensor's shape, true for at least one element.
    """
    places = wrong.nonzero()
    index = tuple(map(int, places[0]))
    was, became = (repr(tensor[index].item()) for tensor in (expected, got))
    dtype = dtype_name(got.dtype)
    return Mismatch(operation, dtype, index, was, became, len(places), wrong.numel(), _layout(places, wrong))


def _layout(places: Tensor, wrong: Tensor) -> str:
    """The pattern of several wrong elements: rows, columns or a constant distance; empty for other patterns."""
    if len(places) < 2:
        return ""
    if wrong.ndim > 1:
        for noun, dimension in (("row", -2), ("column", -1)):
            lines = places[:, dimension].unique().tolist()
            if len(lines) <= MOST_NAMED:
                return f"all in {noun}{'s' if len(lines) > 1 else ''} {' and '.join(map(str, lines))}"
    distances = wrong.flatten().nonzero().flatten().diff().unique()
    return f"every {int(distances)} elements" if len(distances) == 1 and distances > 1 else ""
