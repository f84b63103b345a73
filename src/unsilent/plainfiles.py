"""Files: opening what somebody else names or made (plain files alone, of limited size), and replacing one at once."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO

from unsilent.errors import UsageError, first_line


def open_plain(path: str | Path, name: str = "") -> BinaryIO:
    """The file, open for reading bytes; ``name`` is what it is called in errors, by default its path.

    Raises ``UsageError`` for what cannot be read or is not a regular file: a pipe would wait, a device has no end.
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
    """The content of a plain file of at most ``max_bytes`` bytes; raises ``UsageError``."""
    with open_plain(path, name) as file:
        try:
            content = _read_at_most(file, max_bytes + 1)
        except OSError as error:
            raise UsageError(f"cannot read {name or path}: {error.strerror or error}") from None
    if len(content) > max_bytes:
        raise UsageError(
            f"{name or path} is larger than {max_bytes >> 20} MiB, the size limit for this kind of file; give a smaller file"
        )
    return content


_NAME_PARTS = 64
"""Of a dotted name of TOML; the standard library's reader takes quadratic time for them."""
_DECIMAL = re.compile(rb"(?<![\d.])\d+\.\d+(?![\d.])")


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """The values of a TOML text; ``where`` names it in the one-line ``UsageError``."""
    import tomllib

    if any(
        _DECIMAL.sub(b"", line).count(b".") > _NAME_PARTS for line in content.split(b"\n") if len(line) > _NAME_PARTS
    ):
        raise UsageError(
            f"cannot read {where} as TOML: a line has more than {_NAME_PARTS} dots; expected names of a few parts"
        )
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, too
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else first_line(error)[:200]
        raise UsageError(f"cannot read {where} as TOML: {reason}; correct it there") from None


def _read_at_most(file: BinaryIO, most: int) -> bytes:
    """Up to ``most`` bytes. Piece by piece, as one call would take memory for all that it may return."""
    parts = []
    while most and (part := file.read(min(most, 2**20))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def replace_file(target: Path, content: bytes) -> None:
    """Write next to the target, then rename: a reader sees the old file or the new one, never half of one. Raises ``OSError``."""
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
