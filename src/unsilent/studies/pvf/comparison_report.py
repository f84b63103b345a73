"""The report on two compared campaigns."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from unsilent.outcomes.tallies import PvfEstimator
from unsilent.report.dots import Dots, dot_traces, rows_axis
from unsilent.report.estimates import NO_ESTIMATE_KEY, Estimate, estimate_cells, limits_text, machine_table, share_cells
from unsilent.report.model import (
    Heading,
    Part,
    Plot,
    Report,
    Section,
    Table,
    TableRow,
    TextCell,
    columns,
)
from unsilent.report.text import (
    count_text,
    difference_text,
    escape_unprintable,
    estimate_text,
    flips_number_text,
    flips_text,
    p_value_text,
    ratio_text,
    short,
    signed,
)
from unsilent.report.theme import INK, SERIES_COLOURS, Figure, figure, label, vertical_line
from unsilent.studies.pvf.analysis import FIT_REQUIREMENT, check_rate, make_fit_row
from unsilent.studies.pvf.comparison import ComparedRow, Comparison, compare_campaigns
from unsilent.studies.pvf.failure_rates import (
    FailureRates,
    are_bits_alike,
    failure_rates,
    failure_rates_section,
    failure_rates_text,
    fit_headline,
    has_failure_rates,
    mixed_widths_text,
)
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.memory_comparison import (
    FIT_DIFFERENCE_NAMES,
    fit_difference_estimates,
    fit_difference_headline,
    fit_difference_numbers,
    fit_difference_section,
    missing_fit_text,
)
from unsilent.studies.pvf.records import (
    ALL_PARAMETERS,
    EVENTS_COMING_THROUGH,
    MOST_LAYERS_SHOWN,
    at_level,
    components_with_own_layer,
    headline_flips,
    layer_rows,
    main_level,
    row_label,
)
from unsilent.studies.pvf.report import BARS, terminal_tables
from unsilent.studies.pvf.words import common_facts, judging_text, meaning

Rates = tuple[FailureRates, ...]
SCHEMA = "unsilent/comparison/2"
MOST_ROWS_NAMED = 4
"""Most targets that a sentence names."""
LONGEST_VALUE_TEXT = 40
"""Most characters that are shown of a changed value."""
LOOKS = {
    "higher": ("B higher", SERIES_COLOURS[1]),
    "lower": ("B lower", SERIES_COLOURS[0]),
    "": ("no difference shown", "#8a97a3"),
}
"""Legend text and colour for each direction of the difference between B and A."""
COMMON = ("fault", "law", "per", "unit", "judge", "confidence")
SIDE = ("store", "campaign", "command", "workload", "info", "spec", "at", "seed", "device", "dtype", "threads", "samples",
        "batches", "trials_done", "trials_planned", "versions")  # fmt: skip
ROW = ("estimate", "low", "high", "confidence", "n", "unit", "method")
NAMES = ("target", "level", "parent", "flips")
HEADS = ("target", "level", "part of", "flips", "A %", "B %", "B - A", "interval", "B / A", "its interval", "p", "B is",
         "paired")  # fmt: skip
COLUMNS = columns(*HEADS, left=("level", "part of"), priority={"part of": 4, "B / A": 2, "its interval": 2})
METHOD = (
    "The limits of B − A and of B / A are computed from the limits of both rows, which are treated as independent (Zou and "
    "Donner 2008, Donner and Zou 2012). Where every trial of a row had the same fault in both campaigns, the difference is taken "
    "trial by trial, with Gaffke's limits for the mean of numbers between −1 and 1. The ratio of such a row still treats both "
    "campaigns as independent, so its interval is wider than necessary.\n"
    "The p value of a row is the significance level at which its interval would just exclude 0. Values above one half are "
    "shown as 1. Holm's correction covers all rows of a level: if A and B do not truly differ, the chance that any row of "
    "the level is reported as different is at most {:g} %. A row that is not reported as different is not shown to be equal: "
    "its interval contains all differences that are still possible."
)
MACHINE_NAMES = ("level", "target", "parent", "flips", "a", "a_n", "b", "b_n", "", "ratio", "ratio_low", "ratio_high", "p",
                 "b_is", "paired")  # fmt: skip


def compare_stores(store_a: PvfStore, store_b: PvfStore, fit_per_bit: float | None = None, **choices: Any) -> Report:
    """The report that compares two stores.

    Raises ``UsageError`` if a fault rate is given although values of a run were corrupted.

    Args:
        fit_per_bit: Failures of one bit of memory per 1e9 hours.
        choices: Fields of `PvfAnalysisOptions`.
    """
    comparison = compare_campaigns(store_a, store_b, PvfEstimator(**choices))
    if fit_per_bit is not None:
        check_rate(fit_per_bit, comparison.a.transient)
    return comparison_report(comparison, fit_per_bit)


def comparison_report(comparison: Comparison, fit_per_bit: float | None = None) -> Report:
    """The report on a comparison, with FIT if ``fit_per_bit`` is given.

    ``fit_per_bit`` is the failure rate of one bit of memory, in failures per 1e9 hours.
    """
    a, b = comparison.a, comparison.b
    rates = failure_rates(comparison)
    kind = meaning(a)[:1].upper() + meaning(a)[1:]
    table = machine_table(_estimates(comparison), MACHINE_NAMES)
    if comparison.fits:
        table = machine_table(fit_difference_estimates(comparison.fits), FIT_DIFFERENCE_NAMES)
    return Report(
        schema=SCHEMA,
        report_type=f"Comparison · {kind} · {a.fault}",
        title=f"{meaning(a)}, {a.fault}: B ({b.store}, {b.workload}) against A ({a.store}, {a.workload})",
        headline=_headline(comparison, rates, fit_per_bit),
        estimates=table,
        numbers=tuple(_numbers(comparison)),
        findings=tuple(filter(None, _findings(comparison))),
        sections=tuple(_sections(comparison, rates, fit_per_bit)),
        facts=(("command", comparison.command),),
        notes=tuple(_notes(comparison, fit_per_bit)),
        method=METHOD.format(100 - 100 * comparison.confidence),
        further_json=_data(comparison, rates, fit_per_bit),
    )


def _headline(comparison: Comparison, rates: Rates, fit_per_bit: float | None) -> str:
    """The main finding: on FIT if a fault rate is given, on PVF, and on failure rates if bits differ."""
    if comparison.identical:
        return headline(comparison)
    if comparison.fits:
        return fit_difference_headline(comparison.fits)
    first = fit_headline(rates, fit_per_bit) if fit_per_bit is not None else ""
    last = "" if first or are_bits_alike(rates) else failure_rates_text(rates)
    return " ".join(filter(None, (first, headline(comparison), last)))


def _findings(comparison: Comparison) -> Iterator[str]:
    if comparison.fits and not comparison.identical:
        yield headline(comparison)
    yield differing_rows_text(comparison)
    yield from missing_fit_text(comparison.a.memory_fit, comparison.b.memory_fit)
    yield from (*_missing(comparison), *comparison.notes)


def _estimates(comparison: Comparison) -> Iterator[Estimate]:
    for row in at_level(comparison.rows, "component", "model", "layer", "tensor", "bit"):
        d, r = row.difference, row.ratio
        keys = {"level": row.level, "target": row.target, "parent": row.parent, "flips": row.flips}
        further = {
            "a": row.a.estimate, "a_n": row.a.n, "b": row.b.estimate, "b_n": row.b.n,
            "ratio": r.estimate, "ratio_low": r.low, "ratio_high": r.high, "p": row.adjusted_p,
            "b_is": difference_direction(row) or None, "paired": "yes" if row.is_paired else "no",
        }  # fmt: skip
        apart = replace(d, confidence=comparison.confidence, n=min(row.a.n, row.b.n), method=row.method)
        yield Estimate(keys, apart, further=further)


def _data(comparison: Comparison, rates: Rates, fit_per_bit: float | None) -> dict[str, Any]:
    a = comparison.a
    fits: dict[str, Any] = {} if fit_per_bit is None else {"fit_per_bit": fit_per_bit}
    if comparison.fits:
        fits["memory_fit"] = comparison.fits
    return {
        "command": comparison.command,
        "spec": {name: getattr(a, name) for name in COMMON} | {"flips": a.spec["flips"]},
        "measure": a.measure,
        "headline": f"{_headline(comparison, rates, fit_per_bit)} {differing_rows_text(comparison)}".rstrip(),
        "identical": comparison.identical,
        "a": _fields(a, SIDE),
        "b": _fields(comparison.b, SIDE),
        "changes": comparison.changes,
        "only_a": [_fields(row, NAMES) for row in comparison.only_a],
        "only_b": [_fields(row, NAMES) for row in comparison.only_b],
        "results": list(map(_result, comparison.rows)),
        "failure_rates": [_rate(target_rates, fit_per_bit) for target_rates in rates],
        "notes": comparison.notes,
    } | fits


def _rate(rates: FailureRates, fit_per_bit: float | None) -> dict[str, Any]:
    """The ratio of failure rates of a target as JSON values, with FIT if a fault rate is given."""
    row = rates.row
    values = _fields(row, NAMES) | {"bits_a": row.a.bits, "bits_b": row.b.bits, "ratio": _limits_json(rates.ratio, row)}
    if fit_per_bit is None:
        return values
    fits = {name: make_fit_row(side, fit_per_bit) for name, side in (("fit_a", row.a), ("fit_b", row.b))}
    return values | {name: _limits_json(fit, row) for name, fit in fits.items()}


def _limits_json(value: object, row: ComparedRow) -> dict[str, Any]:
    """An estimate with its limits as JSON values, for a comparison of two rows."""
    both = {"confidence": row.a.confidence, "n": min(row.a.n, row.b.n), "unit": row.a.unit}
    return _fields(value, ("estimate", "low", "high")) | both


def _fields(record: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _result(row: ComparedRow) -> dict[str, Any]:
    """A compared row as JSON values."""
    values = {**_fields(row, (*NAMES, "method", "is_paired", "p", "differs")), "p_adjusted": row.adjusted_p}
    values |= _limits_json(row.difference, row) | {"ratio": _limits_json(row.ratio, row)}
    return values | {"a": _fields(row.a, ROW), "b": _fields(row.b, ROW)}


# -- sentences ---------------------------------------------------------------------------------------------------------


def headline(comparison: Comparison) -> str:
    """A sentence on the difference for the whole model."""
    if comparison.identical:
        return "A and B have the same trials with the same outcomes, so every difference is 0."
    untried = [name for name, side in (("A", comparison.a), ("B", comparison.b)) if side.nothing_reaches]
    if untried:
        where = " and in ".join(untried)
        why = "nothing or too little comes through the protection"
        return f"{comparison.a.measure} is not compared: no trial was run in {where}, because {why}."
    model = at_level(comparison.rows, "model")
    first = [row for row in model if row.flips == headline_flips(model) and row.p is not None]
    if not first:
        return "A and B have no fault target in common."
    row, measure = first[0], comparison.a.measure
    is_whole = comparison.a.at == comparison.b.at == ALL_PARAMETERS
    where = "the whole model" if is_whole else "all injected targets together"
    where = EVENTS_COMING_THROUGH if comparison.fits else where
    where += "" if row.flips is None else f" at {flips_text(row.flips)}"
    a, b = (estimate_text(side).estimate for side in (row.a, row.b))
    points = difference_text(row.difference, " points")
    if row.differs:
        return (
            f"{measure} of {where} is {difference_direction(row)} in B: {b} % against {a} % in A, difference {points}."
        )
    return f"No difference is shown in {measure} of {where}: A {a} %, B {b} %, difference {points}."


def differing_rows_text(comparison: Comparison) -> str:
    """A sentence on the rows of the main level that differ; empty if the campaigns are identical."""
    level = main_level(comparison.a)
    rows = [row for row in at_level(comparison.rows, level) if row.p is not None and level != "model"]
    if comparison.identical or not rows:
        return ""
    apart = sorted((row for row in rows if row.differs), key=significance_sort_key)
    what = f" in {comparison.a.measure_text}" if comparison.fits else ""
    shown = f"a difference{what} is shown in {len(apart):,} of {count_text(len(rows), f'{level} row')}"
    start = f"After correction for multiple comparisons, {shown}"
    if not apart:
        return f"{start}."
    first = apart[:MOST_ROWS_NAMED]
    parts = [f"`{escape_unprintable(r.target)}`{_flips(r.flips)} {signed(r.difference).estimate}" for r in first]
    more = f" and {len(apart) - MOST_ROWS_NAMED:,} more" if len(apart) > MOST_ROWS_NAMED else ""
    return f"{start} (points): {', '.join(parts)}{more}."


def difference_counts_text(comparison: Comparison) -> str:
    """The number of rows of each level that differ after correction, as text."""
    parts = []
    for level in dict.fromkeys(row.level for row in comparison.rows):
        rows = [row for row in comparison.rows if row.level == level and row.p is not None]
        parts += [f"{level} {sum(row.differs for row in rows):,} of {len(rows):,}"] if rows else []
    return f"rows in which a difference is shown: {', '.join(parts) or 'none'}"


def paired_rows_text(comparison: Comparison) -> str:
    """A sentence on how many rows have the same faults in both campaigns."""
    paired = sum(row.is_paired for row in comparison.rows)
    if not paired:
        return "no row is paired: A and B have different faults"
    rows = "every row is" if paired == len(comparison.rows) else f"{paired:,} of {len(comparison.rows):,} rows are"
    return f"{rows} paired: A and B had the same faults, and differences are taken trial by trial"


def significance_sort_key(row: ComparedRow) -> tuple[float, float]:
    """The sort key of a row: the smallest p value first, then the largest difference."""
    return 1.0 if row.p is None else row.p, -abs(row.difference.estimate or 0.0)


def difference_direction(row: ComparedRow) -> str:
    """The direction of the difference: ``higher`` or ``lower`` in B, or empty if none is shown."""
    return "" if not row.differs else "higher" if (row.difference.estimate or 0.0) > 0 else "lower"


def _notes(comparison: Comparison, fit_per_bit: float | None) -> Iterator[str]:
    a = comparison.a
    if fit_per_bit is not None and not (has_failure_rates(a) and has_failure_rates(comparison.b)):
        yield f"no FIT: {FIT_REQUIREMENT}"
    if mixed := mixed_widths_text(comparison, fit_per_bit):
        yield mixed
    yield f"{judging_text(a.judge, a.unit, a.law)}; one target per {a.per}"
    if comparison.changes:
        changes = (f"{change.what} (A {_value(change.a)}, B {_value(change.b)})" for change in comparison.changes)
        yield f"A and B also differ in: {', '.join(changes)}"
    if not comparison.rows:
        return
    yield f"{difference_counts_text(comparison)} (p after Holm's correction for the rows of a level)"
    yield f"{_limits(comparison)}, B - A in percentage points; {paired_rows_text(comparison)}"


def _limits(comparison: Comparison) -> str:
    """A sentence on the limits of the differences."""
    return limits_text([replace(row.difference, method=row.method) for row in comparison.rows], comparison.confidence)


def _missing(comparison: Comparison) -> Iterator[str]:
    for side, rows in (("A", comparison.only_a), ("B", comparison.only_b)):
        names = [f"{row.target} ({row.level}{_flips(row.flips)})" for row in rows]
        more = f" and {len(names) - MOST_ROWS_NAMED:,} more" if len(names) > MOST_ROWS_NAMED else ""
        if names:
            yield f"only in {side}: {', '.join(names[:MOST_ROWS_NAMED])}{more}"


def _value(text: str) -> str:
    """A value as text; a hash is shortened to its first digits."""
    hashed = len(text) >= 16 and set(text) <= set("0123456789abcdef")
    return text[:8] if hashed else short(escape_unprintable(text), LONGEST_VALUE_TEXT)


def _flips(flips: int | None) -> str:
    return "" if flips is None else f" x{flips:,}"


def _numbers(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Key numbers for the head of the page: term, value and small text."""
    yield from fit_difference_numbers(comparison.fits)
    for row in () if comparison.fits else at_level(comparison.rows, "model")[:1]:
        where = "" if row.flips is None else f", {flips_text(row.flips)}"
        for name, side in (("A", row.a), ("B", row.b)):
            text = estimate_text(side)
            yield f"{name}{where}", f"{text.estimate} %", text.limits
        apart, times = signed(row.difference), ratio_text(row.ratio)
        yield "B − A, points", apart.estimate, apart.limits
        yield "B / A", times.estimate, times.limits
    yield "faults tried", f"{comparison.a.trials_done:,}", f"and {comparison.b.trials_done:,}"


