"""Conversion of trial rows to table cells and back, derived from the annotated fields of the row's dataclass.

A row is a dataclass with a field ``trial`` (`TrialId`) and fields of these types: ``str``, ``int``, ``bool``, ``float`` (without
limits it may be NaN, which is stored as NULL), ``X | None``, a NamedTuple of those (a column each), ``bytes`` and
``NDArray`` of a number type (compressed). Limits are those of `annotated_types` (``Annotated[int, Ge(0)]``); `FAULTS` is JSON,
`RUN_SPECIFIC` belongs to one run and not to the trial, `LARGE` is not exported.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import xxhash
from annotated_types import Ge, Interval, Lt

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_numpy import np
from unsilent.campaigns.spec import R, TrialId, sorted_json_text
from unsilent.campaigns.stored_values import DamagedRecordError, ReadLimit, check_faults, one_line_preview

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from unsilent.faults import Fault

Shape = int | tuple[int, ...]
FAULTS_JSON = "faults"
"""Marks a text as JSON: a list of faults, or one object in their place (a digest)."""
MOST_ELEMENTS = 4096
RUN_SPECIFIC = "run"
"""Marks a field that belongs to one run of a trial: it may differ if the trial is run again, and is in no canonical export."""
Seconds = Annotated[float, Ge(0), Lt(math.inf), RUN_SPECIFIC]
"""Duration of a trial, which belongs to one run."""
NOT_EXPORTED = "large"
"""Marks an array that is too large to be exported; other fields tell whether it is equal."""
_SQL = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}
_DIGITS = b"0123456789abcdef".ljust(256, b"?")


@dataclass(frozen=True, slots=True)
class SqlColumn:
    """One column of the table.

    ``checked_type`` is the type that stored cells are checked against, and ``kind`` the type of the values in Python.
    """

    name: str
    sql: str
    checked_type: Any
    kind: type


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a row.

    ``from_columns``: for a tuple, the function that builds it from its columns. ``dtype``: for an array, the type of
    its elements.
    """

    name: str
    kind: type
    type_annotations: tuple[Any, ...]
    columns: tuple[SqlColumn, ...]
    from_columns: Callable[..., Any] | None = None
    dtype: Any = None

    @property
    def is_array(self) -> bool:
        """Whether the field is stored as a compressed array."""
        return self.kind in (bytes, np.ndarray)

    @property
    def empty_value(self) -> Any:
        """The value of the field without content: NaN, 0, or an empty text, array or list of faults."""
        if FAULTS_JSON in self.type_annotations:
            return "[]"
        if self.is_array:
            return b"" if self.kind is bytes else np.empty(0, self.dtype)
        values = [math.nan if column.sql == _SQL[float] else column.kind() for column in self.columns]
        return values[0] if self.from_columns is None else self.from_columns(*values)


