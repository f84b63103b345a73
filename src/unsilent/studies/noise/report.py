"""The report of the noise study."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from unsilent.basics.interval import Interval
from unsilent.basics.interval import known_value as count
from unsilent.basics.strictjson import fields_by_name
from unsilent.report.estimates import Estimate, machine_table
from unsilent.report.model import Column, Plot, Report, Section, Table, TextCell
from unsilent.report.text import (
    count_text,
    duration_text,
    interval_text,
    listed,
    number_text,
    p_value_text,
)
from unsilent.sites.calls import OUTSIDE
from unsilent.statistics.groups import GroupSpread
from unsilent.statistics.replica_spread import FEW_REPLICAS, max_possible_sd
from unsilent.studies.noise.diverging_operation import DATA, DEALT, MOVED, PATH, RANDOM, START
from unsilent.studies.noise.plots import (
    GROUP_SIGNIFICANCE_LEVEL,
    has_identical_replicas,
    is_significant_spread,
    plots_by_place,
)
from unsilent.studies.noise.records import DivergingOperation, NoiseResult, SwitchEffect, VariantNoise
from unsilent.workloads.base import UNNAMED

GROUP_COUNTS = {
    "group_samples": "n", "group_error": "error", "group_by_size": "sd_by_size", "group_p": "p", "group_p_corrected": "corrected",
    "group_p_corrected_error": "p_standard_error", "group_draws": "draws",
}  # fmt: skip
"""Names of a group's measures without an interval -> their fields."""
UNIT_MOST = 2.0
"""Largest possible distance on the unit sphere."""
SCHEMA = "unsilent/noise/3"
LABELS = {
    "accuracy": "Accuracy of replicas by variant",
    "loss": "Loss of replicas by variant",
    "churn": "Churn of all pairs of replicas",
    "parting": "Standard deviation of the training loss by step",
    "groups": "Variation of each group's error compared with random groups of the same size",
}
"""Descriptions of the figures, in the order of the page."""
LEADS = {
    "Variants": "Each column is one variant: a set of switches (sources of variation between runs).",
    "Distributions": "Each mark is one replica. The vertical offset of a mark has no meaning; it keeps equal values apart.",
    "Churn": "Share of held-out samples for which two replicas make different predictions, for all pairs of replicas. Hover "
    "over a cell to see its pair.",
    "Where runs diverge": "Standard deviation of the training loss over replicas, at each step. Steps at which all replicas "
    "have the same loss are not drawn, because the axes are logarithmic.",
    "Groups of held-out samples": "The error of a small group varies more than that of a large group, simply because the "
    "group is small. Each group is therefore compared with random groups of the same size. A group on the dotted line varies "
    "as much as random groups. Filled marks and bold rows of the table vary significantly more (5 % level for all groups of a "
    "variant together, Holm's correction). “In common” is the part of a group's sd that would remain with unlimited samples.",
    "Each switch alone": "Runs with only this switch are compared bit for bit with the clean twin, the run without switches.",
}
"""Titles of sections -> their introductory texts on the page."""
METHOD = (
    "A replica is one complete training run, in a process with the settings that its switches need. Everything else is fixed: "
    "seeds, one thread, deterministic algorithms. Replicas with the same number have the same new seeds in all variants."
)
GROUPS_TITLE = (
    "sd of each group's error; by size: sd of random groups of this size; bold: significantly larger sd (5 %, Holm)"
)


def report(result: NoiseResult) -> Report:
    """The report on a result."""
    facts = {"command": result.command, "base seed": result.seed, "device": result.device, "store": result.store}
    facts |= {"training": result.training, **result.machine, **result.versions}
    return Report(
        schema=SCHEMA,
        report_type="The noise floor",
        title=f"Run-to-run variation of {training_name(result)}",
        headline=headline(result),
        estimates=machine_table(estimates(result), ("variant", "measure", "target", "")),
        numbers=tuple(_numbers(result)),
        findings=tuple(findings(result)),
        sections=tuple(_sections(result)),
        facts=tuple((term, str(text)) for term, text in facts.items() if text != ""),
        notes=tuple(noise_method_lines(result)),
        method=METHOD,
        further_json=fields_by_name(result),
    )


