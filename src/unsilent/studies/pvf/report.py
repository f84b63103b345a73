"""The report on a PVF campaign.

Rows with trials that are left out are counted or named. An estimate of zero is drawn as a point, marked as an upper limit.
Missing data are None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.report.bars import Bar, stacked_shares_figure
from unsilent.report.dots import (
    Dots,
    axis_bottom,
    dot_traces,
    hover_text,
    rate_hover_text,
    rates_figure,
    share_axis,
    shares_figure,
)
from unsilent.report.estimates import (
    FEW_TRIALS,
    NO_ESTIMATE_KEY,
    Estimate,
    has_few_trials,
    machine_table,
    share_cells,
)
from unsilent.report.heat import HeatMap, heat_figures
from unsilent.report.model import (
    Column,
    Heading,
    Part,
    Plot,
    Report,
    Section,
    Table,
    TableRow,
    TextBlock,
    TextCell,
    columns,
)
from unsilent.report.text import (
    count_text,
    flips_number_text,
    flips_text,
    number_text,
    percent_text,
    share_of_estimate_text,
)
from unsilent.report.theme import (
    MODEL_COLOUR,
    SERIES_COLOURS,
    Figure,
    figure,
    label,
    series_colour,
    series_marker,
)
from unsilent.studies.pvf import words
from unsilent.studies.pvf.analysis import FIT_REQUIREMENT, FitRow, check_rate, fit_rows, make_fit_row
from unsilent.studies.pvf.lost_scores import lost_cells, lost_columns
from unsilent.studies.pvf.memory_report import FIT_ESTIMATE_NAMES, memory_data, memory_estimates, memory_section
from unsilent.studies.pvf.records import (
    MOST_LAYERS_SHOWN,
    LookupRow,
    PvfCurves,
    PvfResult,
    PvfRow,
    at_level,
    components_with_own_layer,
    layer_rows,
    main_level,
    row_label,
    vulnerability_key,
)
from unsilent.studies.pvf.words import headline, meaning

SCHEMA = "unsilent/pvf/3"
MACHINE_NAMES = ("level", "target", "parent", "flips", "", "sdc", "due", "silent", "deciding")
FIT_NAMES = ("fit", "fit_low", "fit_high")
IN_TERMINAL = ("target", "flips", "{} %", "interval %", "n", "silent %", "due %")
SPEC = ("workload", "fault", "at", "per", "law", "unit", "judge", "confidence", "samples", "batches", "device", "dtype",
        "threads", "info")  # fmt: skip
TOP_LEVEL = ("command", "seed", "seconds", "cpu_seconds", "golden_seconds", "store", "campaign", "device", "versions",
             "trials_done", "trials_planned", "measure", "score_name", "golden_score", "notes")  # fmt: skip


def report_of_memory(result: PvfResult, fit_per_bit: float | None = None) -> Report:
    """The report on a result.

    Raises ``UsageError`` if a fault rate is given although values of a run were corrupted.
    """
    if fit_per_bit is not None:
        check_rate(fit_per_bit, result.transient)
    return report(result, fit_per_bit)


def report(result: PvfResult, fit_per_bit: float | None = None) -> Report:
    """The report on a result; ``fit_per_bit`` adds failures per 1e9 hours (FIT).

    Raises ``UsageError`` if it is not a valid rate.
    """
    fits = () if fit_per_bit is None else fit_rows(result, check_rate(fit_per_bit))
    rows, names = memory_estimates(result), FIT_ESTIMATE_NAMES
    if not result.memory_fit:
        rows, names = estimates(result, fit_per_bit if fits else None), (*MACHINE_NAMES, *(FIT_NAMES if fits else ()))
    return Report(
        schema=SCHEMA,
        report_type=f"{meaning(result)[:1].upper()}{meaning(result)[1:]}",
        title=f"{result.workload}: {meaning(result)}, {result.fault} at {result.at}",
        headline=" ".join(filter(None, (words.fit_headline(fits), headline(result)))),
        estimates=machine_table(rows, names),
        numbers=tuple(words.key_numbers(result)),
        findings=tuple(words.findings(result, fits)),
        sections=tuple(_sections(result, fit_per_bit, fits)),
        facts=tuple(words.facts(result)),
        notes=tuple(words.notes(result, fit_per_bit, fits)),
        next_commands=tuple(words.next_commands(result)),
        method="\n".join(words.method(result)),
        further_json=_data(result, fit_per_bit, fits),
    )


def estimates(result: PvfResult, fit_per_bit: float | None) -> Iterator[Estimate]:
    """The estimate and counts of every row, and the FIT of single flips if a fault rate is given."""
    for row in at_level(result.rows, "component", "model", "layer", "tensor", "bit"):
        keys = {"level": row.level, "target": row.target, "parent": row.parent, "flips": row.flips}
        further = {"sdc": row.sdc, "due": row.due, "silent": row.silent_share, "deciding": row.incorrect_trials}
        if fit_per_bit is not None:
            fit = make_fit_row(row, fit_per_bit) if row.flips == 1 else None
            limits = (fit.estimate, fit.low, fit.high) if fit else (None, None, None)
            further |= zip(FIT_NAMES, limits, strict=True)
        yield Estimate(keys, row.interval, further=further)


def _data(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> dict[str, Any]:
    """The JSON object of a result: its settings, and every row with its limits."""
    by_name: dict[str, Any] = {name: getattr(result, name) for name in TOP_LEVEL}
    came_to = {name: getattr(result, name) for name in SPEC}
    by_name["spec"] = came_to | {k: v for k, v in result.spec.items() if v is not None or k not in came_to}
    by_name |= {"headline": headline(result), "results": result.rows, "heat_maps": list(map(_heat, result.heat_maps))}
    common = {"confidence": result.confidence, "unit": result.unit}
    by_name["lookups"] = [{n: getattr(row, n) for n in row.__dataclass_fields__} | common for row in result.lookups]
    if fit_per_bit is not None:
        names = ("target", "level", "flips", "bits", "confidence", "n", "unit")
        fit_fields = ("unmasked_fit", "estimate", "low", "high")
        by_name["fit"] = [
            {n: getattr(f.row, n) for n in names}
            | {n: getattr(f, n) for n in fit_fields}
            | {"reason": f.reason or None}
            for f in fits
        ]
        by_name["fit_per_bit"] = fit_per_bit
    if result.memory_fit:
        by_name |= memory_data(result)
    return by_name


def _heat(heat_map: HeatMap) -> dict[str, Any]:
    fields = {name: getattr(heat_map, name) for name in ("dtype", "layers", "bits", "estimate", "n")}
    return fields | {"fields": [heat_map.fields.get(bit, "") for bit in heat_map.bits]}


# -- tables ------------------------------------------------------------------------------------------------------------


def _columns(result: PvfResult) -> tuple[Column, ...]:
    names = ("target", "level", "part of", "flips", f"{result.measure} %", "interval %", "n")
    counts = ("masked", "benign", "silent", "detectable", "silent %", "due %")
    priority = {"part of": 4, "silent %": 2, "due %": 3}
    return columns(*names, *counts, *lost_columns(result), left=("level", "part of"), priority=priority)


def _row(result: PvfResult, row: PvfRow, components: frozenset[str]) -> TableRow:
    """The cells of a table row, with a hint that is shown on hover."""
    unit = "batch" if row.unit == "batch" else "sample"
    due = "–"  # weighted like the estimate
    if row.estimate is not None and row.silent_share is not None:
        due = share_of_estimate_text(1 - row.silent_share, row.estimate, row.low, row.high)
    silent_key = NO_ESTIMATE_KEY if row.silent_share is None else row.silent_share
    silent = TextCell(percent_text(row.silent_share).removesuffix(" %"), silent_key)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in row.due_kinds.items() if count)
    hint = (
        f"{count_text(row.elements, 'element')}, {count_text(row.bits, 'bit')}, {count_text(row.units, unit)} judged, "
        f"{count_text(row.incorrect_trials, 'fault')} with an incorrect output; {row.method}{kinds and '; '}{kinds}"
    )
    flips = TextCell(flips_number_text(row.flips), float(row.flips or 0))
    names = (row_label(row, components), row.level, row.parent, flips)
    counts = (row.n, row.masked, row.benign, row.sdc, row.due)
    key = (row.estimate or 0.0) * (1 - (row.silent_share or 0.0))
    lost = lost_cells(result, row)
    return TableRow((*names, *share_cells(row), *counts, silent, TextCell(due, key), *lost), row.level == "model", hint)


def terminal_tables(
    columns: Sequence[Column],
    column_names: Sequence[str],
    main: Sequence[TableRow],
    more: Sequence[TableRow],
    title: str,
    main_title: str = "",
) -> Iterator[Table]:
    """The tables for a terminal, with selected columns: main rows, then layers."""
    for rows, names, head, most in (
        (main, column_names, main_title, len(main)),
        (more, [*column_names, "part of"], title, MOST_LAYERS_SHOWN),
    ):
        places = [i for i, column in enumerate(columns) if column.name in names]
        shown = tuple(TableRow(tuple(row.cells[i] for i in places), row.emphasised) for row in rows)
        if shown:
            heads = tuple(columns[i] for i in places)
            yield Table(heads, shown, head, terminal_rows=most, on_page=False)


def _terminal(result: PvfResult) -> Iterator[Table]:
    components = components_with_own_layer(result.rows)
    main = at_level(result.rows, "component", "model")
    more = layer_rows(
        result.rows,
        lambda row: tuple(-x for x in vulnerability_key(row)),
        lambda row: (row.estimate, row.n, row.elements),
    )
    few = sum(has_few_trials(row, row.n) for row in more)
    title = f"The {MOST_LAYERS_SHOWN} most vulnerable layers" if len(more) > MOST_LAYERS_SHOWN else "Layers"
    title += f"; {few} with fewer than {FEW_TRIALS} trials come last" if few else ""
    column_names = [name.format(result.measure) for name in IN_TERMINAL]
    rows = [[_row(result, row, components) for row in part] for part in (main, more)]
    main_title = result.measure_text if result.memories else ""
    yield from terminal_tables(_columns(result), column_names, rows[0], rows[1], title, main_title)


def _fit_table(fits: Sequence[FitRow], fit_per_bit: float) -> Table:
    most = max((f.high or 0.0 for f in fits), default=0.0) or 1.0
    rows = []
    for f in fits:
        value = TextCell(f.text.estimate, NO_ESTIMATE_KEY if f.estimate is None else f.estimate)
        limits = TextCell(f.reason or f.text.limits, f.high, bar=((f.low or 0.0) / most, (f.high or 0.0) / most))
        raw = TextCell(number_text(f.unmasked_fit), f.unmasked_fit)
        cells = (f.row.target, f.row.bits, raw, share_cells(f.row)[0], value, limits)
        rows.append(TableRow(cells, f.row.level == "model"))
    heads = columns("target", "bits", "raw FIT", "PVF %", "FIT", "interval", priority={"raw FIT": 1, "PVF %": 1})
    title = f"Failures per 1e9 hours at {fit_per_bit:g} per bit (FIT)"
    return Table(heads, tuple(rows), title)


def _lookup_table(result: PvfResult) -> Table:
    heads = ("rows", "number", "look-ups", "share of elements", f"{result.measure} %", "interval %", "n")
    rows = tuple(
        TableRow((r.lookup_class, r.rows, r.lookups, f"{100 * r.share_of_elements:.3g} %", *share_cells(r), r.n))
        for r in result.lookups
    )
    return Table(columns(*heads), rows, terminal_rows=0)


# -- sections ----------------------------------------------------------------------------------------------------------


def _sections(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> Iterator[Section]:
    measure, level = result.measure, main_level(result)
    lines = curves(result)
    plots: list[Part] = []
    if lines.series:
        plots = [Plot("curves", f"{measure} by {level}", curves_figure(lines, measure))]
    if result.memory_fit:
        yield memory_section(result)
    if result.nothing_reaches:
        return
    against = " against the number of flips" if len(lines.flips) > 1 else ""
    title = f"{result.measure_text} by {level}{against}"
    yield Section(title, words.curves_lead(result, lines), (*plots, *_terminal(result)))
    maps = heat_figures(result.heat_maps, measure)
    if maps:
        parts: list[Part] = []
        for number, (heat, plot) in enumerate(maps):
            parts += [Heading(heat.dtype, count_text(heat.total_trials, "trial"))] if len(maps) > 1 else []
            parts.append(Plot(f"heat-{number}", f"{measure} by layer and bit position, {heat.dtype}", plot))
        yield Section(f"{measure} by layer and bit position", words.heat_map_lead(result, len(maps)), tuple(parts))
    if splits := outcome_shares_by_row(result):
        units, left = words.units(result), split_rows(result)[1]
        plot = stacked_shares_figure(_bars(splits), f"share of {units}")
        parts = [Plot("outcomes", "Outcomes by target and number of flips", plot)]
        if dues := due_shares_by_row(result):
            plot = stacked_shares_figure(_bars(dues), f"share of incorrect {units}")
            parts.append(Heading("Silent and detectable wrong outputs"))
            parts.append(Plot("due", "Silent and detectable share of wrong outputs", plot))
        lead = words.OUTCOME_MEANINGS.format(measure)
        lead += f" The {BARS} most vulnerable rows are drawn; {left} more are in the table of all rows." if left else ""
        yield Section("How trials ended", lead, tuple(parts))
    if not result.transient:
        yield _fit_section(fit_per_bit, fits)
    if result.lookups:
        parts = [_lookup_table(result)]
        if any(row.estimate is not None for row in result.lookups):
            plot = lookup_figure(result.lookups, measure)
            parts.append(Plot("lookups", f"{measure} of hot and cold embedding rows", plot))
        yield Section("Hot and cold embedding rows", words.LOOKUPS, tuple(parts))
    components = components_with_own_layer(result.rows)
    rows = tuple(_row(result, row, components) for row in result.rows)
    table = Table(_columns(result), rows, terminal_rows=0, sortable=True)
    yield Section("All rows", words.all_rows_lead(result), (table,))


def _fit_section(fit_per_bit: float | None, fits: Sequence[FitRow]) -> Section:
    if fit_per_bit is None or not fits:
        why = (
            "give the raw fault rate of the memory with `--fit-per-bit RATE` (failures per 10⁹ hours and bit) to get "
            "raw FIT × bits × PVF for each target"
        )
        line = f"Not computed: {why if fit_per_bit is None else FIT_REQUIREMENT}."
        return Section("FIT estimate", "", (TextBlock(((None, line),)),))
    lead = (
        f"FIT is raw fault rate ({fit_per_bit:.3g} FIT per bit) × bits × PVF: the number of single-bit faults per 10⁹ hours that "
        "make an output wrong. The largest FIT comes first (targets without a wrong output are ranked by their upper limit). "
        "Limits come from the PVF; the raw rate is taken as exact. Bars show intervals. A target whose elements have several "
        "widths has no FIT, because PVF is uniform over elements and the raw rate is uniform over bits."
    )
    return Section("FIT estimate", lead, (*_fit_plot(fits), _fit_table(fits, fit_per_bit)))


def _fit_plot(fits: Sequence[FitRow]) -> Iterator[Plot]:
    """The plot of the targets with the largest FIT and of the model; none if no FIT is above 0."""
    known = [f for f in fits if f.estimate is not None and f.high]
    shown = [f for f in known if f.row.level != "model"][:BARS] + [f for f in known if f.row.level == "model"]
    if not shown:
        return
    names = [f.row.target for f in shown]
    rates = [f.interval for f in shown if f.interval is not None]
    hover = [rate_hover_text(rate, name, "FIT") for rate, name in zip(rates, names, strict=True)]
    colours = [MODEL_COLOUR if f.row.level == "model" else SERIES_COLOURS[0] for f in shown]
    places = [(float(place), rate, text) for place, (rate, text) in enumerate(zip(rates, hover, strict=True))]
    plot = rates_figure([Dots("", colours, "circle", places)], names, "FIT (failures in 10⁹ hours)")
    yield Plot("fit", "FIT by target", plot)


SERIES = 8
"""Most lines that can be distinguished in one figure."""
BARS = 40
"""Most bars in one figure."""


# -- against the number of flips ---------------------------------------------------------------------------------------


def curves(result: PvfResult) -> PvfCurves:
    """The rows of the most vulnerable targets and of the model, to be drawn as curves."""
    level = main_level(result)
    named = _series(at_level(result.rows, level)) if level != "model" else {}
    missing = sorted({row.target for row in at_level(result.rows, level) if row.estimate is None})
    ranked = sorted(named, key=lambda name: max(map(vulnerability_key, named[name])), reverse=True)[: SERIES - 1]
    series = {name: rows for name, rows in named.items() if name in ranked} | _series(at_level(result.rows, "model"))
    return PvfCurves(series, len(named) - len(ranked), tuple(missing))


def _series(rows: Sequence[PvfRow]) -> dict[str, list[PvfRow]]:
    by_name: dict[str, list[PvfRow]] = {}
    for row in rows:
        if row.estimate is not None:
            by_name.setdefault(row.target, []).append(row)
    return by_name


def curves_figure(lines: PvfCurves, measure: str) -> Figure:
    """Estimates against flips on two logarithmic axes; for one number of flips, a dot per target."""
    every = list(enumerate(lines.series.items()))
    looks = [_look(i, rows[0]) for i, (_, rows) in every]
    hover = [[hover_text(row, name, flips_text(row.flips), measure) for row in rows] for _, (name, rows) in every]
    flips = lines.flips
    if len(flips) < 2:
        dots = [
            Dots("", *looks[i], [(i, *pair) for pair in zip(rows, hover[i], strict=True)]) for i, (_, rows) in every
        ]
        return shares_figure(dots, list(lines.series), measure)
    bottom = axis_bottom([row for rows in lines.series.values() for row in rows])
    traces = []
    for i, (name, rows) in every:
        # Series are shifted slightly along x, so that their error bars do not overlap.
        shift = 1.035 ** (i - (len(every) - 1) / 2)
        pairs = zip(rows, hover[i], strict=True)
        places = [(row.flips * shift, row, text) for row, text in pairs if row.flips is not None]
        mine = dot_traces(Dots(label(name), *looks[i], places), bottom, "y")
        line = {"color": looks[i][0], "width": 2, **({"dash": "dash"} if rows[0].level == "model" else {})}
        mine[0] |= {"mode": "lines+markers", "line": line}
        traces += [{**trace, "legendgroup": str(i)} for trace in mine]
    ends = [math.log10(flips[0]) - 0.12, math.log10(flips[-1]) + 0.12]
    axis = {"type": "log", "range": ends, "tickvals": flips, "ticktext": [f"{f:,}" for f in flips]}
    title = {"title": {"text": "flipped bits per fault"}}
    return figure(traces, 440, xaxis=axis | title, yaxis=share_axis(bottom, measure))


def _look(index: int, row: PvfRow) -> tuple[str, str]:
    if row.level == "model":
        return MODEL_COLOUR, "circle-open"
    return series_colour(index), series_marker(index)


def lookup_figure(lookups: Sequence[LookupRow], measure: str) -> Figure:
    """The PVF of embedding rows by look-up class, with limits."""
    rows = [row for row in lookups if row.estimate is not None]
    places = [(float(i), row, hover_text(row, row.lookup_class, measure)) for i, row in enumerate(rows)]
    dots = Dots("", SERIES_COLOURS[0], "circle", places)
    return shares_figure([dots], [row.lookup_class for row in rows], measure)


# -- how trials ended --------------------------------------------------------------------------------------------------

Split = tuple[PvfRow, dict[str, float]]
"""A row and its units by outcome: shares weighted by the law, or counts."""


def split_rows(result: PvfResult) -> tuple[list[PvfRow], int]:
    """The most vulnerable rows, whose outcomes are drawn, and the number of other rows.

    The model is left out if its parts are shown, since its counts pool strata that were not sampled in proportion.
    """
    rows = [row for row in at_level(result.rows, main_level(result)) if row.units > 0]
    least = sorted(map(vulnerability_key, rows), reverse=True)[:BARS][-1:]
    shown = [row for row in rows if vulnerability_key(row) >= least[0]][:BARS]
    return shown, len(rows) - len(shown)


def outcome_shares_by_row(result: PvfResult) -> list[Split]:
    """Masked, benign, silent and detectable units of each drawn row."""
    output = []
    for row in split_rows(result)[0]:
        counts: Mapping[str, float] = row.outcome_mix or {"masked": row.masked, "benign": row.benign, "sdc": row.sdc}
        due = sum(row.outcome_mix[kind] for kind in row.due_kinds) if row.outcome_mix else row.due
        output.append((row, {kind: float(counts[kind]) for kind in ("masked", "benign", "sdc")} | {"due": float(due)}))
    return output


def due_shares_by_row(result: PvfResult) -> list[Split]:
    """Silent and detectable incorrect units of each drawn row, by kind of error."""
    rows = [row for row in split_rows(result)[0] if row.sdc + row.due > 0]
    kinds = ("sdc", *dict.fromkeys(kind for row in rows for kind in row.due_kinds))
    whole = [row.outcome_mix or {"sdc": row.sdc, **row.due_kinds} for row in rows]
    return [(row, {kind: float(of.get(kind, 0)) for kind in kinds}) for row, of in zip(rows, whole, strict=True)]


def _bars(splits: Sequence[Split]) -> list[Bar]:
    return [Bar(row.target, "" if row.flips is None else flips_text(row.flips), parts) for row, parts in splits]