class RowCodec(Generic[R]):
    """The conversion of rows of one type to table cells and back.

    Attributes:
        schema: Schema of the table ``trial``.
        columns: Names of the columns, scalars before arrays.
    """

    def __init__(self, row: type[R]) -> None:
        if (first := fields(row)[0].name) != "trial":  # type: ignore[arg-type]
            raise UsageError(f"the first field of {row.__name__} is {first}; expected trial: put it first")
        hints = get_type_hints(row, include_extras=True)
        self._row = row
        self.fields = [_field(row.__name__, entry.name, hints[entry.name]) for entry in fields(row)]  # type: ignore[arg-type]
        self._scalars = [entry for entry in self.fields if not entry.is_array]
        self.arrays = [entry for entry in self.fields if entry.is_array]
        self._columns = [column for entry in (*self._scalars, *self.arrays) for column in entry.columns]
        self.columns = tuple(column.name for column in self._columns)
        self.schema = (
            f"CREATE TABLE trial ({', '.join(f'{c.name} {c.sql}' for c in self._columns)});\n"
            "CREATE UNIQUE INDEX trial_identity ON trial (target, IFNULL(flips, 0), k, sample_count);\n"
        )

    def encode(self, row: R, shapes: Callable[[Mapping[str, Any]], Mapping[str, Shape]]) -> tuple[Any, ...]:
        """The cells of a row, in the order of `columns`.

        Raises ``UsageError`` for values that could not be read back.
        """
        cells = tuple(_encode_cells(row, self._scalars))
        try:
            self._checked.validate_python(tuple(int(c) if isinstance(c, bool) else c for c in cells), strict=True)
        except ValueError as error:
            raise self._unfit(row, cells, error) from None
        known = shapes({field.name: getattr(row, field.name) for field in self._scalars}) if self.arrays else {}
        for field in self.arrays:
            size, expected = (
                np.size(getattr(row, field.name)) if field.dtype else len(getattr(row, field.name)),
                known[field.name],
            )
            if size != _count(expected):
                raise UsageError(
                    f"{type(row).__name__}.{field.name} of trial {row.trial} has {size} elements; expected the shape {expected} "
                    "that its kind gives: change the runner, or shapes of the kind"
                )
        return cells + tuple(_compress_array(field, getattr(row, field.name)) for field in self.arrays)

    def _unfit(self, row: R, cells: Sequence[Any], error: ValueError) -> UsageError:
        """The error for a row with a value that its column cannot hold."""
        place, why = _place_and_reason(error)
        column, cell = self._columns[place], cells[place]
        if isinstance(cell, str):
            cell.encode()  # a name that is not valid text: the store names it
        shown = (
            "a NaN" if cell is None and column.kind is float else f"{one_line_preview(cell)} ({type(cell).__name__})"
        )
        return UsageError(
            f"{type(row).__name__}.{column.name} of trial {row.trial} is {shown}; expected {column.kind.__name__} "
            f"({why}): change the runner"
        )

    def decode(
        self, cells: Sequence[Any], shapes: Callable[[Mapping[str, Any]], Mapping[str, Shape]], allowance: ReadLimit
    ) -> R:
        """The row that these cells hold; raises ``DamagedRecordError``.

        Args:
            shapes: Function from the scalars to the shape of each array. An array whose cell is ``None`` is left empty.
        """
        allowance.count_read(*cells)
        count = len(cells) - len(self.arrays)
        try:
            scalars = iter(self._checked.validate_python(tuple(cells[:count]), strict=True))
        except ValueError as error:
            place, why = _place_and_reason(error)
            column = self.columns[place]
            raise DamagedRecordError(f"{_trial_text(cells)} has an invalid value in column {column} ({why})") from None
        values: dict[str, Any] = {field.name: _decode_field(field, scalars) for field in self._scalars}
        for field in self._scalars:
            if FAULTS_JSON in field.type_annotations:
                check_faults(values[field.name], _trial_text(cells))
        try:
            known = shapes(values)
            for field, cell in zip(self.arrays, cells[count:], strict=True):
                values[field.name] = _decompress_array(field, cell, known[field.name], allowance)
        except DamagedRecordError as wrong:
            raise DamagedRecordError(f"{_trial_text(cells)}: {wrong}") from None
        return self._row(**values)

    def reproducible_values(self, row: R) -> dict[str, Any]:
        """The values of a row, by field, that are equal whenever the trial is run again."""
        return {
            field.name: getattr(row, field.name).tobytes()
            if field.kind is np.ndarray
            else getattr(row, field.name)
            if field.is_array
            else tuple(_encode_cells(row, [field]))
            for field in self.fields
            if RUN_SPECIFIC not in field.type_annotations and NOT_EXPORTED not in field.type_annotations
        }

    def empty_values(self) -> dict[str, Any]:
        """A value without content for each field that has no default."""
        required = {entry.name for entry in fields(cast("Any", self._row)) if entry.default is MISSING}
        return {field.name: field.empty_value for field in self.fields if field.name in required}

    def row_as_json(self, row: R, *, canonical: bool = False) -> dict[str, Any]:
        """The row as JSON values.

        With ``canonical``, fields that differ from run to run, such as times, are left out.

        Curves are lists, ``inf`` is text, unknown values are null, and each byte is one hex digit.
        """
        by_name: dict[str, Any] = {}
        for field in self.fields:
            if NOT_EXPORTED in field.type_annotations or (canonical and RUN_SPECIFIC in field.type_annotations):
                continue
            value = getattr(row, field.name)
            if isinstance(value, TrialId):
                by_name["trial"] = str(value)
            if field.from_columns is not None:
                by_name |= {c.name: _json_value(part) for c, part in zip(field.columns, value, strict=True)}
            elif FAULTS_JSON in field.type_annotations:
                by_name[field.name] = json.loads(value)
            else:
                by_name[field.name] = _json_value(value)
        return by_name | row.derived()

    @cached_property
    def _checked(self) -> TypeAdapter[tuple[Any, ...]]:
        """The validator for the cells of all fields that are not arrays."""
        from pydantic import TypeAdapter

        hinted = tuple(c.checked_type for field in self._scalars for c in field.columns)
        return TypeAdapter(cast("Any", tuple.__class_getitem__(hinted)))

    @property
    def hex_fields(self) -> list[str]:
        """Names of the fields that are exported as hex digits."""
        return [blob.name for blob in self.arrays if blob.kind is bytes and NOT_EXPORTED not in blob.type_annotations]

    @property
    def number_columns(self) -> set[str]:
        """Names of the columns of numbers that may be infinite."""
        return {c.name for c in self._columns if c.sql.startswith("REAL")}


