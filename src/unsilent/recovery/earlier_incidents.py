"""A small file with earlier incidents of each device, so that they are counted across jobs.

    incidents/devices.json      {"schema": 1, "incidents": [{"device": …, "step": …, "kind": …}, …]}, the last one last

Only incidents that leave a suspicion on a device are stored. The file may come from anywhere, so it is read with a limit on its
size, and every value in it is checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unsilent.basics.errors import content_errors
from unsilent.basics.plainfiles import parse_json, read_plain, replace_file
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.fault_verdict import FaultVerdict

DEVICES_FILE = "devices.json"
SCHEMA = 1
SUSPECTED = ("transient", "device", "undetermined")
"""Kinds that leave a suspicion on a device."""
MOST_INCIDENTS = 1000
MOST_BYTES = 2**22
"""Largest size of the file in bytes; the stored incidents take less, whatever the characters of their devices."""
LONGEST_NAME = 300
_UUID = re.compile(r"GPU-[0-9a-f-]{8,}")


@dataclass(frozen=True)
class EarlierIncident:
    """An incident of an earlier run.

    Attributes:
        device: Host and device, as returned by `device_identity`.
        step: Step of the alarm.
        kind: Kind of the fault.
    """

    device: str
    step: int
    kind: str


def device_identity(known: Evidence | FaultVerdict) -> str:
    """The identity of an alarm's device: its UUID, or host and device; empty if no rank is suspected."""
    unique = _UUID.search(known.device)
    text = unique[0] if unique else f"{known.host} {known.device}"
    return text.strip()[:LONGEST_NAME] if known.rank >= 0 else ""


def read_earlier_incidents(path: Path) -> list[EarlierIncident]:
    """The incidents in a file, oldest first; an empty list if the file does not exist.

    Raises ``UsageError`` for any other file.
    """
    if not path.exists():
        return []
    content = read_plain(path, MOST_BYTES)
    with content_errors(f"{path} is no file of earlier incidents", "correct it, or delete it to forget them"):
        table = parse_json(content)
        if not isinstance(table, dict) or table.get("schema") != SCHEMA or not isinstance(table.get("incidents"), list):
            raise ValueError(f"expected an object with schema {SCHEMA} and a list of incidents")
        return [_read_incident(entry) for entry in table["incidents"]]


def with_earlier_incidents(evidence: Evidence, earlier: list[EarlierIncident]) -> Evidence:
    """The evidence, with the earlier incidents of its device and its step added."""
    device = device_identity(evidence)
    if not device:
        return replace(evidence, strikes=0, strikes_in_step=0, strikes_elsewhere=0)
    in_step = [incident for incident in earlier if incident.step == evidence.step]
    strikes = sum(incident.device == device and incident.kind in ("transient", "device") for incident in earlier)
    undetermined = sum(incident.device == device and incident.kind == "undetermined" for incident in in_step)
    elsewhere = sum(incident.device != device for incident in in_step)
    return replace(evidence, strikes=strikes, strikes_in_step=undetermined, strikes_elsewhere=elsewhere)


def incident_of(verdict: FaultVerdict) -> EarlierIncident | None:
    """The incident to record for a verdict; None if the verdict does not suspect a device."""
    device = device_identity(verdict)
    return EarlierIncident(device, verdict.step, verdict.kind) if device and verdict.kind in SUSPECTED else None


def write_earlier_incidents(path: Path, incidents: list[EarlierIncident]) -> None:
    """Write the most recent of these incidents to the file.

    Raises ``OSError``.
    """
    table = {"schema": SCHEMA, "incidents": [asdict(incident) for incident in incidents[-MOST_INCIDENTS:]]}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(table, indent=1).encode())


def _read_incident(value: Any) -> EarlierIncident:
    """An incident from its JSON value.

    Raises ``ValueError`` if the value is invalid.
    """
    if not isinstance(value, dict):
        raise ValueError("an incident is no object")
    device, step, kind = (value.get(name) for name in ("device", "step", "kind"))
    if not isinstance(device, str) or not device or len(device) > LONGEST_NAME:
        raise ValueError(f"a device is no text of 1 to {LONGEST_NAME} characters")
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError("a step is no whole number from 0 on")
    if kind not in SUSPECTED:
        raise ValueError(f"a kind is none of {', '.join(SUSPECTED)}")
    return EarlierIncident(device, step, kind)
