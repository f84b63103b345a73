"""`Fault`: the record of one fully determined corruption of one tensor.

The same record can be replayed in memory, in a file, in a gradient or in a payload, so it contains only words and flat
positions. Invariants: ``elements`` are distinct and ascending; arrays are read-only; the JSON form
restores an equal record.

    xor and or set   operands are words, one per element: before (op) operand
    copy_from        operands are flat positions in the same tensor, whose words before the fault are copied
    scale            operands are float64 factors; the product is computed in float64 and encoded again
    function         operands are 64 random bits each; ``function`` (name and hash) computes new words from the old ones and them

``held`` is for hardware that keeps a value in another format than the tensor does (a float16 operand register): the word is
converted to that dtype, corrupted there, and converted back, so that it is rounded as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.codecs import Array, Codec, codec
from unsilent.faults.sampling import Ints

MASKS = ("xor", "and", "or")
OPERATIONS = (*MASKS, "set", "copy_from", "scale", "function")
TIMING_FIELDS = ("rank", "step", "micro_step", "occurrence", "first_step", "last_step")
LABELS = ("phase", "operand")
OPTIONAL = ("held", "reach", "function")
"""Fields that are left out of the JSON form if they are None."""
LAYOUTS = ("strided", "stuffed")
"""Layouts of a tensor. ``stuffed`` is the gradient of a convolution's output with zeros between and around its elements, the way
a convolution of stride 1 reads it."""


@dataclass(frozen=True, eq=False)
class Fault:
    """A resolved corruption of one tensor.

    The constructor does not check its arguments and makes the arrays read-only; `from_json` checks a record.
    ``elements`` int64[n]: flat C-order indices into ``shape``. ``operands`` [n]: see the module. ``reach`` int64[m]: flat
    positions of the operation's output that see the corrupted operand (None: all that use it). ``rank``, ``step`` and the
    fields after them select the rank and the time at which the fault acts (``None``: not restricted).
    """

    VERSION: ClassVar[int] = 1

    site: str
    dtype: str
    shape: tuple[int, ...]
    elements: Ints
    operation: str
    operands: Array
    layout: str = "strided"
    rank: int = 0
    step: int | None = None
    micro_step: int | None = None
    phase: str | None = None
    operand: str | None = None
    occurrence: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    held: str | None = None
    reach: Ints | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        for array in (self.elements, self.operands, self.reach):
            if array is not None:
                array.setflags(write=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # pickle makes the arrays writable again
        self.__post_init__()

    @property
    def codec(self) -> Codec:
        """The bit layout of the tensor's dtype."""
        return codec(self.dtype)

    @property
    def corrupted_codec(self) -> Codec:
        """The layout of the corrupted bits: that of dtype ``held`` if given, else of the tensor's dtype."""
        return codec(self.held or self.dtype)

    def apply(self, words: Array, source: Array | None = None) -> Array:
        """Apply the fault to ``words`` and return a new array, both [n] of the codec's word dtype.

        ``source`` [n], for ``copy_from`` only: the words at ``operands`` before the fault. Raises
        ``UsageError`` if an array is missing or does not have one word per element.
        """
        self._check(words, "words")
        if self.held is not None:
            tensor_codec, register_codec = self.codec, self.corrupted_codec
            sources = None if source is None else register_codec.encode(tensor_codec.decode(source))
            inner = replace(self, dtype=self.held, held=None)
            return tensor_codec.encode(
                register_codec.decode(inner.apply(register_codec.encode(tensor_codec.decode(words)), sources))
            )
        if self.operation == "xor":
            return np.asarray(words ^ self.operands)
        if self.operation == "or":
            return np.asarray(words | self.operands)
        if self.operation == "and":
            return np.asarray(words & self.operands)
        if self.operation == "set":
            return self.operands.copy()
        if self.operation == "scale":
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                return self.codec.encode(self.codec.decode(words) * self.operands)
        if self.operation == "function":
            from unsilent.faults.value_functions import apply_function

            return apply_function(self.function or "", words, self.operands, self.dtype)
        self._check(source, "source")
        assert source is not None
        return source.copy()

    def _check(self, words: Array | None, name: str) -> None:
        if words is None or words.shape != self.elements.shape or words.dtype != self.codec.word_dtype:
            result = "nothing" if words is None else f"{words.dtype} of shape {words.shape}"
            raise UsageError(
                f"{name} is {result}; {self.operation} needs {self.codec.word_dtype} of shape ({len(self)},)"
            )

    def bit_positions(self) -> list[tuple[int, int]]:
        """The (element, bit) pairs that the fault masks, in ascending order; empty if it replaces whole words.

        For ``xor`` these are the flipped bits, for ``or`` those forced to 1, for ``and`` those forced to 0.
        """
        if self.operation not in MASKS:
            return []
        masks = ~self.operands if self.operation == "and" else self.operands
        named = (masks[:, None] >> np.arange(self.corrupted_codec.bits, dtype=masks.dtype)) & masks.dtype.type(1)
        row, bit = np.nonzero(named)
        return list(zip(self.elements[row].tolist(), bit.tolist(), strict=True))

    def describe(self) -> str:
        """The fault in one short line, such as ``param:fc.weight[3,5] xor 0x40000000 (bit 30, exponent)``."""
        if len(self) == 1:
            index = np.unravel_index(int(self.elements[0]), self.shape) if self.shape else ()
            where = f"[{','.join(str(int(i)) for i in index)}]" if index else ""
            text = f"{self.site}{where} {self.operation} {self._operand_text()}"
        else:
            text = f"{self.site} {self.operation} on {len(self)} elements"
            if self.operation in MASKS:
                text += f" ({len(self.bit_positions())} bits)"
        labels = {k: getattr(self, k) for k in (*TIMING_FIELDS, *LABELS)}
        at = [f"{k} {v}" for k, v in labels.items() if v is not None and (k, v) != ("rank", 0)]
        text += f" held as {self.held}" if self.held else ""
        text += f", seen by {self.reach.size} outputs" if self.reach is not None else ""
        return text + (f" at {', '.join(at)}" if at else "")

    def _operand_text(self) -> str:
        if self.operation == "copy_from":
            return f"element {int(self.operands[0])}"
        if self.operation == "scale":
            return f"by {float(self.operands[0]):g}"
        if self.operation == "function":
            return (self.function or "").rpartition("@")[0]
        word = hex_words(self.operands, self.corrupted_codec)[0]
        if self.operation == "set":
            return f"{word} ({self.corrupted_codec.decode(self.operands)[0]:g})"
        bits = [b for _, b in self.bit_positions()]
        if len(bits) == 1:
            return f"{word} (bit {bits[0]}, {self.corrupted_codec.field_of_bit(bits[0])})"
        return f"{word} (bits {', '.join(map(str, bits))})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe dict with words and factors as hex strings; `from_json` restores an equal record."""
        if self.operation == "copy_from":
            operands: list[Any] = self.operands.tolist()
        elif self.operation == "scale":
            operands = [float(x).hex() for x in self.operands]
        elif self.operation == "function":
            operands = [f"0x{x:016x}" for x in self.operands.tolist()]
        else:
            operands = hex_words(self.operands, self.corrupted_codec)
        plain = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None or f.name not in OPTIONAL}
        arrays = {"shape": list(self.shape), "elements": self.elements.tolist(), "operands": operands}
        if self.reach is not None:
            arrays["reach"] = self.reach.tolist()
        return {"version": self.VERSION, **plain, **arrays}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Fault:
        """Read a record from untrusted JSON; raises ``UsageError`` on any invalid content."""
        from unsilent.faults.fault_json import read_fault

        return read_fault(record)

    def __len__(self) -> int:
        return int(self.elements.size)

    def _content(self) -> tuple[Any, ...]:
        scalars = tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("elements", "operands", "reach"))
        reach = None if self.reach is None else self.reach.tobytes()
        return (*scalars, reach, self.elements.tobytes(), self.operands.dtype.str, self.operands.tobytes())

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Fault) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())


def hex_words(words: Array, layout: Codec) -> list[str]:
    """Words as hex strings of the dtype's full width."""
    return [f"0x{w:0{layout.bits // 4}x}" for w in words.tolist()]
