r"""Reads and writes published injections: CSV files from the artifact of He et al., with one fault each.

The artifact belongs to ISCA 2023, doi 10.1145/3579371.3589105.

A file has one ``key,value[,value…]`` per row and no header. A victim is an index into a tensor of the artifact (channels last,
joined by ``/``) and the value at that index afterwards. The name of the fault model determines the corrupted tensor. The
corruption itself is given only by the values, which need not agree with that name.

Invariants: numbers keep their text from the file, so that reading and writing again gives the same bytes if the file has its
keys in the published order and lines that end in ``\n``; other orders and line endings (``\r\n``, ``\r``), blank lines and a
byte order mark are normalised. Every injection that is read has one value for each victim, and no victim twice.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import read_plain
from unsilent.faults.codecs import Array
from unsilent.faults.hardware.presets import PRESETS
from unsilent.faults.sampling import Ints

KEYS = (
    *("model", "stage", "fmodel", "target_worker", "target_layer", "target_epoch", "target_step"),
    *("inj_pos", "inj_values", "learning_rate", "seed"),
)
MODELS = ("resnet18", "resnet18_nobn", "resnet18_sgd", "effnet", "densenet", "nfnet")
FORWARD, BACKWARD = "fwrd_inject", "bkwd_inject"
GRADIENTS = ("grad_in", "grad_wt")
WORKERS, EPOCHS, STEPS = 8, 80, 49
"""Number of replicas of the published trainings, of epochs, and of steps in an epoch (50,000 images in batches of 1,024)."""

OPERANDS: Mapping[str, str] = MappingProxyType({name: preset.operand for name, preset in PRESETS.items()})
"""The tensor of the operation that each fault model corrupts."""
FLIPS = tuple(name for name, preset in PRESETS.items() if preset.fault_model_text == "bitflip")
"""Fault models that flip a bit, which may give a value that is not finite; the others do not."""

MAX_FILE_BYTES = 64 * 2**20
"""Most bytes of a file; two million victims fit."""
MAX_ROW_FIELDS = 4 * 2**20
"""Most fields of a row."""
INDICES = 4
_LONGEST = 200  # most characters of a name or number
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?|inf|nan)", re.ASCII)
_LAYER = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)


@dataclass(frozen=True)
class PublishedInjection:
    """A published injection of one fault.

    The constructor checks nothing; `read_injection` checks all fields.

    ``inj_pos`` has one index into the artifact's tensor for each victim. ``inj_values`` and ``learning_rate`` are numbers as
    texts. ``name`` and ``rows`` are the file and rows that were read, for messages.
    """

    model: str
    stage: str
    fmodel: str
    target_worker: int
    target_layer: str
    target_epoch: int
    target_step: int
    inj_pos: tuple[tuple[int, ...], ...]
    inj_values: tuple[str, ...]
    learning_rate: str
    seed: int
    name: str = field(default="injection", compare=False, repr=False)
    rows: tuple[int, ...] = field(default=tuple(range(1, len(KEYS) + 1)), compare=False, repr=False)

    @property
    def phase(self) -> str:
        """Phase of the corrupted convolution: ``fwd``, ``grad_in`` or ``grad_wt``."""
        return "fwd" if self.stage == FORWARD else self.target_layer[-len(GRADIENTS[0]) :]

    @property
    def layer(self) -> str:
        """The layer without the suffix that names a gradient."""
        return self.target_layer if self.stage == FORWARD else self.target_layer.removesuffix(f"_{self.phase}")

    @property
    def operand(self) -> str:
        """The corrupted operand: ``first``, ``second`` or ``out``."""
        return OPERANDS[self.fmodel]

    @property
    def positions(self) -> Ints:
        """Indices of the corrupted elements, int64[n, 4]."""
        return np.array(self.inj_pos, dtype=np.int64).reshape(-1, INDICES)

    @property
    def value_words(self) -> Array:
        """Bits of the injected values as float32, uint32[n]."""
        with np.errstate(under="ignore"):
            return (
                np.array([float(text) for text in self.inj_values], dtype=np.float64).astype(np.float32).view(np.uint32)
            )

    def file_position(self, key: str, entry: int = 0) -> str:
        """The position of a value in the file, like ``fault.csv, row 8, column 3``."""
        return _place(self.name, self.rows[KEYS.index(key)], entry + 2)


def read_injection(path: str | Path) -> PublishedInjection:
    """Read an injection from an untrusted file.

    Raises ``UsageError`` with row and column for anything invalid.
    """
    content = read_plain(path, MAX_FILE_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}); expected rows like stage,fwrd_inject"
        ) from None
    return parse_injection(text, Path(path).name)


def write_injection(injection: PublishedInjection, path: str | Path) -> None:
    """Write an injection in the published layout.

    Raises ``UsageError`` if `read_injection` would refuse the file.
    """
    text = injection_text(injection)
    parse_injection(text, Path(path).name)
    try:
        Path(path).expanduser().write_bytes(text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def injection_text(injection: PublishedInjection) -> str:
    """Text of an injection in the published layout."""
    return "".join(f"{key},{','.join(_texts(getattr(injection, key)))}\n" for key in KEYS)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, tuple):
        return [str(value)]
    return ["/".join(map(str, part)) if isinstance(part, tuple) else part for part in value]


def parse_injection(text: str, name: str) -> PublishedInjection:
    """The checked injection in the text of a file; ``name`` is the file's name in errors."""
    by_name: dict[str, Any] = {}
    rows: dict[str, int] = {}
    for number, cells in _rows(text, name):
        key = cells[0]
        if key not in KEYS:
            raise UsageError(f"{_place(name, number, 1)}: {unknown_name_error('key', key[:60], KEYS)}")
        if key in by_name:
            raise UsageError(f"{_place(name, number, 1)}: {key} appears twice, first in row {rows[key]}; remove one")
        by_name[key], rows[key] = _READ[key](_Cells(name, number, key, cells)), number
    if missing := [key for key in KEYS if key not in by_name]:
        raise UsageError(
            f"{name}, row {len(rows) + 1}, column 1: {', '.join(missing)} not found; expected {', '.join(KEYS)}"
        )
    injection = PublishedInjection(**by_name, name=name, rows=tuple(rows[key] for key in KEYS))
    _check_layer(injection)
    _check_victims(injection)
    return injection


