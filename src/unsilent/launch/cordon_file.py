"""The file next to an isolated job's events, with the devices in cordon and the actions after each incident.

The file is written before an action starts, so that the same command can continue after a kill at any moment. A slot identifies a
device: the number that its rank has on this host if no device is in cordon. The file may be hostile, so it is read with limits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unsilent.basics.errors import content_errors, system_errors
from unsilent.basics.options import LARGEST
from unsilent.basics.plainfiles import parse_json, read_plain, replace_file
from unsilent.basics.strictjson import as_json_values
from unsilent.events.event_files import MOST_RANKS, check_range, parse_fields

NAME = "cordon.json"
SCHEMA = 1
MOST_BYTES = 2**22
Status = Literal["suspected", "confirmed", "lifted", "kept"]
SELF_TEST_FAILED, SELF_TEST_PASSED = 17, 0
"""Exit codes of ``unsilent selftest``."""


@dataclass(frozen=True, kw_only=True)
class Cordon:
    """The exclusion ("cordon") of a suspected device from a job, and its status.

    Attributes:
        slot, host, device: Identity of the device; ``device`` is the monitor's name for it.
        reason: Reason of the verdict.
        step, time: Step and time of the last incident; the step counts from the beginning of the training.
        incident: Name of that incident's folder.
        incidents: Number of incidents that named this device.
        status: ``suspected``: not tested yet; ``confirmed`` by a self-test; ``lifted``, because a self-test found nothing;
            ``kept``, although it found nothing, because this is not the first incident of this device.
    """

    slot: int
    host: str
    device: str
    reason: str
    step: int
    time: float
    incident: str
    incidents: int = 1
    status: Status = "suspected"


@dataclass(frozen=True, kw_only=True)
class HandledIncident:
    """An incident that the job has reacted to.

    Attributes:
        folder: Name of the folder.
        kind: Kind of its verdict.
        step: Step from the beginning of the training.
        slot: Suspected slot; -1: none.
    """

    folder: str
    kind: str
    step: int
    slot: int


@dataclass(frozen=True, kw_only=True)
class AvoidedCheckpoint:
    """A checkpoint that may contain the effects of a fault; one written later at the same path is not avoided.

    Attributes:
        path: File or folder, for readers.
        step: Step of the checkpoint.
        written: Time of its last change, in seconds since 1970.
    """

    path: str
    step: int
    written: float


@dataclass(frozen=True, kw_only=True)
class IsolationRecord:
    """Content of the file: devices in cordon, incidents, and checkpoints that are avoided.

    Attributes:
        cordons: One entry for each device that was ever in cordon.
        handled: Incidents that the job has reacted to.
        avoided: Checkpoints from which the job is never started.
        slots: Slots of the ranks of the last start, in their order.
        first_step: Step of the checkpoint that the last start began with; 0 if there was none.
    """

    schema: int = SCHEMA
    cordons: tuple[Cordon, ...] = ()
    handled: tuple[HandledIncident, ...] = ()
    avoided: tuple[AvoidedCheckpoint, ...] = ()
    slots: tuple[int, ...] = ()
    first_step: int = 0

    def active(self, host: str) -> dict[int, Cordon]:
        """Devices of a host that are in cordon, by slot."""
        return {cordon.slot: cordon for cordon in self.cordons if cordon.host == host and cordon.status != "lifted"}

    def with_cordon(self, new: Cordon) -> IsolationRecord:
        """The record with one more incident of a device."""
        same = [cordon for cordon in self.cordons if (cordon.slot, cordon.host) == (new.slot, new.host)]
        other_devices = tuple(cordon for cordon in self.cordons if cordon not in same)
        counted = replace(new, incidents=1 + sum(cordon.incidents for cordon in same))
        return replace(self, cordons=(*other_devices, counted))

    def tested(self, slot: int, host: str, exit_code: int) -> IsolationRecord:
        """The record after a self-test of a device; an inconclusive test changes nothing."""
        of_device = [cordon for cordon in self.cordons if (cordon.slot, cordon.host) == (slot, host)]
        after = {cordon: replace(cordon, status=_status_after(cordon, exit_code)) for cordon in of_device}
        return replace(self, cordons=tuple(after.get(cordon, cordon) for cordon in self.cordons))


def _status_after(cordon: Cordon, exit_code: int) -> Status:
    if exit_code == SELF_TEST_FAILED:
        return "confirmed"
    if exit_code == SELF_TEST_PASSED:
        return "lifted" if cordon.incidents == 1 else "kept"
    return cordon.status


def read_record(path: Path) -> IsolationRecord:
    """Read the record from a file; an empty record if the file does not exist.

    Raises ``UsageError`` if the file is damaged.
    """
    if not path.exists() and not path.is_symlink():
        return IsolationRecord()
    with content_errors(f"{path} is not what unsilent run --isolate writes", "correct or remove it"):
        values = parse_json(read_plain(path, MOST_BYTES))
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise ValueError(f"expected an object with the schema {SCHEMA}")
        record = parse_fields(IsolationRecord, values)
        _check_numbers(record)
        return record


def _check_numbers(record: IsolationRecord) -> None:
    """Raise ``ValueError`` if steps or slots are impossible."""
    check_range("first_step", record.first_step, 0, LARGEST)
    for entries in (record.cordons, record.handled, record.avoided):
        for entry in entries:
            check_range("step", entry.step, 0, LARGEST)
    for slot in (*record.slots, *(cordon.slot for cordon in record.cordons)):
        check_range("slot", slot, 0, MOST_RANKS)
    for handled in record.handled:
        check_range("slot", handled.slot, -1, MOST_RANKS)


def write_record(path: Path, record: IsolationRecord) -> None:
    """Write the file atomically.

    Raises ``UsageError`` if it cannot be written.
    """
    content = json.dumps(as_json_values(record), indent=1, ensure_ascii=False, allow_nan=False)
    with system_errors(f"cannot write {path}", "free space, or write elsewhere"):
        replace_file(path, content.encode(errors="replace") + b"\n")
