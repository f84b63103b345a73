"""Safe reading of untrusted regular files with size limits, and atomic replacement of files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from unsilent.basics.errors import UsageError, first_line, system_errors


def open_plain(path: str | Path, name: str = "") -> BinaryIO:
    """Open a regular file for reading bytes; errors call it ``name``, by default its path.

    Raises ``UsageError`` if the file cannot be read or is not a regular file: a pipe would block, a device has no end.
    """
    try:
        file = open(Path(path).expanduser(), "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except (OSError, ValueError, RuntimeError) as error:  # a null byte in the name; no home folder
        raise UsageError(
            f"cannot read {name or path}: {getattr(error, 'strerror', None) or error}; check the path"
        ) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"{name or path} is not a regular file; copy its content to a regular file and give that one")
    return file


def read_plain(path: str | Path, max_bytes: int, name: str = "") -> bytes:
    """The content of a regular file of at most ``max_bytes`` bytes; raises ``UsageError``."""
    with open_plain(path, name) as file, system_errors(f"cannot read {name or path}"):
        # A file that is known to be too large is not read. The content is checked as well: a file may grow or report no size.
        is_large = os.fstat(file.fileno()).st_size > max_bytes
        content = b"" if is_large else _read_at_most(file, max_bytes + 1)
    if is_large or len(content) > max_bytes:
        raise _too_large(name or path, max_bytes, "this kind of file")
    return content


def read_lines(path: str | Path, max_bytes: int, max_line: int, name: str = "") -> Iterator[bytes]:
    """The lines of a regular file with their line ends, read one at a time; the last line may have no end.

    Raises ``UsageError``, also for more than ``max_bytes`` bytes, or more than ``max_line`` bytes in one line.
    """
    with open_plain(path, name) as file, system_errors(f"cannot read {name or path}"):
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(name or path, max_bytes, "this kind of file")
        read = 0
        while line := file.readline(max_line + 1):
            read += len(line)
            if len(line) > max_line:
                raise _too_large(f"a line of {name or path}", max_line, "a line of it")
            if read > max_bytes:
                raise _too_large(name or path, max_bytes, "this kind of file")
            yield line


def _too_large(source: object, limit: int, kind: str) -> UsageError:
    size = f"{limit >> 20} MiB" if limit >= 2**20 else f"{limit >> 10} KiB"
    return UsageError(f"{source} is larger than {size}, the size limit for {kind}; give a smaller file")


MOST_JSON_MEMORY = 2**29
"""Most bytes of memory for the values of one JSON text."""
_JSON_COSTS = {b"[": 110, b"{": 200, b":": 200, b",": 64}
"""Bytes of memory for each character: a list; a dict; a key with its place and pair; a value with its place (Python 3.11)."""


def json_memory(content: bytes) -> int:
    """Upper estimate of the memory in bytes that the values of a JSON text need, without parsing it.

    The values can need more than 30 times the bytes of the text. The content may also be a part of a text, or several texts.
    """
    # The text itself and the strings in it; one non-ASCII character makes its whole string wider.
    as_text = len(content) * (2 if content.isascii() else 8)
    return as_text + sum(cost * content.count(character) for character, cost in _JSON_COSTS.items())


def parse_json(content: bytes, **hooks: Any) -> Any:
    """The value of a JSON text in UTF-8; ``hooks`` as in ``json.loads``.

    Raises:
        ValueError: the content is not JSON, is nested too deeply, or its values would need more than `MOST_JSON_MEMORY`.
    """
    if (needed := json_memory(content)) > MOST_JSON_MEMORY:
        raise ValueError(f"it would take {needed >> 20} MiB of memory, at most {MOST_JSON_MEMORY >> 20} are used")
    try:
        return json.loads(content.decode("utf-8-sig"), **hooks)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


_NAME_PARTS = 64
"""Most parts of a dotted name in TOML; the standard library's reader needs quadratic time for them."""
_DECIMAL = re.compile(rb"(?<![\d.])\d+\.\d+(?![\d.])")


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """The values of a TOML text; ``where`` names it in the one-line ``UsageError``."""
    import tomllib

    long_lines = [line for line in content.split(b"\n") if len(line) > _NAME_PARTS]
    if any(_DECIMAL.sub(b"", line).count(b".") > _NAME_PARTS for line in long_lines):
        raise UsageError(
            f"cannot read {where} as TOML: a line has more than {_NAME_PARTS} dots; expected names of a few parts"
        )
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # for example a number with thousands of digits
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else first_line(error)[:200]
        raise UsageError(f"cannot read {where} as TOML: {reason}; correct it there") from None


def _read_at_most(file: BinaryIO, most: int) -> bytes:
    """Read up to ``most`` bytes, piece by piece to save memory."""
    parts = []
    while most and (part := file.read(min(most, 2**20))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def shown_path(path: Path) -> Path:
    """The path relative to the current folder if it lies inside, else the path itself."""
    here = Path(os.path.realpath("."))
    return path.relative_to(here) if path.is_relative_to(here) else path


def move_aside(path: Path) -> None:
    """Rename an existing file to the first free name of NAME.1.SUFFIX, NAME.2.SUFFIX …."""
    if not path.exists():
        return
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(free_name for free_name in names if not free_name.exists()))


def replace_file(target: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new one. Raises ``OSError``."""
    draft = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
