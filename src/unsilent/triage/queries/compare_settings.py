"""Query for settings that differ from those of an earlier job, or between the optimizers of ranks."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from unsilent.basics.printable import escape_unprintable
from unsilent.report.text import listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome

NOT_COUNTED = re.compile(
    r"(?:run|job|exp|experiment)[_-]?name|name|tags?|notes|(?:.*[_-])?(?:id|dir|folder|path|root|date|time|timestamp|host"
    r"|hostname|node|port|addr|workers|user|sha|commit|revision|log[_-]?level|verbose|verbosity)",
    re.IGNORECASE,
)
"""Last names of settings that differ even between runs that are meant to be equal."""
EXCEPT = "names, ids, commits, folders, dates, hosts, workers and levels of logs"
MOST_SHOWN = 3
LONGEST_VALUE = 60


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find optimizer settings that differ between ranks, or else settings that differ from the earlier job's."""
    states, missing = bundle.states()
    groups = {
        rank: {name: value for name, value in state.values.items() if "/groups/" in name}
        for rank, state in states.items()
    }
    names = dict.fromkeys(name for settings in groups.values() for name in settings)
    unlike = [name for name in names if len({repr(settings.get(name)) for settings in groups.values()}) > 1]
    if unlike:
        values = "; ".join(
            f"rank {rank}: {_value_text(settings.get(unlike[0]))}" for rank, settings in list(groups.items())[:8]
        )
        text = f"settings of optimizers differ between ranks: {listed(map(_name, unlike), MOST_SHOWN)} ({values})"
        return _differs(unlike[0], text, bundle.incident.step, missing)
    now, why_not_now = bundle.configuration()
    earlier, why_not_earlier = bundle.earlier_configuration()
    missing += why_not_now + why_not_earlier
    if differ := differing_settings(bundle):
        differences = (
            f"{_name(name)}: {_value_text(then)} then, {_value_text(value)} now"
            for name, (then, value) in differ.items()
        )
        text = f"settings are not those of the earlier job: {listed(differences, MOST_SHOWN)}"
        return _differs(next(iter(differ)), text, 0, missing)
    looked_at = [f"between the optimizers of {len(groups)} ranks"] * (len(groups) > 1)
    looked_at += [f"between the job and an earlier one (not compared: {EXCEPT})"] * (
        now is not None and earlier is not None
    )
    if not looked_at:
        text = (
            f"nothing can be compared: settings of optimizers can be read of {len(groups)} ranks (needed: 2 or more), and of the "
            f"configurations of this job and an earlier one {(now is not None) + (earlier is not None)} can be read (needed: 2)"
        )
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    text = f"no setting differs {', or '.join(looked_at)}; whether the settings are the intended ones was not checked"
    return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)


def differing_settings(bundle: Bundle) -> dict[str, tuple[Any, Any]]:
    """Values of differing settings in the earlier job and in this one, by name.

    Empty if one of the configurations cannot be read.
    """
    (now, _), (earlier, _) = bundle.configuration(), bundle.earlier_configuration()
    if now is None or earlier is None:
        return {}
    counted = [name for name in {**now, **earlier} if not NOT_COUNTED.fullmatch(name.rpartition("/")[2])]
    both = {name: (earlier.get(name, _ABSENT), now.get(name, _ABSENT)) for name in counted}
    return {
        name: (then, value)
        for name, (then, value) in both.items()
        if _normalised_value(then) != _normalised_value(value)
    }


_ABSENT = "no such setting"


def _normalised_value(value: Any) -> Any:
    """A value normalised for comparison: numbers in text are parsed, and empty values count as absent."""
    if value is None or value in ("", _ABSENT, [], {}):
        return None
    for number in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):  # also for whole numbers with more digits than Python reads
            value = number(value)
            break
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def _differs(name: str, text: str, step: int, missing: tuple[str, ...]) -> Finding:
    return Finding(
        outcome=Outcome.DIFFERS, text=text, kind=FindingKind.SETTINGS, tensor=_name(name), step=step, missing=missing
    )


def _name(name: str) -> str:
    return escape_unprintable(name[:LONGEST_VALUE])


def _value_text(value: Any) -> str:
    return _ABSENT if value is _ABSENT else ascii(value)[:LONGEST_VALUE]