def estimates(result: NoiseResult) -> list[Estimate]:
    """All estimates and counts of every variant."""
    rows: list[Estimate] = []
    for variant in result.variants:
        for measure, target, value in _values(variant):
            keys = {"variant": variant.name, "measure": measure, "target": target}
            rows.append(Estimate(keys, value, "replica", further={"switches": variant.switches}))
    return rows


def _values(variant: VariantNoise) -> Iterator[tuple[str, str, Interval]]:
    """Name of the measure, group of samples and estimate, for every measure of a variant."""
    yield "distinct_states", "all", count(variant.distinct_final_states, variant.n)
    yield "accuracy_mean", "all", count(variant.accuracy.mean, variant.n)
    yield "accuracy_sd", "all", variant.accuracy.sd
    if variant.loss is not None:
        yield "loss_mean", "all", count(variant.loss.mean, variant.n)
        yield "loss_sd", "all", variant.loss.sd
    yield "churn", "all", variant.churn
    yield "churn_twin_least", "all", count(min(variant.twin_churn), variant.n)
    yield "churn_twin_most", "all", count(max(variant.twin_churn), variant.n)
    if variant.unit_sphere_distance is not None and variant.raw_weight_distance is not None:
        yield "distance_unit", "all", variant.unit_sphere_distance
        yield "distance_raw", "all", variant.raw_weight_distance
    yield "parting_step", "all", variant.median_divergence_step
    for group in variant.groups:
        yield "group_error_sd", group.name, group.sd
        yield "group_error_sd_common", group.name, group.common_sd
        for measure, field in GROUP_COUNTS.items():
            yield measure, group.name, count(getattr(group, field), variant.n)


def _numbers(result: NoiseResult) -> Iterator[tuple[str, str, str]]:
    replicas = sum(variant.n for variant in result.variants)
    yield "replicas", f"{replicas:,}", f"of {count_text(result.steps, 'step')} each"
    yield "parameters", f"{result.parameters:,}", ""
    yield "held-out samples", f"{result.samples:,}", ""


def _sections(result: NoiseResult) -> Iterator[Section]:
    """The sections that are not empty."""
    drawn = plots_by_place(result)
    plots = {name: Plot(name, label, drawn[name]) for name, label in LABELS.items() if name in drawn}
    yield Section("Variants", LEADS["Variants"], (_variants_table(result),))
    places = {"Distributions": ("accuracy", "loss"), "Churn": ("churn",), "Where runs diverge": ("parting",)}
    for title, names in places.items():
        if shown := tuple(plots[name] for name in names if name in plots):
            yield Section(title, LEADS[title], shown)
    if "groups" in plots:
        title = "Groups of held-out samples"
        yield Section(title, LEADS[title], (plots["groups"], _groups_table(result)))
    if result.effects:
        columns = (
            Column.text("switch"), Column.text("kind"),
            Column.text("changes bits", lambda e: effect_text(e.changes_bits)), Column.text("how", effect_explanation),
        )  # fmt: skip
        table = Table.of(result.effects, columns, "each switch alone", plain_line_format="switch {0}: {2}: {3}")
        yield Section("Each switch alone", LEADS["Each switch alone"], (table,))


def _variants_table(result: NoiseResult) -> Table:
    """The table of all measures, with one column per variant."""
    measures = {variant.name: _measures(variant) for variant in result.variants}
    names = dict.fromkeys(name for texts in measures.values() for name in texts)
    rows = [{"measure": name, **{variant: texts[name] for variant, texts in measures.items()}} for name in names]
    return Table.of(rows, (Column("measure"), *map(Column, measures)))


def _groups_table(result: NoiseResult) -> Table:
    columns = (
        Column.text("group", lambda row: row[1].name), Column.text("variant", lambda row: row[0].name),
        Column.count("samples", lambda row: row[1].n, 2), Column.percent("error", lambda row: row[1].error, 3, ".2f"),
        Column("sd", unit="points", of=lambda row: _spread_cell(row, row[1].sd)),
        Column("by size", "number", "points", 100, ".2f", of=lambda row: row[1].sd_by_size),
        Column("sd / by size", "number", digits=".2f", priority=1, of=lambda row: _ratio(row[1])),
        Column("in common", unit="points", priority=4, of=lambda row: _spread_cell(row, row[1].common_sd)),
        Column("p", "number", digits=p_value_text, priority=5, of=lambda row: row[1].p),
        Column("p, Holm", "number", digits=p_value_text, of=lambda row: row[1].corrected),
    )  # fmt: skip
    rows = [(variant, group) for variant in differing_variants(result) for group in variant.groups]
    return Table.of(
        rows, columns, GROUPS_TITLE, lambda row: is_significant_spread(row[1]), terminal_rows=24, sortable=True
    )