def _place_and_reason(error: ValueError) -> tuple[int, str]:
    """The number of the column that failed validation, and the reason."""
    result = error.errors()[0] if hasattr(error, "errors") else {}
    return int(result.get("loc", (0,))[0]), one_line_preview(str(result.get("msg", error)))


def faults_text(faults: Sequence[Fault]) -> str:
    """The faults of a trial as JSON for its row.

    Faults of more than `MOST_ELEMENTS` elements are stored as a digest, since the seed reproduces them.
    """
    text = json.dumps([fault.to_json() for fault in faults], separators=(",", ":"))
    count = sum(map(len, faults))
    if count <= MOST_ELEMENTS:
        return text
    return sorted_json_text({"elements": count, "digest": xxhash.xxh3_128_hexdigest(text.encode())})


@cache
def row_codec(row: type[R]) -> RowCodec[R]:
    """The codec for rows of this type."""
    return RowCodec(row)


class StoredRow:
    """A base class of rows that are stored in a campaign store."""

    __slots__ = ()

    @classmethod
    def without_result(cls, trial: TrialId, **known: Any) -> Self:
        """A row for a trial without a result: only the given fields have values, all others are empty.

        Fields with a default have that value.
        """
        values = row_codec(cast("Any", cls)).empty_values()
        return cls(**values | {"trial": trial} | known)

    def reproducible_values(self) -> dict[str, Any]:
        """The values of a row, by field, that are equal whenever the trial is run again."""
        return row_codec(cast("Any", type(self))).reproducible_values(self)

    def derived(self) -> dict[str, Any]:
        """Values, by name, that an export contains in addition to the fields."""
        return {}

    def with_worker(self, number: int) -> Self:
        """A copy of the row with the number of the worker that ran the trial."""
        return cast("Self", replace(cast("Any", self), worker=number))


def _field(row: str, name: str, hint: Any) -> Field:
    kind, marks = _taken_apart(hint)
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = get_type_hints(kind, include_extras=True)
        return Field(name, kind, marks, tuple(_column(row, part, hints[part]) for part in kind._fields), kind)  # type: ignore[attr-defined]
    if kind is bytes or get_origin(kind) is np.ndarray:
        dtype = None if kind is bytes else _dtype(row, name, kind)
        columns = (SqlColumn(name, "BLOB NOT NULL", bytes, bytes),)
        return Field(name, bytes if kind is bytes else np.ndarray, marks, columns, dtype=dtype)
    return Field(name, kind, marks, (_column(row, name, hint),))


