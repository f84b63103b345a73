"""Entries of a list of faults, before the model is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from unsilent.basics.errors import UsageError
from unsilent.faults.record import Fault


class ColumnNames(NamedTuple):
    """Names of the columns of a file format, for messages."""

    layer: str
    coordinates: tuple[str, ...]
    """One name for each coordinate, or one name for all coordinates."""
    operand: str


class NthLayer(NamedTuple):
    """A layer by its number among the model's layers of the given kinds."""

    number: int
    kinds: tuple[str, ...]


class ParameterPath(NamedTuple):
    """A parameter by its path in a file: ``/model/fc.weight``."""

    path: str


@dataclass(frozen=True, slots=True)
class ListedCorruption:
    """A corruption of one element of a layer's ``weight``, or of a parameter named by a path.

    ``index``: a flat C-order position, or coordinates. ``operation``: ``xor`` with the bit ``operand`` (0 is the least
    significant one), or ``set`` to the number ``operand``. ``required_dtype``: the only dtype for which the tool does
    this. ``bit_from_sign``: bit 0 of ``operand`` is the most significant bit instead.
    """

    layer: str | NthLayer | ParameterPath
    index: int | tuple[int, ...]
    operation: str
    operand: float
    columns: ColumnNames
    required_dtype: str | None = None
    bit_from_sign: bool = False


class FaultListEntry(NamedTuple):
    """The faults of one trial, and their place in the file (``line 3``)."""

    file_position: str
    corruptions: tuple[Fault | ListedCorruption, ...]


class Format(Protocol):
    """A file format of fault lists."""

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """The entries in the order of the file called ``name``; raises `WrongEntry`."""
        ...


class WrongEntry(UsageError):
    """An error in a fault list, with its column; `errors_at` and `errors_in` add the line and the file."""

    def __init__(self, message: str, column: str = "") -> None:
        super().__init__(message)
        self.column, self.place = column, ""


@contextmanager
def errors_at(place: str = "", column: str = "") -> Iterator[None]:
    """Context in which errors get a place of the file (``line 3``) and a column, if they have none yet."""
    try:
        yield
    except UsageError as error:
        wrong = error if isinstance(error, WrongEntry) else WrongEntry(str(error))
        wrong.place, wrong.column = wrong.place or place, wrong.column or column
        raise wrong from None


@contextmanager
def errors_in(name: str) -> Iterator[None]:
    """Context in which error messages begin with the file's name, the place and the column."""
    try:
        yield
    except WrongEntry as error:
        where = ", ".join(filter(None, (error.place, error.column)))
        raise UsageError(f"{name}{' ' if where else ''}{where}: {error}") from None
