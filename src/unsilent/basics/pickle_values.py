"""Reading of pickled values without unpickling: no function that the pickle names is called.

Opcodes and their arguments are those listed by `pickletools`. Calls, objects and names become records of this module, so a pickle
that would run code when loaded is read like any other. Floats and byte strings contain the position of their bytes in the pickle.
Protocols 0 to 5 in the form that ``pickle``, ``torch.save`` and numpy write can be read. Python containers have the same content
as after loading. Constructs that no pickler writes and that a loader could read differently (a repeated key, a state that is set
twice, two descriptions of one storage) are refused.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickletools
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

MAGIC = b"\x80"
_PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
    "FLOAT",
}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_BYTES = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9, "BYTEARRAY8": 9}
"""Number of bytes of the opcode before its content."""


class PickleDamaged(ValueError):
    """The pickle is damaged; the message is one phrase."""


class Name(NamedTuple):
    """A module's attribute that the pickle names, such as ``torch._utils _rebuild_tensor_v2``."""

    module: str
    name: str


class Float(NamedTuple):
    """A floating-point number with the position of its eight bytes, most significant first."""

    value: float
    offset: int


class ByteString(NamedTuple):
    """A bytes value and its position in the pickle."""

    value: bytes
    offset: int


@dataclass(eq=False, slots=True)
class Call:
    """A call in a pickle, ``function(*arguments)``, with the state, items and elements added to its result."""

    function: Any
    arguments: Any = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
    keys: set[Any] | None = None

    @property
    def name(self) -> str:
        """``module.name`` of the called function; empty if the function is not a name."""
        return ".".join(self.function) if isinstance(self.function, Name) else ""


@dataclass(eq=False, slots=True)
class Mapped:
    """A dict as a list of pairs, since its keys may be objects that are never constructed."""

    items: list[tuple[Any, Any]] = field(default_factory=list)
    keys: set[Any] | None = None

    def get(self, key: Any) -> Any:
        """The value of a text or number key; None if the key is missing."""
        return next((value for k, value in self.items if type(k) is type(key) and k == key), None)


class Persistent(NamedTuple):
    """A persistent id in a pickle, which names a storage of torch."""

    id: Any


