"""``unsilent report``: a stored campaign again, two stores compared, a card, or events of a monitored training."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from unsilent.campaigns.kinds import Kind
from unsilent.cli import typer_options as o
from unsilent.cli.card import CARDS, card_paths, show_card, write_card
from unsilent.cli.paths import report_path, writable_page
from unsilent.errors import UsageError
from unsilent.options import OUTPUT_PANEL, Option, OptionField, OptionValues, options_of
from unsilent.report.model import Report

T = TypeVar("T")
AnyKind = Kind[Any, Any, Any]


@dataclass(frozen=True)
class CardOptions:
    """What stores of ``unsilent pvf`` can be written as."""

    card: Annotated[
        bool,
        Option("Instead of the report page, write a card to share: STORE.card.json and STORE.card.html.", OUTPUT_PANEL),
    ] = False


def make_report_command(arguments: Sequence[str]) -> Callable[..., int]:
    """The verb with the options of the store that the arguments name; without one, with those of every kind."""
    from unsilent.studies.campaign_kinds import KINDS, find_kind_of_store

    kinds = (find_kind_of_store(Path(word)) for word in arguments)
    kind = next((kind for kind in kinds if kind is not None), None)
    return o.with_options(report, options_of_every_kind(KINDS) if kind is None else options_of(*option_classes(kind)))


def option_classes(kind: AnyKind) -> tuple[type, ...]:
    """Options of a report on stores of this kind."""
    from unsilent.studies.pvf.kind import PVF

    return kind.analysis_options, kind.report_options, *((CardOptions,) if kind is PVF else ())


def options_of_every_kind(kinds: Sequence[AnyKind]) -> dict[str, OptionField]:
    """The options of all kinds; the help of an option that some of them lack names the others."""
    by_kind = {kind.name: options_of(*option_classes(kind)) for kind in kinds}
    merged: dict[str, OptionField] = {}
    for name, asking in ((name, asking) for options in by_kind.values() for name, asking in options.items()):
        own = [kind for kind, options in by_kind.items() if name in options]
        text, default = asking.option.help, asking.default_text
        for kind in own:
            other = by_kind[kind][name]
            if other.default_text != asking.default_text:
                text += f" For {kind}: {other.option.help}"
                default += f"; for {kind} {other.default_text}"
        text += "" if len(own) == len(by_kind) else f" Only for stores of unsilent {' and '.join(own)}."
        merged.setdefault(name, replace(asking, option=replace(asking.option, help=text, default_text=default)))
    return merged


def report(
    context: typer.Context,
    store: o.StoreOrCard,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER", help="A second store (B), to be compared with the first (A).", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="Path of the report page or card to write. [default: next to the store]",
            show_default=False,
        ),
    ] = None,
    canonical: Annotated[
        bool,
        typer.Option(
            "--canonical", help="With --json: leave out time, paths and versions, so that two reports can be compared."
        ),
    ] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
    **values: Any,
) -> int:
    """Show the results of a stored campaign as a table and an HTML report, without running a trial.

    Which options there are depends on the store: see unsilent report STORE --help. Options that the command of the campaign
    gave need not be repeated. With two stores: show how their results differ. With a card: check its checksum and show it.
    With events of a monitored training: show the last run.
    """
    from unsilent.cli.report_output import show_report
    from unsilent.events.event_files import has_events
    from unsilent.studies.campaign_kinds import kind_of_store
    from unsilent.studies.pvf.card import is_card

    if not as_json:
        o.reject_if_given(context, ("canonical",), "only used with --json")
    if has_events(store):
        o.reject_if_given(context, (*values, "other"), "not available for events of a monitored training")
        named = store / "events.jsonl" if store.is_dir() else store
        page = writable_page(report_path(named, output), output)
        show_report(report_of_events(store), page, as_json, plain, canonical=canonical)
        return 0
    if is_card(store):
        if other is not None:
            raise UsageError(CARDS.format(store))
        names = (*values, "output", "canonical")
        o.reject_if_given(context, names, "a card contains no trials, so its numbers cannot be computed again")
        show_card(store, as_json, plain)
        return 0
    if other is not None and is_card(other):
        raise UsageError(CARDS.format(other))
    kind = kind_of_store(store)
    if other is not None:
        names = ("card", *options_of(kind.report_options))
        o.reject_if_given(context, names, "not available when two stores are compared")
    classes = option_classes(kind)
    known = options_of(*classes)
    asked = OptionValues(classes, {name: v for name, v in o.given_values(values).items() if name in known})
    made = card_paths(store, output) if asked.given_values.get("card") else None
    page = None if made else writable_page(page_path(store, other, output), output)
    result = report_of(store, other, asked, canonical, made)
    files = dict(zip(("Card", "Page"), made or (), strict=False))
    show_report(result, page, as_json, plain, files, canonical=canonical)
    return 0


def report_of_events(path: Path) -> Report:
    """The last run in the events of a monitored training."""
    from unsilent.events import run_report
    from unsilent.events.event_files import iterate_events

    return run_report.report(iterate_events(path), str(path), shlex.join(["unsilent", "report", str(path)]))


def report_of(
    store: Path, other: Path | None, asked: OptionValues, canonical: bool, card: tuple[Path, Path] | None = None
) -> Report:
    """What a store of any kind holds, or how ``other`` differs from it.

    Args:
        asked: Options; of those that were not given, what the command of the store gave.
        canonical: Without the folders of files.
        card: Where to write a card and its page.
    """
    from unsilent.campaigns.store import open_store
    from unsilent.campaigns.stored_command import stored_options
    from unsilent.studies.campaign_kinds import kind_of_store

    kind = kind_of_store(store)
    with open_store(store, kind, canonical=canonical) as one:

        def chosen(cls: type[Any]) -> Mapping[str, Any]:
            own = options_of(cls)
            given = {name: value for name, value in asked.given_values.items() if name in own}
            return dict(vars(replace(stored_options(one, cls), **given)))

        reading = chosen(kind.analysis_options)
        if card:
            write_card(store, reading, *card)
        if other is None:
            return kind.report(one.analyse(**reading), **chosen(kind.report_options))
        if kind.compare is None:
            raise UsageError(
                f"stores of unsilent {kind.command_words}, like {store}, cannot be compared; give one store"
            )
        with open_store(other, kind, canonical=canonical) as two:
            for each in (one, two):
                each.check_has_trials()
            return kind.compare(one, two, **reading)


def page_path(store: Path, other: Path | None, output: Path | None) -> Path:
    """Where the page goes: as asked, else next to the store, as ``A-vs-B.html`` for two; raises as `report_path` does."""
    if other is None:
        return report_path(store, output)
    if output is None:
        return report_path(store.with_name(f"{store.stem}-vs-{other.stem}.sqlite"), None)
    report_path(other, output)
    return report_path(store, output)
