"""The record of a report of any study: headline, numbers, findings, sections and estimates.

Studies make the record, renderers show it in a terminal, as plain columns, as JSON or as a page. The renderers clean its text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, get_args

from unsilent.basics.errors import unknown_name_error
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
        unit: Unit shown after the name.
        scale: Factor for shown numbers (100: percent).
        digits: Format of a float, like ``.2f``, or a function that makes the text of any number; an int is shown with
            thousands separators.
        priority: Order of omission in a narrow terminal: columns with the highest number are omitted first, 0 never.
        left_aligned: Whether the column is left-aligned, for text that is read, not compared.
        of: Function that returns the cell for a row object (see `Table.of`), or name of the object's key or attribute (possibly
            nested: ``curve.step``); None: the column's name, for attributes with ``_`` instead of blanks.
    """

    name: str
    kind: Kind = "text"
    unit: str = ""
    scale: float = 1.0
    digits: str | Callable[[float], str] = ".6g"
    priority: int = 0
    left_aligned: bool = False
    of: Getter | str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown_name_error("kind of column", self.kind, get_args(Kind))

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
"""A colour like ``#0072B2`` and a sign like ``●`` that mark a series in a figure."""


@dataclass(frozen=True, slots=True)
class TextCell:
    """A cell with a given text.

    ``key``: the number by which it is sorted; None: it is sorted by its text. ``mark``, ``bar``: on a page, a mark before the
    text, and the ends (0 to 1) of a bar below it.
    """

    text: str
    key: float | None = None
    mark: Mark | None = None
    bar: tuple[float, float] | None = None


Cell = str | int | float | bool | Interval | TextCell | None
"""A value in a table; None means no value and is shown as ``–``."""


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
        terminal_rows: Most rows in a terminal; 0: the table is shown only on the page.
        more_rows_text: Text in a terminal if there are more rows, with ``{shown}`` and ``{left}`` for the numbers of rows.
        on_page: Whether the page shows the table; False if it shows the content in another form.
        sortable: Whether readers of the page can sort and filter the table.
        plain_line_format: Format of the line for each row in plain mode, in which only estimates are a table,
            with cells by number (``switch {0}: {1}``); empty: the table is left out.
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

        ``more``: further attributes of the table.
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
        numbers: Important numbers, each with term, text, and a detail in smaller type.
        estimates: Machine-readable table with a row for each estimate: lines in plain mode, ``results`` in
            JSON.
        sections: Sections of the report; all their figures have different names.
        facts: Facts on how the result was made, each with term and text.
        notes: Notes on how to read the tables, without full stops.
        repeat_command: Command that makes the result again, to be copied.
        next_commands: Further uses of the result, each in a few words with its command.
        method: Sentences on how the result was made, one line for each paragraph.
        further_json: Further fields of the JSON object, of any depth; ``results`` in it replace those of
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