def _rows(text: str, name: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        row = line.rstrip("\n")
        if row:
            if row.count(",") > MAX_ROW_FIELDS:
                raise UsageError(
                    f"{_place(name, number, MAX_ROW_FIELDS + 2)}: more than {MAX_ROW_FIELDS} fields; expected fewer corrupted "
                    "elements"
                )
            yield number, row.split(",")


def _place(name: str, row: int, column: int) -> str:
    return f"{name}, row {row}, column {column}"


@dataclass(frozen=True)
class _Cells:
    """The fields of one row, with their position for errors."""

    name: str
    row: int
    key: str
    cells: Sequence[str]

    def fault(self, entry: int, result: str, expected: str) -> UsageError:
        value = result if len(result) <= 60 else result[:57] + "..."
        return UsageError(f"{_place(self.name, self.row, entry + 2)}: {self.key} is {value!r}; expected {expected}")

    def one(self) -> str:
        if len(self.cells) != 2:
            if len(self.cells) < 2:
                raise UsageError(f"{_place(self.name, self.row, 2)}: {self.key} has no value; add one after a comma")
            raise self.fault(1, self.cells[2], f"no second value, because {self.key} takes one value")
        return self.cells[1]

    def of(self, what: str, known: Sequence[str]) -> str:
        value = self.one()
        if value not in known:
            raise UsageError(f"{_place(self.name, self.row, 2)}: {unknown_name_error(what, value[:60], known)}")
        return value

    def whole(self) -> int:
        return self._index(self.one(), 0, self.one())

    def worker(self) -> int:
        if (value := self.whole()) >= WORKERS:
            raise self.fault(0, str(value), f"the number of a worker, 0 to {WORKERS - 1}")
        return value

    def layer(self) -> str:
        value = self.one()
        if len(value) > _LONGEST or not _LAYER.fullmatch(value):
            raise self.fault(0, value, "the name of a layer, like basicblock_1_basic_0_conv1")
        return value

    def rate(self) -> str:
        value = self._number(self.one(), 0)
        if not 0 < float(value) < math.inf:
            raise self.fault(0, value, "a finite number above 0")
        return value

    def positions(self) -> tuple[tuple[int, ...], ...]:
        seen: dict[tuple[int, ...], int] = {}
        for entry, text in enumerate(self._many()):
            parts = text[:_LONGEST].split("/")
            if len(parts) != INDICES:
                where = _place(self.name, self.row, entry + 2)
                raise UsageError(f"{where}: index has {len(parts)} parts, expected {INDICES}, like 107/3/3/85")
            index = tuple(self._index(part, entry, text) for part in parts)
            if index in seen:
                raise self.fault(entry, text, f"an element other than the one in column {seen[index] + 2}")
            seen[index] = entry
        return tuple(seen)

    def values(self) -> tuple[str, ...]:
        return tuple(self._number(text, entry) for entry, text in enumerate(self._many()))

    def _many(self) -> Sequence[str]:
        if len(self.cells) < 2:
            raise UsageError(
                f"{_place(self.name, self.row, 2)}: {self.key} has no value; expected one for each corrupted element"
            )
        return self.cells[1:]

    def _index(self, text: str, entry: int, whole: str) -> int:
        if re.fullmatch(r"-[0-9]+", text, re.ASCII):
            raise self.fault(entry, whole, "no negative number")
        if not _WHOLE.fullmatch(text):
            raise self.fault(entry, whole, "whole numbers below 10^9, without signs or leading zeros")
        return int(text)

    def _number(self, text: str, entry: int) -> str:
        if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
            raise self.fault(entry, text, "a number like 2.5e+17")
        return text


_READ = {
    "model": lambda cells: cells.of("model", MODELS),
    "stage": lambda cells: cells.of("stage", (FORWARD, BACKWARD)),
    "fmodel": lambda cells: cells.of("fault model", tuple(OPERANDS)),
    "target_worker": _Cells.worker,
    "target_layer": _Cells.layer,
    "target_epoch": _Cells.whole,
    "target_step": _Cells.whole,
    "inj_pos": _Cells.positions,
    "inj_values": _Cells.values,
    "learning_rate": _Cells.rate,
    "seed": _Cells.whole,
}


def _check_layer(injection: PublishedInjection) -> None:
    of_gradient = injection.target_layer.endswith(tuple(f"_{name}" for name in GRADIENTS))
    if of_gradient != (injection.stage == BACKWARD):
        expected = "without _grad_in or _grad_wt" if of_gradient else "ending in _grad_in or _grad_wt"
        raise UsageError(
            f"{injection.file_position('target_layer')}: target_layer is {injection.target_layer[:60]!r}; "
            f"expected a name {expected}, because the stage is {injection.stage}"
        )


def _check_victims(injection: PublishedInjection) -> None:
    positions, values = len(injection.inj_pos), len(injection.inj_values)
    if positions != values:
        where = injection.file_position("inj_values", min(positions, values))
        raise UsageError(f"{where}: {values} values for {positions} positions; expected one value per position")
    numbers = np.array([float(text) for text in injection.inj_values])
    with np.errstate(over="ignore", under="ignore"):
        single = numbers.astype(np.float32)
    for entry in np.flatnonzero(~np.isfinite(single)).tolist():
        where, text = injection.file_position("inj_values", entry), injection.inj_values[entry]
        if math.isfinite(numbers[entry]) or text.strip("+-") not in ("inf", "nan"):
            raise UsageError(f"{where}: {text} is outside the range of float32; expected at most 3.4028235e+38")
        if injection.fmodel not in FLIPS:
            raise UsageError(
                f"{where}: {text} is not finite; expected a finite value, because {injection.fmodel} is not a bit-flip model"
            )
