"""Compares two campaigns of faulty trainings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.report.dots import Dots, hover_text, shares_figure
from unsilent.report.estimates import Estimate, machine_table, rows_across
from unsilent.report.model import Column, Plot, Report, Section, Table
from unsilent.report.text import count_text, listed
from unsilent.report.theme import SERIES_COLOURS, Figure
from unsilent.statistics.comparing import Counts, joint_differences
from unsilent.studies.training.judging import SHARES
from unsilent.studies.training.kind import TrainingStore
from unsilent.studies.training.records import Contrast, TrainingResult

SETTINGS_THAT_MUST_MATCH = ("faults", "accelerator", "value", "phases", "per")
"""Fields of the spec that must be equal for both campaigns to draw faults from the same distribution."""
SAME_CAMPAIGN = (
    "A and B are stores of the same campaign, so their common trials are the same; the limits of B - A, which take A and B for "
    "independent, do not apply"
)
ALL_EQUAL = "A and B are stores of the same campaign and have the same outcomes, so every difference is 0"


def compare_stores(a: TrainingStore, b: TrainingStore, **choices: Any) -> Report:
    """The report that compares two stores; ``choices`` are fields of `TrainingAnalysisOptions`."""
    results = [store.analyse(**choices) for store in (a, b)]
    return comparison_report(compare_training_results(*results), *results)


def compare_training_results(a: TrainingResult, b: TrainingResult) -> tuple[Contrast, ...]:
    """Contrasts between two results: in the shares of different, harmful and latent runs, and of each class.

    Limits of the differences hold for all rows together. Raises ``UsageError`` if the campaigns draw faults from different
    distributions.
    """
    unequal = [name for name in SETTINGS_THAT_MUST_MATCH if a.spec[name] != b.spec[name]]
    if unequal:
        raise UsageError(
            f"{a.store} and {b.store} draw different faults ({', '.join(unequal)} differ); "
            "compare campaigns that draw the same faults"
        )
    rows = {kind: (getattr(a.all_trials, kind), getattr(b.all_trials, kind)) for kind in SHARES}
    for mine, theirs in zip(a.classes, b.classes, strict=True):
        if mine.n or theirs.n:
            rows[mine.name] = mine.share, theirs.share
    gaps = joint_differences([(_counts(second), _counts(first)) for first, second in rows.values()], a.confidence)
    first, second, pairs = campaign_label(a), campaign_label(b), zip(rows.items(), gaps, strict=True)
    return tuple(Contrast(name, first, second, *shares, gap) for (name, shares), gap in pairs)


def _counts(share: Interval) -> Counts:
    """The number of events and of trials behind a share."""
    return round((share.estimate or 0.0) * share.n), share.n


def campaign_label(result: TrainingResult) -> str:
    """A short description of a campaign."""
    optimizers = " and ".join(dict.fromkeys(result.optimizers)) or "no optimizer"
    return f"{result.workload} ({optimizers}, {count_text(result.n, 'trial')})"


# -- its report -----------------------------------------------------------------------------------------------------------


def comparison_report(output: Sequence[Contrast], a: TrainingResult, b: TrainingResult) -> Report:
    """The report that compares two results, with a row for each contrast."""
    joint = 100 * output[0].difference.confidence
    estimates = [
        Estimate({"outcome": c.name, "of": of}, value)
        for c in output
        for of, value in (("A", c.one), ("B", c.other), ("B - A", c.difference))
    ]
    different = {c.name for c in output if c.difference.low > 0 or c.difference.high < 0}
    columns = (Column.text("outcome"), Column.share("A"), Column.share("B"), Column.points("B - A"))
    rows = Table.of(rows_across(estimates, "of"), columns, is_emphasised=lambda row: row["outcome"] in different)
    plot = Plot("shares", "Shares of outcomes in A and B", _figure(estimates))
    return Report(
        schema="unsilent/training-comparison/2",
        report_type="Two campaigns compared",
        title=f"{a.workload} and {b.workload}",
        headline=ALL_EQUAL if a.campaign == b.campaign and _all_equal(output) else _headline(output),
        estimates=machine_table(estimates, ("outcome", "of", "")),
        findings=(f"A: {output[0].first}", f"B: {output[0].second}"),
        sections=(Section("Outcomes", "Shares of trials with confidence limits.", (plot, rows)),),
        facts=tuple(
            (f"{name}, {term}", text) for name, result in (("A", a), ("B", b)) for term, text in _facts(result)
        ),
        notes=(
            *((SAME_CAMPAIGN,) if a.campaign == b.campaign else ()),
            f"limits of A and of B hold for each row separately; limits of B - A hold for all {len(output)} rows together "
            f"({joint:.4g} %, Bonferroni)",
        ),
        further_json={"a": output[0].first, "b": output[0].second, "method": output[0].difference.method},
    )


def _all_equal(result: Sequence[Contrast]) -> bool:
    return all(c.one == c.other for c in result)


def _headline(result: Sequence[Contrast]) -> str:
    larger = [c.name for c in result if c.difference.low > 0]
    smaller = [c.name for c in result if c.difference.high < 0]
    shares = {"larger": larger, "smaller": smaller}
    parts = [f"a {word} share of {listed(names)}" for word, names in shares.items() if names]
    if not parts:
        return f"A and B are not shown to differ in any of {count_text(len(result), 'row')}"
    return f"B has {' and '.join(parts)} than A"


def _figure(estimates: Sequence[Estimate]) -> Figure:
    series = []
    for number, (name, symbol) in enumerate((("A", "circle"), ("B", "square"))):
        shown = [dot for dot in estimates if dot.keys["of"] == name]
        rows = [
            (i + 0.3 * (number - 0.5), dot.interval, hover_text(dot.interval, *dot.names))
            for i, dot in enumerate(shown)
        ]
        series.append(Dots(name, SERIES_COLOURS[number], symbol, rows))
    return shares_figure(series, [str(dot.keys["outcome"]) for dot in shown], "share of trials")


def _facts(result: TrainingResult) -> Iterator[tuple[str, str]]:
    yield "store", result.store
    yield "campaign", result.campaign
    yield "command", result.command
