"""The report of run-to-run variation: sentences, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from unsilent.interval import Interval
from unsilent.interval import counted as count
from unsilent.report.model import Cell, Column, Plot, Report, Row, Section, Shown, Table
from unsilent.report.text import amount, chance, clean, counted, limits, listed, seconds
from unsilent.sites.calls import OUTSIDE
from unsilent.statistics.replicas import FEW, greatest_sd
from unsilent.studies.noise.figures import CALLED, called, figures, identical
from unsilent.studies.noise.parting import DATA, DEALT, MOVED, PATH, RANDOM, START
from unsilent.studies.noise.records import Effect, FirstOperation, NoiseResult, VariantNoise

MEASURES = (
    "replicas",
    "different final states",
    "accuracy %, mean",
    "  sd, points",
    "loss, mean",
    "  sd",
    "churn %",
    "L2, unit sphere",
    "L2, raw",
    "parts at step",
    "churn from the twin %",
)
"""Rows of the table of variants."""
UNIT_MOST = 2.0
"""Greatest distance on the unit sphere."""
SCHEMA = "unsilent/noise/1"
LABELS = {
    "accuracy": "Accuracy of replicas by variant",
    "loss": "Loss of replicas by variant",
    "churn": "Churn of all pairs of replicas",
    "parting": "Spread of the training loss by step",
    "groups": "Spread of groups against what their size gives",
}
"""What each figure shows, in the order of the page."""
LEADS = {
    "Variants": "One column is one set of switches.",
    "Distributions": "One mark is one replica. Marks are set apart upwards and downwards only so that equal ones can be told "
    "apart.",
    "Churn": "Share of held-out samples on which two replicas give different answers, for all pairs. Point at a cell for its "
    "pair.",
    "Where runs part": "Standard deviation over replicas of the training loss at each step. A step at which all have the same "
    "loss has no point on these logarithmic axes.",
    "Parts of the data": "A small group varies more than a large one by itself, so the spread of each group is set against "
    "that of random groups of its size: on the dotted line there is nothing particular about it. Filled marks, and bold rows "
    "of the table, vary more than that (5 % for all groups of a variant together, Holm). “In common” is the part of a group's "
    "sd that would stay with unlimited samples.",
    "Each switch alone": "One run with the switch is compared with the clean twin, bit for bit.",
}
"""Titles of sections, and what the page says of each."""
METHOD = (
    "A replica is a whole training in a process with the settings that its switches need. What is not switched is held: seeds, "
    "one thread, deterministic algorithms. Replicas of the same number have the same fresh seeds in all variants."
)
GROUPS_TITLE = "sd of a group's error, and what a random group of its size has; bold: it varies more (5 %, Holm)"
GROUP_COLUMNS = (
    Column("group", left=True),
    Column("variant", left=True),
    Column("samples", "number", priority=2),
    Column("error", "number", unit="%", scale=100, digits=".2f", priority=3),
    Column("sd", "text", unit="points"),
    Column("by size", "number", unit="points", scale=100, digits=".2f"),
    Column("sd / by size", "number", digits=".2f", priority=1),
    Column("in common", "text", unit="points", priority=4),
    Column("p", "text", priority=5),
    Column("p, Holm", "text"),
)
NAMELESS = "custom"
"""The name that a training of the user's has where none was given."""


def report(result: NoiseResult) -> Report:
    """All that is shown of a result."""
    names = (
        "command",
        "spec",
        "seed",
        "seconds",
        "cpu_seconds",
        "store",
        "versions",
        "workload",
        "training",
        "steps",
        "samples",
    )
    data = {
        name: getattr(result, name)
        for name in (*names, "parameters", "device", "machine", "level", "smallest_p", "info")
    }
    data["variants"] = [_variant(one) for one in result.variants]
    data |= {
        "switches": result.effects,
        "churn_matrix": result.matrix,
        "loss_spread": result.curves,
        "notes": result.notes,
    }
    facts = {"command": result.command, "base seed": result.seed, "device": result.device, "store": result.store}
    facts |= {"training": result.training, **result.machine, **result.versions}
    return Report(
        schema=SCHEMA,
        kicker="The noise floor",
        title=f"Run-to-run variation of {training_name(result)}",
        headline=headline(result),
        estimates=estimates(result),
        numbers=tuple(_numbers(result)),
        findings=tuple(findings(result)),
        sections=tuple(_sections(result)),
        facts=tuple((term, str(text)) for term, text in facts.items() if text != ""),
        notes=tuple(how(result)),
        method=METHOD,
        data=data,
    )


