"""``unsilent replay``: one stored trial again, and what its kind can say of it, such as how its fault spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsilent.cli import typer_options as o
from unsilent.cli.tables import show_lines
from unsilent.errors import UsageError
from unsilent.options import OUTPUT_PANEL

if TYPE_CHECKING:
    from unsilent.campaigns.replay import TrialReplay

TRACE_OPTIONS = ("batch", "output")
"""Parameters that mean nothing without --trace."""
STORE_OPTIONS = ("trial", "workload", "accelerator", "with_", "batch")
INJECTION_OPTIONS = ("steps", "steps_before", "batch_size", "images", "quiet")
"""Parameters of a stored trial, and of a published injection, alone."""


def replay(
    context: typer.Context,
    store: Annotated[
        Path, typer.Argument(metavar="STORE|FILE.csv", help="A campaign store, or a published injection (.csv).")
    ],
    trial: Annotated[
        str | None,
        typer.Argument(metavar="TRIAL", help="For a store: the trial, like top_mlp/x8/17.", show_default=False),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="The workload, if it is not built in. Code that a store names runs only if you name it here too.",
            show_default=False,
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="The file that describes the accelerator, if the store names one.", show_default=False),
    ] = None,
    with_: o.With = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show how the fault spreads: compare every operation with the golden run.")
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(
            help="For a store: the batch to trace, counted from 0. [default: the first whose output changed]",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="For a store: the data file, if the store names one. For an injection: images as .npz, or digits (built-in).",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="For a store: the weights, if the store names them. For an injection: the weights to start from.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            help="For an injection: number of steps to train after the fault. [default: 5]", show_default=False
        ),
    ] = 5,
    steps_before: Annotated[
        int | None,
        typer.Option(
            help="For an injection: number of steps to train before the fault. [default: with weights, all earlier steps of "
            "the same epoch; otherwise 0]",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            help="For an injection: images per step for all 8 workers together. [default: 1024]", show_default=False
        ),
    ] = 1024,
    images: Annotated[
        int | None,
        typer.Option(
            help="For an injection: number of images to use, starting with the first. [default: all]",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write what was injected to this file, in the log format of the published injections. [default: for an "
            "injection, replay_NAME.txt in the current folder]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="With --trace: where to write the HTML page. [default: next to the store]",
            show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Run one stored trial again and check that its result is the same; exit with 1 if it is not.

    With a published injection: replay it on the network that it was made for.
    """
    from unsilent.campaigns import Store, TrialId
    from unsilent.campaigns.replay import replay_trial
    from unsilent.cli.published_injection import is_injection_csv, replay_injection_csv
    from unsilent.cli.trace_output import show_trace, trace_path
    from unsilent.studies.campaign_kinds import kind_of_store

    if not trace:
        o.reject_if_given(context, TRACE_OPTIONS, "only used with --trace")
    if is_injection_csv(store):
        o.reject_if_given(context, STORE_OPTIONS, f"{store} is a published injection, not a store")
        if data is None:
            raise UsageError(
                f"{store} is a published injection, which needs images to train on; add --data IMAGES.npz or --data digits"
            )
        asked: dict[str, Any] = {"data": data, "weights": weights, "log": log, "trace": trace}
        asked |= {"steps": steps, "steps_before": steps_before, "batch": batch_size, "images": images}
        return replay_injection_csv(store, output, as_json=as_json, plain=plain, quiet=quiet, **asked)
    o.reject_if_given(context, INJECTION_OPTIONS, f"{store} is a store, not a published injection (.csv)")
    if trial is None:
        raise UsageError(f"{store} has many trials; name one, like top_mlp/x8/17 (unsilent export {store} lists them)")
    given = {"workload": workload, "data": data, "weights": weights, "accelerator": accelerator}
    choices = {"trace": trace, "batch": batch, "log": log is not None}
    kind, number = kind_of_store(store), TrialId.parse(trial)
    lacking = [name for name in choices if name not in kind.replay_choices]
    o.reject_if_given(context, lacking, f"not available for trials of unsilent {kind.command_words}")
    page = trace_path(store, str(number), output) if trace else None
    with Store(store, kind) as opened:
        own = {name: choices[name] for name in kind.replay_choices}
        result = (kind.replay or replay_trial)(opened, number, given, o.parse_workload_options(with_), **own)
    if log is not None:
        _write_log(log, result.log)
    code = show_replay(result, as_json, plain, **({} if page is None else {"report": str(page)}))
    if result.report is not None and page is not None:
        show_trace(result.report, page, as_json, plain)
    return code


def show_replay(result: TrialReplay[Any], as_json: bool, plain: bool = False, **more: str) -> int:
    """Print a trial and its repetition, in JSON with ``more`` fields; returns the exit code, 1 where they differ."""
    if as_json:
        print(json.dumps({**result.to_json(), **more}, indent=2))
    else:
        lines = str(result).splitlines()
        if plain:
            print("\n".join(f"# {line}" for line in lines))
        else:
            show_lines(*lines)
    return 0 if result.is_identical else 1


def _write_log(path: Path, lines: tuple[str, ...]) -> None:
    """Raises ``UsageError`` where it cannot be written."""
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; give another --log") from None
