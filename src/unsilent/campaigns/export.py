"""A store as JSON lines, CSV, JSON or Parquet; ``canonical`` for comparing two stores byte by byte.

The canonical export is the campaign's identity followed by its rows in order, without anything that may differ between two
runs of the same campaign: time, path, host, worker.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from unsilent.campaigns.filed import temporary_name
from unsilent.campaigns.replay import outcome_counts
from unsilent.campaigns.spec import TrialRow, canonical
from unsilent.campaigns.store import Store
from unsilent.campaigns.trainings.spec import GUARDED, MADE, TrainingRow
from unsilent.campaigns.trainings.store import TrainingStore
from unsilent.errors import UsageError

AnyStore = Store | TrainingStore
_DIGITS = b"0123456789abcdef".ljust(256, b"?")
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""
FORMATS = (".csv", ".json", ".jsonl", ".parquet")


def export_store(store: AnyStore, to: Path | None, *, canonical: bool = False) -> None:
    """Write every trial to ``to`` (format by its ending; stdout as JSON lines when None).

    Raises ``UsageError`` for an unknown ending or a file that cannot be written.
    """
    if to is not None and to.suffix not in FORMATS:
        raise UsageError(f"cannot export to {to.name!r}; expected an ending of {', '.join(FORMATS)}")
    if canonical and to is not None and to.suffix != ".jsonl":
        raise UsageError(
            f"--canonical writes JSON lines, {to.name!r} asks for another format; use stdout or a .jsonl file"
        )
    if to is None:
        _lines(store, sys.stdout, canonical)
        return
    temporary = temporary_name(to)
    try:
        if to.suffix == ".parquet":
            _parquet(store, temporary)
        else:
            with temporary.open("w", newline="", encoding="utf-8") as file:
                _write(store, file, to.suffix, canonical)
        os.replace(temporary, to)
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror}; choose another place") from None
    finally:
        temporary.unlink(missing_ok=True)


def _write(store: AnyStore, file: IO[str], suffix: str, plain: bool) -> None:
    if suffix == ".csv":
        _csv(store, file)
    elif suffix == ".json":
        _json(store, file)
    else:
        _lines(store, file, plain)


def canonical_lines(store: AnyStore) -> Iterator[str]:
    """The canonical export, line by line."""
    description = store.description
    samples = {} if isinstance(store, TrainingStore) else {"samples": list(store.description.samples)}
    head = {"campaign": description.campaign, "spec": store.spec.identity()}
    yield canonical({**head, "fingerprint": dict(description.fingerprint), **samples})
    for values in _records(store):
        if values["target"].startswith((GUARDED, MADE)):
            continue  # asked for afterwards, no part of the campaign
        for key in ("seconds", "worker"):
            del values[key]
        yield _line(values, canonical)


def record(row: TrialRow) -> dict[str, Any]:
    """One trial as JSON values; ``codes`` is one hex digit a sample."""
    return {
        "trial": str(row.trial),
        "target": row.trial.target,
        "flips": row.trial.flips,
        "k": row.trial.k,
        **outcome_counts(row),
        "incorrect_batches": row.incorrect_batches,
        "severity": row.severity if row.severity != float("inf") else "inf",
        "error": row.error,
        "codes": row.codes.translate(_DIGITS).decode(),
        "faults": json.loads(row.faults),
        "seconds": row.seconds,
        "worker": row.worker,
    }


def training_record(row: TrainingRow) -> dict[str, Any]:
    """One struck training as JSON values: curves as lists, ``inf`` as text, null for what is not known."""
    struck = row.struck
    return {
        "trial": str(row.trial),
        "target": row.trial.target,
        "k": row.trial.k,
        **struck._asdict(),
        "written": _number(row.written),
        "usual": _number(row.usual),
        "reason": row.reason,
        "ran": row.ran,
        "bits": row.bits,
        "test": _number(row.test),
        "test_loss": _number(row.test_loss),
        "churn": _number(row.churn),
        "caught": row.caught,
        "error": row.error,
        "losses": [_number(x) for x in row.losses.tolist()],
        "metric": [_number(x) for x in row.metric.tolist()],
        "watched": [[_number(x) for x in step] for step in row.watched.tolist()],
        "faults": json.loads(row.fault),
        "seconds": row.seconds,
        "worker": row.worker,
    }


def _number(value: float) -> float | str | None:
    return None if math.isnan(value) else value if math.isfinite(value) else str(value)


def _records(store: AnyStore) -> Iterator[dict[str, Any]]:
    if isinstance(store, TrainingStore):
        return map(training_record, store.rows())
    return map(record, store.rows())


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """For tables: what is nested as JSON text, numbers as numbers."""
    flat = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in values.items()}
    for key in ("severity", "written", "usual", "test_loss"):
        if isinstance(flat.get(key), str):
            flat[key] = float(flat[key])
    return flat


def _line(values: dict[str, Any], dumps: Callable[[Any], str]) -> str:
    """One record as JSON. ``codes`` come last and as they are: escaping them is most of the time of a large export."""
    codes = values.pop("codes", None)
    text = dumps(values)
    return text if codes is None else f'{text[:-1]},"codes":"{codes}"}}'


def _lines(store: AnyStore, file: IO[str], plain: bool) -> None:
    for line in canonical_lines(store) if plain else (_line(values, json.dumps) for values in _records(store)):
        file.write(line + "\n")


def _json(store: AnyStore, file: IO[str]) -> None:
    head = json.dumps({"spec": store.spec.to_json(), "description": store.description.to_json()})
    file.write(f'{head[:-1]}, "trials": [')
    for number, record in enumerate(_records(store)):
        file.write(", " if number else "")
        file.write(_line(record, json.dumps))
    file.write("]}")


def _csv(store: AnyStore, file: IO[str]) -> None:
    writer = None
    for values in map(_flat, _records(store)):
        if writer is None:
            writer = csv.DictWriter(file, list(values))
            writer.writeheader()
        writer.writerow({key: _for_spreadsheets(value) for key, value in values.items()})


def _for_spreadsheets(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe before it; numbers are left as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def _parquet(store: AnyStore, path: Path) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError("Parquet needs an extra: pip install 'unsilent[parquet]'") from None
    parquet.write_table(arrow.Table.from_pylist([_flat(values) for values in _records(store)]), path)
