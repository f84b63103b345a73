"""A report, whatever study it is of: a headline, numbers, findings, sections, and the estimates behind them.

Studies make it, renderers show it: in a terminal, as plain columns, as JSON, as a page. Text is cleaned where it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unsilent.interval import Interval
from unsilent.report.look import Figure

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


@dataclass(frozen=True, slots=True)
class Shown:
    """A cell that is shown as ``text`` whatever its column says, and sorted by ``key`` (None: by the text)."""

    text: str
    key: float | None = None


Cell = str | int | float | bool | Interval | Shown | None
"""None: there is nothing; shown as ``–``."""


@dataclass(frozen=True, slots=True)
class Row:
    """Cells in the order of columns; ``strong`` rows stand out."""

    cells: tuple[Cell, ...]
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of typed columns.

    Attributes:
        title: one line above it. terminal_rows: most rows in a terminal, which says how many there are besides; 0: this table
        is left to the page. long: the page lets the reader sort and filter it. sentence: in plain mode, where only estimates
        are a table, each row is a line of this form, with cells by number (``switch {0}: {1}``); empty: it is left out.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    terminal_rows: int = 40
    long: bool = False
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as plain plotly data; ``label`` is what it shows, for those who do not see it."""

    name: str
    label: str
    figure: Figure


Part = Table | Plot


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a few sentences for the page, and tables and figures."""

    title: str
    lead: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is shown of a result.

    Attributes:
        schema: of the JSON object, like ``unsilent/noise/1``. kicker: what kind of report it is. numbers: term, text, and what
        is set smaller. estimates: one row for each estimate, the table of machines: lines of plain mode, ``results`` of JSON.
        facts: how it was made, term and text. notes: how to read the tables, without full stops. method: how it was made, in
        sentences. data: further fields of the JSON
        object, of any depth.
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
    method: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
