"""Loading of accelerator descriptions, either shipped with the package or written by a user."""

from __future__ import annotations

import os
from importlib import resources

from pydantic import ValidationError

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.plainfiles import parse_toml, read_plain
from unsilent.faults.hardware import SHIPPED
from unsilent.faults.hardware.accelerator import Accelerator
from unsilent.faults.hardware.description import AcceleratorDescription

MOST_BYTES = 2**20


def load_accelerator(which: str) -> Accelerator:
    """Load an accelerator by a name from `SHIPPED` or from a ``.toml`` file; raises ``UsageError``."""
    if which in SHIPPED:
        content = (resources.files("unsilent.faults.hardware") / f"{which}.toml").read_bytes()
    elif which.endswith(".toml") or os.sep in which:
        content = read_plain(which, MOST_BYTES, f"the accelerator {which!r}")
    else:
        raise unknown_name_error("accelerator", which[:60], [*SHIPPED, "FILE.toml"])
    return parse_accelerator(content, which)


def parse_accelerator(content: bytes, where: str) -> Accelerator:
    """Parse the content of a description file; ``where`` names the file in the one-line ``UsageError``."""
    try:
        return Accelerator(AcceleratorDescription.model_validate(parse_toml(content, where)))
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_error_line(error)}") from None


def _first_error_line(error: ValidationError) -> str:
    """The first validation error, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return _short_error(f"{where} is missing; add it")
    result = "" if isinstance(first["input"], (dict, AcceleratorDescription)) else f" is {first['input']!r}"
    return _short_error(f"{where}{result}: {message}" if where else message)


def _short_error(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
