"""Joins stores that hold trials of the same campaign from several machines.

Stores may come from anywhere and are read only through `Store`. Rows are streamed: every store returns them in canonical order,
so that only one row of each store is in memory. All rows are written in one transaction, or none. A new store is first created
under another name.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from unsilent.basics.errors import StoreError, UsageError
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.locking import FileLock
from unsilent.campaigns.spec import CampaignRow, TrialId, differences, spec_value_text
from unsilent.campaigns.sqlite_file import check_name, remove_if_possible, temporary_name
from unsilent.campaigns.store import AnyStore, Store

_SHARD = re.compile(r" --shard (\d{1,9})/(\d{1,9})")
Order = tuple[str, bool, int, int, int]


@dataclass
class MergeInput:
    """One joined store, with its number of trials and how many of them no earlier store held."""

    store: Path
    trials: int = 0
    new: int = 0

    @property
    def duplicates(self) -> int:
        """The number of its trials that an earlier store held as well, with the same content."""
        return self.trials - self.new


@dataclass(frozen=True)
class MergeResult:
    """The joined store, its number of trials before, and the trials that each input added."""

    store: Path
    campaign: str
    trials_before: int
    merged_inputs: tuple[MergeInput, ...]

    @property
    def trials(self) -> int:
        """The number of trials that the joined store holds now."""
        return self.trials_before + sum(part.new for part in self.merged_inputs)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": "unsilent/merge/1",
            "store": str(self.store),
            "campaign": self.campaign,
            "trials": self.trials,
            "before": self.trials_before,
            "inputs": [
                {"store": str(p.store), "trials": p.trials, "new": p.new, "duplicates": p.duplicates}
                for p in self.merged_inputs
            ],
        }

    def __str__(self) -> str:
        lines = [f"{p.store}: {p.trials} trials, {p.new} new, {p.duplicates} duplicates" for p in self.merged_inputs]
        held = f", {self.trials_before} of them stored before" if self.trials_before else ""
        return "\n".join([*lines, f"{self.store}: {self.trials} trials{held}"])


def merge_stores(out: Path, paths: Sequence[Path], kind: Kind[Any, Any, Any]) -> MergeResult:
    """Join stores into ``out``, which is created, or extended if it holds the same campaign.

    Raises:
        UsageError: A file is named twice.
        StoreError: The stores hold different campaigns, or different results of one trial (``out`` is then not changed); one
            of them cannot be used, or ``out`` cannot be written.
    """
    check_name(out)
    _check_names(out, paths)
    with ExitStack() as stack:
        sources = [stack.enter_context(Store(path, kind)) for path in paths]
        if not out.exists():
            _check_campaigns(sources)
            return _make(out, sources)
        with Store(out, kind) as held:
            _check_campaigns([held, *sources])
        # The writer closes last, so that it can fold its log into the file.
        with Store(out, kind, write=True) as target, Store(out, kind) as held:
            merged = _fill(target, out, [held, *sources])
        return MergeResult(out, merged.campaign, merged.merged_inputs[0].trials, merged.merged_inputs[1:])


def _check_names(out: Path, paths: Sequence[Path]) -> None:
    seen = {os.path.realpath(out)}
    for path in paths:
        if os.path.realpath(path) in seen:
            same = os.path.realpath(path) == os.path.realpath(out)
            where = "the output store cannot also be an input" if same else "name it once"
            raise UsageError(f"{path} is named twice; {where}")
        seen.add(os.path.realpath(path))


def _check_campaigns(stores: Sequence[AnyStore]) -> None:
    """Raise ``StoreError`` unless all stores hold the same campaign."""
    first, *others = [(store.path, store.spec, store.baseline) for store in stores]
    text = partial(spec_value_text, stores[0].kind.spec)
    for path, spec, result in others:
        if result.campaign != first[2].campaign:
            parts = [
                f"{key}: {text(key, v[0])} and {text(key, v[1])}" if v else f"different {key}"
                for key, v in islice(differences(first[1:], (spec, result)), 4)
            ]
            raise StoreError(
                f"{first[0]} and {path} hold different campaigns ({'; '.join(parts)}); "
                "only trials of one campaign can be joined"
            )
        for part in stores[0].kind.shared_baseline_fields:
            if getattr(result, part) != getattr(first[2], part):
                raise StoreError(
                    f"{first[0]} and {path} hold one campaign but different {part}, so one of them is damaged; restore a copy"
                )


def _make(out: Path, sources: Sequence[AnyStore]) -> MergeResult:
    """Create the joined store under a temporary name and rename it when it is complete."""
    lock, temporary = FileLock(out), temporary_name(out)
    beside = [temporary.with_name(temporary.name + ending) for ending in ("", "-wal", "-shm", "-journal")]
    try:
        _check_free(out)
        with Store(temporary, sources[0].kind, write=True) as target:
            target.bind_campaign(sources[0].spec, sources[0].baseline)
            merged = _fill(target, out, sources)
        if any(path.exists() for path in beside[1:]):
            raise StoreError(f"cannot write {out} (is the disk full?); free space and run the same command again")
        os.replace(temporary, out)
        return merged
    except StoreError as error:
        raise StoreError(str(error).replace(str(temporary), str(out))) from None
    except OSError as error:
        raise StoreError(f"cannot write {out} ({error.strerror}); choose another path") from None
    finally:
        for path in beside:
            remove_if_possible(path)
        lock.release()


def _check_free(out: Path) -> None:
    """Raise ``StoreError`` if the new store's file or a leftover SQLite log of it exists already."""
    for path in (out, *(out.with_name(out.name + ending) for ending in ("-wal", "-journal"))):
        if path.exists():
            raise StoreError(
                f"{path} exists already, so the new store {out} cannot be written; move it away or choose another name"
            )


