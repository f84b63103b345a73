"""Export of a store as JSON lines, CSV, JSON or Parquet.

Canonical exports of equal campaigns are equal byte by byte.

The canonical export is the campaign's identity followed by its rows in order, without anything that may differ between two runs
of the same campaign: time, path, host, worker. If the campaign has rounds, they are included, as they determine which rows
count.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.spec import Json, sorted_json_text
from unsilent.campaigns.sqlite_file import remove_if_possible, temporary_name
from unsilent.campaigns.store import AnyStore

if TYPE_CHECKING:
    from pandas import DataFrame

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Characters that begin a formula in a spreadsheet."""
FORMATS = (".csv", ".json", ".jsonl", ".parquet")


def export_store(store: AnyStore, to: Path | None, *, canonical: bool = False) -> None:
    """Write every trial to ``to``, in the format of its file ending.

    JSON lines on stdout if ``to`` is None.

    Raises ``UsageError`` if the ending is unknown or the file cannot be written.
    """
    if to is not None and to.suffix not in FORMATS:
        raise UsageError(f"cannot export to {to.name!r}; expected a name that ends in {' or '.join(FORMATS)}")
    if canonical and to is not None and to.suffix != ".jsonl":
        raise UsageError(
            f"--canonical writes JSON lines, but the output is {to.name!r}; give a name that ends in .jsonl, or no output file"
        )
    if to is None:
        _lines(store, sys.stdout, plain=canonical)
        return
    temporary = temporary_name(to)
    try:
        if to.suffix == ".parquet":
            _parquet(store, temporary)
        else:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                write = {".csv": _csv, ".json": _json}.get(to.suffix, partial(_lines, plain=canonical))
                write(store, file)
        os.replace(temporary, to)
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror or error}; choose another path") from None
    finally:
        remove_if_possible(temporary)


def canonical_lines(store: AnyStore) -> Iterator[str]:
    """The canonical export, line by line, without trials that were run outside of the plan."""
    baseline = store.baseline
    head = {"campaign": baseline.campaign, "spec": store.spec.identity(), "fingerprint": dict(baseline.fingerprint)}
    yield sorted_json_text(head | _rounds(store))
    for row in store.rows():
        if store.kind.is_planned_trial(row.trial):
            yield _line(store, store.codec.row_as_json(row, canonical=True), sorted_json_text)


def _rounds(store: AnyStore) -> Json:
    """The decisions of all rounds, empty for campaigns without rounds."""
    rounds = store.records_as_json(ROUND) if ROUND in store.kind.record_readers else []
    return {"rounds": rounds} if rounds else {}


def _records(store: AnyStore) -> Iterator[Json]:
    """Rows as JSON values.

    Kinds with rounds add the look from which on a trial counts.
    """
    if ROUND not in store.kind.record_readers:
        yield from map(store.codec.row_as_json, store.rows())
        return
    from unsilent.campaigns.rounds import plans_by_stratum

    plans = plans_by_stratum(rounds) if (rounds := store.records(ROUND)) else {}
    for row in store.rows():
        trial = row.trial
        plan = plans.get((trial.target, trial.flips))
        yield store.codec.row_as_json(row) | {"look": plan and plan.look_of_trial(trial)}


def _flat(store: AnyStore) -> Iterator[Json]:
    """Rows for tables: nested values as JSON text, numbers as numbers."""
    for values in _records(store):
        flat = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in values.items()}
        for key in store.codec.number_columns:
            if isinstance(flat.get(key), str):
                flat[key] = float(flat[key])
        yield flat


def _line(store: AnyStore, values: Json, dumps: Callable[[Any], str]) -> str:
    """One record as a line of JSON.

    Hex digits are appended without escaping, which would take most of the time of a large export.
    """
    digits = {name: values.pop(name) for name in store.codec.hex_fields}
    return dumps(values)[:-1] + "".join(f',"{name}":"{text}"' for name, text in digits.items()) + "}"


def _lines(store: AnyStore, file: IO[str], plain: bool) -> None:
    for line in canonical_lines(store) if plain else (_line(store, values, json.dumps) for values in _records(store)):
        file.write(line + "\n")


def _json(store: AnyStore, file: IO[str]) -> None:
    head = json.dumps({"spec": store.spec.to_json(), "description": store.baseline.to_json(), **_rounds(store)})
    file.write(f'{head[:-1]}, "trials": [')
    for number, record in enumerate(_records(store)):
        file.write(", " if number else "")
        file.write(_line(store, record, json.dumps))
    file.write("]}")


def _csv(store: AnyStore, file: IO[str]) -> None:
    writer = None
    for values in _flat(store):
        if writer is None:
            writer = csv.DictWriter(file, list(values))
            writer.writeheader()
        writer.writerow({key: for_spreadsheets(value) for key, value in values.items()})


def for_spreadsheets(value: Any) -> Any:
    """The value with an apostrophe before any text that a spreadsheet would execute as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def trials_as_frame(store: AnyStore) -> DataFrame:
    """A pandas table with a row for every trial; raises ``UsageError`` if pandas is missing."""
    try:
        import pandas
    except ImportError:
        raise UsageError(
            "a table of trials needs an optional package; install it with: pip install 'unsilent[pandas]'"
        ) from None
    return pandas.DataFrame(list(_flat(store)))


def _parquet(store: AnyStore, path: Path) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(
            "export to Parquet needs an optional package; install it with: pip install 'unsilent[parquet]'"
        ) from None
    parquet.write_table(arrow.Table.from_pylist(list(_flat(store))), path)
