"""The report of faulty training runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.basics.interval import Interval
from unsilent.basics.interval import known_value as certain
from unsilent.basics.strictjson import fields_by_name
from unsilent.report.estimates import FEW_TRIALS, Estimate, machine_table
from unsilent.report.model import (
    Column,
    Getter,
    Heading,
    Mark,
    Part,
    Plot,
    Report,
    Section,
    SideBySide,
    Table,
    TableRow,
    TextBlock,
    TextCell,
)
from unsilent.report.text import count_text, estimate_text, number_text, short
from unsilent.studies.training.necessary_conditions import MOST, conditions_figure, points_to_plot
from unsilent.studies.training.plots import (
    GOLDEN,
    ROWS,
    classes_figure,
    curve_figures,
    example_line_style,
    group_figures,
    guard_figure,
    outcome_style,
    training_pvf_figure,
)
from unsilent.studies.training.records import (
    ClassShare,
    ConditionPoint,
    ExampleCurve,
    GuardDetection,
    TrainingResult,
    TrialGroup,
)
from unsilent.studies.training.sentences import (
    FACTOR,
    KINDS,
    classes_with_trials,
    convergence_limits_of,
    findings,
    headline,
    most_vulnerable_first,
    ordered_groups,
    outcome_text,
    pvf_text,
    thresholds,
    training_method_lines,
    worst_first,
)
from unsilent.studies.training.spec import HISTORY_KINDS

SCHEMA = "unsilent/training/3"
GROUPS = 16
"""Maximum number of rows of a terminal table of groups or targets; JSON and the page have all rows."""
EXAMPLE = 28
"""Maximum number of characters for the name of a trial in a table."""
SHAPES = {
    "circle-open": "○", "circle": "●", "triangle-up": "▲", "triangle-down": "▼", "square": "■", "diamond": "◆",
    "pentagon": "⬟", "star": "★", "cross": "✚", "x": "✖",
}  # fmt: skip
"""Plotly's markers as text."""
COUNTS = (
    "true_positives", "false_negatives", "false_positives", "true_negatives", "visible_harm_with", "visible_harm_without",
)  # fmt: skip
METHOD = (
    "The names of the classes and the threshold of 2 % for masked come from the artifact of He et al., Understanding and "
    "Mitigating Hardware Failures in Deep Learning Training Systems, ISCA 2023 (DOI 10.1145/3579371.3589105)."
)
CONDITIONS = (
    "Large values before latent harm (silent degradation). A value is large if, within two steps of the fault, it exceeds factor "
    "x the largest value of the golden run. hit: latent harm after a large value; missed: latent harm without one; false, clear: "
    "no harm, with and without a large value; loud, not: harm with an error, with and without one. "
    "different: sensitivity for trials that end in latent harm if judged by implementation noise alone"
)
TRIALS = Column.count("trials", "n")
CONDITION_COLUMNS = (
    Column("kind of value", of=lambda row: KINDS.get(row.kind, row.kind)), Column("factor", "number", digits=",.0f"),
    Column.count("hit", "true_positives"), Column.count("missed", "false_negatives"),
    Column.count("false", "false_positives", 1), Column.count("clear", "true_negatives", 1),
    Column.count("loud", "visible_harm_with", 3), Column.count("not", "visible_harm_without", 3),
    Column.share("sensitivity"), Column.share("specificity"), Column.share("different", priority=2),
)  # fmt: skip
PART_COLUMNS = (
    Column("target", of=lambda row: row.part or row.target), Column.text("memory", "memory_kind"), Column.count("elements"),
    TRIALS, Column.count("failed", "failures"), Column.share("PVF", "pvf"), Column.share("different"),
)  # fmt: skip
UNDER_GUARD = (
    "caught: alarm within two steps of the fault; rows with a size: harmful faults by the largest value written, as a multiple "
    "of the largest value in the tensor before the fault"
)


def report(result: TrainingResult) -> Report:
    """The report on a result."""
    limits = ", ".join(f"{name} {value}" for name, value, _, _ in thresholds(result))
    return Report(
        schema=SCHEMA,
        report_type="Faults in training",
        title=f"Faulty training runs of {result.workload}",
        headline=headline(result),
        estimates=machine_table(estimates(result), ("group", "target", "measure", "")),
        numbers=tuple(key_numbers(result)),
        findings=tuple(findings(result)),
        sections=tuple(section for section in _sections(result) if section.parts),
        facts=tuple(facts(result)),
        notes=(*training_method_lines(result), f"thresholds: {limits}"),
        method=METHOD,
        further_json=_data(result),
    )


# -- numbers for machines -----------------------------------------------------------------------------------------------