def estimates(result: NoiseResult) -> Table:
    """One row for each estimate, and for each number that is counted."""
    names = ("variant", "measure", "target", "", "unit", "switches")
    columns = tuple(Column(name, "estimate" if not name else "text", priority=int(name in names[4:])) for name in names)
    rows = [
        Row((one.name, measure, target, value, "replica", one.switches))
        for one in result.variants
        for measure, target, value in _values(one)
    ]
    return Table(columns, tuple(rows))


def _values(one: VariantNoise) -> Iterator[tuple[str, str, Interval]]:
    """Measure, what it is of, and its estimate."""
    yield "distinct_states", "all", count(one.distinct, one.n)
    yield "accuracy_mean", "all", count(one.accuracy.mean, one.n)
    yield "accuracy_sd", "all", one.accuracy.sd
    if one.loss is not None:
        yield "loss_mean", "all", count(one.loss.mean, one.n)
        yield "loss_sd", "all", one.loss.sd
    yield "churn", "all", one.churn
    yield "churn_twin_least", "all", count(min(one.twin_churn), one.n)
    yield "churn_twin_most", "all", count(max(one.twin_churn), one.n)
    if one.unit is not None and one.raw is not None:
        yield "distance_unit", "all", one.unit
        yield "distance_raw", "all", one.raw
    yield "parting_step", "all", one.parting
    for group in one.groups:
        yield "group_samples", group.name, count(group.n, one.n)
        yield "group_error", group.name, count(group.error, one.n)
        yield "group_error_sd", group.name, group.sd
        yield "group_error_sd_common", group.name, group.common
        yield "group_by_size", group.name, count(group.by_size, one.n)
        yield "group_p", group.name, count(group.p, one.n)
        yield "group_p_corrected", group.name, count(group.corrected, one.n)
        yield "group_p_corrected_error", group.name, count(group.error_p, one.n)
        yield "group_draws", group.name, count(group.draws, one.n)


def _variant(one: VariantNoise) -> dict[str, Any]:
    """What JSON has of a variant besides its estimates."""
    names = (
        "name",
        "switches",
        "n",
        "fixed",
        "distinct",
        "partings",
        "accuracies",
        "losses",
        "twin_churn",
        "twin_unit",
    )
    result = {name: getattr(one, name) for name in (*names, "seconds", "notes")}
    result |= {"accuracy_mean": one.accuracy.mean, "loss_mean": None if one.loss is None else one.loss.mean}
    result["groups"] = [
        {"name": g.name, "samples": g.n, "error": g.error, "by_size": g.by_size, "p": g.p, "p_corrected": g.corrected}
        | {"p_corrected_error": g.error_p, "draws": g.draws}
        for g in one.groups
    ]
    return result | {"first": one.first}


def _numbers(result: NoiseResult) -> Iterator[tuple[str, str, str]]:
    yield "replicas", f"{sum(one.n for one in result.variants):,}", f"of {counted(result.steps, 'step')} each"
    for one in spreading(result)[:4]:
        yield f"churn, {one.name}", f"{100 * (one.churn.estimate or 0):.2g} %", ""
    yield "parameters", f"{result.parameters:,}", ""
    yield "held-out samples", f"{result.samples:,}", ""


def _sections(result: NoiseResult) -> Iterator[Section]:
    """Those that have something to show."""
    drawn = figures(result)
    plots = {name: Plot(name, label, drawn[name]) for name, label in LABELS.items() if name in drawn}
    yield Section("Variants", LEADS["Variants"], (_variants_table(result),))
    for title, named in (
        ("Distributions", ("accuracy", "loss")),
        ("Churn", ("churn",)),
        ("Where runs part", ("parting",)),
    ):
        if shown := tuple(plots[name] for name in named if name in plots):
            yield Section(title, LEADS[title], shown)
    if "groups" in plots:
        yield Section("Parts of the data", LEADS["Parts of the data"], (plots["groups"], _groups_table(result)))
    if result.effects:
        columns = ("switch", "kind", "changes bits", "how")
        rows = [Row((e.switch, e.kind, effect_text(e.changes), effect_how(e))) for e in result.effects]
        heads = tuple(Column(name, left=True) for name in columns)
        table = Table(heads, tuple(rows), "each switch alone", sentence="switch {0}: {2}: {3}")
        yield Section("Each switch alone", LEADS["Each switch alone"], (table,))