DICTS = {"collections.OrderedDict", "collections.Counter"}
SETS = {"builtins.set", "builtins.frozenset"}
SIZE = "torch.Size"
BYTES = "_codecs.encode"
_CONTAINERS = {*DICTS, *SETS, SIZE}
"""Containers that are filled when they are created, so that their arguments are read at that moment."""
_SCALARS_AS_KEYS = {"builtins.complex", "torch.device"}
"""Types that are not allowed as keys: equal values have several descriptions, and a complex number can equal a number."""
MOST_MEMORY = 2**29
"""Most bytes for the objects of a pickle; those of 100,000 tensors need about half of it."""
_MEMORY = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"), 130), **dict.fromkeys(("MARK", "EMPTY_LIST"), 90),
    **dict.fromkeys(("EMPTY_DICT", "DICT", "EMPTY_SET", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"), 300),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), 300),
    **dict.fromkeys(("SETITEM", "APPEND", "BINPERSID", "PERSID", "BINFLOAT", *_BYTES), 160),
}  # fmt: skip
_LEAST_MEMORY = 70
"""Most bytes of memory for any other opcode, besides its argument (Python 3.11)."""
_MOST_KEY_PARTS = 16
_MOST_KEY_DEPTH = 3


def read_pickle(content: bytes, most_memory: int = MOST_MEMORY, start: int = 0) -> tuple[Any, int]:
    """The value of a pickle, made of plain values, lists, tuples and the records of this module, and its end.

    Args:
        content: Bytes with a pickle at ``start``; positions count from the first byte of ``content``.
        most_memory: Most bytes for the objects of the pickle, besides texts and byte strings.

    Raises:
        PickleDamaged: the pickle is cut off, damaged, too large, or unlike the output of any known pickler.
    """
    machine = _Machine(most_memory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # for backslashes in strings of protocol 0
            return machine.run(_opcodes(content, start)), machine.end
    except PickleDamaged:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, AttributeError, struct.error) as error:
        raise PickleDamaged(f"damaged: {ascii(str(error))[:60]}") from None


_BY_CODE = {ord(opcode.code): (opcode.name, opcode.arg) for opcode in pickletools.opcodes}
_FIXED = {
    "uint1": struct.Struct("<B"),
    "uint2": struct.Struct("<H"),
    "uint4": struct.Struct("<I"),
    "int4": struct.Struct("<i"),
}


def _opcodes(content: bytes, at: int) -> Iterator[tuple[str, Any, int, int]]:
    """Name, argument, position and end of every opcode; a faster `pickletools.genops`."""
    stream = io.BytesIO(content)
    for _ in range(len(content)):
        if at >= len(content):
            return
        name, argument = _BY_CODE[content[at]]
        if argument is None:
            end, value = at + 1, None
        elif (fixed := _FIXED.get(argument.name)) is not None:
            end, value = at + 1 + fixed.size, fixed.unpack_from(content, at + 1)[0]
        else:
            stream.seek(at + 1)
            value = argument.reader(stream)
            end = stream.tell()
        if name == "FRAME" and value is not None and value > len(content) - end:
            raise PickleDamaged("a frame is longer than the file")
        yield name, value, at, end
        at = end


class _Machine:
    """The stack machine of pickle, which builds records instead of objects.

    Attributes:
        end: Position where the last opcode ends.
    """

    def __init__(self, most_memory: int) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each mark
        self.storages: dict[Any, Any] = {}
        self.memo: dict[int, Any] = {}
        self.memory = most_memory
        self.end = 0

    def run(self, opcodes: Iterator[tuple[str, Any, int, int]]) -> Any:
        for name, argument, position, end in opcodes:
            self.memory -= _MEMORY.get(name, _LEAST_MEMORY)
            if self.memory < 0:
                raise PickleDamaged("it holds more objects than are read")
            if (value := _VALUES.get(name)) is not None:
                self.stack.append(value(argument, position))
            elif (numbered := _NUMBERED.get(name)) is not None:
                numbered(self, argument)
            elif (action := _ACTIONS.get(name)) is not None:
                action(self)
            elif name == "STOP":
                if self.below or len(self.stack) != 1:
                    raise PickleDamaged("it holds more than one value")
                self.end = end
                return self.stack[0]
            elif name not in ("PROTO", "FRAME"):
                raise PickleDamaged(f"it holds {name}")
        raise PickleDamaged("it is cut off")

    def put(self, number: Any) -> None:
        self.memo[int(number)] = self.stack[-1]

    def get(self, number: Any) -> None:
        self.stack.append(self.memo[int(number)])

    def tuple_of(self, count: int) -> None:
        self.stack[-count:] = [tuple(self._top(count))]

    def _top(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleDamaged("it takes more values than it has")
        return self.stack[-count:]

    def marked(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        if not self.below:
            raise PickleDamaged("it has no mark where one is needed")
        values, self.stack = self.stack, self.below.pop()
        return values

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def two(self) -> tuple[Any, Any]:
        """Pop the two top values."""
        below, top = self._top(2)
        del self.stack[-2:]
        return below, top

    def put_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (Mapped, Call)) or len(values) % 2:
            raise PickleDamaged("it sets items of what is no dict")
        _add_items(target, zip(values[::2], values[1::2], strict=True))

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
        if below.state is not None:
            raise PickleDamaged("it sets the state of an object twice")
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
        self.stack.append(_container_of_call(Call(function, arguments)))

    def new_object(self) -> None:
        function, arguments = self.two()
        result = Call(function, arguments)
        if result.name in _CONTAINERS and arguments != ():  # some classes ignore their arguments, others do not
            raise PickleDamaged(f"it makes a {result.name} in a way that pickle does not")
        self.stack.append(result)

    def persistent(self) -> None:
        named = self.stack.pop()
        # Loaders create a storage at the first occurrence of its key, and ignore later descriptions.
        if _is_storage(named) and self.storages.setdefault(named[2], named[:5]) != named[:5]:
            raise PickleDamaged("it describes one storage in two ways")
        self.stack.append(Persistent(named))

    def name(self) -> None:
        module, name = self.two()
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleDamaged("it names something by what is no text")
        self.stack.append(_python3_name(module, name))


def _is_storage(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) < 5:
        return False
    return all(isinstance(part, (str, int, Name)) for part in value[:5])


def _python3_name(module: str, name: str) -> Name:
    """The Python 3 name for a module and name that may be those of Python 2."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    path, _, last = f"{module}.{name}".rpartition(".")
    return Name(path, last)


def _text(argument: str) -> str:
    """Decode a Python 2 string like torch does; a string that is not UTF-8 is unchanged."""
    try:
        return argument.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return argument


def _key(value: Any, depth: int = 0) -> Any:
    """A hashable value that is equal for equal dict keys; raises ``PickleDamaged`` for an unusual key."""
    if isinstance(value, (Float, ByteString)):
        return value.value
    if isinstance(value, Call) and value.name in _SCALARS_AS_KEYS:
        raise PickleDamaged(f"it has a {value.name} as a key")
    if isinstance(value, Call) and value.name == BYTES:
        return encoded_bytes(value)
    if isinstance(value, Call) and value.name == SIZE:
        value = tuple(value.elements)
    if isinstance(value, (Persistent, Call, Mapped, list)):
        return "object", id(value)
    if not isinstance(value, tuple) or isinstance(value, Name):
        return value
    if depth >= _MOST_KEY_DEPTH or len(value) > _MOST_KEY_PARTS:
        raise PickleDamaged("it has a key of many values")
    return ("tuple", *(_key(part, depth + 1) for part in value))


def encoded_bytes(call: Call) -> bytes:
    """The bytes that pickle protocol 2 stores as text; raises ``PickleDamaged`` for another encoding."""
    match call.arguments:
        case (str(text), "latin1" | "latin-1"):
            return text.encode("latin-1")
    raise PickleDamaged("it encodes bytes in a way that pickle does not")


def _add_items(target: Mapped | Call, items: Iterable[tuple[Any, Any]]) -> None:
    target.keys = set() if target.keys is None else target.keys  # most objects have none
    for key, value in items:
        known = _key(key)
        if known in target.keys:
            raise PickleDamaged("a dict has one key twice")
        target.keys.add(known)
        target.items.append((key, value))


def _container_of_call(call: Call) -> Call:
    """A container filled from its constructor's arguments; any other call is unchanged."""
    if call.name == BYTES:
        encoded_bytes(call)
    if call.name not in _CONTAINERS or call.arguments == ():
        return call
    match call.name, call.arguments:
        case name, (Mapped() as source,) if name in DICTS:
            _add_items(call, source.items)
        case "collections.OrderedDict", (list(pairs) | tuple(pairs),) if all(map(_is_pair, pairs)):
            _add_items(call, pairs)
        case name, (list(values) | tuple(values),) if name in SETS:
            call.elements.extend(values)
            if len({_key(value) for value in values}) != len(values):
                raise PickleDamaged("a set has one value twice")
        case "torch.Size", (list(values) | tuple(values),) if all(type(value) is int for value in values):
            call.elements.extend(values)
        case _:
            raise PickleDamaged(f"it makes a {call.name} of what pickle does not")
    return replace(call, arguments=())


def _is_pair(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) == 2


def _byte_string(before: int, argument: Any, position: int) -> ByteString:
    return ByteString(bytes(argument), position + before)


def _pushes(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


_VALUES: dict[str, Callable[[Any, int], Any]] = {
    **dict.fromkeys(_STRINGS, lambda argument, _: _text(argument)),
    **dict.fromkeys(_PLAIN, lambda argument, _: argument),
    **{name: partial(_byte_string, before) for name, before in _BYTES.items()},
    "NONE": lambda _, __: None,
    "NEWTRUE": lambda _, __: True,
    "NEWFALSE": lambda _, __: False,
    "BINFLOAT": lambda argument, position: Float(argument, position + 1),
    "GLOBAL": lambda argument, _: _python3_name(*argument.split(" ", 1)),
    "PERSID": lambda argument, _: Persistent(argument),
}
"""Opcodes of values, each with a function that makes the value from argument and position."""
_NUMBERED: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), _Machine.get),
}
"""Opcodes that store or read memoised values."""
_ACTIONS: dict[str, Callable[[_Machine], Any]] = {
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": _pushes(tuple),
    "EMPTY_LIST": _pushes(list),
    "EMPTY_DICT": _pushes(Mapped),
    "EMPTY_SET": _pushes(lambda: Call(Name("builtins", "set"))),
    "MEMOIZE": lambda m: m.put(len(m.memo)),
    "TUPLE1": lambda m: m.tuple_of(1),
    "TUPLE2": lambda m: m.tuple_of(2),
    "TUPLE3": lambda m: m.tuple_of(3),
    "TUPLE": lambda m: m.push(tuple(m.marked())),
    "LIST": lambda m: m.push(m.marked()),
    "FROZENSET": lambda m: m.push(_container_of_call(Call(Name("builtins", "frozenset"), (m.marked(),)))),
    "DICT": _Machine.dict_of_marked,
    "POP": lambda m: m.stack.pop(),
    "POP_MARK": lambda m: m.marked(),
    "DUP": lambda m: m.push(m.stack[-1]),
    "APPEND": lambda m: m.put_elements([m.stack.pop()]),
    "APPENDS": lambda m: m.put_elements(m.marked()),
    "ADDITEMS": lambda m: m.put_elements(m.marked()),
    "SETITEM": lambda m: m.put_items(list(m.two())),
    "SETITEMS": lambda m: m.put_items(m.marked()),
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new_object,
    "NEWOBJ_EX": _Machine.object_with_keywords,
    "OBJ": _Machine.instance,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
