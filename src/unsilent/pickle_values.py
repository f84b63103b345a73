"""What a pickle holds, read without unpickling: the opcodes are interpreted here, and nothing that they name is called.

`pickletools.genops` takes a pickle apart into opcodes and arguments. Calls, objects and names become records below, so a pickle
that would run code when loaded is read like any other. Floats and byte strings carry the position of their bytes in the pickle.
Protocols 0 to 5 of what ``pickle``, ``torch.save`` and numpy write.
"""

from __future__ import annotations

import io
import pickletools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAGIC = b"\x80"
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
    "STRING", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
_BYTES = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9, "BYTEARRAY8": 9}
"""Bytes of the opcode before the content."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickleDamaged(ValueError):
    """What is wrong with a pickle; one phrase."""


class Name(NamedTuple):
    """A module's attribute that the pickle names, such as ``torch._utils _rebuild_tensor_v2``."""

    module: str
    name: str


class Float(NamedTuple):
    """A number with the position of its eight bytes, most significant first."""

    value: float
    offset: int


class ByteString(NamedTuple):
    """Bytes and their position in the pickle."""

    value: bytes
    offset: int


@dataclass(eq=False)
class Call:
    """A call or object: ``function(*arguments)``, then a state, items and elements that are put into it."""

    function: Any
    arguments: Any = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``module.name`` of what is called; empty where that is no name."""
        return ".".join(self.function) if isinstance(self.function, Name) else ""


@dataclass(eq=False)
class Mapped:
    """A dict: its pairs in order, for keys may be objects that are never made."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: Any) -> Any:
        """The value of a key that is text or a number; None where there is none."""
        return next((value for k, value in reversed(self.items) if type(k) is type(key) and k == key), None)


class Persistent(NamedTuple):
    """What a persistent id names: a storage of torch."""

    id: Any


_MARK = Name("", "mark")


def read_pickle(content: bytes, most_opcodes: int = 20_000_000, start: int = 0) -> tuple[Any, int]:
    """What a pickle holds, made of plain values, lists, tuples and the records of this module, and where it ends.

    Args:
        content: Bytes with a pickle at ``start``; positions count from the first of all bytes.
        most_opcodes: More are refused.

    Raises:
        PickleDamaged: it is cut off, damaged, or not made as any known pickler does.
    """
    stream = io.BytesIO(content)
    stream.seek(start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of backslashes in strings of protocol 0
            return _Machine(most_opcodes).run(_opcodes(stream, start)), stream.tell()
    except PickleDamaged:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, AttributeError, MemoryError) as error:
        raise PickleDamaged(f"damaged: {ascii(str(error))[:60]}") from None


def _opcodes(stream: io.BytesIO, start: int) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int]]:
    for opcode, argument, position in pickletools.genops(stream):
        yield opcode, argument, start if position is None else position


class _Machine:
    """The stack machine of pickle, on records."""

    def __init__(self, most_opcodes: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.most = most_opcodes

    def run(self, opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, int]]) -> Any:
        for count, (opcode, argument, position) in enumerate(opcodes):
            if count > self.most:
                raise PickleDamaged(f"it has more than {self.most:,} opcodes")
            name = opcode.name
            if name == "STOP":
                (result,) = self.stack
                return result
            if not self._literal(name, argument, position) and not self._memory(name, argument):
                action = _ACTIONS.get(name)
                if action is None:
                    raise PickleDamaged(f"it holds {name}")
                action(self)
        raise PickleDamaged("it is cut off")

    def _literal(self, name: str, argument: Any, position: int) -> bool:
        """An opcode that is a value; false for any other."""
        if name in _PLAIN:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name == "BINFLOAT":
            self.stack.append(Float(argument, position + 1))
        elif name == "FLOAT":
            self.stack.append(argument)
        elif name in _BYTES:
            self.stack.append(ByteString(bytes(argument), position + _BYTES[name]))
        elif name == "GLOBAL":
            self.stack.append(Name(*argument.split(" ", 1)))
        elif name == "PERSID":
            self.stack.append(Persistent(argument))
        else:
            return False
        return True

    def _memory(self, name: str, argument: Any) -> bool:
        """An opcode on what was seen before; false for any other."""
        if name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[int(argument)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack[-count:] = [tuple(self._top(count))]
        else:
            return name in ("PROTO", "FRAME")
        return True

    def _top(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleDamaged("it takes more values than it has")
        return self.stack[-count:]

    def marked(self) -> list[Any]:
        """The values above the last mark, which are taken off with it."""
        at = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK), None)
        if at is None:
            raise PickleDamaged("it has no mark where one is needed")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def two(self) -> tuple[Any, Any]:
        """The two values on top, taken off."""
        below, top = self._top(2)
        del self.stack[-2:]
        return below, top

    def put_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (Mapped, Call)) or len(values) % 2:
            raise PickleDamaged("it sets items of what is no dict")
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def put_elements(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Call):
            target.elements.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise PickleDamaged("it appends to what is no list")

    def build(self) -> None:
        below, state = self.two()
        if not isinstance(below, Call):
            raise PickleDamaged("it sets the state of what is no object")
        below.state = state
        self.stack.append(below)

    def dict_of_marked(self) -> None:
        values = self.marked()
        self.stack.append(Mapped())
        self.put_items(values)

    def instance(self) -> None:
        function, *arguments = self.marked()
        self.stack.append(Call(function, tuple(arguments)))

    def object_with_keywords(self) -> None:
        keywords = self.stack.pop()
        function, arguments = self.two()
        self.stack.append(Call(function, (arguments, keywords)))

    def call(self) -> None:
        function, arguments = self.two()
        self.stack.append(Call(function, arguments))

    def name(self) -> None:
        module, name = self.two()
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleDamaged("it names something by what is no text")
        self.stack.append(Name(module, name))


def _pushes(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


_ACTIONS: dict[str, Callable[[_Machine], Any]] = {
    "MARK": _pushes(lambda: _MARK),
    "EMPTY_TUPLE": _pushes(tuple),
    "EMPTY_LIST": _pushes(list),
    "EMPTY_DICT": _pushes(Mapped),
    "EMPTY_SET": _pushes(list),
    "TUPLE": lambda m: m.stack.append(tuple(m.marked())),
    "LIST": lambda m: m.stack.append(m.marked()),
    "FROZENSET": lambda m: m.stack.append(m.marked()),
    "DICT": _Machine.dict_of_marked,
    "POP": lambda m: m.stack.pop(),
    "POP_MARK": lambda m: m.marked(),
    "DUP": lambda m: m.stack.append(m.stack[-1]),
    "APPEND": lambda m: m.put_elements([m.stack.pop()]),
    "APPENDS": lambda m: m.put_elements(m.marked()),
    "ADDITEMS": lambda m: m.put_elements(m.marked()),
    "SETITEM": lambda m: m.put_items(list(m.two())),
    "SETITEMS": lambda m: m.put_items(m.marked()),
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.object_with_keywords,
    "OBJ": _Machine.instance,
    "BUILD": _Machine.build,
    "BINPERSID": lambda m: m.stack.append(Persistent(m.stack.pop())),
}
