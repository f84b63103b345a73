"""Report on a comparison layer by layer: the first differing layer, suspects, and a row for each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unsilent.compare.layer_records import LayerComparison, LayerRow
from unsilent.compare.suspects import Suspect, expected_error, weight_levels
from unsilent.report.model import Column, Section, Table
from unsilent.report.text import count_text, listed

INTRODUCTION = (
    "Accumulated: outputs of the two networks, each with its own earlier layers. Local: outputs of the deployed layer, given the "
    "inputs of the original's. SQNR is the signal to noise ratio of the deployed outputs; 20 dB more is a tenth of the error. "
    "Rounding: the SQNR that rounding weights and inputs explains. Floor: that of the original compared with "
    "itself on the first batch, run again, with other threads and in two halves; the largest difference counts."
)

TITLE = (
    "signal to noise ratio (SQNR): accumulated (own earlier layers), local (the original's inputs), expected from rounding, of "
    "the noise floor"
)


def layer_sections(result: LayerComparison) -> tuple[Section, ...]:
    """Sections of a report on the layers, or none if no layer could be read."""
    if not result.rows:
        return ()
    named = {suspect.layer for suspect in result.suspects}
    if result.first_difference is not None:
        named.add(result.first_difference.name)
    table = Table.of(
        result.rows, _columns(result), TITLE, lambda row: row.name in named, terminal_rows=20, sortable=True
    )
    return (Section("Layers", INTRODUCTION, (table,)),)


def layer_findings(result: LayerComparison) -> Iterator[str]:
    """Sentences on the findings without full stops, the most important first."""
    if not result.rows:
        yield result.unreadable or "outputs of no layer could be compared"
        yield from _left_out(result)
        return
    count, batches = count_text(len(result.rows), "layer"), count_text(result.batches, "batch")
    beyond, first = result.first_beyond_floor, result.first_difference
    if first is None:
        yield f"outputs of {count} are identical bit for bit in {batches}"
        if result.answers_differ:
            yield "the networks return different numbers although these layers agree: what differs is computed outside of them"
    elif result.differs_everywhere:
        yield from _suspect_findings(result)
    elif beyond is None:
        yield f"outputs have different bits from layer {first.name} on, but differ in no layer by more than its noise floor"
    else:
        yield f"outputs first differ by more than the noise floor in layer {beyond.name}: {_place_text(beyond)}"
    if result.quantised:
        yield result.quantised
    yield from _left_out(result)


def _suspect_findings(result: LayerComparison) -> Iterator[str]:
    products = [row.noise for row in result.rows if row.noise is not None]
    yield from map(_suspect_text, result.suspects)
    if not products:
        yield "suspects are looked for in convolutions and linear layers, of which there are none"
    elif result.has_other_weights:
        yield (
            f"of {count_text(len(products), 'convolution or linear layer')}, {len(result.other_weights)} differ so much from the "
            "original's, in their weights or in their outputs for the same inputs, that their weights are no rounded copy of the "
            "original's; so no suspect can be named"
        )
        return
    elif not result.suspects:
        norms = count_text(len(result.judged_norms), "layer")
        also = f" and {norms} whose parameters are vectors" if result.judged_norms else ""
        yield (
            f"of {count_text(len(products), 'convolution or linear layer')}{also}, none is a suspect, which would "
            "differ more than its quantisation and the other layers explain"
        )
    most = "most convolutions and linear layers" if products else "most layers with parameters"
    yield (
        f"given the same inputs, {most} have other outputs than the original's, as after quantisation or pruning, so that no "
        "first differing layer is named"
    )
    if any(noise.weight_step is None for noise in products):
        yield "scales of some layers cannot be read: what is usual there comes from the errors of the other layers alone"


def _left_out(result: LayerComparison) -> Iterator[str]:
    """Sentences on layers that were not compared, with the reason."""
    problems, floor_problems = (
        [f"{name} ({problem})" for name, problem in named.items()] for named in (result.problems, result.floor_problems)
    )
    layers_by_reason = {
        "not compared, as the deployed network does not run a layer of this path": result.unaligned,
        "not compared, as outputs have other shapes": result.other_shapes,
        "not compared": problems,
        "not compared, as only the deployed network has a layer of this path": result.added,
        "not compared, as only the deployed network calls these layers that often": result.further_calls,
        "the noise floor leaves out what could not be run": floor_problems,
    }
    yield from (f"{reason}: {listed(layers)}" for reason, layers in layers_by_reason.items() if layers)


def _cosine(row: LayerRow) -> float | None:
    return None if math.isnan(row.accumulated.cosine) else row.accumulated.cosine


def _suspect_text(suspect: Suspect) -> str:
    channel = "" if suspect.channel is None else f", output channel {suspect.channel}"
    return f"suspect: {suspect.layer}{channel}; {suspect.reason}"


def _place_text(row: LayerRow) -> str:
    if row.local is None:
        return f"in this layer or between the previous layer and it (it could not be run alone: {row.local_problem})"
    if row.local.has_same_bits:
        return "given the same inputs it is identical, so the difference comes from what is computed before it"
    return (
        f"operation {row.operation} has other results for the same inputs" if row.operation else "in the layer itself"
    )


def _columns(result: LayerComparison) -> tuple[Column, ...]:
    noises = {row.name: row.noise for row in result.rows if row.noise is not None}
    levels = weight_levels(noises)

    def expected(row: LayerRow) -> float | None:
        if row.noise is None or levels is None or not result.differs_everywhere:
            return None
        error = float(expected_error(row.noise, levels).sum())
        return 10 * math.log10(float(row.noise.signal.sum()) / error) if error and row.noise.signal.sum() else None

    def floor(row: LayerRow) -> float | str | None:
        if row.floor is None:
            return None
        return -20 * math.log10(row.floor.largest) if row.floor.largest else "none"

    def decibels(value: float | None) -> float | str | None:
        return "equal" if value == math.inf else "not finite" if value == -math.inf else value

    def column(name: str, of: object, priority: int = 0) -> Column:
        return Column(name, "number", "dB", digits=".1f", priority=priority, of=of)  # type: ignore[arg-type]

    return (
        Column.text("layer", "name"),
        Column.text("kind", priority=2),
        column("accumulated", lambda row: decibels(row.accumulated.sqnr)),
        Column("cosine", "number", digits=".6f", priority=1, of=_cosine),
        column("local", lambda row: None if row.local is None else decibels(row.local.sqnr)),
        column("rounding", expected, 1),
        column("floor", floor),
        Column.text("bits", lambda row: "identical" if row.accumulated.has_same_bits else "differ", 1),
    )
