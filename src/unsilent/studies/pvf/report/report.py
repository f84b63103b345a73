"""The report of parameter vulnerability: sentences, tables and figures of a `PvfResult`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unsilent.interval import Interval
from unsilent.report.estimates import NOTHING, cells, share_cells
from unsilent.report.model import Cell, Column, Heading, Part, Plot, Report, Row, Section, Shown, Table, Text
from unsilent.report.text import amount, counted, flips_count, part, share
from unsilent.studies.pvf.records import HeatMap, PvfResult, PvfRow
from unsilent.studies.pvf.report import figures as drawing
from unsilent.studies.pvf.report import words
from unsilent.studies.pvf.report.fit import NEEDS, FitRow, check_rate, fit_of, fit_rows
from unsilent.studies.pvf.report.rows import TOP, at_level, itself, layers, main_level, name_of, rank
from unsilent.studies.pvf.report.sentences import headline, meaning

SCHEMA = "unsilent/pvf/1"
IN_TERMINAL = ("target", "flips", "{} %", "interval %", "n", "silent %", "due %")
SPEC = ("workload", "fault", "at", "per", "law", "unit", "judge", "confidence", "samples", "batches", "device", "dtype",
        "threads", "info")  # fmt: skip
TOP_LEVEL = ("command", "seed", "seconds", "cpu_seconds", "golden_seconds", "store", "campaign", "device", "versions",
             "trials_done", "trials_planned", "measure", "notes")  # fmt: skip


def report(result: PvfResult, fit_per_bit: float | None = None) -> Report:
    """All that is shown of a result; ``fit_per_bit`` adds failures in time, raises ``UsageError`` where it is no rate."""
    fits = () if fit_per_bit is None else fit_rows(result, check_rate(fit_per_bit))
    return Report(
        schema=SCHEMA,
        kicker=f"{meaning(result)[:1].upper()}{meaning(result)[1:]}",
        title=f"{result.workload}: {meaning(result)}, {result.fault} at {result.at}",
        headline=headline(result),
        estimates=estimates(result, fit_per_bit if fits else None),
        numbers=tuple(words.numbers(result)),
        findings=tuple(words.findings(result, fits)),
        sections=tuple(_sections(result, fit_per_bit, fits)),
        facts=tuple(words.facts(result)),
        notes=tuple(words.notes(result, fit_per_bit, fits)),
        method="\n".join(words.method(result)),
        data=_data(result, fit_per_bit, fits),
    )


def estimates(result: PvfResult, fit_per_bit: float | None) -> Table:
    """One row for each estimate; with a rate, FIT of single flips behind it."""
    names = ["level", "target", "parent", "flips", "", "sdc", "due", "silent", "deciding"]
    names += [] if fit_per_bit is None else ["fit", "fit_low", "fit_high"]
    rows = []
    order = at_level(result.rows, "component", "model", "layer", "tensor", "bit")
    for row in order:
        estimate = Interval(row.estimate, row.low, row.high, row.confidence, row.n, row.method)
        told: list[Cell] = [row.level, row.target, row.parent, row.flips, estimate, row.sdc, row.due, row.silent_share]
        found = None if fit_per_bit is None or row.flips != 1 else fit_of(row, fit_per_bit)
        fit = (None,) * 3 if found is None else (found.estimate, found.low, found.high)
        rows.append(Row((*told, row.incorrect_trials, *fit[: len(names) - 9])))
    return Table(tuple(Column(name, "text" if name else "estimate") for name in names), tuple(rows))


def _data(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> dict[str, Any]:
    """The JSON object: all that was asked (where nothing was said, what it came to), every row with its limits."""
    found: dict[str, Any] = {name: getattr(result, name) for name in TOP_LEVEL}
    came_to = {name: getattr(result, name) for name in SPEC}
    found["spec"] = came_to | {k: v for k, v in result.spec.items() if v is not None or k not in came_to}
    found |= {"headline": headline(result), "results": result.rows, "heat_maps": list(map(_heat, result.heat_maps))}
    common = {"confidence": result.confidence, "unit": result.unit}
    found["lookups"] = [{n: getattr(row, n) for n in row.__dataclass_fields__} | common for row in result.lookups]
    if fit_per_bit is not None:
        names = ("target", "level", "flips", "bits", "confidence", "n", "unit")
        own = ("raw", "estimate", "low", "high")
        found["fit"] = [
            {n: getattr(f.row, n) for n in names} | {n: getattr(f, n) for n in own} | {"reason": f.reason or None}
            for f in fits
        ]
        found["fit_per_bit"] = fit_per_bit
    return found


def _heat(found: HeatMap) -> dict[str, Any]:
    fields = {name: getattr(found, name) for name in ("dtype", "layers", "bits", "estimate", "n")}
    return fields | {"fields": [found.fields.get(bit, "") for bit in found.bits]}


# -- tables ------------------------------------------------------------------------------------------------------------


def _columns(measure: str) -> tuple[Column, ...]:
    texts = (Column("target"), Column("level", left=True), Column("part of", left=True, priority=4), Column("flips"))
    counts = (Column(name, "number") for name in ("n", "masked", "benign", "silent", "detectable"))
    shares = (Column("silent %", priority=2), Column("due %", priority=3))
    return (*texts, Column(f"{measure} %"), Column("interval %"), *counts, *shares)


def _row(row: PvfRow, own: frozenset[str]) -> Row:
    """All cells of a row; what is rarely needed is shown when it is pointed at."""
    unit = "batch" if row.unit == "batch" else "sample"
    due = "–"  # weighted like the estimate
    if row.estimate is not None and row.silent_share is not None:
        due = part(1 - row.silent_share, row.estimate, row.low, row.high)
    silent = Shown(
        share(row.silent_share).removesuffix(" %"), NOTHING if row.silent_share is None else row.silent_share
    )
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in row.due_kinds.items() if count)
    hint = (
        f"{counted(row.elements, 'element')}, {counted(row.bits, 'bit')}, {counted(row.units, unit)} judged, "
        f"{counted(row.incorrect_trials, 'fault')} with an incorrect output; {row.method}{kinds and '; '}{kinds}"
    )
    names = (name_of(row, own), row.level, row.parent, Shown(flips_count(row.flips), float(row.flips or 0)))
    counts = (row.n, row.masked, row.benign, row.sdc, row.due)
    key = (row.estimate or 0.0) * (1 - (row.silent_share or 0.0))
    return Row((*names, *share_cells(row), *counts, silent, Shown(due, key)), row.level == "model", hint)


def terminal_tables(
    columns: Sequence[Column], kept: Sequence[str], main: Sequence[Row], more: Sequence[Row], title: str
) -> Iterator[Table]:
    """Some columns of the table of all rows, for terminals: the main rows, then layers with what they are part of."""
    for rows, names, head in ((main, kept, ""), (more, [*kept, "part of"], title)):
        places = [i for i, column in enumerate(columns) if column.name in names]
        shown = tuple(Row(tuple(row.cells[i] for i in places), row.strong) for row in rows)
        if shown:
            heads = tuple(columns[i] for i in places)
            yield Table(heads, shown, head, terminal_rows=TOP if head else len(shown), on_page=False)


def _terminal(result: PvfResult) -> Iterator[Table]:
    own = itself(result.rows)
    main = at_level(result.rows, "component", "model")
    more = layers(
        result.rows, lambda row: tuple(-x for x in rank(row)), lambda row: (row.estimate, row.n, row.elements)
    )
    title = f"The {TOP} most vulnerable layers" if len(more) > TOP else "Layers"
    kept = [name.format(result.measure) for name in IN_TERMINAL]
    rows = [[_row(row, own) for row in part] for part in (main, more)]
    yield from terminal_tables(_columns(result.measure), kept, rows[0], rows[1], title)


def _fit_table(fits: Sequence[FitRow], fit_per_bit: float) -> Table:
    most = max((f.high or 0.0 for f in fits), default=0.0) or 1.0
    rows = []
    for f in fits:
        value, limits = cells(f.text, f.row)
        limits = Shown(f.reason or limits.text, f.high, bar=((f.low or 0.0) / most, (f.high or 0.0) / most))
        raw = Shown(amount(f.raw), f.raw)
        rows.append(Row((f.row.target, f.row.bits, raw, share_cells(f.row)[0], value, limits), f.row.level == "model"))
    heads = (Column("target"), Column("bits", "number"), Column("raw FIT", priority=1), Column("PVF %", priority=1))
    title = f"Failures per 1e9 hours at {fit_per_bit:g} per bit (FIT)"
    return Table((*heads, Column("FIT"), Column("interval")), tuple(rows), title)


def _lookup_table(result: PvfResult) -> Table:
    heads = ("rows", "number", "look-ups", "share of elements", f"{result.measure} %", "interval %", "n")
    rows = tuple(
        Row((r.heat, r.rows, r.lookups, f"{100 * r.share_of_elements:.3g} %", *share_cells(r), r.n))
        for r in result.lookups
    )
    return Table(tuple(map(Column, heads)), rows, terminal_rows=0)


# -- sections ----------------------------------------------------------------------------------------------------------


def _sections(result: PvfResult, fit_per_bit: float | None, fits: Sequence[FitRow]) -> Iterator[Section]:
    measure, level = result.measure, main_level(result)
    lines = drawing.curves(result)
    plots: list[Part] = []
    if lines.series:
        plots = [Plot("curves", f"{measure} by {level}", drawing.curves_figure(lines, measure))]
    against = " against the number of flips" if len(lines.flips) > 1 else ""
    yield Section(f"{measure} by {level}{against}", words.curves_lead(result, lines), (*plots, *_terminal(result)))
    maps = drawing.heat_figures(result)
    if maps:
        parts: list[Part] = []
        for number, (heat, figure) in enumerate(maps):
            parts += [Heading(heat.dtype, counted(heat.trials, "trial"))] if len(maps) > 1 else []
            parts.append(Plot(f"heat-{number}", f"{measure} by layer and bit position, {heat.dtype}", figure))
        yield Section(f"{measure} by layer and bit position", words.heat_lead(result, len(maps)), tuple(parts))
    if splits := drawing.outcome_split(result):
        units, left = words.units(result), drawing.split_rows(result)[1]
        figure = drawing.split_figure(splits, f"share of {units}")
        parts = [Plot("outcomes", "Outcomes by target and number of flips", figure)]
        if dues := drawing.due_split(result):
            figure = drawing.split_figure(dues, f"share of incorrect {units}")
            parts.append(Heading("Of the wrong outputs: silent or detectable, and how"))
            parts.append(Plot("due", "Silent and detectable share of wrong outputs", figure))
        lead = words.ENDED.format(measure)
        lead += (
            f" The {drawing.BARS} most vulnerable rows are drawn; {left} more are in the table of all rows."
            if left
            else ""
        )
        yield Section("How trials ended", lead, tuple(parts))
    if not result.transient:
        yield _fit_section(fit_per_bit, fits)
    if result.lookups:
        parts = [_lookup_table(result)]
        if any(row.estimate is not None for row in result.lookups):
            figure = drawing.lookup_figure(result.lookups, measure)
            parts.append(Plot("lookups", f"{measure} of hot and cold embedding rows", figure))
        yield Section("Hot and cold embedding rows", words.LOOKUPS, tuple(parts))
    own = itself(result.rows)
    rows = tuple(_row(row, own) for row in result.rows)
    yield Section("All rows", words.all_lead(result), (Table(_columns(measure), rows, terminal_rows=0, long=True),))


def _fit_section(fit_per_bit: float | None, fits: Sequence[FitRow]) -> Section:
    if fit_per_bit is None or not fits:
        why = (
            "give the raw fault rate of the memory with `--fit-per-bit RATE` (failures per 10⁹ hours and bit) to get "
            "raw FIT × bits × PVF for each target"
        )
        return Section(
            "FIT estimate", "", (Text(((None, f"Not computed: {why if fit_per_bit is None else NEEDS}."),)),)
        )
    lead = (
        f"Raw rate ({fit_per_bit:.3g} FIT per bit) × bits × PVF: the rate, per 10⁹ hours, of single-bit faults after which an "
        "output would be wrong, largest first (by upper limit where nothing went wrong). Limits are those of the PVF; the raw "
        "rate is taken as exact; bars are intervals. No FIT is given where the elements of a target have several "
        "widths: PVF is uniform over elements, the raw rate over bits."
    )
    return Section("FIT estimate", lead, (_fit_table(fits, fit_per_bit),))
