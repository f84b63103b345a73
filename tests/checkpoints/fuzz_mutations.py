"""Seeded damage to checkpoint files: bits, bytes, cuts, splices, and changes that keep a zip, JSON header or pickle readable."""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

EXTREMES = (0, 1, 2, 3, 7, 8, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Values for fields of lengths, counts and offsets."""
JSON_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**61, 2**62, 2**63, 2**64, 10**400, 1.5, 1e300, float("inf"), float("nan"), "", "F32", "F64", "U8",
    "\x1b[31m", "\ud800", "../x", "x" * 3000, [], {}, [0], [0, 0], [0, 2**62], [2**61, 4], [1] * 65, [[1]], {"a": 1},
)  # fmt: skip
ZIP_FIELDS = {
    b"PK\x01\x02": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
    b"PK\x03\x04": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\x05\x06": ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\x06\x06": ((24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\x06\x07": ((4, 4), (8, 8), (16, 4)),
}
"""Offset and size of fields after a signature."""
_OPCODES = (
    b"(", b"0", b"1", b"2", b".", b"N", b"}", b"]", b")", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"o", b"s", b"u", b"a", b"e",
    b"d", b"l", b"Q", b"\x81", b"\x92", b"\x93", b"\x94", b"\x8f", b"\x90", b"\x91", b"\x97", b"\x98", b"h\x00", b"h\x01", b"h\x05",
    b"q\x00", b"q\x01", b"q\x05", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G\x7f\xf8" + b"\0" * 6,
    b"G\x7f\xf0" + b"\0" * 6, b"X\x04\0\0\0\x1b[2J", b"C\x03abc", b"F1.5\n", b"S'a\\q'\n", b"I01\n", b"L5L\n", b"Pabc\n",
    b"cos\nsystem\n", b"\x82\x01", b"\x8b\xd0\x07\0\0" + b"\x7f" * 2000,
)  # fmt: skip


def mutated(content: bytes, other: bytes, draw: random.Random) -> tuple[str, bytes]:
    """One damaged copy of a file.

    Args:
        content: The file.
        other: Another one, to take bytes from.

    Returns:
        What was done, and the bytes.
    """
    ways = [bits, bits, set_bytes, cut, spliced, extreme_field, chunk_repeated, chunk_removed, chunk_moved]
    if content[:2] == b"PK":
        ways += [zip_field] * 4 + [zip_pickle] * 6 + [zip_rebuilt] * 2
    elif content[:1] == b"\x80":
        ways += [pickle_opcodes] * 8
    elif content[8:9] == b"{":
        ways += [header_json] * 8
    elif content[:1] == b"{":
        ways += [plain_json] * 8
    way = draw.choice(ways)
    with contextlib.suppress(ValueError, IndexError, KeyError, zipfile.BadZipFile, struct.error, NotImplementedError):
        return way.__name__, way(content, other, draw)
    return "bits", bits(content, other, draw)


def bits(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Some flipped bits."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 30)) if result else 0):
        result[draw.randrange(len(result))] ^= 1 << draw.randrange(8)
    return bytes(result)


def set_bytes(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A few bytes set to one value."""
    at, length = draw.randrange(len(content)), draw.choice((1, 1, 2, 4, 8, 64))
    return content[:at] + bytes([draw.choice((0, 0xFF, draw.randrange(256)))]) * length + content[at + length :]


def cut(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Without its end, or without its beginning."""
    at = draw.choice((0, 1, 8, len(content) - 1, draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
    return content[at:] if draw.random() < 0.15 else content[:at]


def spliced(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """The beginning of one file and the end of another, or bytes of another in the middle."""
    at, from_ = draw.randrange(len(content) + 1), draw.randrange(len(other) + 1)
    if draw.random() < 0.5:
        return content[:at] + other[from_:]
    length = draw.randrange(1, 400)
    return content[:at] + other[from_ : from_ + length] + content[at + length :]


def extreme_field(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """An integer anywhere set to an extreme value; often the first one, which is a length in some formats."""
    size = draw.choice((1, 2, 4, 8))
    at = 0 if draw.random() < 0.2 else draw.randrange(len(content) - size)
    value = draw.choice((*EXTREMES, len(content), len(content) - 8)) % (1 << 8 * size)
    return content[:at] + value.to_bytes(size, draw.choice(("little", "big"))) + content[at + size :]


def _chunk(content: bytes, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(content))
    return begin, min(len(content), begin + draw.choice((1, 4, 16, 64, 500, 4096)))


def chunk_repeated(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Some bytes repeated."""
    begin, end = _chunk(content, draw)
    return content[:end] + content[begin:end] * draw.choice((1, 1, 3, 100)) + content[end:]


def chunk_removed(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Some bytes left out."""
    begin, end = _chunk(content, draw)
    return content[:begin] + content[end:]


def chunk_moved(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Some bytes written over others."""
    begin, end = _chunk(content, draw)
    at = draw.randrange(len(content))
    return (content[:at] + content[begin:end] + content[at + end - begin :])[: len(content)]


def zip_field(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Fields of a zip's directory or of a local header, set to extremes, other offsets, or values near those they have."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        signature = draw.choice([s for s in ZIP_FIELDS if s in content])
        place = draw.choice([m.start() for m in re.finditer(re.escape(signature), content)])
        offset, size = draw.choice(ZIP_FIELDS[signature])
        at = place + offset
        old = int.from_bytes(result[at : at + size], "little")
        any_offset = draw.randrange(len(content))
        value = draw.choice((*EXTREMES, old + 1, old - 1, old + 64, old * 2, any_offset, any_offset)) % (1 << 8 * size)
        result[at : at + size] = value.to_bytes(size, "little")
    return bytes(result)


def zip_pickle(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A zip with another pickle in it, and all checksums made to fit."""
    return _rebuilt(content, lambda name, data: pickle_opcodes(data, other, draw) if name.endswith(".pkl") else data)


def zip_rebuilt(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A zip with entries that are damaged, missing, compressed or there twice, and all checksums made to fit."""
    what = draw.choice(("damage", "leave out", "compress", "rename", "double"))
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    victim = draw.choice(names)

    def change(name: str, data: bytes) -> bytes | None:
        if name != victim:
            return data
        if what == "leave out":
            return None
        return mutated(data, other, draw)[1] if what == "damage" and data else data

    rename = {victim: draw.choice((*names, "../evil", "x" * 500, "a/data.pkl", "\x1b[31m"))} if what == "rename" else {}
    return _rebuilt(content, change, rename, {victim} if what == "compress" else (), {victim} if what == "double" else ())


def _rebuilt(
    content: bytes,
    change: Callable[[str, bytes], bytes | None],
    rename: Any = (),
    compress: Any = (),
    double: Any = (),
) -> bytes:
    result = io.BytesIO()
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(result, "w") as new,
    ):
        warnings.simplefilter("ignore")
        for name in old.namelist():
            data = change(name, old.read(name))
            for _ in range(1 + (name in double)):
                if data is not None:
                    kind = zipfile.ZIP_DEFLATED if name in compress else zipfile.ZIP_STORED
                    new.writestr(dict(rename).get(name, name), data, kind)
    return result.getvalue()


def pickle_opcodes(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A pickle whose opcodes are replaced, repeated, left out, moved, or have other arguments."""
    positions = [position for _, _, position in pickletools.genops(content)]
    parts = [content[a:b] for a, b in zip(positions, [*positions[1:], len(content)], strict=True)]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(parts))
        kind = draw.randrange(6)
        if kind == 0:
            parts[at] = draw.choice(_OPCODES)
        elif kind == 1:
            parts[at:at] = [draw.choice(_OPCODES)] * draw.choice((1, 1, 2, 50))
        elif kind == 2:
            parts[at : at + draw.choice((1, 1, 3, 10))] = []
        elif kind == 3:
            length = draw.choice((1, 2, 5, 20))
            parts[at:at] = parts[at : at + length] * draw.choice((1, 1, 3, 70))
        elif kind == 4:
            parts[at] = draw.choice(parts)
        else:
            argument = draw.choice(EXTREMES)
            parts[at] = draw.choice((
                b"K" + bytes([argument % 256]), b"M" + (argument % 2**16).to_bytes(2, "little"),
                b"\x8a\x08" + (argument % 2**64).to_bytes(8, "little"), b"j" + (argument % 2**32).to_bytes(4, "little"),
            ))  # fmt: skip
        parts = parts or [b"."]
    return b"".join(parts)


def header_json(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another header of fitting length."""
    length = int.from_bytes(content[:8], "little")
    header = _json_changed(content[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def plain_json(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """JSON with other values."""
    return _json_changed(content, draw)


def _json_changed(content: bytes, draw: random.Random) -> bytes:
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        parent, key = draw.choice(places)
        kind = draw.randrange(4)
        if kind == 0:
            parent[key] = draw.choice(JSON_VALUES)
        elif kind == 1:
            source, from_ = draw.choice(places)
            parent[key] = json.loads(json.dumps(source[from_]))
        elif kind == 2 and isinstance(parent[key], int):
            parent[key] += draw.choice((-8, -4, -1, 1, 4, 8, 2**40))
        elif isinstance(parent, dict):
            moved = parent.pop(key)
            if kind == 3:
                parent[draw.choice((str(key) + "/x", "", "\x1b[2J", "optimizer/state", "__metadata__", "y" * 3000))] = moved
        else:
            del parent[key]
    text = json.dumps(value)
    if draw.random() < 0.1 and ", " in text:  # a key twice
        text = text[:-1] + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> Any:
    """Every place in nested JSON: a container and a key."""
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield value, number
            yield from _places(part)
