"""``unsilent replay``: run one stored trial again, and show how its fault spread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import OUTPUT_PANEL, WORKLOAD_PANEL, Option, Request
from unsilent.campaigns.options import WORKLOAD_OPTION
from unsilent.cli.tables import show_lines
from unsilent.cli.trace_output import LOG, TRACE, show_trace, trace_path
from unsilent.command import RESULTS, Command, DisplayOptions, output_option

if TYPE_CHECKING:
    from unsilent.campaigns.trial_replay import TrialReplay

NO_STORE = "no store was named; give the store of a campaign and a trial of it, like STORE.sqlite top_mlp/x8/17"


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``unsilent replay`` for every store."""

    store: Annotated[Path, Option("A campaign store.", "", missing_error=NO_STORE)]
    trial: Annotated[str | None, Option("The trial, like top_mlp/x8/17.", "", is_argument=True)] = None
    workload: Annotated[str | None, Option(
        "The workload, if it is not built in. Code that a store names runs only if you name it here too.",
        WORKLOAD_PANEL)] = None  # fmt: skip
    accelerator: Annotated[str | None, Option(
        "The file that describes the accelerator, if the store names one.", WORKLOAD_PANEL)] = None  # fmt: skip
    fault: Annotated[str | None, Option(
        "The fault model, if the store names one in a Python file.", WORKLOAD_PANEL)] = None  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, Option("The data file, if the store names one.", WORKLOAD_PANEL)] = None
    weights: Annotated[str | None, Option("The weights, if the store names them.", WORKLOAD_PANEL)] = None


@dataclass(frozen=True)
class TraceOptions:
    """Options of ``unsilent replay`` for kinds that can trace a trial."""

    trace: Annotated[bool, TRACE] = False
    batch: Annotated[int | None, Option(
        "With --trace: the batch to trace, counted from 0.", OUTPUT_PANEL,
        default_text="the first whose output changed")] = None  # fmt: skip
    output: Annotated[
        Path | None, output_option("With --trace: where to write the HTML page.", "next to the store")
    ] = None
    log: Annotated[Path | None, LOG] = None

    def __post_init__(self) -> None:
        ignored = {"--batch": self.batch, "--output": self.output}
        trace_flags = [flag for flag, value in ignored.items() if value is not None and not self.trace]
        if trace_flags:
            raise UsageError(f"{trace_flags[0]} is only used with --trace: leave out {', '.join(trace_flags)}")


def options_of_store(arguments: Sequence[str]) -> tuple[type, ...]:
    """Dataclasses of the further options of a replay, for the store among the words."""
    from unsilent.studies.campaign_kinds import first_kind

    kind = first_kind(arguments)
    return (TraceOptions,) if kind is not None and kind.replay_choices else ()


def replay(request: Request) -> int:
    """Run one stored trial again and check that its result is the same; exit with 1 if it is not.

    Further options depend on the store: see unsilent replay STORE --help. A published injection is replayed by unsilent
    replay-injection.
    """
    from unsilent.campaigns import Store, TrialId
    from unsilent.campaigns.replay import replay_trial
    from unsilent.cli.file_sorts import STORE_WANTED, refuse_other_files
    from unsilent.studies.campaign_kinds import kind_of_store

    options, display = request[ReplayOptions], request[DisplayOptions]
    store = options.store
    refuse_other_files(store, STORE_WANTED)
    if not store.exists():
        raise UsageError(f"there is no store {store}; check the name")
    if options.trial is None:
        raise UsageError(f"{store} has many trials; name one, like top_mlp/x8/17 (unsilent export {store} lists them)")
    kind, number = kind_of_store(store), TrialId.parse(options.trial)
    tracing = request[TraceOptions]
    choices = {"trace": tracing.trace, "batch": tracing.batch, "log": tracing.log is not None}
    workload_options = {
        name: getattr(options, name) for name in ("workload", "data", "weights", "accelerator", "fault")
    }
    page = trace_path(store, str(number), tracing.output) if tracing.trace else None
    with Store(store, kind) as opened:
        tracing_options = {name: choices[name] for name in kind.replay_choices}
        result = (kind.replay or replay_trial)(opened, number, workload_options, options.options, **tracing_options)
    if tracing.log is not None:
        _write_log(tracing.log, result.log)
    code = show_replay(result, display.as_json, display.plain, **({} if page is None else {"report": str(page)}))
    if result.report is not None and page is not None:
        show_trace(result.report, page, display.as_json, display.plain)
    return code


def show_replay(result: TrialReplay[Any], as_json: bool, plain: bool = False, **more: str) -> int:
    """Print the comparison of a trial with its replay; return the exit code, 1 if they differ.

    ``more`` are further fields of the JSON object.
    """
    if as_json:
        print(json.dumps({**result.to_json(), **more}, indent=2))
    else:
        show_lines(*str(result).splitlines(), plain=plain)
    return 0 if result.is_identical else 1


def _write_log(path: Path, lines: tuple[str, ...]) -> None:
    """Write the log of a replay; raises ``UsageError`` if the file cannot be written."""
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; give another --log") from None


COMMAND = Command(
    "replay", RESULTS, "unsilent replay STORE.sqlite top_mlp/x8/17", (ReplayOptions, DisplayOptions), replay,
    options_by_arguments=options_of_store,
)  # fmt: skip
