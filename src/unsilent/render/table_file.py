"""Writing of a report's main table to a file for a paper: LaTeX, Markdown or CSV."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.campaigns.export import for_spreadsheets
from unsilent.render.cells import filled_columns, header_text, texts
from unsilent.render.pages import write_file
from unsilent.render.report_json import row_object
from unsilent.render.report_terminal import machine_names
from unsilent.report.model import Report, Table
from unsilent.report.text import escape_unprintable

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "–": "--", "—": "---", "…": r"\dots{}", "\xa0": "~", "·": r"$\cdot$",
    "−": "$-$", "×": r"$\times$", "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$", "∞": r"$\infty$", "→": r"$\rightarrow$",
}  # fmt: skip
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def write_table(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the main table of a report and return the path.

    Raises ``UsageError`` for a file name that does not end in .tex, .md or .csv, a report without tables, or a file that cannot
    be written.
    """
    formats = {".tex": _latex, ".md": _markdown, ".csv": _csv}
    ending = Path(path).suffix.lower()
    if ending not in formats:
        raise UsageError(f"the table is to be written to {path}; expected a name that ends in .tex, .md or .csv")
    return write_file(formats[ending](report).encode(), path, "the table")


def latex_text(text: str) -> str:
    """The text with all special characters of LaTeX escaped."""
    signs = "".join(_LATEX.get(sign, sign) for sign in text)
    return re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"$^{{{match[0].translate(_RAISED)}}}$", signs)


def markdown_text(text: str) -> str:
    """The text with all special characters of a Markdown table escaped."""
    marked = re.sub(r"([\\|*_`])|\]\(", lambda match: f"\\{match[0]}" if match[1] else "]\\(", text)
    return re.sub(r"&(?=#?\w+;)", "&amp;", marked).replace("<", "&lt;")


def _main_table(report: Report) -> Table:
    """The first table of a report whose columns have names."""
    tables = [part for section in report.sections for part in section.parts if isinstance(part, Table)]
    for table in tables:
        if any(column.name for column in table.columns):
            return table
    raise UsageError("this report has no tables for a paper; give -o FILE.csv for its estimates")


def _lines(table: Table, escape: Callable[[str], str], bold: str) -> tuple[list[str], list[bool], list[list[str]]]:
    """The non-empty columns of a table: their heads, whether they are left-aligned, and their cells."""
    every = [texts(table.columns, row) for row in table.rows]
    filled = filled_columns(table.columns, [["" if text == "–" else text for text in line] for line in every])
    columns = [table.columns[number] for number in filled]
    rows = []
    for row, line in zip(table.rows, every, strict=True):
        form = bold if row.emphasised else "{}"
        rows.append([form.format(escape(line[number])) for number in filled])
    left = [bool(column.left_aligned) or not number for number, column in enumerate(columns)]
    return [escape(header_text(column)) for column in columns], left, rows


def _latex(report: Report) -> str:
    heads, left, rows = _lines(_main_table(report), latex_text, r"\textbf{{{}}}")
    title = escape_unprintable(report.title)
    # LaTeX would read a bracket at the beginning of a line as the argument of the preceding line break.
    lines = [f"{'{}' * line[0].startswith(('[', '*'))}{' & '.join(line)} \\\\" for line in rows]
    return "\n".join([
        f"% {title}", r"% Needs \usepackage{booktabs}.",
        rf"\begin{{tabular}}{{{''.join('l' if is_left else 'r' for is_left in left)}}}",
        r"\toprule", rf"{' & '.join(heads)} \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}", "",
    ])  # fmt: skip


def _markdown(report: Report) -> str:
    heads, left, rows = _lines(_main_table(report), markdown_text, "**{}**")
    rule = "|".join(":---" if is_left else "---:" for is_left in left)
    return "\n".join([_row(heads), f"|{rule}|", *map(_row, rows), ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _csv(report: Report) -> str:
    names, content = machine_names(report.estimates), io.StringIO()
    writer = csv.DictWriter(content, names, extrasaction="ignore")
    writer.writeheader()
    for row in report.estimates.rows:
        values = {
            name: escape_unprintable(v) if isinstance(v, str) else v
            for name, v in row_object(report.estimates, row).items()
        }
        writer.writerow({name: for_spreadsheets(value) for name, value in values.items()})
    return content.getvalue()