def _spread_cell(row: tuple[VariantNoise, GroupSpread], sd: Interval) -> TextCell:
    return TextCell(interval_text(sd, 100, max_possible_sd(row[0].n)), sd.estimate)


def _ratio(group: GroupSpread) -> float:
    return (group.sd.estimate or 0.0) / group.sd_by_size if group.sd_by_size else 0.0


def _measures(result: VariantNoise) -> dict[str, str]:
    """The cells of one variant in the table of variants, by row name."""
    same, loss, most = has_identical_replicas(result), result.loss, max_possible_sd(result.n)
    return {
        "replicas": f"{result.n}",
        "different final states": f"{result.distinct_final_states}",
        "accuracy %, mean": f"{100 * result.accuracy.mean:.2f}",
        "  sd, points": _interval_text(result.accuracy.sd, same, 100, most),
        "loss, mean": "–" if loss is None else number_text(loss.mean),
        "  sd": _interval_text(None if loss is None else loss.sd, same),
        "churn %": _interval_text(result.churn, same, 100, 1.0),
        "L2, unit sphere": _interval_text(result.unit_sphere_distance, same, most=UNIT_MOST),
        "L2, raw": _interval_text(result.raw_weight_distance, same),
        "diverges at step": divergence_step_text(result),
        "churn from the twin %": _range(result.twin_churn, 100),
    }


def divergence_step_text(result: VariantNoise) -> str:
    """The median and the range of the steps at which replicas diverge from the twin."""
    known = [step for step in result.divergence_steps if step is not None]
    if not known:
        return "never"
    middle = result.median_divergence_step.estimate or 0.0
    text = "never" if math.isinf(middle) else f"{middle:g}"
    ends = f"{min(known)}…{max(known)}" if len(known) == result.n else f"{min(known)}…never"
    return text if min(known) == max(known) and len(known) == result.n else f"{text} ({ends})"


def differing_variants(result: NoiseResult) -> list[VariantNoise]:
    """Variants whose replicas differ."""
    return [output for output in result.variants if not has_identical_replicas(output)]


def training_name(result: NoiseResult) -> str:
    """The name of the training; file and function if it has no name."""
    if result.workload != UNNAMED:
        return result.workload
    path, colon, function = str(result.spec.get("workload", UNNAMED)).rpartition(":")
    return PurePath(path).name + colon + function


def headline(result: NoiseResult) -> str:
    """The main finding in one sentence.

    The sentence is about the variant ALGO+IMPL if its replicas differ, otherwise about the last variant whose replicas differ.
    """
    noisy = differing_variants(result)
    if not noisy:
        return _same_bits(result)
    value = next((v for v in noisy if v.name == "ALGO+IMPL"), noisy[-1])
    churn, sd = interval_text(value.churn, 100, 1.0), interval_text(value.accuracy.sd, 100, max_possible_sd(value.n))
    return (
        f"Two runs of {training_name(result)} with the switches of {value.name} disagree, on average, on {churn} % of "
        f"{result.samples:,} predictions; the standard deviation of accuracy is {sd} points"
    )


def _same_bits(result: NoiseResult) -> str:
    """A sentence on whether variants differ from the clean twin, for the case that no variant varies."""
    others = [output.name for output in result.variants if any(step is not None for step in output.divergence_steps)]
    if not others:
        return "Runs with the same switches do not differ: their final states are bit-identical"
    named = " and ".join(part for part in (", ".join(others[:-1]), others[-1]) if part)
    return f"The replicas of each variant are bit-identical; replicas of {named} differ from the clean twin"


