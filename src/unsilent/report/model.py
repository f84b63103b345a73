"""The record of a report of any study: headline, numbers, findings, sections and estimates.

Studies make it, renderers show it: in a terminal, as plain columns, as JSON, as a page. Text is cleaned where it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from unsilent.basics.interval import Interval
from unsilent.report.theme import Figure

Getter = Callable[[Any], "Cell"]
Kind = Literal["text", "number", "estimate", "difference"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        kind: ``text``; ``number`` (int, or float with ``digits``); ``estimate`` (`Interval`, shown with its
            limits); ``difference`` (`Interval` of a difference of shares, shown in points with signs).
        unit: Unit shown behind the name.
        scale: Factor of numbers that are shown (100: percent).
        digits: Format of a float, like ``.2f``, or a function that makes the text of any number; an int is shown with
            thousands separated.
        priority: 0 is always shown; where a terminal is too narrow, columns of the highest priority go first.
        left_aligned: Text that is read, not compared.
        of: Takes the cell from what a row is made of (see `Table.of`), or names its key, or its attribute (of an attribute:
            ``curve.step``); None: the column's name, in attributes with ``_`` in place of blanks.
    """

    name: str
    kind: Kind = "text"
    unit: str = ""
    scale: float = 1.0
    digits: str | Callable[[float], str] = ".6g"
    priority: int = 0
    left_aligned: bool = False
    of: Getter | str | None = None

    def cell(self, row: Any) -> Cell:
        """The column's cell in the row built from ``row``; None if a mapping lacks the key."""
        if callable(self.of):
            return self.of(row)
        if isinstance(row, Mapping):
            value: Cell = row.get(self.of or self.name)
        else:
            value = attrgetter(self.of or self.name.replace(" ", "_"))(row)
        return value

    @classmethod
    def text(cls, name: str, of: Getter | str | None = None, priority: int = 0) -> Column:
        """A column of left-aligned text."""
        return cls(name, left_aligned=True, priority=priority, of=of)

    @classmethod
    def count(cls, name: str, of: Getter | str | None = None, priority: int = 0) -> Column:
        """A column of whole numbers."""
        return cls(name, "number", priority=priority, of=of)

    @classmethod
    def share(cls, name: str, of: Getter | str | None = None, priority: int = 0) -> Column:
        """A column of shares as `Interval`, shown in percent with limits."""
        return cls(name, "estimate", "%", 100.0, priority=priority, of=of)

    @classmethod
    def percent(cls, name: str, of: Getter | str | None = None, priority: int = 0, digits: str = ".3g") -> Column:
        """A column of shares without limits, shown in percent."""
        return cls(name, "number", "%", 100.0, digits, priority, of=of)

    @classmethod
    def points(cls, name: str, of: Getter | str | None = None, priority: int = 0) -> Column:
        """A column of differences of shares as `Interval`, in percentage points with sign and limits."""
        return cls(name, "difference", "points", 100.0, priority=priority, of=of)


Mark = tuple[str, str]
"""A colour like ``#0072B2`` and a sign like ``●``: what stands for something in a figure."""


@dataclass(frozen=True, slots=True)
class TextCell:
    """A cell with a given text.

    ``key``: the number by which it is sorted; None: it is sorted by its text.

    On a page with a mark, and over a bar between the ends ``bar``, 0 and 1 at most.
    """

    text: str
    key: float | None = None
    mark: Mark | None = None
    bar: tuple[float, float] | None = None


Cell = str | int | float | bool | Interval | TextCell | None
"""A value of a table; None: there is nothing; shown as ``–``."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table row with its cells in the order of the columns.

    ``tooltip``: the text shown on a page when the pointer is over the row.
    """

    cells: tuple[Cell, ...]
    emphasised: bool = False
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with typed columns.

    It has no head if no column has a name.

    Attributes:
        title: Line above the table.
        terminal_rows: Most rows in a terminal; 0: this table is left to the page.
        more_rows_text: Text of a terminal where there are more, of ``{shown}`` and ``{left}`` rows.
        on_page: False where a page shows the same otherwise.
        sortable: The page lets the reader sort and filter it.
        plain_line_format: Form of a line for each row in plain mode, where only estimates are a table,
            with cells by number (``switch {0}: {1}``); empty: it is left out.
    """

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    title: str = ""
    terminal_rows: int = 40
    more_rows_text: str = "and {left:,} more in the report"
    on_page: bool = True
    sortable: bool = False
    plain_line_format: str = ""

    @classmethod
    def of(
        cls,
        rows: Iterable[Any],
        columns: Iterable[Column],
        title: str = "",
        is_emphasised: Callable[[Any], bool] = lambda _: False,
        tooltip: Callable[[Any], str] = lambda _: "",
        **more: Any,
    ) -> Table:
        """A table with one row built from each of ``rows``.

        ``more``: further attributes.
        """
        heads = tuple(columns)
        lines = (TableRow(tuple(head.cell(row) for head in heads), is_emphasised(row), tooltip(row)) for row in rows)
        return cls(heads, tuple(lines), title, **more)


def columns(*names: str, left: Container[str] = (), priority: Mapping[str, int] | None = None) -> tuple[Column, ...]:
    """Text columns with these names.

    ``left`` and ``priority``: see `Column`.
    """
    return tuple(Column(name, left_aligned=name in left, priority=(priority or {}).get(name, 0)) for name in names)


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as plain plotly data.

    ``alt_text``: a description for readers who cannot see it.
    """

    name: str
    alt_text: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Lines of text for the page, each with an optional mark, for example the legend of a figure."""

    lines: tuple[tuple[Mark | None, str], ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A smaller heading within a section, with an optional subtitle."""

    title: str
    subtitle: str = ""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Parts of a section that are placed side by side if there is room."""

    parts: tuple[Table | Plot | TextBlock | Heading, ...]


Part = Table | Plot | TextBlock | Heading | SideBySide


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a report: a heading, sentences for the page, and parts such as tables and figures."""

    title: str
    introduction: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A report on a result, independent of its output.

    Text in backquotes is a name or code.

    Attributes:
        schema: Schema of the JSON object, like ``unsilent/noise/2``.
        report_type: Kind of report.
        numbers: Term, text, and what is set smaller.
        estimates: One row for each estimate, the table for machines: lines of plain mode, ``results`` of
            JSON.
        sections: Their figures have names of their own.
        facts: Facts on how the result was made, term and text.
        notes: Notes on how to read the tables, without full stops.
        repeat_command: The command that makes it again, to be copied.
        next_commands: Use of the result in a few words, and the command for it.
        method: Sentences on how the result was made, a line each paragraph.
        further_json: Further fields of the JSON object, of any depth; ``results`` there replace those of
            ``estimates``.
    """

    schema: str
    report_type: str
    title: str
    headline: str
    estimates: Table
    numbers: tuple[tuple[str, str, str], ...] = ()
    findings: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    repeat_command: str = ""
    next_commands: tuple[tuple[str, str], ...] = ()
    method: str = ""
    further_json: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plots(self) -> dict[str, Plot]:
        """All figures of the report by name, in their order."""
        parts = [part for section in self.sections for part in section.parts]
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, SideBySide) else (part,))]
        return {part.name: part for part in flat if isinstance(part, Plot)}