def _variants_table(result: NoiseResult) -> Table:
    """One column for each variant: what is measured in different units stands one under the other."""
    columns = [cells(output) for output in result.variants]
    rows = [Row((name, *(column[i] for column in columns))) for i, name in enumerate(MEASURES)]
    return Table((Column("measure"), *(Column(output.name) for output in result.variants)), tuple(rows))


def _groups_table(result: NoiseResult) -> Table:
    rows = []
    for one in spreading(result):
        most = greatest_sd(one.n)
        for g in one.groups:
            ratio = (g.sd.estimate or 0.0) / g.by_size if g.by_size else 0.0
            p = (Shown(chance(g.p), g.p), Shown(chance(g.corrected), g.corrected))
            more: tuple[Cell, ...] = (Shown(limits(g.sd, 100, most), g.sd.estimate), g.by_size, ratio)
            common = Shown(limits(g.common, 100, most), g.common.estimate)
            rows.append(Row((g.name, one.name, g.n, g.error, *more, common, *p), called(g)))
    return Table(GROUP_COLUMNS, tuple(rows), GROUPS_TITLE, terminal_rows=24, long=True)


def cells(result: VariantNoise) -> list[str]:
    """What the table says of one variant, by the order of `MEASURES`."""
    same = identical(result)
    loss = result.loss
    return [
        f"{result.n}",
        f"{result.distinct}",
        f"{100 * result.accuracy.mean:.2f}",
        "0" if same else limits(result.accuracy.sd, 100, greatest_sd(result.n)),
        "–" if loss is None else amount(loss.mean),
        "–" if loss is None else "0" if same else limits(loss.sd),
        "0" if same else limits(result.churn, 100, 1.0),
        _distance(result.unit, same, UNIT_MOST),
        _distance(result.raw, same),
        parting_text(result),
        _range(result.twin_churn, 100),
    ]


def parting_text(result: VariantNoise) -> str:
    """The median step at which replicas part from the twin, and the range."""
    known = [step for step in result.partings if step is not None]
    if not known:
        return "never"
    middle = result.parting.estimate or 0.0
    text = "never" if math.isinf(middle) else f"{middle:g}"
    ends = f"{min(known)}…{max(known)}" if len(known) == result.n else f"{min(known)}…never"
    return text if min(known) == max(known) and len(known) == result.n else f"{text} ({ends})"


def spreading(result: NoiseResult) -> list[VariantNoise]:
    """Variants whose replicas differ."""
    return [output for output in result.variants if not identical(output)]


def training_name(result: NoiseResult) -> str:
    """Of the training; of one without a name, file and function."""
    if result.workload != NAMELESS:
        return clean(result.workload)
    path, colon, function = str(result.spec.get("workload", NAMELESS)).rpartition(":")
    return clean(PurePath(path).name + colon + function)


def headline(result: NoiseResult) -> str:
    """The finding in one sentence: of the first variant that has both kinds of noise, else of the last that differs."""
    noisy = spreading(result)
    if not noisy:
        return _same_bits(result)
    value = next((v for v in noisy if v.name == "ALGO+IMPL"), noisy[-1])
    return (
        f"Two runs of {training_name(result)} with {clean(value.name)} disagree on {limits(value.churn, 100, 1.0)} % of "
        f"{result.samples:,} predictions, while accuracy has an sd of "
        f"{limits(value.accuracy.sd, 100, greatest_sd(value.n))} points"
    )


def _same_bits(result: NoiseResult) -> str:
    """Where no variant varies: whether each is the clean twin, too."""
    others = [clean(output.name) for output in result.variants if any(step is not None for step in output.partings)]
    if not others:
        return "Runs with the same switches do not differ: they end in the same bits"
    named = " and ".join(part for part in (", ".join(others[:-1]), others[-1]) if part)
    return f"Replicas of each variant end in the same bits; {named} in other bits than the clean twin"