def findings(result: NoiseResult) -> Iterator[str]:
    """Further findings, one sentence each."""
    for output in result.variants:
        if output.is_deterministic:
            text = f"end in {count_text(output.distinct_final_states, 'different final state')}"
            if has_identical_replicas(output):
                text = "have bit-identical final states"
            yield f"{output.name}: {count_text(output.n, 'run')} {text}"
    for output in result.variants:
        if (first := output.diverging_operation) is not None:
            where = f"run {first.replica} first differs from the clean twin at step {first.step}"
            yield f"{output.name}: {where}: {diverging_operation_text(first)}"
    yield from (_parts(output) for output in differing_variants(result) if output.groups)
    for output in differing_variants(result):
        if unsure := [g.name for g in output.groups if g.is_near_level(GROUP_SIGNIFICANCE_LEVEL)]:
            why = f"p is within its Monte-Carlo error of {GROUP_SIGNIFICANCE_LEVEL}"
            yield f"{output.name}: significance is uncertain for {listed(unsure)}: {why}"
    if any(not output.is_deterministic and output.n < FEW_REPLICAS for output in result.variants):
        yield f"fewer than {FEW_REPLICAS} replicas: intervals are wide and may not cover rare runs that end differently"
    for output in result.variants:
        for note in output.notes:
            yield f"{output.name}: {note}"
    yield from result.notes


def _parts(result: VariantNoise) -> str:
    """A sentence on the groups of samples that vary more than random groups."""
    more = [g.name for g in result.groups if is_significant_spread(g)]
    said = f"{listed(more)} {'varies' if len(more) == 1 else 'vary'} more than random groups of the same size"
    if not more:
        said = "none is shown to vary more than random groups of the same size"
    whole = result.accuracy.sd.estimate
    most = max(result.groups, key=lambda g: g.sd.estimate or 0.0)
    text = f"{result.name}: of {count_text(len(result.groups), 'group')} of samples, {said}"
    if not whole or not most.sd.estimate:
        return text
    return (
        f"{text}; the largest raw sd, of {most.name}, is {most.sd.estimate / whole:.1f} times the sd of accuracy (for a random "
        f"group of the same size: {most.sd_by_size / whole:.1f} times)"
    )


def noise_method_lines(result: NoiseResult) -> list[str]:
    """Notes on the method, for display under the tables."""
    return [
        "sd: standard deviation over replicas (n - 1 in the denominator); churn (predictions that differ) and L2 (distance of "
        f"final weights): means over pairs of replicas; in brackets: {100 * result.confidence:g} % limits by the jackknife "
        "(those of an sd are at least as wide as for a normal sample); –: no limit",
        "diverges at step: first step, counted from 0, after which weights differ from those of the clean twin (median over "
        f"replicas); {count_text(result.steps, 'step')} per run",
        f"the smallest p value that a rank test against these replicas can give is {p_value_text(result.smallest_p)}",
        f"{duration_text(result.seconds)} in all sessions, {duration_text(result.cpu_seconds)} of CPU time",
    ]


def diverging_operation_text(result: DivergingOperation) -> str:
    """A clause on the operation at which runs diverge."""
    module = f"of {result.module}" if result.module not in ("", OUTSIDE) else ""
    where = " ".join(part for part in (result.phase, module) if part)
    what = f"{result.kernel} ({where})" if where else result.kernel
    texts = {
        MOVED: f"{what} takes different elements of the same tensor",
        START: "the weights already differ before this step",
        DATA: f"{what} receives different values",
        RANDOM: f"{what} draws different random numbers",
        DEALT: f"{what} assigns the same random numbers to different elements",
        PATH: f"a different operation runs: {what}",
    }
    return texts.get(result.kind, f"{what} returns different bits for the same inputs")


def effect_explanation(result: SwitchEffect) -> str:
    """A sentence on the effect of a switch, and on where it makes runs diverge."""
    first = result.diverging_operation
    where = "" if first is None else f", first at step {first.step}: {diverging_operation_text(first)}"
    return result.explanation + where


def effect_text(changes: bool | None) -> str:
    """The word for the effect of a switch."""
    return "not applicable" if changes is None else "yes" if changes else "no"


def _interval_text(interval: Interval | None, same: bool, scale: float = 1.0, most: float = math.inf) -> str:
    return "–" if interval is None else "0" if same else interval_text(interval, scale, most)


def _range(values: tuple[float, ...], scale: float) -> str:
    low, high = scale * min(values), scale * max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g}…{high:.3g}"
