"""Reads and checks the columns of an operation table from an untrusted Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import open_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.timeline.pipeline import TYPES

WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc")
SECONDS = ("start_ts", "duration")
COLUMNS = (*WHOLE, *SECONDS, "optype")
"""Required columns. ``mc`` and ``gmc`` are the part of the model on the worker and in the whole model; -1 and null: none."""
MOST_ROWS = 10_000_000
MOST_BYTES = 2**31
"""Most bytes of all columns before compression."""
LARGEST_NUMBER = 2**31 - 1
MISSING_EXTRA = "needs an optional package; install it with: pip install 'unsilent[timeline]'"

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Rows(NamedTuple):
    """Columns of an operation table, n elements each.

    ``type`` is an index in `TYPES`, or -1 if unknown.
    """

    data_rank: Integers
    stage: Integers
    rank: Integers
    step: Integers
    type: Integers
    start: Floats
    duration: Floats
    number: Integers
    chunk: Integers
    model_chunk: Integers

    def of(self, which: NDArray[Any]) -> Rows:
        """The rows at the given indices."""
        return Rows(*(column[which] for column in self))


def read_rows(path: Path) -> tuple[Rows, list[str]]:
    """All rows of a table, and the printable names of its operations.

    Raises ``UsageError`` if the table cannot be read.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UsageError(f"an operation table {MISSING_EXTRA}") from None
    with open_plain(path) as file:
        try:
            source = parquet.ParquetFile(file)
            _check_size_and_types(source, path)
            # Names stay numbers that refer to a dictionary: written out, a long one could fill the memory.
            source = parquet.ParquetFile(file, metadata=source.metadata, read_dictionary=["optype"])
            table = source.read(columns=list(COLUMNS))
            names_column = table["optype"].unify_dictionaries().combine_chunks()
            names = [str(name) for name in names_column.dictionary.to_pylist()]
            name = names_column.indices.fill_null(len(names)).to_numpy(zero_copy_only=False)
            of = {column: _numbers(table[column], column, path) for column in (*WHOLE, *SECONDS)}
        except UsageError:
            raise
        except Exception as error:  # a damaged file can raise anything
            reason = escape_unprintable(" ".join(str(error).split()))[:120]
            raise UsageError(f"{path} cannot be read as Parquet ({reason}); expected an operation table") from None
    known = {operation_type.name: at for at, operation_type in enumerate(TYPES)}
    types = np.array([*(known.get(text, -1) for text in names), -1], np.int64)[name]
    whole = {column: of[column].astype(np.int64) for column in WHOLE}
    rows = Rows(
        whole["dp_rank"], whole["stage"], whole["rank"], whole["step"], types, of["start_ts"], of["duration"], whole["seq_id"],
        whole["mc"], whole["gmc"],
    )  # fmt: skip
    return rows, [escape_unprintable(text)[:40] for text in names]


def _check_size_and_types(source: Any, path: Path) -> None:
    """Raise ``UsageError`` before reading if the table is too large or a column is missing or wrong."""
    import pyarrow as arrow

    metadata, schema = source.metadata, source.schema_arrow
    if missing := [name for name in COLUMNS if name not in schema.names]:
        raise UsageError(f"{path} lacks {', '.join(missing)}; expected a table with {', '.join(COLUMNS)}")
    size = sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups))
    if not 0 < metadata.num_rows <= MOST_ROWS or size > MOST_BYTES:
        raise UsageError(
            f"{path} has {metadata.num_rows:,} rows and {size >> 20:,} MiB; expected 1 to {MOST_ROWS:,} rows and at most "
            f"{MOST_BYTES >> 20:,} MiB; give fewer steps"
        )
    kinds = arrow.types
    for name in COLUMNS:
        kind = schema.field(name).type
        if name == "optype":
            text = kind.value_type if kinds.is_dictionary(kind) else kind
            fits, expected = kinds.is_string(text) or kinds.is_large_string(text), "text"
        else:
            fits, expected = kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_null(kind), "numbers"
        if not fits:
            raise UsageError(f"{path}: {name} is {kind!s:.60}; expected {expected}")


def _numbers(column: Any, name: str, path: Path) -> Floats:
    """A checked column as float64, which holds whole numbers up to `LARGEST_NUMBER` exactly.

    Raises ``UsageError`` for invalid values.
    """
    values = column.cast("float64", safe=False).to_numpy()
    least = -1.0 if name in ("mc", "gmc") else -np.inf if name == "start_ts" else 0.0
    values = np.where(np.isnan(values), -1.0, values) if least == -1 else values
    with np.errstate(invalid="ignore"):
        wrong = ~(np.isfinite(values) & (values >= least) & (np.abs(values) <= LARGEST_NUMBER))
        if name not in ("start_ts", "duration"):
            wrong |= values != np.floor(values)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        kind = "seconds" if name in ("start_ts", "duration") else "a whole number"
        limit = "" if least == -np.inf else f" of {least:.0f} or more"
        raise UsageError(f"{path}: {name} of row {at + 1:,} is {values[at]:g}; expected {kind}{limit}")
    return np.asarray(values, np.float64)