# -- tables and figures ------------------------------------------------------------------------------------------------


def _sections(comparison: Comparison, rates: Rates, fit_per_bit: float | None) -> Iterator[Section]:
    measure, level = comparison.a.measure_text, main_level(comparison.a)
    if comparison.fits:
        yield fit_difference_section(comparison.fits)
    if comparison.fits and not comparison.rows:  # no fault reaches the model in one of the campaigns
        return
    flips = sorted({row.flips for row in at_level(comparison.rows, level) if _drawn(row)}, key=lambda f: f or 0)
    parts: list[Part] = []
    left = 0
    for number, count in enumerate(flips):
        every = [row for row in at_level(comparison.rows, level) if row.flips == count and _drawn(row)]
        model = [row for row in at_level(comparison.rows, "model") if row.flips == count and level != "model"]
        shown = sorted(every, key=significance_sort_key)[:BARS]
        left = max(left, len(every) - BARS)
        parts += [Heading(flips_text(count))] if len(flips) > 1 else []
        plot = forest([*(row for row in every if row in shown), *model])
        parts.append(Plot(f"forest-{number}", f"Difference of {measure} by {level}, {flips_text(count)}", plot))
    lead = (
        f"{measure} of B minus {measure} of A, in percentage points ({_limits(comparison)}). Rows that differ after correction "
        "for the number of rows are coloured. A diamond marks a row with the same faults in A and B; its difference is taken "
        "trial by trial."
    )
    if left > 0:
        lead += f" The {BARS} rows with the smallest p values are drawn; the table of all rows has the others."
    title = f"Difference of {measure} by {level}" if comparison.fits else f"Difference by {level}"
    yield Section(title, lead, (*parts, *_terminal(comparison)))
    if rates and (fit_per_bit is not None or not are_bits_alike(rates)):
        yield failure_rates_section(rates, fit_per_bit)
    more = [row for row in _layers(comparison) if row.level != level and row.p is not None][:MOST_LAYERS_SHOWN]
    if more:
        plot = forest(more, several=len({row.flips for row in more}) > 1)
        lead = f"The layers and tensors with the smallest p values, at most {MOST_LAYERS_SHOWN}."
        yield Section("Difference by layer", lead, (Plot("layers", f"Difference of {measure} by layer", plot),))
    components = components_with_own_layer(comparison.rows)
    lead = "Click a heading to sort. Hover over a row for its numbers of faults, p before correction and the method."
    rows = tuple(_row(row, components) for row in comparison.rows)
    yield Section("All rows", lead, (Table(COLUMNS, rows, terminal_rows=0, sortable=True),))
    heads = columns("", "A", "B", left=("A", "B"))
    sides = zip(common_facts(comparison.a), common_facts(comparison.b), strict=True)
    tables = [
        ("What differs", [TableRow((c.what, c.a, c.b)) for c in comparison.changes]),
        ("All facts", [TableRow((term, a, b)) for (term, a), (_, b) in sides]),
    ]
    text = tuple(Table(heads, tuple(rows), title, terminal_rows=0) for title, rows in tables if rows)
    lead = "Both campaigns use the same fault model, sampling law, target level, unit and judge."
    yield Section("A and B", lead, text)


