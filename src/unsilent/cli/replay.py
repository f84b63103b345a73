"""``unsilent replay``: one stored trial again, and what its kind can say of it, such as how its fault spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.campaigns.replay import Replay

OF_TRACES = ("batch", "output")
"""Parameters that mean nothing without --trace."""
OF_STORES = ("trial", "workload", "accelerator", "with_", "batch")
OF_INJECTIONS = ("steps", "steps_before", "batch_size", "images", "quiet")
"""Parameters of a stored trial, and of a published injection, alone."""


def replay(
    context: typer.Context,
    store: Annotated[Path, typer.Argument(metavar="STORE|FILE.csv", help="A store, or a published injection.")],
    trial: Annotated[
        str | None, typer.Argument(help="Of a store: which one, like top_mlp/x8/17.", show_default=False)
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="The workload, if it is not built in: a store may name any file, so none is used unasked.",
            show_default=False,
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="The accelerator's file, where the store names one.", show_default=False)
    ] = None,
    with_: o.With = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show how the fault spread: every operation compared with the golden run.")
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(help="Of a store: the batch to trace, from 0.", show_default="the first whose output changed"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The data file, if the store names one; of an injection: images, .npz.", show_default=False),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="The weights, if the store names them; of an injection: what to start from.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Of an injection: steps to train after it.")] = 5,
    steps_before: Annotated[
        int | None,
        typer.Option(
            help="Of an injection: steps to train before it.", show_default="its epoch's, or 0 without weights"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Of an injection: images of all 8 workers in a step.")] = 1024,
    images: Annotated[
        int | None, typer.Option(help="Of an injection: use only the first so many.", show_default="all")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="What was injected, as a log in the layout of published injections.",
            show_default="of an injection: replay_NAME.txt here",
        ),
    ] = None,
    output: o.Page = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Run one stored trial again and check that it ends the same; exit 1 when it does not.

    Or replay a published injection on the network that it was made for.
    """
    from unsilent.campaigns import Store, TrialId
    from unsilent.campaigns.replay import replay_trial
    from unsilent.cli.injection import is_injection, replay_csv
    from unsilent.cli.tracing import show_trace, trace_path
    from unsilent.studies.registered import kind_of

    if not trace:
        o.refuse(context, OF_TRACES, "only --trace has that")
    if is_injection(store):
        o.refuse(context, OF_STORES, f"{store} is a published injection, not a store")
        if data is None:
            raise UsageError(f"{store} is a published injection, which needs images to train on: --data IMAGES.npz")
        asked: dict[str, Any] = {"data": data, "weights": weights, "log": log, "trace": trace}
        asked |= {"steps": steps, "steps_before": steps_before, "batch": batch_size, "images": images}
        return replay_csv(store, output, as_json=as_json, plain=plain, quiet=quiet, **asked)
    o.refuse(context, OF_INJECTIONS, f"{store} is a store; published injections end in .csv")
    if trial is None:
        raise UsageError(f"{store} has many trials; name one, like top_mlp/x8/17 (unsilent export {store} lists them)")
    given = {"workload": workload, "data": data, "weights": weights, "accelerator": accelerator}
    choices = {"trace": trace, "batch": batch, "log": log is not None}
    kind, number = kind_of(store), TrialId.parse(trial)
    lacking = [name for name in choices if name not in kind.replay_choices]
    o.refuse(context, lacking, f"trials of unsilent {kind.name} are replayed without that")
    page = trace_path(store, str(number), output) if trace else None
    with Store(store, kind) as opened:
        own = {name: choices[name] for name in kind.replay_choices}
        result = (kind.replay or replay_trial)(opened, number, given, o.pairs(with_), **own)
    if log is not None:
        _write_log(log, result.log)
    code = show_replay(result, as_json, plain, **({} if page is None else {"report": str(page)}))
    if result.report is not None and page is not None:
        show_trace(result.report, page, as_json, plain)
    return code


def show_replay(result: Replay[Any], as_json: bool, plain: bool = False, **more: str) -> int:
    """Print a trial and its repetition, in JSON with ``more`` fields; returns the exit code, 1 where they differ."""
    if as_json:
        print(json.dumps({**result.to_json(), **more}, indent=2))
    else:
        print("\n".join(f"{'# ' if plain else ''}{line}" for line in str(result).splitlines()))
    return 0 if result.same else 1


def _write_log(path: Path, lines: tuple[str, ...]) -> None:
    """Raises ``UsageError`` where it cannot be written."""
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
