"""Click data from a CSV file of the user.

Invariants: nothing depends on Python's ``hash``; mean, scale and table sizes come from the training rows alone; every
defect of the file is reported in one line that names the row or column.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import read_plain
from unsilent.workloads.cache import digest_of_parts
from unsilent.workloads.clicks import Clicks, clicks

POSITIVE = ("1", "1.0", "yes", "true", "y", "t", "click", "clicked", "positive")
TARGETS = ("y", "label", "click", "target")
MISSING = ("", "na", "nan", "null", "none", "?")
FEWEST_ROWS = 100
MOST_BYTES = 2**30
ROOM = 16
"""Default number of table rows per category; about n / 32 pairs of n categories then share a row."""


def from_csv(
    path: str, *, target: str = "", positive: str = "", drop: Sequence[str] = (), rows: int = 10_000, room: int = ROOM
) -> Clicks:
    """Read a CSV file with a header line (delimiter ``,``, ``;`` or tab) as click data.

    Columns in which every given value is a number are dense (standardised; missing values become the mean). All others
    are categorical: hashed (xxhash) into a table with about ``room`` rows per category, but at most ``rows``. More room
    means fewer collisions and more rows that are never looked up, which lowers the vulnerability of a table as a whole.

    Args:
        target: Column to predict; default: the column named y, label, click or target (any case), else the last column.
        positive: Target value that counts as 1; default: yes, true, 1 and similar values, else the rarer value.
        drop: Columns to leave out.
        rows, room: Limits of the table size: at most ``rows`` rows, and about ``room`` rows per category.

    Raises:
        UsageError: the file cannot be read or decoded, is not rectangular, lacks the columns, or its target has not
            exactly two values.
    """
    header, cells, content = _read(path)
    for name in drop:
        if name not in header:
            raise unknown_name_error(f"column to drop from {path}", name, header)
    named = [name for name in header if name.lower() in TARGETS]
    chosen = target or (named or header)[-1 if not named else 0]
    if chosen not in header:
        raise unknown_name_error(f"target column in {path}", chosen, header)
    columns = dict(zip(header, zip(*cells, strict=True), strict=True))
    labels = _labels(path, chosen, columns.pop(chosen), positive)
    order = np.random.default_rng(0).permutation(len(labels))
    train = np.zeros(len(labels), bool)
    train[order[: len(labels) * 4 // 5]] = True
    dense, sparse, tables = [], [], []
    for name, values in columns.items():
        if name in drop:
            continue
        numbers = _numbers(values)
        if numbers is not None:
            dense.append(_standardised_column(numbers, train))
        else:
            index, size = _categories(values, train, rows, room)
            sparse.append(index)
            tables.append(size)
    if not dense or not sparse:
        kind = "numeric" if not dense else "categorical"
        raise UsageError(f"{path} has no {kind} column besides the target; DLRM needs at least one")
    description = f"{Path(path).name}, {len(labels):,} rows, target {chosen!r}, a fifth held out"
    digest = digest_of_parts(content, repr((chosen, positive, tuple(drop), rows, room)).encode())
    arrays = np.stack(dense, 1)[order], np.stack(sparse, 1)[order], labels[order]
    return clicks(*arrays, tuple(tables), description, digest)


def _read(path: str) -> tuple[list[str], list[list[str]], bytes]:
    """The header and the rows of a CSV file, all of one length, and the bytes of the file."""
    content = read_plain(path, MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path} is not UTF-8 text (line {line}, byte {error.start}); expected a CSV file") from None
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    try:
        lines = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    except csv.Error as error:
        raise UsageError(f"{path} is not a readable CSV file: {error}") from None
    if not lines:
        raise UsageError(f"{path} is empty; expected a CSV file with a header line")
    header, cells = [name.strip() for name in lines[0]], lines[1:]
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        raise UsageError(f"{path} has two columns named {twice[0]!r}; name each column once")
    for number, row in enumerate(cells, 1):
        if len(row) != len(header):
            raise UsageError(f"{path}: data row {number} has {len(row)} cells, the header has {len(header)}")
    if len(cells) < FEWEST_ROWS:
        raise UsageError(
            f"{path} has {len(cells)} data rows; expected at least {FEWEST_ROWS} for training and held-out data"
        )
    return header, cells, content


def _labels(path: str, name: str, values: Sequence[str], positive: str) -> NDArray[np.float32]:
    """The values of the target column as 0 and 1."""
    counts = Counter(value.strip() for value in values)
    if len(counts) != 2:
        examples = ", ".join(repr(value) for value in sorted(counts)[:5])
        raise UsageError(f"{path}: target column {name!r} has {len(counts)} distinct values ({examples}); expected two")
    if positive and positive not in counts:
        raise unknown_name_error(f"positive value of column {name!r}", positive, counts)
    usual = [value for value in sorted(counts) if value.lower() in POSITIVE]
    rarer = min(sorted(counts), key=counts.__getitem__)
    hit = positive or (usual[0] if len(usual) == 1 else rarer)
    return np.array([value.strip() == hit for value in values], np.float32)


def _numbers(values: Sequence[str]) -> NDArray[np.float64] | None:
    """The values of a column as numbers, or None if the column is not numeric.

    Missing values are NaN.
    """
    try:
        numbers = np.array([np.nan if v.strip().lower() in MISSING else float(v) for v in values])
    except ValueError:
        return None
    numbers[~np.isfinite(numbers)] = np.nan
    return None if np.isnan(numbers).all() else numbers


def _standardised_column(numbers: NDArray[np.float64], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """A column scaled to zero mean and unit variance over the training rows.

    Missing values become 0, far outliers 10.
    """
    known = numbers[train & ~np.isnan(numbers)]
    mean, scale = (known.mean(), known.std()) if len(known) else (0.0, 1.0)
    scaled = (np.nan_to_num(numbers, nan=mean) - mean) / (scale or 1.0)
    return np.clip(scaled, -10, 10).astype(np.float32)


def _categories(values: Sequence[str], train: NDArray[np.bool_], rows: int, room: int) -> tuple[NDArray[np.int64], int]:
    """The embedding row of every value of a column, and the number of rows of the table.

    The number is a power of two that makes collisions rare, and at most ``rows``.
    """
    distinct = len({value for value, used in zip(values, train, strict=True) if used})
    size = min(rows, 1 << (room * distinct - 1).bit_length())
    places = {value: xxhash.xxh64_intdigest(value.encode()) % size for value in set(values)}
    return np.array([places[value] for value in values], np.int64), size