def estimates(result: TrainingResult) -> Iterator[Estimate]:
    """All estimates and counts of a result."""

    def of(group: str, target: str, measure: str, value: Interval, **further: str | int) -> Estimate:
        return Estimate({"group": group, "target": target, "measure": measure}, value, "trial", further=further)

    for row in result.classes:
        yield of("class", row.name, "share", row.share)
    every = [("all", result.all_trials), *((kind, group) for kind, groups in result.groups.items() for group in groups)]
    for kind, group in every:
        for measure in ("different", "harmful", "latent"):
            yield of(kind, group.name, measure, getattr(group, measure))
        for name, number in group.counts.items():
            yield of(kind, group.name, f"{name}_trials", certain(number, group.n))
    for contrast in result.contrasts:
        gap = f"{contrast.first} - {contrast.second}"
        yield of("contrast", contrast.first, contrast.name, contrast.one)
        yield of("contrast", contrast.second, contrast.name, contrast.other)
        yield of("contrast", gap, contrast.name, contrast.difference)
    for c in result.conditions:
        name = f"{c.kind} above {c.factor:g}"
        yield of("condition", name, "sensitivity", c.sensitivity)
        yield of("condition", name, "specificity", c.specificity)
        yield of("condition", name, "sensitivity_different", c.different)
        counted_of = c.true_positives + c.false_negatives + c.false_positives + c.true_negatives
        for count in COUNTS:
            yield of("condition", name, f"{count}_trials", certain(getattr(c, count), counted_of))
    for part in result.parts:
        yield of(
            "target", part.target, "training_pvf", part.pvf,
            memory_kind=part.memory_kind, part=part.part, elements=part.elements, failures=part.failures,
        )  # fmt: skip
        yield of("target", part.target, "training_pvf_different", part.different)
    for kind, caught in _caught(result):
        yield of(
            kind, caught.name, "caught", caught.share,
            caught=caught.detected_in_time, identical=caught.recovered_identical,
        )  # fmt: skip
    for name in ("steps", "steps_without_early_end", "seconds", "per_hour"):
        yield of("cost", "all", name, certain(getattr(result.cost, name), result.n))


def _caught(result: TrainingResult) -> Sequence[tuple[str, GuardDetection]]:
    guard = result.guard
    if guard is None:
        return ()
    every = [("guard", detection) for detection in (guard.different, guard.all_harmful, guard.large_harmful)]
    return [
        *every,
        *(("guard size", detection) for detection in guard.sizes),
        *(("guard group", detection) for detection in guard.groups),
    ]


def _data(result: TrainingResult) -> dict[str, Any]:
    """The values in the JSON output besides the estimates."""
    further = fields_by_name(
        result, "classes", "all_trials", "contrasts", "parts", "golden_losses", "flip_flops", "points"
    )
    further["least_accuracy"], further["least_accuracy_different"] = convergence_limits_of(result)
    further["classes"] = {row.name: row.n for row in result.classes}
    further["different"] = {row.name: row.different for row in result.classes}
    return {**further, "points": [_point(point) for point in result.points]}


def _point(point: ConditionPoint) -> dict[str, Any]:
    """The ratios of a point by kind, as JSON values; ``not_finite`` lists the kinds that are not finite."""
    ratios = dict(zip(HISTORY_KINDS, point.ratios, strict=False))
    lost = [kind for kind, ratio in ratios.items() if ratio is not None and not math.isfinite(ratio)]
    return {"trial": point.trial, "class": point.outcome, "ratios": ratios, "not_finite": lost}


# -- what is shown ------------------------------------------------------------------------------------------------------


def key_numbers(result: TrainingResult) -> Iterator[tuple[str, str, str]]:
    """Key numbers for the head of the page: term, value and small text."""
    yield "faulty training runs", f"{result.n:,}", f"of {count_text(result.steps, 'step')} each"
    whole = result.all_trials
    shares = [("different", whole.different), ("harmful", whole.harmful), ("latent", whole.latent)]
    if result.parts:
        yield "targets", f"{len(result.parts):,}", ""
        worst = max((part.pvf for part in result.parts), key=lambda share: (share.estimate or 0.0, share.low))
        shares = [("largest training PVF", worst)]
    for term, share in shares:
        text = estimate_text(share)
        yield term, f"{text.estimate} %", text.limits if share.estimate else ""
    yield "fault-free accuracy", f"{100 * result.golden_test:.2f} %", f"of {result.samples:,} samples"
    yield "cost of a trial", f"{100 * result.cost.steps:.0f} %", "of a run's steps"


