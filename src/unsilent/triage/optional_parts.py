"""Reads the optional parts of an incident's folder, and raises ``UsageError`` for unreadable ones."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import open_plain, parse_json, read_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.timeline.flight_recorder import Dump, read_dumps
from unsilent.triage.parts import MOST_TEXT, TIMELINE_KEYS

MOST_CONFIGURATION, MOST_TIMELINE = 2**20, 2**24
"""Bytes."""
MOST_STEP, MOST_RANK, MOST_PARTS, MOST_SECONDS = 2**53, 2**20, 64, 1e9
MOST_DUMPS = 4096
LONGEST_NAME = 100
MOST_SETTINGS, DEEPEST = 10_000, 20
"""Most settings, and most levels of nested objects."""
DUMP_NAME = re.compile(r"rank(\d{1,6})\.json", re.ASCII)


@dataclass(frozen=True, eq=False)
class RecordedTimes:
    """Seconds of the parts of each recorded step.

    Attributes:
        ranks, parts: Numbers of the ranks and names of the parts.
        steps: Steps of the run, increasing, int64[s].
        seconds: float64[ranks, steps, parts]; NaN if a rank has no such part.
    """

    ranks: tuple[int, ...]
    parts: tuple[str, ...]
    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]


def read_report(path: Path) -> str:
    """The report of a person who watched the run, as text."""
    return read_plain(path, MOST_TEXT).decode("utf-8", "replace")


def read_configuration(path: Path) -> dict[str, Any]:
    """Settings of a job, keyed by slash-separated paths of names."""
    settings: dict[str, Any] = _read_object(path, MOST_CONFIGURATION, settings_of)
    return settings


def read_times(path: Path) -> RecordedTimes:
    """Seconds of the parts of each recorded step."""
    times: RecordedTimes = _read_object(path, MOST_TIMELINE, _times)
    return times


def read_dump(path: Path) -> Dump:
    """The JSON dump of a rank's flight recorder; pickles are refused."""
    with open_plain(path) as file:
        if not file.read(64).lstrip().startswith(b"{"):
            raise UsageError(f"{path} is no JSON object; write the dump in JSON, as unsilent timeline record does")
    (dump,) = read_dumps([path])
    return dump


def _read_object(path: Path, most: int, make: Callable[[Any], Any]) -> Any:
    content = read_plain(path, most)
    try:
        return make(parse_json(content))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = escape_unprintable(first_line(error))[:200]
        raise UsageError(f"{path} cannot be read: {reason}; remove it, or write it again") from None


def settings_of(value: Any) -> dict[str, Any]:
    """Settings of a nested object, keyed by slash-separated paths of names.

    Raises ``ValueError`` if the value is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    result = dict(itertools.islice(_settings(value, "", DEEPEST), MOST_SETTINGS + 1))
    if len(result) > MOST_SETTINGS:
        raise ValueError(f"expected at most {MOST_SETTINGS:,} settings")
    return result


def _settings(value: Any, name: str, levels: int) -> Iterator[tuple[str, Any]]:
    """Settings below a name, where a list of plain values counts as one setting."""
    is_list = isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value)
    if not is_list and (not isinstance(value, dict) or (name and not value)):
        yield name, value
        return
    for key, part in enumerate(value) if is_list else value.items():
        if not levels or len(str(key)) > LONGEST_NAME:
            raise ValueError(f"expected at most {DEEPEST} levels, and names of at most {LONGEST_NAME} letters")
        yield from _settings(part, f"{name}/{key}" if name else str(key), levels - 1)


def _times(values: Any) -> RecordedTimes:
    if not isinstance(values, dict):
        raise ValueError("expected an object")
    if values.get("schema") != 1 or any(not isinstance(values.get(key), list) for key in TIMELINE_KEYS[1:]):
        raise ValueError(f"expected schema 1 and lists of {', '.join(TIMELINE_KEYS[1:])}")
    parts, ranks, steps, seconds = (values[key] for key in TIMELINE_KEYS[1:])
    if not all(isinstance(name, str) for name in parts) or not 0 < len(set(parts)) == len(parts) <= MOST_PARTS:
        raise ValueError(f"its parts are not 1 to {MOST_PARTS} names")
    _check_numbers("ranks", ranks, MOST_RANK)
    _check_numbers("steps", steps, MOST_STEP)
    if sorted(steps) != steps:
        raise ValueError("its steps are not in order")
    shape = (len(ranks), len(steps), len(parts))
    if [
        len(seconds),
        *{len(of_rank) for of_rank in seconds},
        *{len(row) for of_rank in seconds for row in of_rank},
    ] != [*shape]:
        raise ValueError("its seconds are not a number for each rank, step and part")
    every = [value for of_rank in seconds for row in of_rank for value in row]
    if not all(value is None or (type(value) in (int, float) and 0 <= value <= MOST_SECONDS) for value in every):
        raise ValueError("its seconds are not all numbers from 0, or null")
    names = tuple(escape_unprintable(name[:LONGEST_NAME]) for name in parts)
    return RecordedTimes(tuple(ranks), names, np.array(steps, np.int64), np.array(every, np.float64).reshape(shape))


def _check_numbers(name: str, values: list[Any], most: int) -> None:
    """Raise ``ValueError`` unless the values are distinct whole numbers in range."""
    if not all(type(value) is int and 0 <= value <= most for value in values) or not 0 < len(set(values)) == len(
        values
    ):
        raise ValueError(f"its {name} are not different whole numbers from 0 to {most}")
