"""``unsilent status [STORE…]``: what stores are, how far their campaigns are, which command goes on, and what was found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsilent.cli import options as o
from unsilent.errors import StoreError, UnsilentError, UsageError
from unsilent.printable import clean

if TYPE_CHECKING:
    from unsilent.campaigns.kinds import Kind

MOST = 1000
"""Stores of a folder that are listed."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of one store.

    Attributes:
        kind: the verb that made it. subject: what runs. done, planned: trials or replicas; None where that is not known.
        command: goes on with it. found: the headline of its report, or why there is none. error: why it cannot be read.
    """

    store: str
    kind: str = ""
    subject: str = ""
    done: int = 0
    planned: int | None = None
    command: str = ""
    found: str = ""
    error: str = ""


def status(
    stores: Annotated[
        list[Path] | None, typer.Argument(help="Stores, or folders of stores.", show_default="the current folder")
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Show what stores are, how complete their campaigns are, which command continues them, and their main result.

    A folder stands for the stores in it. The exit code is 1 where a store cannot be read.
    """
    given = stores or [Path()]
    result = [status_of(path) for path in _files(given)]
    if as_json:
        print(json.dumps({"schema": "unsilent/status/1", "stores": [asdict(one) for one in result]}, indent=2))
    elif not result:
        print(f"no store in {', '.join(map(str, given))}")
    else:
        print("\n\n".join("\n".join(lines(one)) for one in result))
    return int(any(one.error for one in result))


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Files that were named, and the stores of ours in folders that were."""
    from unsilent.studies.registered import registered

    for path in given:
        if not path.is_dir():
            if not path.exists():
                raise UsageError(f"there is no store {path}; check the name")
            yield path
            continue
        ours = [file for file in sorted(path.iterdir()) if registered(file)]
        if len(ours) > MOST:
            raise UsageError(f"{path} has {len(ours):,} stores; name some of them, at most {MOST:,}")
        yield from ours


def status_of(path: Path) -> Status:
    """The status of one store; what is wrong with it is part of that."""
    from unsilent.studies.registered import registered

    kind = registered(path)
    try:
        if kind is not None:
            return _campaign(path, kind)
    except UnsilentError as error:
        return Status(str(path), kind.name if kind else "", error=str(error))
    return Status(str(path), error="this is no store of unsilent pvf, training or noise")


def lines(result: Status) -> list[str]:
    """What a terminal shows of a status."""
    if result.error:
        return [f"{result.store}: {result.kind or 'unknown'}", f"  cannot be read: {result.error}"]
    unit = "replicas" if result.kind == "noise" else "trials"
    count = f"{result.done:,} {unit}" if result.planned is None else f"{result.done:,} of {result.planned:,} {unit}"
    word = "" if result.planned is None else ", complete" if result.done >= result.planned else ", not complete"
    parts = [f"{result.store}: {result.kind} of {result.subject}", f"  {count}{word}"]
    parts += [f"  found: {result.found}"] if result.found else []
    return [*parts, f"  continue with: {result.command}"] if result.command else parts


def _campaign(path: Path, kind: Kind[Any, Any, Any]) -> Status:
    from unsilent.campaigns.store import open_store

    with open_store(path, kind) as store:
        own = sum(map(kind.planned, store.done()))
        try:
            result = kind.report(kind.analyse(store)).headline
        except StoreError:
            raise
        except UsageError as error:  # interrupted before there was anything to read
            result = str(error).partition(";")[0]
        parts = clean(kind.subject(store)), own, kind.size(store), _with(store.budget()[1], path), result
    return Status(str(path), kind.name, *parts)


def _with(command: str, path: Path) -> str:
    """The stored command, with this store in the place of the one that it had then."""
    try:
        words = shlex.split(command)
    except ValueError:  # of a store that somebody has altered
        words = []
    if words[:1] != ["unsilent"]:
        return clean(command)
    if "--store" in words[:-1]:
        del words[(at := words.index("--store")) : at + 2]
    return clean(shlex.join([*words, "--store", str(path)]))