def _sections(result: TrainingResult) -> Iterator[Section]:
    if result.parts:
        plot = Plot("parts", "Training PVF of each target", training_pvf_figure(result.parts))
        text = pvf_text(result)
        yield Section("Training PVF", f"{text[0].upper()}{text[1:]}.", (plot, _parts_table(result)))
    plot = Plot("classes", "Share of each class of outcomes", classes_figure(result))
    yield Section(
        "How trainings ended",
        "Each trial is one training with one fault, compared with its fault-free twin (golden). Bars are confidence limits of "
        "the share. A hollow triangle is the upper limit for a class that did not occur. The column “different” counts trials "
        "that differ by more than implementation noise; such trials in a masked class are still within the noise of seeds.",
        (plot, _classes_table(result)),
    )
    yield _harm(result)
    if result.flip_flops:
        yield _failure_rates(result)
    yield Section("Which values precede harm", _values_before_harm(result), tuple(_conditions(result)))
    yield Section(
        "Under the guard",
        "Every trial that ended different from the fault-free run was repeated under the guard. The size of a harmful fault is "
        "the largest value written, as a multiple of the largest value in the corrupted tensor before the fault.",
        tuple(_guard_parts(result)),
    )
    yield _examples(result)
    columns = map(Column.text, ("threshold", "value", "what it is", "source of the default"))
    yield Section("Thresholds", "", (Table(tuple(columns), tuple(map(TableRow, thresholds(result))), terminal_rows=0),))


def _classes_table(result: TrainingResult) -> Table:
    def name(row: ClassShare) -> TextCell:
        colour, symbol = outcome_style(row.name)
        return TextCell(row.name, mark=(colour, SHAPES[symbol]))

    examples = {curve.outcome: curve.trial for curve in reversed(result.curves)}
    columns = (
        Column("class", of=name), TRIALS, Column.count("different"), Column.share("share"),
        Column.text("example", lambda row: short(examples.get(row.name, ""), EXAMPLE), 1),
        Column.text("what it is", lambda row: outcome_text(row.name, result)),
    )  # fmt: skip
    return Table.of(result.classes, columns)


def _harm(result: TrainingResult) -> Section:
    """The section with a figure and a table for each grouping of the trials."""
    parts: list[Part] = []
    for number, (kind, figure) in enumerate(group_figures(result).items()):
        parts += [Heading(f"by {kind}"), Plot(f"group-{number}", f"Harmful share by {kind}", figure)]
        parts.append(_groups_table(kind, ordered_groups(result)[kind]))
    many = any(len(groups) > ROWS for groups in result.groups.values())
    lead = (
        "Shares of trials that are different, harmful and latent, with confidence limits. A hollow triangle is the upper limit "
        "of a share of 0."
    )
    if many:
        lead += f" Of more than {ROWS} groups, only the {ROWS} most harmful are drawn; the table has all."
    return Section("Where faults do harm", lead, tuple(parts))


def _failure_rates(result: TrainingResult) -> Section:
    """The section on the failure rates of an accelerator's flip-flops."""
    lead = (
        "Failures in 1e9 hours of use. The raw FIT of a group is that of the description, for the flip-flops in use; it is "
        "taken as exact. The other columns are raw FIT x the share of this campaign's trials that ended different, or "
        "harmful: the probability of not being masked is measured here."
    )
    columns = (
        Column("flip-flops", of="name"), TRIALS, Column("raw FIT", "number", digits=number_text, of="raw"),
        Column("FIT, different", "estimate", of="different"), Column("FIT, harmful", "estimate", of="harmful"),
    )  # fmt: skip
    return Section("Failure rates (FIT)", lead, (Table.of(result.flip_flops, columns),))


def _groups_table(kind: str, groups: list[TrialGroup]) -> Table:
    """The table of the shares of the groups, and of their trials by class."""
    classes = classes_with_trials(sum((Counter(group.counts) for group in groups), Counter()))
    columns = (
        Column(kind, of="name"), TRIALS, *map(Column.share, ("different", "harmful", "latent")),
        *(Column.count(name, _trials_of(name), 1 + number) for number, name in enumerate(reversed(classes))),
    )  # fmt: skip
    shown = groups if len(groups) <= GROUPS else worst_first(groups)
    return Table.of(shown, columns, terminal_rows=GROUPS, more_rows_text=CUT.format("harmful"), sortable=True)


def _trials_of(outcome: str) -> Getter:
    return lambda group: group.counts.get(outcome, 0)


CUT = f"the {{{{shown}}}} most {{}} (rows of fewer than {FEW_TRIALS} trials come last), and {{{{left:,}}}} more in the report"


def _values_before_harm(result: TrainingResult) -> str:
    left_out = len(points_to_plot(result.points)) < len(result.points)
    return (
        "One mark is one trial. The axes show the largest value within two steps of the fault in the optimizer's gradient "
        "history (first and second moments, momentum) and in the moving statistics of normalisation layers, as multiples "
        f"of the largest value in the golden run. Dashed lines mark {FACTOR:g} times. Values that are not finite are at "
        "the upper edge, values that are zero or missing at the lower edge."
        + (f" At most {MOST} of the masked trials are drawn." if left_out else "")
    )


