"""Finds lines of a log that look like errors, and masks the parts that differ between ranks and times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unsilent.basics.plainfiles import read_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.triage.parts import MOST_LOG

MOST_ERRORS, MOST_LINES = 10_000, 200_000
"""Most errors that are kept of a log (the first ones), and most lines that are read (the last ones)."""
LONGEST_LINE = 2000
LONGEST_SHOWN = 200
ERROR = re.compile(
    r"\b\w+(?:Error|Exception)\b|\b(?:Error|Exception|error):|(?<![=\w])(?:ERROR|FATAL|CRITICAL|Killed|Aborted)\b"
    r"|(?i:no space left|segmentation fault|out of memory|bus error|core dumped|cuda error|uncorrectable)"
    r"|(?i:\bxid\b|off the bus|exitcode: -\d|\bsignal \d+ \(sig|oom-kill|terminate called|i(?:nput)?/o(?:utput)? error)"
    r"|(?i:double bit|\bassertion\b.*\bfailed|\bpanic:|\babort:|hardware failure|failed to write|died unexpectedly)"
    r"|(?i:\btimed out\b|\bwatchdog\b)|\bTimeout\b(?!\s*[=:(])|(?i:(?<!\w)-?\bnan\b(?![\w-]))"
)
_WORDS = (
    "error", "exception", "fatal", "critical", "killed", "aborted", "space", "fault", "memory", "dumped", "uncorrect", "timed",
    "watchdog", "timeout", "nan", "xid", "bus", "exitcode", "signal", "oom-kill", "terminate called", "double bit", "assertion",
    "panic", "abort", "hardware failure", "failed to", "unexpectedly",
)  # fmt: skip
"""A line that looks like an error contains one of these words. Searching for them first takes a tenth of the time."""
_HARMLESS = re.compile(
    r"(?i:\b(?:0|no|without)\s+(?:\w+\s+){0,2}(?:errors?|exceptions?|fatal|critical)\b)"
    r"|(?i:\b(?:errors?|fatal|critical|out of memory retries)\s*[:=]\s*(?:0|none)\b(?!\.))"
    r"|(?i:\b\w*error\b\s*[:=]?\s*[-+]?\d*\.\d)|=\s*\w*Error\("
)
"""Error counts of 0, metrics that are called an error, and names of losses."""
_EXCEPTION = re.compile(r"\s*(?:[A-Za-z_][\w.]*\.)?\w*(?:Error|Exception)(?::|\s*$)")
"""Exception at the beginning of a line, as Python prints an unhandled one."""
LAST_LINES = 10
"""Number of last lines of a log in which an error may have ended the program. An error elsewhere may have been handled."""
OF_ANOTHER_RANK = re.compile(
    r"(?i:by peer|broken pipe|watchdog|timed out|timeout|sigterm|signal 15|childfailed|\bnan\b|heartbeat|remoteerror)"
    r"|(?i:socket closed|gracefulexit)"
)
"""Errors that follow from those of other ranks, and values that one rank may log for all. They do not indicate the rank."""
_RANK_PREFIX, _COLOUR = re.compile(r"^\[(?:rank|default)?\d+\]:?\s?", re.ASCII), re.compile(r"\x1b\[[\d;]*m", re.ASCII)
_TRACEBACK = "Traceback (most recent call last)"
_STEP = re.compile(r"(?i:\b(?:global_?)?(?:step|iter|iteration)\b[\s:=#\[(]{0,8}(\d{1,12})\b)", re.ASCII)
_MASKED = re.compile(r"0x[0-9a-fA-F]+|(?:/[\w.+-]+){2,}/?|\d+(?:[.:,]\d+)*(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class LoggedError:
    """A line of a log that looks like an error.

    Attributes:
        number: Number of the line, from 1.
        step: Step named in the line or in the nearest one before it; ``None`` if there is none.
        text: Text of the line that can be shown.
        masked: Line without numbers, addresses and paths.
        names_rank: Whether the error may belong to the rank that logs it: it is an exception or in one of the last lines, and
            does not come from another rank.
    """

    number: int
    step: int | None
    text: str
    masked: str
    names_rank: bool


def read_log_errors(path: Path) -> tuple[LoggedError, ...]:
    """The first errors in a log.

    Raises ``UsageError`` if it cannot be read.
    """
    text = read_plain(path, MOST_LOG).decode("utf-8", "replace")
    return tuple(error for error, _ in zip(_errors(text), range(MOST_ERRORS), strict=False))


def last_step(path: Path) -> int | None:
    """The last step number in a log, or None if the log has none.

    Raises ``UsageError`` if it cannot be read.
    """
    steps = _STEP.findall(read_plain(path, MOST_LOG).decode("utf-8", "replace"))
    return int(steps[-1]) if steps else None


def mask_line(line: str) -> str:
    """The line with numbers, addresses and paths masked."""
    return " ".join(_MASKED.sub("#", line).split())


def _errors(text: str) -> Iterator[LoggedError]:
    step, is_traceback = None, False
    lines = text.splitlines()
    first = max(0, len(lines) - MOST_LINES)
    for number, whole in enumerate(lines[first:], first + 1):
        line = _RANK_PREFIX.sub("", _COLOUR.sub("", whole[:LONGEST_LINE]))
        if ("step" in line.lower() or "iter" in line.lower()) and (named := _STEP.search(line)) is not None:
            step = int(named[1])
        if _TRACEBACK in line:
            is_traceback = True
        elif is_traceback and (not line.strip() or line[0].isspace()):
            continue  # code of the program
        elif is_traceback or (any(map(line.lower().__contains__, _WORDS)) and ERROR.search(_HARMLESS.sub("", line))):
            is_own = is_traceback or number > len(lines) - LAST_LINES or _EXCEPTION.match(line)
            is_traceback = False
            names_rank = bool(is_own and not OF_ANOTHER_RANK.search(line))
            line_text = escape_unprintable(line.strip()[:LONGEST_SHOWN])
            yield LoggedError(number, step, line_text, mask_line(line), names_rank)