def _fill(target: AnyStore, out: Path, sources: Sequence[AnyStore]) -> MergeResult:
    """Add to ``target`` the trials and records that it lacks.

    ``target`` may itself be the first of ``sources``.
    """
    parts = tuple(MergeInput(store.path) for store in sources)
    extends = sources[0].path == target.path
    records = {name: _records(sources, name) for name in target.kind.record_readers}
    target.add_rows(row for number, row in _union(sources, parts) if number or not extends)
    _carry_books(target, [s for s, part in zip(sources, parts, strict=True) if part.new and s.path != target.path])
    for name, values in records.items():
        target.replace_records(name, values)
    return MergeResult(out, target.baseline.campaign, 0, parts)


def _carry_books(target: AnyStore, sources: Sequence[AnyStore]) -> None:
    """Add the time spent of all these stores to ``target``, and the largest budget of them."""
    seconds = [store.total_session_seconds() for store in sources]
    if seconds:
        target.add_session_seconds(sum(wall for wall, _ in seconds), sum(cpu for _, cpu in seconds))
    trials, command = max((store.largest_budget() for store in sources), key=itemgetter(0), default=(0, ""))
    if trials > target.largest_budget()[0]:
        target.record_budget(trials, command_without_shard(command))


def command_without_shard(command: str) -> str:
    """The command line without its ``--shard`` option."""
    return _SHARD.sub("", command)


def shard_in_command(command: str) -> tuple[int, int]:
    """The part and the number of parts that a command's ``--shard`` selects; (1, 1) without the option."""
    match = _SHARD.search(command)
    return (int(match[1]), int(match[2])) if match else (1, 1)


def _records(stores: Sequence[AnyStore], name: str) -> list[Any]:
    """The longest list of records of one name, which must begin with the lists of all other stores.

    Raises ``StoreError`` if it does not, since a record (for example the decision of a look) holds for all trials of a
    campaign.
    """
    result = [store.records_as_json(name) for store in stores]
    most = max(range(len(stores)), key=lambda i: len(result[i]))
    for store, values in zip(stores, result, strict=True):
        if values != result[most][: len(values)]:
            raise StoreError(
                f"{stores[most].path} and {store.path} have different records of {name}, because of another precision, noise "
                "floor or other trials; join stores before you continue the campaign, or leave one store out"
            )
    return result[most]


def _union(sources: Sequence[AnyStore], parts: Sequence[MergeInput]) -> Iterator[tuple[int, CampaignRow]]:
    """Every trial once, in canonical order, with the number of the first store that holds it.

    Counts the trials in ``parts``.
    """
    with ExitStack() as stack:  # a query left open after an error would keep its file open
        streams = [stack.enter_context(closing(_rows(store, number))) for number, store in enumerate(sources)]
        for _, group in groupby(heapq.merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
            (_, number, row), *again = group
            for _, holder, copy in again:
                parts[holder].trials += 1
                _check_equal(row, copy, sources[number].path, sources[holder].path)
            parts[number].trials += 1
            parts[number].new += 1
            yield number, row


def _rows(store: AnyStore, number: int) -> Generator[tuple[Order, int, CampaignRow], None, None]:
    """The trials of a store in ascending order."""
    for row in store.rows():
        yield _trial_sort_key(row.trial), number, row


def _trial_sort_key(trial: TrialId) -> Order:
    """The sort key of a trial, which gives the same order as SQLite: target, flips, k, samples."""
    return trial.target, trial.flips is not None, trial.flips or 0, trial.k, trial.sample_count


def _check_equal(row: CampaignRow, copy: CampaignRow, where: Path, place: Path) -> None:
    """Raise ``StoreError`` if a trial has different results in two stores."""
    again = copy.reproducible_values()
    for column, value in row.reproducible_values().items():
        if value != again[column]:
            raise StoreError(
                f"trial {row.trial} has different results in {where} and {place} (column {column}), so one of the machines does "
                "not reproduce the campaign; replay the trial on both machines and leave out the store with the wrong result"
            )
