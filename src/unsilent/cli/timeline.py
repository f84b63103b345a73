"""``unsilent timeline PATH…``: how much stragglers slow a distributed training job down, and which they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.command import EXPLAIN, Command
from unsilent.options import Asked, Option

if TYPE_CHECKING:
    from unsilent.report.model import Report

NO_TRACES = "no trace was named; give an operation table, like trace.parquet"
HELP = """Replay a distributed training job from its traces, and find what slows it down.

Reads an operation table of StragglerAnalysis (.parquet). Prints how many times as long as without stragglers a step takes, and
the ranks, stages and operations that cause it.
"""


@dataclass(frozen=True)
class TimelineOptions:
    """Which traces are read."""

    traces: Annotated[tuple[Path, ...], Option(
        "Traces of one job: an operation table (.parquet), with its metadata beside it (meta-X.yaml for trace-X.parquet).", "",
        metavar="TRACE", missing_error=NO_TRACES, is_repeatable=True)] = ()  # fmt: skip


def timeline(asked: Asked) -> Report:
    """Measure the slowdown."""
    from unsilent.timeline.load import load_job
    from unsilent.timeline.slowdown import measure_slowdown

    traces = asked[TimelineOptions].traces
    return measure_slowdown(load_job(traces)).report(traces[0].name)


COMMAND = Command(
    "timeline", EXPLAIN, HELP, "unsilent timeline trace.parquet", (TimelineOptions,), timeline, has_report=True
)
