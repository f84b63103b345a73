"""``unsilent timeline optimise PATH…``: find the fastest buckets and gradient precision for DDP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import wrong_value_error
from unsilent.basics.options import Option, Request
from unsilent.command import EXPLAIN, Command
from unsilent.report.model import Report

NO_TRACES = "no trace was named; give the folder of unsilent timeline record"


@dataclass(frozen=True)
class OptimiseOptions:
    """Options of ``unsilent timeline optimise``."""

    traces: Annotated[tuple[Path, ...], Option(
        "Traces of the ranks, or their folder.", "", metavar="TRACE", missing_error=NO_TRACES,
        is_repeatable=True)] = ()  # fmt: skip
    system: Annotated[str | None, Option(
        "Machine that sets the times of collectives: a .json file of unsilent placement measure -o, a TOML file or a preset.",
        "", default_text="fitted to the traces")] = None  # fmt: skip


def find(request: Request) -> Report:
    """Find the buckets and the gradient precision with which a recorded training under DDP would be fastest.

    Prints the setting to pass to DistributedDataParallel, and how much shorter a step would be than with the recorded buckets,
    compared with the noise floor of the recording.
    """
    from unsilent.timeline.ddp.optimise_report import find_settings
    from unsilent.timeline.ddp.traces import ddp_job
    from unsilent.timeline.link_costs import FLAT, reduction_costs
    from unsilent.timeline.load import load_job

    options = request[OptimiseOptions]
    if options.system == "":
        raise wrong_value_error("--system", options.system, "a file or a preset")
    job = load_job(options.traces)
    costs = reduction_costs(options.system, job.world_size) if options.system else {}
    return find_settings(ddp_job(job, costs.get(FLAT)), costs).report(options.traces[0].name)


COMMAND = Command(
    "timeline optimise", EXPLAIN, "unsilent timeline optimise traces", (OptimiseOptions,), find, has_report=True,
)  # fmt: skip