def _dtype(row: str, name: str, kind: Any) -> Any:
    """The type of the elements of an array."""
    dtype = next(iter(get_args(get_args(kind)[1])), None)
    if not (isinstance(dtype, type) and issubclass(dtype, np.number | np.bool_)):
        raise UsageError(
            f"column {name} of {row} is an array of {dtype}; expected a number type, like NDArray[np.int64]"
        )
    return dtype


def _column(row: str, name: str, hint: Any) -> SqlColumn:
    kind, marks = _taken_apart(hint)
    optional = get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)
    plain = next(arg for arg in get_args(kind) if arg is not NoneType) if optional else kind
    if plain not in _SQL:
        raise UsageError(
            f"column {name} of {row} has type {getattr(plain, '__name__', plain)}; expected str, int, bool, float, one of "
            "them or None, a NamedTuple of them, bytes or NDArray of a number type"
        )
    checked: Any = int if plain is bool else plain
    limits = tuple(mark for mark in marks if not isinstance(mark, str))
    if plain is bool:
        limits = (Interval(ge=0, le=1),)
    if limits:
        checked = Annotated[(checked, *limits)]
    null = optional or (plain is float and not limits)
    return SqlColumn(name, _SQL[plain] + ("" if null else " NOT NULL"), checked | None if null else checked, plain)


def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return kind, tuple(marks)
    return hint, ()


def _encode_cells(row: object, chosen: Sequence[Field]) -> Iterator[Any]:
    for field in chosen:
        value = getattr(row, field.name)
        for part in value if field.from_columns is not None else (value,):
            plain = part.item() if isinstance(part, np.generic) else part
            yield None if isinstance(plain, float) and math.isnan(plain) else plain


def _decode_field(field: Field, cells: Iterator[Any]) -> Any:
    values = [_value(column, next(cells)) for column in field.columns]
    return values[0] if field.from_columns is None else field.from_columns(*values)


def _value(column: SqlColumn, cell: Any) -> Any:
    if cell is None:
        return math.nan if column.kind is float else None
    return bool(cell) if column.kind is bool else cell


def _compress_array(field: Field, array: Any) -> bytes:
    data = array if field.kind is bytes else np.ascontiguousarray(array, dtype=field.dtype).tobytes()
    return zlib.compress(data, 1)


def _decompress_array(field: Field, cell: Any, shape: Shape, allowance: ReadLimit) -> Any:
    if cell is None:  # not requested
        return b"" if field.kind is bytes else np.empty(0, field.dtype)
    count = _count(shape)
    size = count if field.kind is bytes else count * np.dtype(field.dtype).itemsize
    content = allowance.unpack(cell, size)
    if len(content) != size:
        raise DamagedRecordError(f"the array {field.name} has {len(content)} bytes, but its trial needs {size}")
    return content if field.kind is bytes else np.frombuffer(content, field.dtype).reshape(shape)


def _count(shape: Shape) -> int:
    """The number of elements of an array."""
    return shape if isinstance(shape, int) else math.prod(shape)


def _json_value(value: Any) -> Any:
    """A value converted for JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.translate(_DIGITS).decode()
    if isinstance(value, np.ndarray):
        return _json_value(value.tolist())
    return [_json_value(part) for part in value] if isinstance(value, list) else value


def _trial_text(cells: Sequence[Any]) -> str:
    """The name of the trial in a row of unchecked cells, for error messages.

    The first three cells are target, flips and number.
    """
    target, flips, k = cells[:3]
    return f"trial {one_line_preview(target)}/x{one_line_preview('' if flips is None else flips)}/{one_line_preview(k)}"