def _layers(comparison: Comparison) -> list[ComparedRow]:
    """The rows of layers and tensors, the smallest p value first."""
    return layer_rows(comparison.rows, significance_sort_key, lambda row: (row.difference, row.ratio, row.a.n, row.b.n))


def _terminal(comparison: Comparison) -> Iterator[Table]:
    """The tables for a terminal, without columns that are the same in every row."""
    hidden = {"level", "part of"}
    hidden |= {"flips"} if len({row.flips for row in comparison.rows}) < 2 else set()
    hidden |= {"paired"} if not any(row.is_paired for row in comparison.rows) else set()
    components, more = components_with_own_layer(comparison.rows), _layers(comparison)
    title = f"The {MOST_LAYERS_SHOWN} layers with the smallest p values" if len(more) > MOST_LAYERS_SHOWN else "Layers"
    column_names = [column.name for column in COLUMNS if column.name not in hidden]
    main, rest = (
        [_row(r, components) for r in part] for part in (at_level(comparison.rows, "component", "model"), more)
    )
    main_title = comparison.a.measure_text if comparison.fits else ""
    yield from terminal_tables(COLUMNS, column_names, main, rest, title, main_title)


def _row(row: ComparedRow, components: frozenset[str]) -> TableRow:
    flips = TextCell(flips_number_text(row.flips), float(row.flips or 0))
    names = (row_label(row, components), row.level, row.parent, flips)
    both = [share_cells(side)[0] for side in (row.a, row.b)]
    apart, times = (
        estimate_cells(signed(row.difference), row.difference),
        estimate_cells(ratio_text(row.ratio), row.ratio),
    )
    p = TextCell(p_value_text(row.adjusted_p), NO_ESTIMATE_KEY if row.adjusted_p is None else row.adjusted_p)
    parts = (*names, *both, *apart, *times, p, difference_direction(row), "yes" if row.is_paired else "no")
    faults = f"A {count_text(row.a.n, 'fault')}, B {count_text(row.b.n, 'fault')}"
    return TableRow(parts, row.level == "model", f"{faults}; p before correction {p_value_text(row.p)}; {row.method}")


