"""The campaign store: one SQLite file that holds one campaign, with one writer and any number of readers.

The file contains the campaign's identity, settings and cost, its trials (encoded by the codec of its kind), and further records
of its kind. Rows are committed in groups. A kill loses at most the group in flight, and those trials run again on resume.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, cast

from unsilent.basics.errors import StoreError, UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.campaigns.codec import row_codec
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.spec import B, R, S, TrialId, campaign_hash, differences, spec_value_text
from unsilent.campaigns.sqlite_file import SqliteFile
from unsilent.campaigns.stored_values import (
    MOST_TRIALS,
    DamagedRecordError,
    RemovedOptionError,
    check_ascending,
    dump_stored_json,
    is_whole_number,
    one_line_preview,
    parse_record,
    read_budget,
)

_LONGEST = 80
"""Most characters of a value in a message."""
LISTED = 8
"""Most targets that a message names."""
TABLES = """
CREATE TABLE campaign (
    id INTEGER PRIMARY KEY CHECK (id = 1), hash TEXT NOT NULL, spec TEXT NOT NULL, description TEXT NOT NULL
);
CREATE TABLE budget (trials INTEGER NOT NULL, command TEXT NOT NULL, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE usage (seconds REAL NOT NULL, cpu_seconds REAL NOT NULL);
CREATE TABLE record (name TEXT NOT NULL, value TEXT NOT NULL);
"""


class Store(SqliteFile, Generic[S, B, R]):
    """An open store of a campaign of one kind.

    See `SqliteFile` for ``path``, ``write`` and errors.

    Args:
        kind: Kind of the campaign. Subclasses for stores of one kind leave it out.
        canonical: Whether the spec describes files and devices only as far as the campaign's identity does.
    """

    kind: Kind[S, B, R]

    def __init__(
        self, path: str | Path, kind: Kind[S, B, R] | None = None, *, write: bool = False, canonical: bool = False
    ) -> None:
        kind = kind or self.kind
        self.kind, self.codec, self._canonical = kind, row_codec(kind.row), canonical
        self.application_id, self.schema_version, self.max_cell_bytes = (
            kind.application_id,
            kind.schema_version,
            kind.max_cell_bytes,
        )
        self.schema = TABLES + self.codec.schema
        self._read: tuple[tuple[Any, ...], tuple[S, B]] | None = None
        super().__init__(path, write=write)

    # -- the campaign --------------------------------------------------------------------------------------------

    def bind_campaign(self, spec: S, baseline: B) -> None:
        """Write the campaign into an empty store, or check that the store holds this campaign.

        Raises ``StoreError`` if it holds another one.
        """
        if self._one("SELECT hash FROM campaign") is not None:
            self.check_campaign(spec, baseline)
            return
        values = (baseline.campaign, dump_stored_json(spec.to_json()), dump_stored_json(baseline.to_json()))
        with self._together(), self._writing("campaign"):
            self._db.execute("INSERT INTO campaign VALUES (1, ?, ?, ?)", values)
            self._read_campaign(*values)

    def check_campaign(self, spec: S, baseline: B) -> None:
        """Raise ``StoreError``, with the differences, if the store holds another campaign."""
        known = self._one("SELECT hash FROM campaign")
        if known is None or known[0] != baseline.campaign:
            raise StoreError(
                f"{self.path} holds another campaign ({self._difference(spec, baseline)}); "
                "give another --store, or remove the file"
            )

    def _difference(self, spec: S, description: B) -> str:
        result = islice(differences((self.spec, self.baseline), (spec, description)), 4)
        parts = (
            f"{key}: {self._short(key, v[0])} in the store, {self._short(key, v[1])} now" if v else f"{key} changed"
            for key, v in result
        )
        return "; ".join(parts) or "unknown difference"

    def _short(self, key: str, value: Any) -> str:
        text = spec_value_text(self.kind.spec, key, value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

    @property
    def spec(self) -> S:
        """The spec of the campaign; raises ``StoreError`` if the store is empty."""
        return self._campaign()[0]

    @property
    def baseline(self) -> B:
        """The baseline: facts that were established before the first trial."""
        return self._campaign()[1]

    def _campaign(self) -> tuple[S, B]:
        """Spec and baseline of the campaign, cached until the file changes."""
        with self._errors():
            row = self._one("SELECT hash, spec, description FROM campaign")
            if row is None:
                raise StoreError(f"{self.path} holds no campaign yet; run the command that made it again")
            if self._read is None or self._read[0] != row:
                spec, record = self._read_campaign(*row)
                if self._canonical:
                    known, same = spec.to_json(), spec.identity()
                    changed = {name: same[name] for name in known if same[name] != known[name]}
                    spec = replace(cast("Any", spec), **changed)
                self._read = row, (spec, record)
            return self._read[1]

    def _read_campaign(self, stored_hash: Any, spec_text: Any, baseline_text: Any) -> tuple[S, B]:
        """Spec and baseline parsed from their stored texts.

        Raises ``DamagedRecordError`` if they are damaged, or ``StoreError`` if they are of another version.
        """
        try:
            spec = parse_record(self.kind.spec, spec_text, "spec")
            baseline = parse_record(self.kind.baseline, baseline_text, "description")
            self.kind.check_spec(spec)
            self.kind.check_baseline(baseline)
            if not stored_hash == baseline.campaign == campaign_hash(spec, baseline.fingerprint):
                raise DamagedRecordError("its campaign hash does not match its spec")
        except RemovedOptionError as error:
            raise self.other_options_error(str(error)) from None
        except DamagedRecordError:
            if changed := self._changed_options(spec_text):
                raise self.other_options_error(", ".join(changed)) from None
            raise
        return spec, baseline

    def other_options_error(self, options: str) -> StoreError:
        """The error for a store of another version, with options that do not exist in this version."""
        return StoreError(
            f"{self.path} was made with other options ({one_line_preview(options)}) than those of this "
            f"version of unsilent {self.kind.command_words}; give another store"
        )

    def _changed_options(self, text: Any) -> list[str]:
        """Names of the fields that only the stored spec or only this version's specs have."""
        try:
            stored = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            return []
        known = {field.name for field in fields(cast("Any", self.kind.spec))}
        return sorted(known ^ stored.keys()) if isinstance(stored, dict) else []

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Convert a ``DamagedRecordError`` while writing to ``StoreError``, so that only readable values are stored."""
        try:
            yield
        except DamagedRecordError as error:
            raise StoreError(f"{self.path} cannot hold this {what}: {error}; change what is asked") from None

    def record_budget(self, trials: int, command: str) -> None:
        """Store the budget and the command of this run.

        A later run may have a larger budget.
        """
        with self._writing("budget"):
            budget = read_budget(trials, escape_unprintable(command))
        with self._errors(), self._db:
            self._db.execute("INSERT INTO budget (trials, command) VALUES (?, ?)", budget)

    def largest_budget(self) -> tuple[int, str]:
        """The largest number of trials per stratum in any run so far, and the command of that run."""
        with self._errors():
            result = [
                read_budget(*row) for row in self._db.execute("SELECT trials, command FROM budget ORDER BY rowid")
            ]
        return max(reversed(result), key=itemgetter(0), default=(0, ""))

    # -- further records -----------------------------------------------------------------------------------------

    def records(self, name: str) -> list[Any]:
        """All records with this name, oldest first, parsed by their kind."""
        return [value for _, value in self._records(name)]

    def records_as_json(self, name: str) -> list[Any]:
        """All records with this name as plain JSON values, after their kind has checked them."""
        return [json.loads(text) for text, _ in self._records(name)]

    def _records(self, name: str) -> list[tuple[str, Any]]:
        with self._errors():
            rows = self._db.execute("SELECT value FROM record WHERE name = ? ORDER BY rowid", (name,)).fetchall()
            if not rows:
                return []
            allowance = self._allowance()
            allowance.count_read(*(row[0] for row in rows))
            read, (spec, result) = self.kind.record_readers[name], self._campaign()
            return [(row[0], read(row[0], spec, result)) for row in rows]

    def add_record(self, name: str, value: Any) -> None:
        """Add a record, stored as JSON."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO record VALUES (?, ?)", (name, dump_stored_json(value)))

    def replace_records(self, name: str, values: Iterable[Any]) -> None:
        """Replace all records with this name."""
        with self._together():
            self._db.execute("DELETE FROM record WHERE name = ?", (name,))
            self._db.executemany(
                "INSERT INTO record VALUES (?, ?)", [(name, dump_stored_json(value)) for value in values]
            )

    # -- trials --------------------------------------------------------------------------------------------------

    def add_rows(self, rows: Iterable[R]) -> None:
        """Commit rows in one transaction.

        If this raises, rows that were committed before remain.

        Raises:
            StoreError: The disk is full.
            UsageError: A value does not have the type of its column.
        """
        names, shapes = self.codec.columns, partial(self.kind.shapes, self.baseline)
        statement = f"INSERT INTO trial ({', '.join(names)}) VALUES ({','.join('?' * len(names))})"  # noqa: S608 - constants
        with self._together():
            self._db.executemany(statement, (self.codec.encode(row, shapes) for row in rows))

    def stored_trial_ids(self) -> set[TrialId]:
        """Identities of all stored trials."""
        with self._errors():
            known = self._known()
            return {
                self._trial(known, *cells)
                for cells in self._db.execute("SELECT target, flips, k, sample_count FROM trial")
            }

    @property
    def rows_written(self) -> int:
        """A number that grows with every row that is written."""
        row = self._one("SELECT IFNULL(MAX(rowid), 0) FROM trial")
        assert row is not None
        return int(row[0])

    def rows(self, *, target: str | None = None, omit_arrays: Collection[str] = (), after: int = 0) -> Iterator[R]:
        """All trials, or those of one target, in canonical order (target, flips, k, sample_count).

        Arrays named in ``omit_arrays`` are left empty. With ``after``, only trials written since `rows_written` had that value
        are returned.
        """
        # Uses the index, as sorting cannot be interrupted.
        where, values = (
            ("WHERE rowid > ? ", [after]) if target is None else ("WHERE rowid > ? AND target = ? ", [after, target])
        )
        with self._errors():
            yield from check_ascending(
                self._select(f"{where}ORDER BY target, IFNULL(flips, 0), k, sample_count", tuple(values), omit_arrays)
            )

    def analyse(self, **options: Any) -> Any:
        """The result of the stored trials, as the kind computes it; raises ``UsageError`` if there are none."""
        self.check_has_trials()
        return self.kind.analyse(self, **options)

    def check_has_trials(self) -> None:
        """Raise ``UsageError`` if no trial is stored, unless the campaign has no targets."""
        if not self.has_trials and (self._one("SELECT 1 FROM campaign") is None or self.baseline.targets):
            raise UsageError(f"{self.path} has no trial yet; run the command that made it again")

    @property
    def has_trials(self) -> bool:
        """Whether a trial is stored."""
        return self._one("SELECT 1 FROM trial LIMIT 1") is not None

    def find_row(self, trial: TrialId) -> R | None:
        """The row of a trial; None if it was not run."""
        rows = list(self._select("WHERE target = ? AND flips IS ? AND k = ? AND sample_count = ?", tuple(trial)))
        return rows[0] if rows else None

    def row(self, trial: TrialId) -> R:
        """The row of a trial; raises ``StoreError`` if it was not run."""
        result = self.find_row(trial)
        if result is None:
            names = [t.name for t in self.baseline.targets] or sorted({t.target for t in self.stored_trial_ids()})
            targets = ", ".join(names[:LISTED])
            flips = ", ".join(f"x{f or ''}" for f in self.spec.flips)
            most = max(t.slots for t in self.baseline.targets) if self.spec.is_enumerated else self.largest_budget()[0]
            raise StoreError(
                f"{self.path} has no trial {trial}; expected TARGET/xFLIPS/NUMBER with a target of {targets} …, flips of {flips} "
                f"and a number below {most}; trials that evaluate some samples end in /s and their number, like /s1"
            )
        return result

    def _select(self, clause: str, values: tuple[Any, ...] = (), without: Collection[str] = ()) -> Iterator[R]:
        columns = ", ".join("NULL" if name in without else name for name in self.codec.columns)
        query = f"SELECT {columns} FROM trial {clause}"  # noqa: S608 - constants
        with self._errors():
            baseline, known, allowance = self.baseline, self._known(), self._allowance()
            shapes = partial(self.kind.shapes, baseline)
            with self._query(query, values) as cursor:
                for cells in cursor:
                    self._trial(known, *cells[:4])
                    row = self.codec.decode(cells, shapes, allowance)
                    try:
                        self.kind.check_row(row, baseline)
                    except DamagedRecordError as wrong:
                        raise DamagedRecordError(f"trial {one_line_preview(str(row.trial))} {wrong}") from None
                    yield row

    def _known(self) -> tuple[S, frozenset[str]]:
        """The spec and the names of the targets."""
        return self.spec, frozenset(target.name for target in self.baseline.targets)

    def _trial(self, known: tuple[S, frozenset[str]], target: Any, flips: Any, k: Any, count: Any) -> TrialId:
        """The trial of these cells; raises ``DamagedRecordError`` if it does not belong to the campaign."""
        numbers = [k, count, 0 if flips is None else flips]
        if not isinstance(target, str) or not all(map(is_whole_number, numbers)):
            raise DamagedRecordError(
                f"trial {one_line_preview(target)}/{one_line_preview(k)} has a target, flips, a trial number or samples of the "
                "wrong type"
            )
        trial = TrialId(target, flips, k, count)
        if (
            not 0 <= k < MOST_TRIALS
            or not 0 <= count <= self.kind.max_samples
            or not self.kind.accepts_trial(trial, *known)
        ):
            raise DamagedRecordError(
                f"it holds trial {one_line_preview(str(trial))}, which does not belong to its campaign"
            )
        return trial

    @contextmanager
    def _together(self) -> Iterator[None]:
        """One transaction: its writes are committed at the end of the ``with`` block, or not at all."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


AnyStore = Store[Any, Any, Any]


def open_store(path: str | Path, kind: Kind[S, B, R], *, write: bool = False, canonical: bool = False) -> Any:
    """Open a store of a kind, with the store class of the kind if it has one; see `Store`."""
    return (kind.store_class or Store)(path, kind, write=write, canonical=canonical)
