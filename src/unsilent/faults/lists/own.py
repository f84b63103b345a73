"""Our own list: JSON lines of `Fault` records, as ``Fault.to_json`` and ``unsilent export`` write them.

A line is one trial: a record, a list of records (one a tensor), or a row of ``unsilent export`` with its ``faults``. The head of
a canonical export is passed over; the single object of an export to ``.json`` is read as well.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unsilent.errors import UsageError, first_line
from unsilent.faults.lists.entries import Entry, refused, shown
from unsilent.faults.naming import is_transient, parse_site
from unsilent.faults.reading import read_fault
from unsilent.faults.record import LABELS, MOMENT, Fault

HONOURED: Mapping[str, tuple[str, ...]] = {
    "param": ("step",),
    "op": ("step",),
    "input": ("step",),
    "kv": ("step", "occurrence"),
}
"""What a record may say about its moment, by the kind of its site. Values of a run must say it; a fault of a parameter without a
batch (``step``) acts in all of them."""


@dataclass(frozen=True)
class JsonLines:
    """Fault records as JSON lines, also what unsilent export writes."""

    def entries(self, content: bytes, name: str) -> Iterator[Entry]:
        """One entry a line; blank lines are passed over."""
        for number, line in enumerate(io.BytesIO(content), 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise refused(
                    name,
                    place,
                    f"cannot be read as JSON ({shown(first_line(error), 80)}); expected one fault record a line",
                ) from None
            for where, records in _trials(value, name, place):
                yield Entry(where, _faults(records, name, where))


def _trials(value: Any, name: str, place: str) -> Iterator[tuple[str, list[Any]]]:
    """The records of each trial in a line."""
    if isinstance(value, list):
        yield place, value
    elif not isinstance(value, dict):
        raise refused(name, place, f"found {shown(value)}; expected a fault record, or a list of them")
    elif "faults" in value:
        yield place, _row(value, name, place)
    elif isinstance(value.get("trials"), list) and "spec" in value:
        for number, row in enumerate(value["trials"], 1):
            where = f"{place}, trial {number}"
            yield where, _row(row, name, where)
    elif not ("campaign" in value and "fingerprint" in value):
        yield place, [value]


def _row(row: Any, name: str, place: str) -> list[Any]:
    """The records in a row of ``unsilent export``."""
    result = row.get("faults") if isinstance(row, dict) else None
    if isinstance(result, dict) and "digest" in result:
        raise refused(name, place, "only a digest of this fault was stored, it is too large; leave the line out")
    if not isinstance(result, list):
        raise refused(name, place, f"its faults are {shown(result)}; expected a list of fault records")
    return result


def _faults(records: list[Any], name: str, place: str) -> tuple[Fault, ...]:
    """The checked faults of one trial."""
    if not records:
        raise refused(name, place, "corrupts nothing; leave the line out")
    try:
        faults = tuple(_placed(read_fault(record)) for record in records)
    except UsageError as error:
        raise refused(name, place, str(error)) from None
    if len({f.step for f in faults}) > 1:
        raise refused(
            name, place, "its faults act in several batches; a trial is one evaluation: give each its own line"
        )
    return faults


def _placed(fault: Fault) -> Fault:
    """The fault by the canonical name of its site; raises ``UsageError`` for a moment that no campaign here can keep to."""
    site = parse_site(fault.site)
    for key in (*MOMENT, *LABELS):
        value = getattr(fault, key)
        if value != (0 if key == "rank" else None) and key not in HONOURED[site.kind]:
            raise UsageError(
                f"{key} is {shown(value)}, which a campaign on {site.kind}: sites cannot keep to; leave it out"
            )
    missing = [key for key in HONOURED[site.kind] if getattr(fault, key) is None]
    if is_transient(fault.site) and missing:
        raise UsageError(f"{shown(site.text, 80)} lacks {' and '.join(missing)}: in which evaluation it acts")
    return fault if fault.site == site.text else replace(fault, site=site.text)
