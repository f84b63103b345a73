"""Tables of any report: in a terminal no word is broken while there is another way, columns go by their priority."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from report.conftest import HOSTILE
from report.test_report_html import Page, check_harmless
from unsilent.render.report_json import report_json, without_run_details
from unsilent.render.report_page import report_html
from unsilent.render.report_terminal import render_report
from unsilent.report.model import Column, Report, Section, Table, TableRow, TextCell

WORDY = "largest value written by the fault, as a multiple of what was usual in that tensor"
TABLE = Table(
    (
        Column("group", left_aligned=True),
        Column("share %"),
        Column("second moment of all trials"),
        Column("median", priority=1),
        Column("trials", "number", priority=2),
        Column("what it is", left_aligned=True),
    ),
    (
        TableRow(("encoder.layers.10.attention", "0.31 [0.18, 0.46]", "2.25 [0.91, 4.13]", "100…never", 500, WORDY)),
        TableRow(("head", "< 0.39", "–", "3", 7, "nothing")),
    ),
    title="Groups",
)


def report(*tables, **more):
    sections = (Section("All", "", tables),)
    return Report("unsilent/x/1", "kicker", "title", "headline", Table((), ()), sections=sections, **more)


def shown(*tables, width=80, plain=False, is_terminal=True, **more):
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    render_report(report(*tables, **more), console, plain)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 70, 80, 100, 120, 200])
def test_words_are_whole_and_lines_fit(width):
    text = shown(TABLE, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    if width >= 60:
        words = set(re.findall(r"[^\s─]+", text))
        for cell in (WORDY, "0.31 [0.18, 0.46]", "< 0.39", "second moment of all trials", "share %", "head"):
            assert set(cell.split()) <= words, (cell, width)
    assert ("100…never" in text) == (width >= 100)
    assert ("500" in text) == (width >= 100)
    assert ("0.31 [0.18, 0.46]" in text) == (width >= 70)


@pytest.mark.parametrize("width", [40, 80])
def test_what_is_no_terminal_gets_every_column_and_every_row_as_one_line(width):
    text = shown(TABLE, width=width, is_terminal=False)
    row = next(line for line in text.splitlines() if line.startswith("encoder.layers.10.attention"))
    for cell in ("0.31 [0.18, 0.46]", "2.25 [0.91, 4.13]", "100…never", "500", WORDY):
        assert cell in row
    assert "do not fit" not in text


def test_names_without_blanks_are_folded_behind_their_dots():
    name = "encoder.layers.10.self_attention.out_projection.weight"
    table = replace(TABLE, rows=(TableRow((name, *TABLE.rows[0].cells[1:])),))
    lines = [line.split()[0] for line in shown(table).splitlines() if line.strip()]
    assert {"encoder.layers.10.", "self_attention.", "out_projection.weight"} <= set(lines)


def test_a_table_of_pairs_has_no_head():
    table = Table((Column(""), Column("", left_aligned=True)), (TableRow(("what", WORDY)),), "Pairs")
    text = shown(table)
    assert "─" not in text
    assert text.splitlines()[2:4] == ["", "Pairs"]
    assert text.splitlines()[4].startswith("what  largest value")
    assert "<th" not in report_html(report(table))


def test_a_title_is_as_wide_as_the_terminal():
    title = "sd of the error of a group, and the sd of a random group of that size"
    assert f"\n{title}\n" in shown(Table((Column("a"),), (TableRow(("b",)),), title))


def test_what_makes_it_again_is_one_line_to_copy():
    command = "unsilent pvf dlrm " + " ".join(f"--with key{i}=value" for i in range(9))
    assert f"\nrepeat with: {command}\n" in shown(repeat_command=command, width=40)
    assert f"\n# repeat with: {command}\n" in shown(repeat_command=command, plain=True, width=40)
    page = Page(report_html(report(repeat_command=f"{command} '<b>'")))
    check_harmless(page)
    assert f"{command} '<b>'" in page.text


def test_bars_go_from_end_to_end():
    rows = tuple(
        TableRow((name, TextCell(name, bar=bar))) for name, bar in (("a", (0.25, 0.5)), ("b", (1, 1)), ("c", None))
    )
    text = report_html(report(Table((Column("x"), Column("y")), rows)))
    bars = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', text)
    assert bars == [("25.00", "25.00"), ("100.00", "0.60")]


def test_a_study_may_give_results_of_its_own():
    told = report_json(report(further_json={"results": {"a": 1}}))
    head = {"schema": "unsilent/x/1", "command": "", "headline": "headline", "notes": []}
    assert json.loads(json.dumps(told)) == head | {"results": {"a": 1}}
    assert report_json(report())["results"] == []


def test_the_json_object_has_the_notes_which_are_no_result():
    told = report_json(report(notes=("one rank was not read",)))
    assert told["notes"] == ["one rank was not read"]
    assert "notes" not in without_run_details(told)


def test_names_are_only_names_in_any_cell():
    columns = tuple(Column(name, left_aligned=i % 2 == 0) for i, name in enumerate(HOSTILE))
    table = Table(columns, (TableRow(HOSTILE), TableRow(tuple(map(TextCell, HOSTILE)))), HOSTILE[1], sortable=True)
    for width in (30, 80, 300):
        text = shown(table, width=width, findings=HOSTILE, repeat_command=HOSTILE[0], notes=HOSTILE)
        assert "\x1b" not in text
        assert "\u202e" not in text
    check_harmless(Page(report_html(report(table, findings=HOSTILE, repeat_command=HOSTILE[0], notes=HOSTILE))))
