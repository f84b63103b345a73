"""Descriptions of accelerators from files: those that come with the package, and a person's own."""

from __future__ import annotations

import os
import stat
import tomllib
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from unsilent.errors import UsageError, unknown
from unsilent.faults.hardware.accelerator import Accelerator
from unsilent.faults.hardware.description import Description

SHIPPED = ("nvdla", "systolic", "tensor-core")
MOST_BYTES = 2**20


def accelerator(which: str) -> Accelerator:
    """The accelerator of a name among `SHIPPED` or of a ``.toml`` file; raises ``UsageError``."""
    if which in SHIPPED:
        content = (resources.files("unsilent.faults.hardware") / f"{which}.toml").read_bytes()
    elif which.endswith(".toml") or os.sep in which:
        content = _read(which)
    else:
        raise unknown("accelerator", which[:60], [*SHIPPED, "a file like mine.toml"])
    return parsed(content, which)


def parsed(content: bytes, where: str) -> Accelerator:
    """The accelerator that a file's content describes; ``where`` names it in the one-line ``UsageError``."""
    try:
        return Accelerator(Description.model_validate(tomllib.loads(content.decode())))
    except UnicodeDecodeError:
        raise UsageError(f"{where} is no text in UTF-8; expected a TOML file that describes an accelerator") from None
    except ValidationError as error:
        raise UsageError(f"{where}: {_first(error)}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, too
        raise UsageError(f"{where} is no TOML: {_short(error)}; correct it there") from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return _short(f"{where} is missing; expected it beside the others")
    found = "" if isinstance(first["input"], (dict, Description)) else f" is {first['input']!r}"
    return _short(f"{where}{found}: {what}" if where else what)


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _read(path: str) -> bytes:
    try:
        with open(Path(path).expanduser(), "rb", opener=_opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path} is no plain file; give a TOML file that describes an accelerator")
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the accelerator {path!r}: {why}; check its name") from None
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{path} is larger than {MOST_BYTES >> 20} MiB; expected a TOML file that describes an accelerator"
        )
    return content


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would wait
