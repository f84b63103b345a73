"""``unsilent report STORE --help``: options of stores of one kind; without a store those of every store."""

from __future__ import annotations

import html
import shlex
import sys
from pathlib import Path

import pytest

from conftest import in_process
from unsilent.basics.options import options_of
from unsilent.cli.table import load_command
from unsilent.studies.campaign_kinds import KINDS
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.stored_results import read_result


@pytest.mark.parametrize("verb", ["report", "diff", "replay"])
def test_without_a_store_there_are_no_options_of_a_kind(verb):
    assert set(options_of(*load_command(verb).all_option_classes())) < {
        "store", "first", "second", "output", "canonical", "as_json", "plain", "figure", "table",
        "trial", "workload", "accelerator", "fault", "options", "data", "weights",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_store_has_the_options_of_its_kind(kind, monkeypatch):
    monkeypatch.setattr("unsilent.studies.campaign_kinds.find_kind_of_store", lambda path: kind)
    shown = options_of(*load_command("report").all_option_classes(["s.sqlite"]))
    assert set(options_of(kind.analysis_options, kind.report_options)) < set(shown)
    assert ("card" in shown) == (kind is PVF)


def test_a_figure_of_a_store_is_written_to_a_file(stored, tmp_path):
    pytest.importorskip("matplotlib")
    done = in_process("report", stored, "--figure", "curves", "-o", tmp_path / "fig.svg")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Figure: {tmp_path / 'fig.svg'}\n"
    assert (tmp_path / "fig.svg").read_bytes().startswith(b"<?xml")
    again = in_process("report", stored, "--figure", "curves", "-o", tmp_path / "again.svg")
    assert again.returncode == 0
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "fig.svg").read_bytes()


@pytest.mark.parametrize("ending", ["tex", "md", "csv"])
def test_the_table_of_a_store_and_of_a_card_is_written_to_a_file(stored, tmp_path, ending):
    card = tmp_path / "c.json"
    assert in_process("report", stored, "--card", "-o", card).returncode == 0
    for source in (stored, card):
        done = in_process("report", source, "--table", "-o", tmp_path / f"t.{ending}")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"Table: {tmp_path / f't.{ending}'}\n"
        assert "first" in (tmp_path / f"t.{ending}").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--figure", "curves"), "--figure needs the file to write; give -o FILE.svg, FILE.pdf or FILE.png"),
        (("--table",), "--table needs the file to write; give -o FILE.tex, FILE.md or FILE.csv"),
        (("--figure", "curves", "-o", "x.html"), "expected a name that ends in .svg, .pdf or .png"),
        (("--table", "-o", "x.html"), "expected a name that ends in .tex, .md or .csv"),
        (("--figure", "curve", "-o", "x.svg"), "unknown figure 'curve'; did you mean 'curves'"),
        (("--figure", "curves", "--table", "-o", "x.svg"), "leave out --table"),
        (("--figure", "curves", "--json", "-o", "x.svg"), "leave out --json"),
        (("--table", "--card", "-o", "x.tex"), "leave out --card"),
        (("--table", "-o", "no/such.tex"), "cannot write the table to 'no/such.tex'"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(stored, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = in_process("report", stored, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_a_missing_package_is_named(stored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = in_process("report", stored, "--figure", "curves", "-o", tmp_path / "x.svg")
    assert done.returncode == 2
    assert "pip install 'unsilent[figures]'" in done.stderr


def test_the_next_commands_of_a_page_work(stored):
    result = read_result(stored)
    report = result.report()
    page = Path("page.html")
    result.write_html(page)
    assert len(report.next_commands) == 3
    for _, line in report.next_commands:
        assert html.escape(line) in page.read_text("utf-8")
        done = in_process(*shlex.split(line)[1:], *(["--dry-run"] if line.startswith("unsilent pvf") else []))
        assert done.returncode == 0, (line, done.stderr)
