"""``unsilent timeline PATH…``: measure how much stragglers slow down a distributed training job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.options import OUTPUT_PANEL, Option, Request
from unsilent.command import EXPLAIN, Command
from unsilent.report.model import Report

NO_TRACES = "no trace was named; give the folder of unsilent timeline record, or an operation table (.parquet)"


@dataclass(frozen=True)
class TimelineOptions:
    """Options of ``unsilent timeline``."""

    traces: Annotated[tuple[Path, ...], Option(
        "Traces of one job: files of the profiler or their folder, or an operation table (.parquet), with its metadata beside it "
        "(meta-X.yaml for trace-X.parquet).", "",
        metavar="TRACE", missing_error=NO_TRACES, is_repeatable=True)] = ()  # fmt: skip
    what_if: Annotated[tuple[str, ...], Option(
        "Predict the step time if something were different: scale:GLOB=FACTOR, rank:R=+20ms, rank:R=0.9, network=infinite or "
        "straggler=none; under DDP also buckets=1,8,25 (MiB), gradients=fp16, server=N (parameter servers) or reduction=PROGRAM "
        "(as unsilent placement names it; needs --system), under FSDP2 reshard_after_forward=no, reduce_dtype=bf16, \"fsdp "
        "wrap=2\" or \"fsdp prefetch=2\" (units); with memory events recompute=GLOB or accumulate=2. Repeat the option for more "
        "questions.", "", is_repeatable=True)] = ()  # fmt: skip
    system: Annotated[str | None, Option(
        "Machine that sets the times of collectives, for questions on DDP: a .json file of unsilent placement measure -o, a "
        "TOML file or a preset.", "", default_text="fitted to the traces")] = None  # fmt: skip
    perfetto: Annotated[Path | None, Option(
        "Write recorded and replayed steps to this .zip file, which Perfetto opens.", OUTPUT_PANEL)] = None  # fmt: skip


def timeline(request: Request) -> Report:
    """Replay a distributed training job from its traces, and find what slows it down.

    Reads traces of torch.profiler, one of each rank (see unsilent timeline record), or an operation table of StragglerAnalysis
    (.parquet). Prints which rank is late in which part of a step, where the time went, and how many times as long a step takes
    as it would without stragglers.
    """
    from unsilent.timeline.diagnosis import diagnose
    from unsilent.timeline.load import load_job
    from unsilent.timeline.perfetto import write_runs

    options = request[TimelineOptions]
    result = diagnose(load_job(options.traces), options.what_if, options.system)
    if options.perfetto is not None:
        write_runs(options.perfetto, result.job, result.path)
    return result.report(options.traces[0].name)


COMMAND = Command("timeline", EXPLAIN, "unsilent timeline traces", (TimelineOptions,), timeline, has_report=True)
