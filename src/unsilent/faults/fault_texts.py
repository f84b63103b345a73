"""Parsing of the option ``--fault``: the weighted parts of a mixture, and the user's file of functions.

0.7*bitflip + 0.3*burst:length=3      a mixture: each fault is drawn from one of the models by weight
my_faults.py:stuck-row:count=4        a function of the old bits in a Python file, see `value_functions`
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import PurePath

from unsilent.basics.errors import UsageError

FILE_AND_NAME = re.compile(r"(?P<file>.+\.py):(?P<name>[^:]+)(?::(?P<parameters>.*))?", re.DOTALL)
_MOMENT = re.compile(r"(?P<first>0|[1-9]\d{0,8})(\.\.(?P<last>0|[1-9]\d{0,8}))?", re.ASCII)
_BETWEEN = re.compile(r"\s+\+\s+")
_WEIGHTED = re.compile(r"(?P<weight>-?[0-9]+(?:\.[0-9]+)?)\*(?P<rest>.+)", re.DOTALL)


def split_weight(text: str) -> tuple[float, str]:
    """Split ``2*zero`` into ``(2.0, "zero")``; the weight is 1 if the text has none.

    Raises ``UsageError`` for a weight that is not above 0.
    """
    match = _WEIGHTED.fullmatch(text)
    weight, rest = (float(match["weight"]), match["rest"]) if match else (1.0, text)
    if not weight > 0:
        raise UsageError(f"--fault {text} has weight {weight:g}; expected more than 0")
    return weight, rest


def split_lasts(text: str) -> tuple[str, int | None]:
    """Split ``zero:run=3,lasts=5`` into ``("zero:run=3", 5)``; None for ``lasts=end``, 1 without ``lasts``."""
    text, value = _without(text, "lasts")
    if value is None:
        return text, 1
    if value != "end" and not re.fullmatch(r"[1-9]\d{0,8}", value, re.ASCII):
        raise UsageError(f"lasts={value[:40]}; expected a number of batches or steps, 1 or more, or end")
    return text, None if value == "end" else int(value)


def split_from(text: str) -> tuple[str, tuple[int, int] | None]:
    """Split ``zero:run=3,from=2..5`` into ``("zero:run=3", (2, 5))``; None without ``from``."""
    text, value = _without(text, "from")
    if value is None:
        return text, None
    match = _MOMENT.fullmatch(value)
    first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (1, 0)
    if first > last:
        raise UsageError(f"from={value[:40]}; expected the number of a batch or step, 0 or more, or a range like 2..5")
    return text, (first, last)


def from_text(begins: tuple[int, int] | None) -> str:
    """A range of steps as text, such as ``from=2..5``; empty for None."""
    if begins is None:
        return ""
    first, last = begins
    return f"from={first}" if first == last else f"from={first}..{last}"


def _without(text: str, name: str) -> tuple[str, str | None]:
    """A fault model's text without one parameter, and the value of that parameter; None if it is absent."""
    match = re.search(rf"(?P<before>[:,]){name}=(?P<value>[^,]*)(?P<after>,|$)", text)
    if match is None:
        return text, None
    between = match["before"] if match["after"] else ""
    return text[: match.start()] + between + text[match.end() :], match["value"]


def weighted_parts(text: str) -> list[tuple[float, str]]:
    """The fault models of a text with their weights; a text that is not a mixture has one."""
    parts = _BETWEEN.split(text.strip())
    return [split_weight(part) for part in parts] if len(parts) > 1 else [(1.0, parts[0])]


def check_paths(text: str) -> None:
    """Raise ``UsageError`` if the path of an existing file would be split like a mixture."""
    between = list(_BETWEEN.finditer(text))
    for start in (0, *(separator.end() for separator in between)):
        weighted = _WEIGHTED.fullmatch(text, start)
        first = start if weighted is None else weighted.start("rest")
        for end in (*(separator.start() for separator in between), len(text)):
            named = FILE_AND_NAME.fullmatch(text, first, end)
            if named and _BETWEEN.search(named["file"]) and os.path.isfile(os.path.expanduser(named["file"])):
                raise UsageError(
                    f"--fault names {named['file']}, but ' + ' in a path separates the parts of a mixture; rename the folder or "
                    f"file, or run the command in its folder and give {os.path.basename(named['file'])}:{named['name']}"
                )


def mixture_text(parts: Iterator[tuple[float, str]] | list[tuple[float, str]]) -> str:
    """The text of fault models with their weights."""
    several = list(parts)
    return several[0][1] if len(several) == 1 else " + ".join(f"{weight:.15g}*{part}" for weight, part in several)


def function_file(text: str) -> str | None:
    """The Python file that a fault model needs, or None; raises ``UsageError`` for several files."""
    files = {match["file"] for _, part in weighted_parts(text) if (match := FILE_AND_NAME.fullmatch(part))}
    if len(files) > 1:
        raise UsageError(f"--fault names functions of {len(files)} files; put them into one file")
    return files.pop() if files else None


def with_function_file(text: str, file: str) -> str:
    """The fault model's text with another path for the file of its functions."""
    return mixture_text((weight, _in_file(part, file)) for weight, part in weighted_parts(text))


def without_folder(text: str) -> str:
    """The fault model's text with the file of its functions named without its folder."""
    file = function_file(text)
    return text if file is None else with_function_file(text, PurePath(file).name)


def _in_file(part: str, file: str) -> str:
    match = FILE_AND_NAME.fullmatch(part)
    return part if match is None else file + part[match.end("file") :]
