"""A card in the terminal and as a page: complete, and names of strangers stay names."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from report.test_report_html import BROWSER, Page, check_harmless, opened
from unsilent.basics.interval import PART_OF_LIST
from unsilent.render.report_page import report_html, write_report
from unsilent.render.report_terminal import render_report
from unsilent.report.estimates import limits_text
from unsilent.studies.pvf.card import CardRow, PvfCard, ordered, report
from unsilent.studies.pvf.spec import PvfSpec

PLAIN = ("level", "target", "parent", "flips", "estimate", "low", "high", "n", "silent")


def make_card(names=("emb", "top"), bad=None, flips=(1, 8), **more):
    def row(level, target, parent, count):
        return CardRow(level, target, parent, count, 0.02, 0.01, 0.04, 500, bad or "Clopper-Pearson", 0.8, 1000, 32000)

    rows = [row("model", "model", "", f) for f in flips]
    rows += [row("component", name, "", f) for f in flips for name in names]
    rows += [row("layer", f"{name}.0", name, 1) for name in names]
    texts = {k: bad or k for k in ("measure", "command", "campaign", "judge", "unit", "device", "dtype", "sha256")}
    spec = PvfSpec(bad or "dlrm", flips=flips, fault=bad or "bitflip")
    fields = {
        **texts, "schema": "unsilent-pvf-card", "version": 3, "memory_fit": (), "spec": spec, "confidence": 0.95,
        "samples": 2048, "batches": 2, "trials": 3000, "threads": 1, "notes": (bad or "mind this",),
        "info": {bad or "data": bad or "clicks"}, "versions": {bad or "torch": bad or "2.13.0"},
        "fingerprint": dict.fromkeys(("weights", "inputs", "golden", "code"), bad or "3f" * 16),
        "files": {bad or "data": bad or "9c" * 32},
    }  # fmt: skip
    return PvfCard(**{**fields, "rows": tuple(rows), **more})


def text_of(card, plain=False, width=120, is_terminal=True):
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    render_report(report(card), console, plain)
    return console.file.getvalue()


def test_both_show_all_of_it():
    card = make_card(command="unsilent pvf dlrm --flips 1,8 --seed 0 --trials 500")
    texts = (text_of(card), text_of(card, plain=True), " ".join(Page(report_html(report(card))).text.split()))
    for wanted in (
        *(
            "PVF card, version 3",
            "dlrm",
            "bitflip",
            "emb",
            "top",
            "model",
            "emb.0",
            "3,000 trials",
            "2,048 samples",
            "mind this",
        ),
        *(card.command, "3f" * 16, "9c" * 32, "torch 2.13.0", "sha256", "campaign", "seed 0", "per-element"),
    ):
        for text in texts:
            assert wanted.lower() in text.lower(), wanted
    assert all("2.0" in text for text in (texts[0], texts[2]))
    assert "0.02" in texts[1]
    assert "fault-free" not in texts[2]
    assert (
        "AUC 0.7931" in Page(report_html(report(make_card(info={"accuracy": {"name": "AUC", "value": 0.7931}})))).text
    )


def test_the_command_is_one_line_to_copy():
    command = "unsilent pvf dlrm --with rows=2048 --fault bitflip:bits=exponent --seed 0 --trials 500 --dtype bfloat16"
    assert f"repeat with: {command}\n" in text_of(make_card(command=command), width=60)


def test_exact_rows_have_no_interval():
    rows = tuple(replace(row, low=0.02, high=0.02, method="exhaustive") for row in make_card().rows)
    card = make_card(rows=rows)
    for told in (text_of(card), " ".join(Page(report_html(report(card))).text.split())):
        assert "all rows are exact, because every fault was tried" in told
        assert "% intervals" not in told
        assert "[2" not in told
        assert told.count("exact") > len(rows)
    assert "[1.0, 4.0]" in text_of(make_card())


def test_columns_of_a_pipe_never_shift(hostile_names):
    for card in (make_card(), make_card(flips=(None,)), make_card(hostile_names, hostile_names[1])):
        lines = [line for line in text_of(card, plain=True).splitlines() if line[0] != "#"]
        assert {len(line.split()) for line in lines} == {len(PLAIN)}
        assert tuple(lines[0].split()) == PLAIN


def test_names_are_only_names(hostile_names):
    for bad in hostile_names:
        card = make_card(hostile_names, bad)
        for plain in (False, True):
            text = text_of(card, plain, width=200)
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "[red]x[/red]" in text
        text = report_html(report(card))
        page = Page(text)
        check_harmless(page)
        for name in hostile_names:
            assert name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.text
            assert "<" not in name or name not in text


def test_rows_are_in_reading_order():
    rows = [(r.level, r.target, r.flips) for r in ordered(make_card())]
    assert rows == [
        ("component", "emb", 1), ("component", "emb", 8), ("component", "top", 1), ("component", "top", 8),
        ("model", "model", 1), ("model", "model", 8), ("layer", "emb.0", 1), ("layer", "top.0", 1),
    ]  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.slow
def test_browser_shows_it_without_a_word(hostile_names, tmp_path):
    path = write_report(report(make_card(hostile_names, hostile_names[1])), tmp_path / "card.html")
    text, console = opened(path, tmp_path / "profile")
    assert console == []
    assert "PVF card, version 3" in text


def test_what_the_limits_are_is_said_of_each_kind():
    drawn = make_card().rows[0]
    exact, part = replace(drawn, low=0.02, high=0.02), replace(drawn, method=f"Gaffke, {PART_OF_LIST}")
    assert limits_text([drawn], 0.95) == "95 % intervals"
    assert limits_text([exact], 0.95) == "all rows are exact, because every fault was tried"
    bounds = "for partly run fault lists, bounds that allow any outcome of the remaining faults"
    assert limits_text([part], 0.95) == bounds
    assert (
        limits_text([drawn, exact, part], 0.9)
        == f"90 % intervals; {bounds}; rows are exact where every fault was tried"
    )
