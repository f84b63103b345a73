"""Two campaigns of faulty trainings compared: with and without batch norm, one optimizer and another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unsilent.errors import UsageError
from unsilent.interval import Interval
from unsilent.report.estimates import Dots, difference_cell, shares_figure
from unsilent.report.model import Column, Plot, Report, Section, Table, TableRow, TextBlock, estimates_table
from unsilent.report.text import count_text, listed
from unsilent.report.theme import SERIES_COLOURS
from unsilent.statistics.comparing import Counts, joint_differences
from unsilent.studies.training.judging import SHARES
from unsilent.studies.training.records import Contrast, TrainingResult

SETTINGS_THAT_MUST_MATCH = ("faults", "accelerator", "value", "phases", "per")
"""What must be equal in two specs, so that both corrupt by the same law."""
SAME_CAMPAIGN = (
    "A and B are stores of the same campaign, so their common trials are the same; the limits of B - A, which take A and B for "
    "independent, do not apply"
)
ALL_EQUAL = "A and B are stores of the same campaign and have the same outcomes, so every difference is 0"


def compare_training_results(one: TrainingResult, other: TrainingResult) -> tuple[Contrast, ...]:
    """The second against the first: what is different, harm, latent harm, and each class that occurs.

    Limits of the differences hold for all rows together. Raises ``UsageError`` where their faults are of other laws.
    """
    unequal = [name for name in SETTINGS_THAT_MUST_MATCH if one.spec[name] != other.spec[name]]
    if unequal:
        raise UsageError(
            f"{one.store} and {other.store} draw different faults ({', '.join(unequal)} differ); "
            "compare campaigns that draw the same faults"
        )
    rows = {kind: (getattr(one.all_trials, kind), getattr(other.all_trials, kind)) for kind in SHARES}
    for mine, theirs in zip(one.classes, other.classes, strict=True):
        if mine.n or theirs.n:
            rows[mine.name] = mine.share, theirs.share
    gaps = joint_differences([(_counts(second), _counts(first)) for first, second in rows.values()], one.confidence)
    return tuple(
        Contrast(name, campaign_label(one), campaign_label(other), *shares, gap)
        for (name, shares), gap in zip(rows.items(), gaps, strict=True)
    )


def _counts(share: Interval) -> Counts:
    """Events and trials of a share."""
    return round((share.estimate or 0.0) * share.n), share.n


def campaign_label(result: TrainingResult) -> str:
    """A campaign in a few words."""
    return (
        f"{result.workload} ({' and '.join(dict.fromkeys(result.optimizers)) or 'no optimizer'}, "
        f"{count_text(result.n, 'trial')})"
    )


# -- its report -----------------------------------------------------------------------------------------------------------


def comparison_report(output: Sequence[Contrast], one: TrainingResult, other: TrainingResult) -> Report:
    """What is shown of a comparison."""
    joint = 100 * output[0].difference.confidence
    shares = (Column(name, "estimate", scale=100) for name in ("A %", "B %"))
    rows = tuple(
        TableRow((c.name, c.one, c.other, difference_cell(c.difference)), emphasised=_differs(c)) for c in output
    )
    table = Table((Column("outcome"), *shares, Column("B - A, points")), rows)
    marks = tuple(zip(((SERIES_COLOURS[0], "●"), (SERIES_COLOURS[1], "■")), ("A", "B"), strict=True))
    plot = Plot("shares", "Shares of outcomes in A and B", _figure(output))
    return Report(
        schema="unsilent/training-comparison/2",
        report_type="Two campaigns compared",
        title=f"{one.workload} and {other.workload}",
        headline=ALL_EQUAL if one.campaign == other.campaign and _all_equal(output) else _headline(output),
        estimates=estimates_table(("outcome", "of", ""), (row for c in output for row in _estimates(c))),
        findings=(f"A: {output[0].first}", f"B: {output[0].second}"),
        sections=(Section("Outcomes", "Shares of trials with confidence limits.", (TextBlock(marks), plot, table)),),
        facts=tuple(
            (f"{name}, {term}", text) for name, result in (("A", one), ("B", other)) for term, text in _facts(result)
        ),
        notes=(
            *((SAME_CAMPAIGN,) if one.campaign == other.campaign else ()),
            f"limits of A and of B hold for each row separately; limits of B - A hold for all {len(output)} rows together "
            f"({joint:.4g} %, Bonferroni)",
        ),
        further_json={"a": output[0].first, "b": output[0].second, "method": output[0].difference.method},
    )


def _all_equal(result: Sequence[Contrast]) -> bool:
    return all(c.one == c.other for c in result)


def _headline(result: Sequence[Contrast]) -> str:
    more = [c.name for c in result if c.difference.low > 0]
    less = [c.name for c in result if c.difference.high < 0]
    parts = [
        f"a larger share of {listed(names)}" if sign else f"a smaller share of {listed(names)}"
        for sign, names in ((True, more), (False, less))
        if names
    ]
    return (
        f"B has {' and '.join(parts)} than A"
        if parts
        else f"A and B are not shown to differ in any of {count_text(len(result), 'row')}"
    )


def _differs(result: Contrast) -> bool:
    return result.difference.low > 0 or result.difference.high < 0


def _estimates(result: Contrast) -> Iterator[tuple[str, str, Interval]]:
    yield result.name, "A", result.one
    yield result.name, "B", result.other
    yield result.name, "B - A", result.difference


def _figure(result: Sequence[Contrast]) -> dict[str, object]:
    series = []
    for number, (name, symbol) in enumerate((("A", "circle"), ("B", "square"))):
        shares = [c.other if number else c.one for c in result]
        rows = [
            (i + 0.3 * (number - 0.5), share, f"{c.name}, {name}")
            for i, (c, share) in enumerate(zip(result, shares, strict=True))
        ]
        series.append(Dots("", SERIES_COLOURS[number], symbol, rows))
    return shares_figure(series, [c.name for c in result], "share of trials")


def _facts(result: TrainingResult) -> Iterator[tuple[str, str]]:
    yield "store", result.store
    yield "campaign", result.campaign
    yield "command", result.command
