"""``unsilent status [STORE…]``: show the progress and the results of stored campaigns."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import StoreError, UnsilentError, UsageError
from unsilent.basics.options import Option, Request
from unsilent.basics.printable import escape_unprintable
from unsilent.cli.tables import show_lines, show_table
from unsilent.command import RESULTS, Command, DisplayOptions

if TYPE_CHECKING:
    from unsilent.campaigns.kinds import Kind

MOST = 1000
"""Most stores of a folder that are listed."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one store.

    Attributes:
        kind: Command that created the store.
        subject: Name of the subject of its trials.
        done, planned: Number of completed and of planned trials or replicas, of this part with ``--shard``; ``None`` if
            unknown.
        shard: Part of the campaign in the store, for example ``1/2``, if it is only a part.
        command: Command that continues the campaign, or extends it with a larger budget.
        headline: Headline of the report.
        no_result: Reason why there is no headline.
        error: Reason why the store cannot be read.
    """

    store: str
    kind: str = ""
    subject: str = ""
    done: int = 0
    planned: int | None = None
    shard: str = ""
    command: str = ""
    headline: str = ""
    no_result: str = ""
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all planned trials are stored."""
        return self.planned is not None and self.done >= self.planned


@dataclass(frozen=True)
class StatusOptions:
    """Options of ``unsilent status``."""

    stores: Annotated[tuple[Path, ...], Option(
        "Stores, or folders of stores.", "", metavar="STORE", is_argument=True, is_repeatable=True,
        default_text="the current folder")] = ()  # fmt: skip


def status(request: Request) -> int:
    """Show what each store holds, how complete its campaign is, which command continues it, and its main result.

    For a folder, show all stores in it. The exit code is 1 if a store cannot be read.
    """
    paths, display = request[StatusOptions].stores or (Path(),), request[DisplayOptions]
    for path in paths:
        if path.suffix == ".jsonl":
            verbs = f"use unsilent watch {path}, or unsilent report {path}"
            raise UsageError(f"{path} has events of a monitored job; {verbs}")
    result = [status_of(path) for path in _files(paths)]
    if display.as_json:
        print(json.dumps({"schema": "unsilent/status/1", "stores": [asdict(row) for row in result]}, indent=2))
    elif not result:
        show_lines(f"no store in {', '.join(map(str, paths))}", plain=display.plain)
    elif display.plain:
        show_plainly(result)
    else:
        for number, row in enumerate(result):
            show_lines(*([""] if number else []), *lines(row))
            if row.command and not row.is_complete:
                print(f"  continue with: {row.command}")  # in one line, to be copied
    return int(any(row.error for row in result))


def show_plainly(result: Sequence[Status]) -> None:
    """Print a row for each store, with errors and continuation commands as comments."""
    rows = [
        (row.store, row.kind or "-", row.done, "-" if row.planned is None else row.planned, row.shard or "-",
         "yes" if row.is_complete else "no" if row.planned is not None else "-", row.headline or "-")
        for row in result
    ]  # fmt: skip
    show_table(rows, ("store", "kind", "done", "planned", "part", "complete", "result"), plain=True)
    for row in result:
        if row.error or row.no_result:
            show_lines(f"{row.store}: {row.error or row.no_result}", plain=True)
        if row.command and not row.is_complete:
            show_lines(f"continue with: {row.command}", plain=True)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The given files, and all stores in the given folders."""
    from unsilent.studies.campaign_kinds import find_kind_of_store

    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise UsageError(f"there is no store {path}; check the name")
            yield path
            continue
        ours = [file for file in sorted(path.iterdir()) if find_kind_of_store(file)]
        if len(ours) > MOST:
            raise UsageError(f"{path} has {len(ours):,} stores; name at most {MOST:,} of them")
        yield from ours


def status_of(path: Path) -> Status:
    """The status of one store, with the error if the store cannot be read."""
    from unsilent.studies.campaign_kinds import find_kind_of_store, not_a_store

    kind = find_kind_of_store(path)
    try:
        if kind is not None:
            return _campaign(path, kind)
    except UnsilentError as error:
        return Status(str(path), kind.name if kind else "", error=str(error))
    return Status(str(path), error=f"this {not_a_store()}")


def lines(result: Status) -> list[str]:
    """The lines of a status for a terminal, without the command that continues the campaign."""
    if result.error:
        return [f"{result.store}: {result.kind or 'unknown'}", f"  cannot be read: {result.error}"]
    unit = "replicas" if result.kind == "noise" else "trials"
    count = f"{result.done:,} {unit}" if result.planned is None else f"{result.done:,} of {result.planned:,} {unit}"
    word = "" if result.planned is None else ", complete" if result.is_complete else ", not complete"
    part = f" of part {result.shard}" if result.shard else ""
    parts = [f"{result.store}: {result.kind} of {result.subject}", f"  {count}{part}{word}"]
    parts += [f"  result: {result.headline}"] if result.headline else []
    return [*parts, f"  no result yet: {result.no_result}"] if result.no_result else parts


def _campaign(path: Path, kind: Kind[Any, Any, Any]) -> Status:
    from unsilent.campaigns.kinds import count_budgeted_trials
    from unsilent.campaigns.merging import shard_in_command
    from unsilent.campaigns.store import open_store
    from unsilent.campaigns.stored_command import stored_options

    with open_store(path, kind) as store:
        stored_trials = sum(map(kind.is_planned_trial, store.stored_trial_ids()))
        headline = reason = ""
        try:
            result = store.analyse(**vars(stored_options(store, kind.analysis_options)))
            headline = kind.report(result, **vars(stored_options(store, kind.report_options))).headline
        except StoreError:
            raise
        except UsageError as error:  # interrupted before there was anything to read
            reason = str(error).partition(";")[0]
        command = _with(store.largest_budget()[1], path)
        part, parts = shard_in_command(store.largest_budget()[1])
        planned = kind.count_planned_trials(store) if parts == 1 else count_budgeted_trials(store, part, parts)
        subject, shard = escape_unprintable(kind.subject(store)), "" if parts == 1 else f"{part}/{parts}"
        return Status(str(path), kind.name, subject, stored_trials, planned, shard, command, headline, reason)


def _with(command: str, path: Path) -> str:
    """The stored command with its ``--store`` option set to this path."""
    try:
        words = shlex.split(command)
    except ValueError:  # for a store that somebody has changed
        words = []
    if words[:1] != ["unsilent"]:
        return escape_unprintable(command)
    if "--store" in words[:-1]:
        del words[(at := words.index("--store")) : at + 2]
    return escape_unprintable(shlex.join([*words, "--store", str(path)]))


COMMAND = Command("status", RESULTS, "unsilent status", (StatusOptions, DisplayOptions), status)
