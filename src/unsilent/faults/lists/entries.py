"""Entries of a list of faults, before anybody knows the model they are for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from unsilent.basics.errors import UsageError
from unsilent.faults.record import Fault


class ColumnNames(NamedTuple):
    """Names of the columns of a format, for messages."""

    layer: str
    coordinates: tuple[str, ...]
    """One name for each coordinate, or one for all."""
    operand: str


class NthLayer(NamedTuple):
    """A layer by its number among the layers of some kinds, in the order in which the model holds them."""

    number: int
    kinds: tuple[str, ...]


class ParameterPath(NamedTuple):
    """A parameter by the path that a file has for it: ``/model/fc.weight``."""

    path: str


@dataclass(frozen=True, slots=True)
class ListedCorruption:
    """A corruption of one element of one layer's ``weight``, or of the parameter that a path names.

    ``index``: a flat C-order position, or coordinates. ``operation``: ``xor`` with the bit ``operand`` (0 is the least
    significant one), or ``set`` to the number ``operand``. ``required_dtype``: the one dtype for which that is what the
    tool does. ``bit_from_sign``: bit 0 of ``operand`` is the most significant one instead.
    """

    layer: str | NthLayer | ParameterPath
    index: int | tuple[int, ...]
    operation: str
    operand: float
    columns: ColumnNames
    required_dtype: str | None = None
    bit_from_sign: bool = False


class FaultListEntry(NamedTuple):
    """The faults of one trial, and the place of the file that has them (``line 3``)."""

    file_position: str
    corruptions: tuple[Fault | ListedCorruption, ...]


class Format(Protocol):
    """A way to write a list of faults."""

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """The entries in the file's order; ``name`` is the file's. Raises `WrongEntry`."""
        ...


class WrongEntry(UsageError):
    """Something is wrong in a list: the message, and the column of the entry; `errors_at` and `errors_in` add place and file."""

    def __init__(self, message: str, column: str = "") -> None:
        super().__init__(message)
        self.column, self.place = column, ""


@contextmanager
def errors_at(place: str = "", column: str = "") -> Iterator[None]:
    """Within, what is wrong is wrong at a place of the file (``line 3``), and in a column, unless the error names another."""
    try:
        yield
    except UsageError as error:
        wrong = error if isinstance(error, WrongEntry) else WrongEntry(str(error))
        wrong.place, wrong.column = wrong.place or place, wrong.column or column
        raise wrong from None


@contextmanager
def errors_in(name: str) -> Iterator[None]:
    """Within, what is wrong is wrong in the file of this name: errors begin with it, the place and the column."""
    try:
        yield
    except WrongEntry as error:
        where = ", ".join(filter(None, (error.place, error.column)))
        raise UsageError(f"{name}{' ' if where else ''}{where}: {error}") from None