def findings(result: NoiseResult) -> Iterator[str]:
    """What else is told in sentences."""
    for output in result.variants:
        if output.fixed:
            text = (
                "end in the same bits" if identical(output) else f"end in {counted(output.distinct, 'different state')}"
            )
            yield f"{clean(output.name)}: {counted(output.n, 'run')} {text}"
    for output in result.variants:
        if output.first is not None:
            first = f"{clean(output.first.replica)} parts first, at step {output.first.step}"
            yield f"{clean(output.name)}: {first}: {first_text(output.first)}"
    yield from (_parts(output) for output in spreading(result) if output.groups)
    for output in spreading(result):
        if unsure := [clean(g.name) for g in output.groups if g.unsure(CALLED)]:
            yield f"{clean(output.name)}: {listed(unsure)}: p = {CALLED} within its Monte-Carlo error"
    if any(not output.fixed and output.n < FEW for output in result.variants):
        yield f"fewer than {FEW} replicas: intervals are wide and may miss runs that end elsewhere"
    for output in result.variants:
        for note in output.notes:
            yield f"{clean(output.name)}: {clean(note)}"
    yield from map(clean, result.notes)


def _parts(result: VariantNoise) -> str:
    """Which groups vary more than others, and what is left of a large raw sd once size is counted."""
    more = [clean(g.name) for g in result.groups if called(g)]
    said = f"{listed(more)} {'varies' if len(more) == 1 else 'vary'} more than random groups of that size"
    if not more:
        said = "none varies more than random groups of its size"
    whole = result.accuracy.sd.estimate
    most = max(result.groups, key=lambda g: g.sd.estimate or 0.0)
    text = f"{clean(result.name)}: of {counted(len(result.groups), 'group')} {said}"
    if not whole or not most.sd.estimate:
        return text
    return (
        f"{text}; the largest raw sd, of {clean(most.name)}, is {most.sd.estimate / whole:.1f} times that of accuracy "
        f"(a random group of its size: {most.by_size / whole:.1f} times)"
    )


def how(result: NoiseResult) -> list[str]:
    """Lines under the tables."""
    return [
        "sd: over replicas (n - 1); churn and L2: mean over pairs; in brackets "
        f"{100 * result.confidence:g} % limits, from leaving out one replica at a time (for an sd at least those of a normal "
        "sample); – where nothing bounds it",
        f"parts at step: median over replicas, counted from 0, where weights differ from those of the clean twin; "
        f"{counted(result.steps, 'step')} a run",
        f"a rank test against these replicas can give p = {result.smallest_p:.2g} at the least",
        f"{seconds(result.seconds)} in all sessions, {seconds(result.cpu_seconds)} of CPU time",
    ]


def first_text(result: FirstOperation) -> str:
    """Where runs part, as one clause."""
    module = f"of {result.module}" if result.module not in ("", OUTSIDE) else ""
    where = " ".join(part for part in (result.phase, module) if part)
    what = clean(f"{result.kernel} ({where})" if where else result.kernel)
    texts = {
        MOVED: f"{what} takes other elements of the same tensor",
        START: "the weights that it starts from",
        DATA: f"{what} is given other values",
        RANDOM: f"{what} draws other numbers",
        DEALT: f"{what} deals the same random numbers to other elements",
        PATH: f"another operation runs, {what}",
    }
    return texts.get(result.kind, f"{what} returns different bits for the same values")


def effect_how(result: Effect) -> str:
    """What a switch does, and where runs part by it."""
    first = result.first
    return clean(result.how) + ("" if first is None else f", first at step {first.step}: {first_text(first)}")


def effect_text(changes: bool | None) -> str:
    """The word for what a switch does."""
    return "not here" if changes is None else "yes" if changes else "no"


def _distance(interval: Interval | None, same: bool, most: float = math.inf) -> str:
    return "–" if interval is None else "0" if same else limits(interval, most=most)


def _range(values: tuple[float, ...], scale: float) -> str:
    low, high = scale * min(values), scale * max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g}…{high:.3g}"
