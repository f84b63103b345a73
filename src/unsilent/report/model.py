"""A report, whatever study it is of: a headline, numbers, findings, sections, and the estimates behind them.

Studies make it, renderers show it: in a terminal, as plain columns, as JSON, as a page. Text is cleaned where it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unsilent.interval import Interval
from unsilent.report.theme import Figure

Kind = Literal["text", "number", "estimate"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        kind: ``text``; ``number`` (int, or float with ``digits``); ``estimate`` (`Interval`, shown with its limits).
        unit: is shown behind the name. scale: what numbers are multiplied with before they are shown (100: percent).
        digits: format of a float, like ``.2f``; an int is shown with thousands separated. most: the greatest value that there can
        be, before scaling; an upper limit there says nothing and is shown as ``–``. priority: 0 is always shown; where a
        terminal is too narrow, columns of the highest priority go first. left: text that is read, not compared.
    """

    name: str
    kind: Kind = "text"
    unit: str = ""
    scale: float = 1.0
    digits: str = ".6g"
    most: float = math.inf
    priority: int = 0
    left: bool = False


Mark = tuple[str, str]
"""A colour like ``#0072B2`` and a sign like ``●``: what stands for something in a figure."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A cell that is shown as ``text`` whatever its column says, sorted by ``key`` (None: by the text).

    On a page with a mark, and over a bar between the ends ``bar``, 0 and 1 at most.
    """

    text: str
    key: float | None = None
    mark: Mark | None = None
    bar: tuple[float, float] | None = None


Cell = str | int | float | bool | Interval | Shown | None
"""None: there is nothing; shown as ``–``."""


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in the order of columns; ``strong`` rows stand out; ``hint`` is shown when a page's row is pointed at."""

    cells: tuple[Cell, ...]
    strong: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of typed columns; it has no head where no column has a name.

    Attributes:
        title: one line above it. terminal_rows: most rows in a terminal; 0: this table is left to the page. cut: what a terminal
        says where there are more, of ``{shown}`` and ``{left}`` rows. on_page: False where a page shows the same otherwise.
        long: the page lets the reader sort and filter it. sentence: in plain mode, where only estimates are a table, each row is
        a line of this form, with cells by number (``switch {0}: {1}``); empty: it is left out.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    terminal_rows: int = 40
    cut: str = "and {left:,} more in the report"
    on_page: bool = True
    long: bool = False
    sentence: str = ""


def columns(*names: str, left: Container[str] = (), priority: Mapping[str, int] | None = None) -> tuple[Column, ...]:
    """Columns of text by their names; ``left`` and ``priority``: see `Column`."""
    return tuple(Column(name, left=name in left, priority=(priority or {}).get(name, 0)) for name in names)


def estimates_table(names: Sequence[str], rows: Iterable[tuple[Cell, ...]], rare: Container[str] = ()) -> Table:
    """The table for machines: a row for each estimate, which stands in the column without a name.

    ``rare``: columns that a narrow terminal leaves out.
    """
    heads = (Column(name, "text" if name else "estimate", priority=int(name in rare)) for name in names)
    return Table(tuple(heads), tuple(map(Row, rows)))


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as plain plotly data; ``label`` is what it shows, for those who do not see it."""

    name: str
    label: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Text:
    """Lines for the page, each with a mark or None: what the marks of a figure mean, or a few sentences."""

    lines: tuple[tuple[Mark | None, str], ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A smaller heading within a section, and what is set smaller behind it."""

    title: str
    small: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Parts that stand side by side where there is room."""

    parts: tuple[Table | Plot | Text | Heading, ...]


Part = Table | Plot | Text | Heading | Grid


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a few sentences for the page, and parts of the page; a terminal shows its tables."""

    title: str
    lead: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is shown of a result; what stands in backquotes in its sentences is a name or code.

    Attributes:
        schema: of the JSON object, like ``unsilent/noise/1``. kicker: what kind of report it is. numbers: term, text, and what
        is set smaller. estimates: one row for each estimate, the table for machines: lines of plain mode, ``results`` of JSON.
        sections: their figures have names of their own. facts: how it was made, term and text. notes: how to read the tables,
        without full stops. again: the command that makes it again, to be copied. method: how it was made, in sentences, a line
        each paragraph. data: further fields of the JSON object, of any depth; ``results`` there replace those of ``estimates``.
    """

    schema: str
    kicker: str
    title: str
    headline: str
    estimates: Table
    numbers: tuple[tuple[str, str, str], ...] = ()
    findings: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    again: str = ""
    method: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
