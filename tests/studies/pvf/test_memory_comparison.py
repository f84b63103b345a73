"""Differences of failure rates of memories: against rates known by hand, and what reports and cards say of them."""

from __future__ import annotations

import json

import pytest

import unsilent
from studies.pvf.test_memory_fit import BATCH, DRAM, SINGLE, SRAM, WIDTH, description, workload
from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.render.report_json import report_json
from unsilent.render.table_file import write_table
from unsilent.report.model import Table
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.card import card_json, card_text, checksum, make_card, read_card
from unsilent.studies.pvf.card import report as card_report
from unsilent.studies.pvf.comparison import compare_campaigns
from unsilent.studies.pvf.comparison_report import compare_stores
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.memory_comparison import compared_fits, fit_difference_headline
from unsilent.studies.pvf.memory_records import MemoryFitRow

PATTERNS = {"single": ("bitflip", 0.5), "double": ("burst:length=2", 0.3), "triple": ("multibit:flips=3", 0.2)}
ECC = {**DRAM, "protection": "sec-ded", "code_word": 64}
RAW = 8 * 4 * BATCH * WIDTH
"""FIT of all events in the parameter."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """By name: bare memories, a code in one of them, twice the rate in it."""
    paths = {}
    twice = {**DRAM, "fit_per_mbit": 2 * DRAM["fit_per_mbit"]}
    for name, dram in (("bare", DRAM), ("coded", ECC), ("twice", twice)):
        folder = tmp_path_factory.mktemp(name)
        paths[name] = folder / f"{name}.sqlite"
        accelerator = description(folder, dram=(dram, PATTERNS), sram=(SRAM, SINGLE))
        unsilent.pvf(workload(), accelerator=accelerator, trials=100, store=paths[name])
    return paths


def compared(stores, a, b):
    with PvfStore(stores[a]) as one, PvfStore(stores[b]) as other:
        return compare_campaigns(one, other, PvfEstimator())


def report_of(stores, a, b):
    with PvfStore(stores[a]) as one, PvfStore(stores[b]) as other:
        return compare_stores(one, other)


def fit(comparison, level, name, kind):
    (found,) = [f for f in comparison.fits if (f.level, f.name, f.kind) == (level, name, kind)]
    return found


def test_differences_where_every_event_that_is_read_is_a_failure(stores):
    """The code corrects single flips, reports double ones, and reports or passes on triple ones."""
    comparison = compared(stores, "bare", "coded")
    silent, errors = (fit(comparison, "memory", "dram", kind) for kind in ("silent", "detectable"))
    # Of bare events, all fail; of coded ones, all but the single flips.
    assert silent.difference.estimate + errors.difference.estimate == pytest.approx(-0.5 * RAW)
    assert (silent.direction, errors.direction) == ("falls", "rises")
    # What the memory reports is exact: of the difference only errors of calls are estimated, which are few.
    assert errors.b.low > 0.3 * RAW
    other = fit(comparison, "memory", "sram", "incorrect")
    assert other.difference.low < 0 < other.difference.high or other.difference.estimate == 0
    assert {f.level for f in comparison.fits} == {"memory", "component", "model"}
    assert not comparison.identical


def test_a_rate_that_is_twice_as_high_is_a_difference_though_p_is_the_same(stores):
    comparison = compared(stores, "bare", "twice")
    wrong = fit(comparison, "memory", "dram", "incorrect")
    assert wrong.difference.estimate == pytest.approx(RAW)
    assert wrong.direction == "rises"
    assert not comparison.identical
    same = compared(stores, "bare", "bare")
    assert same.identical
    assert {f.difference.estimate for f in same.fits} == {0.0}
    assert {f.direction for f in same.fits} == {""}


def interval(estimate, low, high):
    return Interval(estimate, low, high, 0.95, 10, "")


def side(silent, detectable, name="model"):
    rates = (silent, detectable, silent)
    return [MemoryFitRow("model" if name == "model" else "memory", name, 1.0, 1.0, 0.0, 0.0, *rates, None)]


def test_a_direction_is_said_only_where_the_interval_leaves_zero_out():
    a = side(interval(0.6, 0.2, 3.1), interval(345.0, 345.0, 345.0))
    far = compared_fits(a, side(interval(0.025, 0.01, 0.06), interval(39.0, 39.0, 39.0)))
    assert fit_difference_headline(far).startswith(
        "Silent FIT of the model falls from 0.6 [0.2, 3.1] to 0.025 [0.010, 0.060]"
    )
    assert "Detectable FIT of the model falls from 345 to 39, difference -306." in fit_difference_headline(far)
    # Zou and Donner: -0.2 ± hypot(2.5, 0.2) above, so 0 is inside.
    near = compared_fits(a, side(interval(0.4, 0.2, 2.0), interval(345.0, 345.0, 345.0)))
    assert near[0].difference.low == pytest.approx(-0.2 - (0.2**2 + 2.5**2) ** 0.5)
    assert near[0].difference.high == pytest.approx(-0.2 + (0.4**2 + 1.6**2) ** 0.5)
    assert fit_difference_headline(near).startswith(
        "No difference is shown in silent FIT of the model: A 0.6 [0.2, 3.1]"
    )
    assert "No difference is shown in detectable FIT of the model: A 345, B 345" in fit_difference_headline(near)


def test_only_rows_of_both_are_compared():
    one = interval(1.0, 0.5, 2.0)
    assert compared_fits(side(one, one, "hbm"), side(one, one, "sram")) == ()
    assert compared_fits(side(one, one), ()) == ()


def test_the_report_speaks_of_fit_and_says_what_p_is_of(stores):
    report = report_of(stores, "bare", "coded")
    assert report.headline.startswith("Silent FIT of the model ")
    assert "P(incorrect)" not in report.headline
    assert "P(incorrect) of events that come through the protection" in " ".join(report.findings)
    first = report.sections[0]
    assert first.title == "Difference of failure rates of memories (FIT)"
    assert [table.title for table in first.parts] == ["Silent FIT", "Detectable FIT", "Incorrect FIT"]
    assert [row.cells[1] for row in first.parts[0].rows] == ["dram", "sram", "other", "input", "model"]
    assert all("events that come through" in section.title for section in report.sections[1:2])
    data = report_json(report)
    rows = {(r["level"], r["name"], r["kind"]): r for r in data["memory_fit"]}
    silent = rows["memory", "dram", "silent"]
    assert silent["difference"]["estimate"] == pytest.approx(silent["b"]["estimate"] - silent["a"]["estimate"])
    assert silent["difference"]["low"] <= silent["difference"]["estimate"] <= silent["difference"]["high"]
    assert report.estimates.rows[0].cells[:3] == ("memory", "dram", "silent FIT")


def test_the_report_of_one_campaign_begins_with_fit_and_says_what_p_is_of(stores, tmp_path):
    with PvfStore(stores["coded"]) as store:
        report = analyse(store, PvfEstimator()).report()
    assert report.sections[0].title == "Failure rate of memories"
    assert report.sections[1].title == "P(incorrect) of events that come through the protection by component"
    assert report.numbers[0][0] == "P(incorrect) of events that come through the protection"
    shown = [part for part in report.sections[1].parts if isinstance(part, Table)]
    assert [table.title for table in shown] == ["P(incorrect) of events that come through the protection"]
    for ending in ("md", "tex", "csv"):  # all are of FIT
        text = write_table(report, tmp_path / f"t.{ending}").read_text()
        assert "silent FIT" in text
        assert "detectable FIT" in text
        table = text[text.index("\n") + 1 if ending == "tex" else 0 :]
        assert "P(incorrect)" not in table


def test_a_card_has_the_fit_of_the_model_and_of_memories(stores, tmp_path):
    with PvfStore(stores["coded"]) as store:
        card, result = make_card(store, PvfEstimator()), analyse(store, PvfEstimator())
    path = tmp_path / "c.json"
    path.write_text(card_text(card))
    assert read_card(path) == card
    assert [(row.level, row.name) for row in card.memory_fit] == [
        ("memory", "dram"),
        ("memory", "sram"),
        ("model", "model"),
    ]
    dram = card.memory_fit[0]
    assert (dram.raw, dram.corrected) == (pytest.approx(RAW), pytest.approx(0.5 * RAW))
    assert dram.silent.estimate + dram.detectable.estimate == pytest.approx(0.5 * RAW)
    assert dram.silent.high == result.memory_fit[0].silent.high
    shown = card_report(card)
    assert shown.sections[0].title == "Failure rate of memories"
    assert shown.sections[1].title == "P(incorrect) of events that come through the protection"
    assert [row.cells[1] for row in shown.sections[0].parts[0].rows] == ["dram", "sram", "model"]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: {**row, "level": "component"},
        lambda row: {**row, "n": -1},
        lambda row: {**row, "corrected": 2 * row["raw"]},
        lambda row: {**row, "detected": -1.0},
        lambda row: {**row, "silent": {**row["silent"], "high": 2 * row["raw"]}},
        lambda row: {**row, "silent": {**row["silent"], "low": -1.0}},
        lambda row: {**row, "incorrect": {**row["incorrect"], "estimate": row["raw"]}},
    ],
)
def test_impossible_fit_of_a_card_is_refused(stores, tmp_path, change):
    with PvfStore(stores["coded"]) as store:
        told = card_json(make_card(store, PvfEstimator()))
    told["memory_fit"][0] = change(told["memory_fit"][0])
    told["sha256"] = checksum(told)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(told))
    with pytest.raises(UsageError, match=r"not a valid PVF card: (memory_fit\.0\.|row 0 of memory_fit )"):
        read_card(path)


def test_a_note_of_both_campaigns_is_there_once(stores):
    notes = compared(stores, "bare", "coded").notes
    assert len([note for note in notes if "Assumed: calls follow each other" in note]) == 1
    assert any(note.startswith("A and B: Assumed: calls") for note in notes)
    numbers = [note.partition(": ")[0] for note in notes if "numbers of memory dram" in note]
    assert numbers == ["A", "B"]  # protection and code_word are in one of them


@pytest.fixture(scope="module")
def untried(tmp_path_factory):
    """No fault comes through the code."""
    folder = tmp_path_factory.mktemp("perfect")
    double = {"single": ("bitflip", 0.5), "double": ("burst:length=2", 0.5)}
    unsilent.pvf(workload(), accelerator=description(folder, dram=(ECC, double)), store=folder / "s.sqlite")
    return folder / "s.sqlite"


def test_a_campaign_without_trials_is_compared_by_its_fit(stores, untried):
    both = {**stores, "perfect": untried}
    shown = report_of(both, "bare", "perfect")
    assert "Silent FIT of the model falls from" in shown.headline
    assert any("is not compared: no trial was run in B, because" in finding for finding in shown.findings)
    alone = report_of(both, "perfect", "perfect")
    assert "same trials" not in f"{alone.headline}{alone.findings}"
    assert [section.title for section in alone.sections] == ["Difference of failure rates of memories (FIT)"]


def test_a_card_of_a_campaign_without_trials_has_its_fit(untried, tmp_path):
    with PvfStore(untried) as store:
        card = make_card(store, PvfEstimator())
    path = tmp_path / "card.json"
    path.write_text(card_text(card))
    assert read_card(path) == card
    (model,) = [row for row in card.memory_fit if row.level == "model"]
    assert (model.silent.estimate, model.silent.high, model.detectable.estimate) == (0, 0, 0.5 * RAW)
    shown = card_report(card)
    assert shown.headline.endswith("no trial was run, because nothing or too little comes through the protection")
    assert [section.title for section in shown.sections] == ["Failure rate of memories", "To repeat the measurement"]
