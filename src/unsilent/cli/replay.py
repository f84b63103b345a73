"""``unsilent replay``: one stored trial again, and how its fault spread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.faults.receipts import Receipt
    from unsilent.report.model import Report
    from unsilent.studies.pvf.kind import PvfStore
    from unsilent.studies.pvf.replay import Replay

OF_TRACES = ("batch", "html")
"""Parameters that mean nothing without --trace."""
OF_STORES = ("trial", "workload", "accelerator", "with_", "batch")
OF_INJECTIONS = ("steps", "steps_before", "batch_size", "images", "quiet")
"""Parameters of a stored trial, and of a published injection, alone."""
OF_EVALUATIONS = ("trace", "batch", "log", "html")
"""Parameters that mean nothing where a struck training is run again."""


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
        bool, typer.Option("--trace", help="Show how the fault spread: every operation beside the golden run.")
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option(help="Of a store: the batch to trace, from 0.", show_default="the first whose output changed"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The data file, if the store names one; of an injection: images, .npz.", show_default=False),
    ] = None,
    weights: Annotated[
        Path | None,
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
            help="What was struck, as a log in the layout of published injections.",
            show_default="of an injection: replay_NAME.txt here",
        ),
    ] = None,
    html: o.Html = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Run one stored trial again and check that it ends the same; exit 1 when it does not.

    Or replay a published injection on the network that it was made for.
    """
    from unsilent.cli.injection import is_injection, replay_csv
    from unsilent.cli.struck import is_training, replay_training

    if not trace:
        o.refuse(context, OF_TRACES, "only --trace has that")
    if is_injection(store):
        o.refuse(context, OF_STORES, f"{store} is a published injection, not a store")
        if data is None:
            raise UsageError(f"{store} is a published injection, which needs images to train on: --data IMAGES.npz")
        return replay_csv(
            store,
            data=str(data),
            weights=_text(weights),
            steps=steps,
            steps_before=steps_before,
            batch=batch_size,
            images=images,
            log=log,
            trace=trace,
            html=html,
            as_json=as_json,
            plain=plain,
            quiet=quiet,
        )
    o.refuse(context, OF_INJECTIONS, f"{store} is a store; published injections end in .csv")
    if trial is None:
        raise UsageError(f"{store} has many trials; name one, like top_mlp/x8/17 (unsilent export {store} lists them)")
    given = {"workload": workload, "data": _text(data), "weights": _text(weights), "accelerator": accelerator}
    if is_training(store):
        o.refuse(context, OF_EVALUATIONS, f"{store} holds a training campaign")
        return replay_training(store, trial, given, o.pairs(with_), as_json)
    o.refuse(context, ("accelerator",), f"{store} holds no training campaign")
    del given["accelerator"]
    return replay_stored(store, trial, given, o.pairs(with_), trace, batch, log, html, as_json, plain)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def replay_stored(
    store: Path,
    trial: str,
    given: Mapping[str, str | None],
    named: tuple[tuple[str, str], ...],
    trace: bool,
    batch: int | None,
    log: Path | None,
    html: Path | None,
    as_json: bool,
    plain: bool,
) -> int:
    """A trial of a campaign; ``given`` and ``named`` (options of the workload): see `named_again`."""
    from unsilent.campaigns import TrialId
    from unsilent.cli.tracing import show_trace, trace_path
    from unsilent.studies.pvf.kind import PvfStore
    from unsilent.studies.pvf.replay import replay_trial

    number = TrialId.parse(trial)
    page = trace_path(store, str(number), html) if trace else None
    with PvfStore(store) as opened:
        again = replay_trial(opened, number, **given, options=named, trace=trace, batch=batch, receipt=log is not None)
        shown = _traced(opened, again)
    if log is not None and again.receipt is not None:
        write_log(log, again.receipt)
    if as_json:
        print(json.dumps(again.to_json() | ({} if page is None else {"report": str(page)}), indent=2))
    else:
        print("\n".join(f"{'# ' if plain else ''}{line}" for line in str(again).splitlines()))
    if shown is not None and page is not None:
        show_trace(shown, page, as_json, plain)
    return 0 if again.same else 1


def write_log(path: Path, receipt: Receipt) -> None:
    """What was struck, in the layout of published injections; raises ``UsageError`` where it cannot be written."""
    from unsilent.workloads.published.log import trial_lines

    try:
        path.write_text("".join(f"{line}\n" for line in trial_lines(receipt)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _traced(store: PvfStore, again: Replay) -> Report | None:
    from unsilent.report.text import counted
    from unsilent.studies.traces import report

    if again.trace is None:
        return None
    spec, found = store.spec, store.description
    trial, samples = str(again.stored.trial), found.samples[again.batch or 0]
    facts = (
        ("workload", spec.workload),
        ("store", str(store.path)),
        ("trial", trial),
        ("batch", f"{again.batch} of {counted(len(found.samples), 'batch')}, {counted(samples, 'sample')}"),
        ("ended", again.ended),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    )
    return report(again.trace, f"how the fault of {trial} spreads: batch {again.batch} of {spec.workload}", facts)
