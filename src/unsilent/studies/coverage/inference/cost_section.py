"""The section on the cost of detectors, in the report of ``unsilent inference-coverage``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unsilent.report.model import Column, Section, Table
from unsilent.report.text import count_text, number_text
from unsilent.studies.coverage.inference.analysis import InferenceCoverageResult
from unsilent.studies.coverage.inference.spec import TIMED_BATCHES

DUPLICATION = "duplication"
"""The detector that runs the whole model twice."""


def cost_section(result: InferenceCoverageResult) -> Section:
    """CPU time and memory of each detector."""
    times = [f"CPU time at batch {size}" for size in TIMED_BATCHES]
    columns = (Column.text("detector"), *map(Column.percent, (*times, "memory")))
    rows = (
        {"detector": one.detector, **{name: ratio for name, ratio in zip(times, one.ratios, strict=True) if math.isfinite(ratio)},
         "memory": one.memory}
        for one in result.costs
    )  # fmt: skip
    return Section(
        "Cost", "CPU time of a pass with the detector over that of the model alone, and memory over that of the model.",
        (Table.of(rows, columns, "Cost of a detector"),),
    )  # fmt: skip


def duplication_is_cheaper(result: InferenceCoverageResult) -> Iterator[str]:
    """A sentence if running the model twice took less CPU time at the smallest batch than other detectors, else nothing."""
    ratios = {one.detector: one.ratios[0] for one in result.costs if math.isfinite(one.ratios[0])}
    twice = ratios.pop(DUPLICATION, math.nan)
    dearer = sorted(
        (name for name, ratio in ratios.items() if ratio > twice), key=lambda name: name != result.reference
    )
    if dearer:
        named = f"{dearer[0]} ({number_text(ratios[dearer[0]])} times)"
        others = f" and {count_text(len(dearer) - 1, 'other detector')}" if len(dearer) > 1 else ""
        yield (
            f"at batch {TIMED_BATCHES[0]} it is cheaper to run the model twice and to compare the answers: {DUPLICATION} took "
            f"{number_text(twice)} times the CPU time of the model alone, less than {named}{others}"
        )