def _drawn(row: ComparedRow) -> bool:
    return row.difference.estimate is not None


def forest(rows: Sequence[ComparedRow], several: bool = False) -> Figure:
    """The forest plot of differences, one row each; ``several`` adds the number of flips to the names."""
    rows = [row for row in rows if _drawn(row)]
    points = [row.difference.scaled(100) for row in rows]
    ends = [0.0, *(end for point in points for end in (point.low, point.high))]
    edge = 0.06 * max(map(abs, ends)) or 1.0
    names = [escape_unprintable(row.target) + (f" · {flips_number_text(row.flips)}" if several else "") for row in rows]
    traces = []
    for kind, (name, colour) in LOOKS.items():
        mine = [i for i, row in enumerate(rows) if difference_direction(row) == kind]
        symbols = ["diamond" if rows[i].is_paired else "circle" for i in mine]
        if mine:
            traces += dot_traces(Dots(name, colour, symbols, [(i, points[i], _hover(rows[i])) for i in mine]))
    title = {"text": "← lower in B · points · higher in B →"}
    xaxis = {"range": [min(ends) - edge, max(ends) + edge], "title": title}
    more = {"showlegend": True, "shapes": [vertical_line(0, INK, 1.2)]}
    return figure(traces, 112 + 32 * len(rows), xaxis=xaxis, yaxis=rows_axis(names), **more)


def _hover(row: ComparedRow) -> str:
    apart, times = signed(row.difference), ratio_text(row.ratio)
    # These strings contain no other markup than that written here: names are escaped, numbers contain at most "<".
    lines = (
        f"B − A {apart.estimate} points {apart.limits}",
        f"A {estimate_text(row.a).estimate} %, n = {row.a.n:,}; B {estimate_text(row.b).estimate} %, n = {row.b.n:,}",
        f"B / A {times.estimate} {times.limits}, p {p_value_text(row.adjusted_p)}",
    )
    text = "<br>".join(html.escape(line, quote=False) for line in lines)
    return f"<b>{label(row.target, 60)}</b> · {flips_text(row.flips)}<br>{text}"
