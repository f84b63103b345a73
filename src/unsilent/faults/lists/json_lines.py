"""Fault lists in JSON lines of `Fault` records, as ``Fault.to_json`` and ``unsilent export`` write them.

A line is one trial: a record, a list of records (one for each tensor), or a row of ``unsilent export`` with its ``faults``. The
head of a canonical export is skipped; the single object of an export to ``.json`` can be read as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import parse_json
from unsilent.basics.printable import short_repr
from unsilent.faults.fault_json import read_fault
from unsilent.faults.lists.entries import FaultListEntry, WrongEntry, errors_at
from unsilent.faults.naming import is_transient, parse_site, site_in_memory
from unsilent.faults.record import LABELS, TIMING_FIELDS, Fault

SUPPORTED_TIMING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "param": ("step",),
    "op": ("step",),
    "input": ("step",),
    "kv": ("step", "occurrence"),
}
"""Timing fields of a record, by the kind of its site. Faults of transient values must have them; a fault of a parameter without a
batch (``step``) acts in all batches."""


@dataclass(frozen=True)
class JsonLines:
    """Fault records as JSON lines, including the output of ``unsilent export``."""

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """One entry for each line; blank lines are skipped."""
        for number, line in enumerate(io.BytesIO(content), 1):
            if not line.strip():
                continue
            place = f"line {number}"
            with errors_at(place):
                for where, records in _trials(_json_of_line(line), place):
                    with errors_at(where):
                        faults = _faults(records)
                    yield FaultListEntry(where, faults)


def _json_of_line(line: bytes) -> Any:
    """The JSON value of a line; raises `WrongEntry`."""
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        reason = short_repr(first_line(error), 80)
        raise WrongEntry(f"cannot be read as JSON ({reason}); expected one fault record per line") from None


def _trials(value: Any, place: str) -> Iterator[tuple[str, list[Any]]]:
    """The place and the fault records of each trial in a line."""
    if isinstance(value, list):
        yield place, value
    elif not isinstance(value, dict):
        raise WrongEntry(f"found {short_repr(value)}; expected a fault record, or a list of them")
    elif "faults" in value:
        yield place, _row(value)
    elif isinstance(value.get("trials"), list) and "spec" in value:
        for number, row in enumerate(value["trials"], 1):
            where = f"{place}, trial {number}"
            with errors_at(where):
                records = _row(row)
            yield where, records
    elif not ("campaign" in value and "fingerprint" in value):
        yield place, [value]


def _row(row: Any) -> list[Any]:
    """The fault records in a row of ``unsilent export``."""
    result = row.get("faults") if isinstance(row, dict) else None
    if isinstance(result, dict) and "digest" in result:
        raise WrongEntry("this fault is too large for a store, which holds only its digest; delete this line")
    if not isinstance(result, list):
        raise WrongEntry(f"faults is {short_repr(result)}; expected a list of fault records")
    return result


def _faults(records: list[Any]) -> tuple[Fault, ...]:
    """The checked faults of one trial."""
    if not records:
        raise WrongEntry("the list of faults is empty; leave the line out")
    faults = tuple(_fault_at_canonical_site(read_fault(record)) for record in records)
    if len({f.step for f in faults}) > 1:
        raise WrongEntry(
            "the faults of one line act in several batches, but a trial runs one batch; write one line per batch"
        )
    return faults


def _fault_at_canonical_site(fault: Fault) -> Fault:
    """The fault with the canonical name of its site; raises ``UsageError`` if no campaign can apply it."""
    site = parse_site(site_in_memory(fault.site))
    if site.kind not in SUPPORTED_TIMING_FIELDS:
        raise UsageError(
            f"no campaign corrupts {short_repr(site.text, 80)}; expected {', '.join(SUPPORTED_TIMING_FIELDS)}: sites"
        )
    if fault.function is not None:
        raise UsageError("the fault is made by a Python function, which a list does not have; delete this line")
    for key in (*TIMING_FIELDS, *LABELS):
        value = getattr(fault, key)
        if value != (0 if key == "rank" else None) and key not in SUPPORTED_TIMING_FIELDS[site.kind]:
            raise UsageError(
                f"{key} is {short_repr(value)}, but a campaign on {site.kind}: sites does not support {key}; leave it out"
            )
    missing = [key for key in SUPPORTED_TIMING_FIELDS[site.kind] if getattr(fault, key) is None]
    if is_transient(fault.site) and missing:
        raise UsageError(
            f"{short_repr(site.text, 80)} lacks {' and '.join(missing)}, needed to tell in which evaluation it acts"
        )
    return fault if fault.site == site.text else replace(fault, site=site.text)