def _conditions(result: TrainingResult) -> Iterator[Part]:
    figure = conditions_figure(result.points)
    if figure is not None:
        yield Plot("conditions", "Largest values after the fault, by outcome", figure)
    if result.conditions:
        yield Table.of(result.conditions, CONDITION_COLUMNS, CONDITIONS)


def _parts_table(result: TrainingResult) -> Table:
    parts = list(result.parts)
    if len(parts) > GROUPS:
        parts = most_vulnerable_first(parts)
    title = "Training PVF: share of trials that failed to converge; different: the same, judged by implementation noise alone"
    more = CUT.format("vulnerable")
    return Table.of(parts, PART_COLUMNS, title, terminal_rows=GROUPS, more_rows_text=more, sortable=True)


def _guard_parts(result: TrainingResult) -> Iterator[Part]:
    guard = result.guard
    if guard is None:
        return
    if any(row.n for row in guard.sizes):
        yield Plot("guard", "Share of harmful faults that the guard caught, by size", guard_figure(guard.sizes))
    columns = (
        Column("faults", of=lambda row: f"size {row[1].name}" if row[0] == "guard size" else row[1].name),
        Column.count("n", lambda row: row[1].n), Column.count("caught", lambda row: row[1].detected_in_time),
        Column.share("share", lambda row: row[1].share),
        Column.count("bit-identical", lambda row: row[1].recovered_identical),
    )  # fmt: skip
    yield Table.of(_caught(result), columns, f"Faults under the guard. {UNDER_GUARD}")


def _examples(result: TrainingResult) -> Section:
    figures = curve_figures(result)
    parts: list[Part] = []
    for name in dict.fromkeys(curve.outcome for curve in result.curves):
        parts.append(Heading(name, outcome_text(name, result)))
        plots: list[Plot | TextBlock] = [
            Plot(f"{kind}-{name}", f"Training {kind} of examples of {name}", figures[f"{kind}-{name}"])
            for kind in ("metric", "loss")
            if f"{kind}-{name}" in figures
        ]
        if len(plots) == 1:
            plots.append(TextBlock(((None, "No loss from the fault's step on is finite."),)))
        mine = [curve for curve in result.curves if curve.outcome == name]
        parts += [SideBySide(tuple(plots)), TextBlock(tuple(_curve(i, curve) for i, curve in enumerate(mine)))]
    lead = (
        "Up to three trials of each class. The broad grey line is the golden run; a dotted line marks the step of a fault. The "
        f"training metric is averaged over the last {result.thresholds.window} steps. Losses are those of single steps; in a "
        "long run, only the largest loss of every few steps is drawn. ✖ at the upper edge is a loss that is not finite."
    )
    if parts:
        parts.insert(0, TextBlock((((GOLDEN, "▬"), "golden"),)))
    return Section("Examples of each class", lead, tuple(parts))


def _curve(number: int, curve: ExampleCurve) -> tuple[Mark, str]:
    test = "end not reached" if curve.test_accuracy is None else f"held-out accuracy {100 * curve.test_accuracy:.2f} %"
    return (str(example_line_style(number)["color"]), "━"), f"{curve.trial}: {curve.trial_description}; {test}"


def facts(result: TrainingResult) -> list[tuple[str, str]]:
    """Facts on how the result was made, as pairs of term and text."""
    spec, info = result.spec, result.info
    known: dict[str, Any] = {"command": result.command, "campaign": result.campaign, "store": result.store}
    known |= {"seed of the faults": spec.get("seed"), "seed of the training": spec.get("init")}
    known["training"] = info.get("description", result.workload)
    known["settings"] = _pairs(info.get("settings"))
    faults = [(str(name), float(weight)) for name, weight in spec.get("faults") or ()]
    known["faults"] = ", ".join(f"{weight:g}*{name}" for name, weight in faults)
    for term in ("accelerator", "value", "per"):
        known[term] = spec.get(term)
    if spec.get("per"):
        known["memory is corrupted"] = f"at the moment {spec.get('moment')!r} of a step"
    for term in ("phases", "layers"):
        known[term] = ", ".join(map(str, spec.get(term) or ()))
    floors = (result.floors.implementation, result.floors.seeds)
    known |= {"replicas": ", ".join(f"{len(floor.accuracy)} with {floor.switches}" for floor in floors)}
    known |= {"data": info.get("data"), "citation": info.get("citation"), "versions": _pairs(result.versions, " ")}
    return [(term, str(text)) for term, text in known.items() if text not in (None, "")]


def _pairs(values: Any, between: str = "=") -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in values.items()) if isinstance(values, Mapping) else ""
