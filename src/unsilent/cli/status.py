"""``unsilent status [STORE…]``: what stores are, how far their campaigns are, which command goes on, and what was found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import options as o
from unsilent.errors import StoreError, UnsilentError, UsageError
from unsilent.printable import clean

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
    """Say of stores what they are, how far their campaigns are, which command goes on, and what was found.

    A folder stands for the stores in it. The exit code is 1 where a store cannot be read.
    """
    given = stores or [Path()]
    found = [status_of(path) for path in _files(given)]
    if as_json:
        print(json.dumps({"schema": "unsilent/status/1", "stores": [asdict(one) for one in found]}, indent=2))
    elif not found:
        print(f"no store in {', '.join(map(str, given))}")
    else:
        print("\n\n".join("\n".join(lines(one)) for one in found))
    return int(any(one.error for one in found))


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Files that were named, and the stores of ours in folders that were."""
    for path in given:
        if not path.is_dir():
            if not path.exists():
                raise UsageError(f"there is no store {path}; check the name")
            yield path
            continue
        ours = [file for file in sorted(path.iterdir()) if _verb(file)]
        if len(ours) > MOST:
            raise UsageError(f"{path} has {len(ours):,} stores; name some of them, at most {MOST:,}")
        yield from ours


def _verb(path: Path) -> str:
    """The verb that made a store; empty for what is none of ours."""
    from unsilent.campaigns.filed import application_of
    from unsilent.replicas import ReplicaStore
    from unsilent.studies.registered import KINDS

    verbs = {kind.application: kind.name for kind in KINDS} | {ReplicaStore.application: "noise"}
    return verbs.get(application_of(path), "")


def status_of(path: Path) -> Status:
    """The status of one store; what is wrong with it is part of that."""
    kind = _verb(path)
    read = {"pvf": _pvf, "training": _training, "noise": _noise}.get(kind)
    if read is None:
        return Status(str(path), error="this is no store of unsilent pvf, training or noise")
    try:
        return read(path)
    except UnsilentError as error:
        return Status(str(path), kind, error=str(error))


def lines(found: Status) -> list[str]:
    """What a terminal shows of a status."""
    if found.error:
        return [f"{found.store}: {found.kind or 'unknown'}", f"  cannot be read: {found.error}"]
    unit = "replicas" if found.kind == "noise" else "trials"
    count = f"{found.done:,} {unit}" if found.planned is None else f"{found.done:,} of {found.planned:,} {unit}"
    word = "" if found.planned is None else ", complete" if found.done >= found.planned else ", not complete"
    told = [f"{found.store}: {found.kind} of {found.subject}", f"  {count}{word}"]
    told += [f"  found: {found.found}"] if found.found else []
    return [*told, f"  goes on with: {found.command}"] if found.command else told


def _pvf(path: Path) -> Status:
    from unsilent.studies.pvf.analysis import analyse
    from unsilent.studies.pvf.kind import PvfStore
    from unsilent.studies.pvf.report.sentences import headline
    from unsilent.studies.pvf.tallies import Question

    with PvfStore(path) as store:
        result = analyse(store, Question())
        command = store.budget()[1]
    return Status(
        str(path),
        "pvf",
        clean(result.workload),
        result.trials_done,
        result.trials_planned,
        _with(command, path),
        headline(result),
    )


def _training(path: Path) -> Status:
    from unsilent.studies.training.kind import TrainingStore
    from unsilent.studies.training.sentences import headline
    from unsilent.studies.training.spec import GUARDED, MADE
    from unsilent.studies.training.study import Reading, read_training

    with TrainingStore(path) as store:
        budget, command = store.budget()
        own = [trial for trial in store.done() if not trial.target.startswith((GUARDED, MADE))]
        planned = budget * len(store.description.targets)
        try:
            found = headline(read_training(store, Reading()))
        except StoreError:
            raise
        except UsageError as error:  # interrupted before there was anything to read
            found = str(error).partition(";")[0]
        subject = store.description.name
    return Status(str(path), "training", clean(subject), len(own), planned, _with(command, path), found)


def _noise(path: Path) -> Status:
    from unsilent.replicas import ReplicaStore

    with ReplicaStore(path) as store:
        trainings = store.trainings()
        names = [store.trained(training).name for training in trainings]
        done = [store.done(training) for training in trainings]
        specs = [store.spec(training) for training in trainings]
    variants = {replica.switches for own in done for replica in own}
    told = f"replicas of {len(variants)} sets of switches"
    if len(specs) == 1:
        (spec,) = specs
        words = [
            "unsilent",
            "noise",
            spec.workload,
            *(w for name, value in spec.options for w in ("--with", f"{name}={value}")),
        ]
        words += ["--steps", str(spec.steps)] if spec.steps else []
        words += ["--data", spec.data] if spec.data else []
        words += ["--seed", str(spec.seed)] if spec.seed else []
        told += f"; {clean(shlex.join([*words, '--store', str(path)]))} studies this training with them"
    subject = ", ".join(map(clean, names)) or "no training yet"
    return Status(str(path), "noise", subject, sum(map(len, done)), None, "", told)


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
