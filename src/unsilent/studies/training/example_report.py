"""The report on a stored example of a fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from unsilent.basics.interval import known_value
from unsilent.report.estimates import Estimate, machine_table
from unsilent.report.model import Column, Plot, Report, Section, Table, TableRow, TextBlock
from unsilent.report.text import count_text, number_text
from unsilent.studies.training.example import TrainingExample
from unsilent.studies.training.plots import GOLDEN, example_line_style, loss_figure
from unsilent.studies.training.sentences import END_TEXTS

FAULT_FREE, FAULTY = "without the fault", "with the fault"
LAST = 50
"""Number of steps at the end of a run whose losses are averaged."""
COLUMNS = (
    Column.text("run"),
    Column("loss at the step of the fault", "number", digits=number_text),
    Column(f"mean loss of the last {LAST} steps", "number", digits=number_text),
    Column.percent("held-out accuracy", digits=".2f"),
)
OTHER_CLASS = (
    "The same fault can end in another class on another CPU or with another version of torch, because the bits of a training "
    "depend on both."
)

LEAD = (
    "The training loss of single steps, on a logarithmic axis. The dotted line marks the step of the fault; ✖ at the upper "
    "edge is a loss that is not finite."
)


def report(example: TrainingExample) -> Report:
    """The report on an example."""
    baseline, name = example.baseline, example.stored.outcome_class
    as_stored = f"; when it was stored, it ended in {name}"
    if example.has_stored_class:
        as_stored = ", as it did when it was stored"
    return Report(
        schema="unsilent/training-example/1",
        report_type="One fault in a training",
        title=f"A fault in {baseline.name} that was stored as {name}",
        headline=f"The run with the fault ended in {example.outcome}{as_stored}",
        estimates=machine_table(_estimates(example), ("run", "measure", "")),
        findings=tuple(_findings(example)),
        sections=(_section(example),),
        facts=tuple(_facts(example)),
        repeat_command=f"unsilent training-example {name}",
        further_json={
            "stored_class": name,
            "class": str(example.outcome),
            "fault_free_run_as_stored": example.has_stored_twin,
            "injection": example.row.injection._asdict(),
            "faults": [fault.to_json() for fault in example.stored.faults],
            "held_out_accuracy": {FAULT_FREE: baseline.test_accuracy, FAULTY: example.curve.test_accuracy},
            "losses": {FAULT_FREE: list(baseline.losses), FAULTY: list(example.curve.losses)},
        },
    )


def _estimates(example: TrainingExample) -> Iterator[Estimate]:
    samples = example.baseline.samples
    for run, value in ((FAULT_FREE, example.baseline.test_accuracy), (FAULTY, example.curve.test_accuracy)):
        if value is not None:
            yield Estimate({"run": run, "measure": "held_out_accuracy"}, known_value(value, samples), "sample")


def _findings(example: TrainingExample) -> Iterator[str]:
    row, steps = example.row, example.baseline.steps
    at = row.injection
    yield f"Injected in step {at.step:,} of {steps:,} (the first is 0): {at.model} at {at.site}"
    written = number_text(row.injected_max) if math.isfinite(row.injected_max) else "not finite"
    before = f"before the fault, the largest in that tensor was {number_text(row.reference_max)}"
    yield f"Largest absolute value written: {written}; {before}"
    if None in example.curve.losses:
        yield f"The loss is not finite at step {at.step + example.curve.losses.index(None):,}, where the run with the fault ended"
    if not example.has_stored_class:
        yield OTHER_CLASS


def _section(example: TrainingExample) -> Section:
    baseline, curve = example.baseline, example.curve
    colour, losses = str(example_line_style(0)["color"]), (*baseline.losses[: curve.step], *curve.losses)
    runs = (
        (GOLDEN, FAULT_FREE, baseline.losses, baseline.test_accuracy),
        (colour, FAULTY, losses, curve.test_accuracy),
    )
    legend = TextBlock(tuple(((colour, "━"), f"{run}: {_accuracy(share)}") for colour, run, _, share in runs))
    figure = loss_figure([curve], baseline.steps, baseline.losses)
    assert figure is not None  # losses of the fault-free run are finite
    plot = Plot("losses", "Training loss of the run with the fault and of the fault-free run", figure)
    rows = (
        TableRow((run, losses[curve.step], _last_mean(losses, baseline.steps), share)) for _, run, losses, share in runs
    )
    return Section("Both runs", LEAD, (legend, plot, Table(COLUMNS, tuple(rows))))


def _accuracy(share: float | None) -> str:
    return "end not reached" if share is None else f"held-out accuracy {100 * share:.2f} %"


def _last_mean(losses: Sequence[float | None], steps: int) -> float | None:
    """The mean of the last losses; None for a run that ended early."""
    known = [x for x in losses[-LAST:] if x is not None]
    return sum(known) / len(known) if len(losses) == steps else None


def _facts(example: TrainingExample) -> Iterator[tuple[str, str]]:
    baseline, stored = example.baseline, example.stored
    settings = "".join(f", {name}={value}" for name, value in stored.spec.options)
    yield "training", f"{stored.spec.workload}{settings}"
    yield "fault", "; ".join(fault.describe() for fault in stored.faults)
    reason = END_TEXTS.get(example.row.end_reason, example.row.end_reason)
    yield "why the run ended", f"{reason}, after {count_text(example.row.steps_run, 'step')}"
    floors = (stored.floors.implementation, stored.floors.seeds)
    runs = (f"{len(floor.accuracy)} stored fault-free runs that differ in {floor.switches}" for floor in floors)
    yield "judged by", ", ".join(runs)
    same = "the same bits as" if example.has_stored_twin else "other bits than"
    yield "losses of the fault-free run", f"{same} when the fault was stored"
    yield "versions", ", ".join(f"{name} {version}" for name, version in baseline.versions.items())
