"""``unsilent replay-injection FILE.csv``: run a published injection again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, WORKLOAD_PANEL, Option, Request
from unsilent.cli.trace_output import LOG, TRACE, show_trace, trace_path
from unsilent.command import RESULTS, Command, DisplayOptions, output_option

NO_FILE = "no injection was named; give the .csv file of a published injection"


@dataclass(frozen=True)
class InjectionOptions:
    """Options of ``unsilent replay-injection``."""

    file: Annotated[Path, Option("A published injection.", "", metavar="FILE.csv", missing_error=NO_FILE)]
    data: Annotated[str | None, Option("Images as .npz, or digits (built-in).", WORKLOAD_PANEL)] = None
    weights: Annotated[str | None, Option("The weights to start from.", WORKLOAD_PANEL)] = None
    steps: Annotated[int, Option("Number of steps to train after the fault.", EXECUTION_PANEL)] = 5
    steps_before: Annotated[int | None, Option(
        "Number of steps to train before the fault.", EXECUTION_PANEL,
        default_text="with weights, all earlier steps of the same epoch; otherwise 0")] = None  # fmt: skip
    batch_size: Annotated[int, Option("Images per step for all 8 workers together.", EXECUTION_PANEL)] = 1024
    images: Annotated[int | None, Option(
        "Number of images to use, starting with the first.", WORKLOAD_PANEL, default_text="all")] = None  # fmt: skip
    log: Annotated[Path | None, replace(LOG, default_text="replay_NAME.txt in the current folder")] = None
    trace: Annotated[bool, TRACE] = False
    output: Annotated[Path | None, output_option("With --trace: where to write the HTML page.", "next to the file")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.output is not None and not self.trace:
            raise UsageError("--output is only used with --trace: leave out --output")


def replay_injection(request: Request) -> int:
    """Replay a published injection on the network that it was made for, and show its step with and without the fault."""
    from unsilent.cli.file_sorts import refuse_other_files
    from unsilent.papers.isca23.injections import read_injection
    from unsilent.papers.isca23.replay import replay_injection
    from unsilent.studies.propagation_report import report

    options, display = request[InjectionOptions], request[DisplayOptions]
    refuse_other_files(options.file, {"store": f"unsilent replay {options.file} TRIAL"})
    injection = read_injection(options.file)
    if options.data is None:
        raise UsageError(
            f"{options.file} is a published injection, which needs images to train on; add --data IMAGES.npz or --data digits"
        )
    done = replay_injection(
        injection, options.data, options.weights, steps=options.steps, steps_before=options.steps_before,
        batch=options.batch_size, images=options.images, log=options.log, trace=options.trace,
        progress=request.observer and request.observer.loading,
    )  # fmt: skip
    page = None if done.trace is None else trace_path(options.file, "", options.output)
    if display.as_json:
        print(json.dumps(done.to_json() | ({} if page is None else {"report": str(page)}), indent=2))
    else:
        print(f"{done}\n\n{'# ' if display.plain else ''}Log: {done.log}")
    if done.trace is not None and page is not None:
        facts = (("injection", injection.name), ("layer", injection.target_layer), ("weights", done.weights))
        trace_report = report(done.trace, f"how the fault of {injection.name} spreads", facts)
        show_trace(trace_report, page, display.as_json, display.plain)
    return 0


COMMAND = Command(
    "replay-injection", RESULTS, "unsilent replay-injection inj_0.csv --data digits",
    (InjectionOptions, DisplayOptions), replay_injection, is_long=True,
)  # fmt: skip
