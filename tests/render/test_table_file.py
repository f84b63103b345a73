"""Tables of a report as files for a paper: LaTeX, Markdown, and CSV with the columns for machines."""

import csv
import io
import re

import pytest

from report.conftest import HOSTILE, make_demo, make_hostile
from report.showing import report_of, text_of
from unsilent.basics.errors import UsageError
from unsilent.render.table_file import latex_text, write_table
from unsilent.report.model import Column, Report, Section, Table, TableRow
from unsilent.statistics import Interval


def report_with(*tables):
    return Report("s", "t", "title", "h", tables[0], sections=(Section("s", "", tables),))


def written(report, tmp_path, ending):
    return write_table(report, tmp_path / f"t.{ending}").read_text("utf-8")


SHARE = Interval(0.038, 0.0251, 0.0559, 0.95, 500, "m")
TABLE = Table.of(
    [{"name": "top_mlp & co", "PVF": SHARE, "change": SHARE, "n": 12345}, {"name": "all", "PVF": None, "n": 7}],
    (Column.text("name"), Column.share("PVF"), Column.points("change"), Column.count("n"), Column.text("empty")),
    is_emphasised=lambda row: row["name"] == "all",
)


def test_latex_has_units_limits_and_escaped_names(tmp_path):
    text = written(report_with(TABLE), tmp_path, "tex")
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    assert lines == [
        r"\begin{tabular}{lrrr}", r"\toprule", r"name & PVF, \% & change, points & n \\", r"\midrule",
        r"top\_mlp \& co & 3.8 [2.5, 5.6] & +3.8 [+2.5, +5.6] & 12,345 \\",
        r"\textbf{all} & \textbf{--} & \textbf{--} & \textbf{7} \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    assert text.startswith("% title")
    assert "booktabs" in text.splitlines()[1]


def test_markdown_has_units_and_limits(tmp_path):
    assert written(report_with(TABLE), tmp_path, "md").splitlines() == [
        "| name | PVF, % | change, points | n |",
        "|:---|---:|---:|---:|",
        r"| top\_mlp & co | 3.8 [2.5, 5.6] | +3.8 [+2.5, +5.6] | 12,345 |",
        "| **all** | **–** | **–** | **7** |",
    ]


def test_csv_has_the_columns_for_machines(tmp_path):
    """Those of plain mode, with whole numbers and shares as they are stored."""
    report = report_of(make_demo())
    rows = list(csv.DictReader(io.StringIO(written(report, tmp_path, "csv"))))
    head = text_of(make_demo(), plain=True).split("\n")
    assert next(line.split() for line in head if line.startswith("level")) == list(rows[0])
    assert len(rows) == len(report.estimates.rows)
    assert [float(row["estimate"]) for row in rows] == [
        next(cell for cell in row.cells if isinstance(cell, Interval)).estimate for row in report.estimates.rows
    ]


def test_names_from_outside_do_nothing_in_latex_markdown_and_spreadsheets(tmp_path):
    report = report_of(make_hostile())
    for name in (r"a\input{x}", "$x$", "50%", "#1", "{", "}", "~", "^", "_", "&", r"\\", *HOSTILE):
        text = latex_text(name)
        plain = re.sub(r"\\[%&#_{}$]|\\text(backslash|asciitilde|asciicircum|bar|less|greater|quotedbl)\{\}", "", text)
        assert not re.search(r"[\\%&#_{}$~^]", plain), (name, text)
    for ending in ("tex", "md", "csv"):
        assert "\x1b" not in written(report, tmp_path, ending)
    assert "<script>" not in written(report, tmp_path, "md")
    formula = Table((Column("x"),), (TableRow(("=1+1",)),))
    assert written(report_with(formula), tmp_path, "csv") == "x\n'=1+1\n"


def test_a_name_in_brackets_is_no_argument_of_the_line_break_before_it(tmp_path):
    table = Table((Column("x"),), (TableRow(("a",)), TableRow(("[4cm]",)), TableRow(("*",))))
    assert written(report_with(table), tmp_path, "tex").splitlines()[6:9] == [r"a \\", r"{}[4cm] \\", r"{}* \\"]


def test_signs_that_latex_lacks_are_written_as_it_has_them():
    assert latex_text("≤ 3 × 10⁹ ± 2 – −1 …") == r"$\leq$ 3 $\times$ 10$^{9}$ $\pm$ 2 -- $-$1 \dots{}"


def test_the_table_is_the_first_with_heads_and_all_its_rows(tmp_path):
    facts = Table((Column(""), Column("")), (TableRow(("a", "b")),))
    long = Table((Column("x"),), tuple(TableRow((str(n),)) for n in range(100)), terminal_rows=3)
    assert len(written(report_with(facts, long), tmp_path, "md").splitlines()) == 102
    with pytest.raises(UsageError, match="this report has no tables"):
        write_table(report_with(facts), tmp_path / "t.md")


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"t\.txt.*expected a name that ends in \.tex, \.md or \.csv"):
        write_table(report_with(TABLE), tmp_path / "t.txt")
