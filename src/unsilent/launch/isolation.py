"""``unsilent run --isolate``: runs a job, and after an incident restarts it without the suspected device.

torchrun loses the exit codes of its ranks, so the actions follow from the verdict in the incident's folder. Each action is
written to the cordon file before it starts, so that the same command can continue after a kill.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.last_good import FoundCheckpoint, LastGood, last_good_checkpoint
from unsilent.events.host import host_name
from unsilent.events.incident_folder import FOLDER, Incident, is_incident, not_executed_verdict, read_incident
from unsilent.launch.cordon_file import (
    NAME,
    AvoidedCheckpoint,
    Cordon,
    HandledIncident,
    read_record,
    write_record,
)
from unsilent.launch.rank_processes import check_slots, end_process, start_ranks, start_self_test
from unsilent.recovery.earlier_incidents import SUSPECTED
from unsilent.recovery.fault_codes import (
    CONFIRMED_EXIT_CODE,
    DATA_BATCH,
    NO_OTHER_CHECKPOINT,
    SOFTWARE_EXIT_CODE,
    UNDETERMINED_EXIT_CODE,
)
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.report.text import count_text, listed

POLL_SECONDS = 0.1
STOPPED = ("data", "numerics", "benign")
"""Kinds of faults that would occur again on every device, so that the job is not started again."""
EARLIER, NONE = "earlier", "none"
LEFT = (EARLIER, NONE)
"""Kinds of incidents that belong to an earlier job, or that did not stop the job."""
_INCIDENT = re.compile(r"[\w.-]{1,100}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class IsolatedJob:
    """Settings of an isolated job.

    Attributes:
        words: Words after ``unsilent`` in the command of each rank.
        events: The file of events; incidents and the cordon file are next to it.
        checkpoints: The folder that the script saves to.
        ranks, spares: Number of devices in use, and number of devices that can replace them.
        restarts: Largest number of restarts of the job.
        test_minutes: Duration of the self-test of a suspected device in minutes; 0: no self-test.
    """

    words: Sequence[str]
    events: Path
    checkpoints: Path
    ranks: int
    spares: int
    restarts: int
    test_minutes: float


class Isolation:
    """Runs one job until it ends.

    ``say`` is called with each line for the user.
    """

    def __init__(self, job: IsolatedJob, say: Callable[[str], None]) -> None:
        check_slots(job.ranks + job.spares, os.environ)
        self._job, self._say, self._host = job, say, host_name()
        self._path, self._incidents = job.events.parent / NAME, job.events.parent / FOLDER
        self._tests: dict[int, subprocess.Popen[bytes]] = {}
        self._is_first = not self._path.exists()
        self._record = read_record(self._path)

    def run(self) -> int:
        """Run the job, with restarts after incidents, until it ends or must not be restarted; returns the exit code.

        Raises:
            UsageError: no device or no good checkpoint is left, or a file is invalid.
        """
        try:
            if self._is_first:
                self._leave_earlier_incidents()
            code = self._run()
            self._wait_for_tests()
            if incidents := [incident for incident in self._record.handled if incident.kind not in LEFT]:
                texts = [
                    f"{incident.kind} fault{_in_slot(incident.slot)} (step {incident.step})" for incident in incidents
                ]
                every = listed(texts, 8)
                self._say(f"the job ended with exit code {code}; incidents so far: {every}; records: {self._incidents}")
            return code
        finally:
            for test in self._tests.values():
                end_process(test)

    def _run(self) -> int:
        starts, answer = 0, self._answer_new()
        while not answer:
            if starts > self._job.restarts:
                self._say(f"the job was started again {count_text(starts - 1, 'time')}, as often as --restarts allows")
                return UNDETERMINED_EXIT_CODE
            ended = self._run_ranks(is_again=answer is not None)
            starts, answer = starts + 1, self._answer_new() if ended else None
            if answer is None:
                if ended:
                    self._say(f"torchrun ended with {ended}, and no incident says that the monitor stopped the job")
                return ended
        return answer

    # -- incidents -------------------------------------------------------------------------------------------------------

    def _new_incidents(self) -> Iterator[Incident]:
        """Yield the incidents that have not been handled yet, in the order of time."""
        known = {incident.folder for incident in self._record.handled}
        folders = self._incidents.iterdir() if self._incidents.is_dir() else ()
        new = [folder for folder in folders if _INCIDENT.fullmatch(folder.name) and folder.name not in known]
        yield from sorted(map(read_incident, filter(is_incident, new)), key=lambda incident: incident.time)

    def _leave_earlier_incidents(self) -> None:
        """Mark incidents as handled, without a reaction, if they are of an earlier job that ran without --isolate."""
        for incident in self._new_incidents():
            self._say(f"{incident.folder} is of an earlier job, and is left as it is")
            self._handle_incident(incident, EARLIER, incident.step, -1)
        write_record(self._path, self._record)

    def _answer_new(self) -> int | None:
        """React to all new incidents, and return the job's exit code.

        It is 0 to restart the job, and None if no incident stopped it.
        """
        answer = None
        for incident in self._new_incidents():
            verdict = stopping_verdict(incident)
            if verdict is None:
                self._handle_incident(incident, NONE, incident.step, -1)
                write_record(self._path, self._record)
            else:
                answer = max(answer or 0, self._answer(incident, verdict))
        return answer

    def _answer(self, incident: Incident, verdict: FaultVerdict) -> int:
        """Record the reaction to an incident, tell the user, and return the job's exit code (0 to restart it)."""
        record, kind = self._record, verdict.kind
        is_of_device = kind in SUSPECTED and 0 <= verdict.rank < len(record.slots)
        slot = record.slots[verdict.rank] if is_of_device else -1
        step = record.first_step + verdict.step
        is_repeated = any((incident.step, incident.slot) == (step, slot) for incident in record.handled)
        self._handle_incident(incident, kind, step, slot)
        is_of_load = kind == "checkpoint" or verdict.code == NO_OTHER_CHECKPOINT.code
        self._avoid(record.first_step if is_of_load else step)
        is_repeated = is_repeated or verdict.exit_code == CONFIRMED_EXIT_CODE
        is_on_spare = kind == "undetermined" and is_repeated and slot >= 0 and self._has_spare(slot)
        if slot >= 0 and (kind == "device" or is_on_spare):
            cordon = Cordon(
                slot=slot, host=self._host, device=verdict.device, reason=verdict.reason, step=step, time=incident.time,
                incident=incident.folder.name,
            )  # fmt: skip
            self._record = self._record.with_cordon(cordon)
        write_record(self._path, self._record)
        where = _in_slot(slot)
        code = f" ({verdict.code})" if verdict.code else ""
        batch = f" in the batch of rank {verdict.rank}" if verdict.code == DATA_BATCH.code and verdict.rank >= 0 else ""
        self._say(f"step {step}: {kind}{code}{where}{batch}; see {incident.folder}")
        if kind in STOPPED:
            self._say("the job is not started again: another device would not help")
            return verdict.exit_code or SOFTWARE_EXIT_CODE
        if kind == "device" and slot < 0:
            rank = f"device rank {verdict.rank} had" if verdict.rank >= 0 else "device it is"
            self._say(f"which {rank} is not known: none was put in cordon")
        if is_on_spare:
            self._say(f"nothing is confirmed for the device{where}: the step is tried on a spare one")
            return 0
        if is_repeated and kind in ("transient", "undetermined"):
            self._say(
                f"the job is not started again: it is not the first incident in step {step}{where}; "
                "nothing is confirmed for a device"
            )
            return CONFIRMED_EXIT_CODE
        return 0

    def _has_spare(self, slot: int) -> bool:
        """Whether enough devices for all ranks are free without the given one."""
        left_out = {slot, *self._record.active(self._host)}
        return len(set(range(self._job.ranks + self._job.spares)) - left_out) >= self._job.ranks

    def _handle_incident(self, incident: Incident, kind: str, step: int, slot: int) -> None:
        new = HandledIncident(folder=incident.folder.name, kind=kind, step=step, slot=slot)
        self._record = replace(self._record, handled=(*self._record.handled, new))

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def _checkpoints(self) -> list[FoundCheckpoint]:
        """The checkpoints with a known step, newest first, without verification."""
        if not self._job.checkpoints.is_dir():
            return []
        return last_good_checkpoint(self._job.checkpoints, before_step=0).not_before

    def _avoid(self, step: int) -> None:
        """Avoid all existing checkpoints of the given step or of later steps."""
        later = [checkpoint for checkpoint in self._checkpoints() if (checkpoint.step or 0) >= step]
        new = [AvoidedCheckpoint(path=str(c.path), step=c.step or 0, written=c.written) for c in later]
        self._record = replace(self._record, avoided=tuple(dict.fromkeys((*self._record.avoided, *new))))

    def _last_good(self) -> LastGood:
        """The newest checkpoint that matches its manifest and is not avoided."""
        avoided = {(checkpoint.step, checkpoint.written) for checkpoint in self._record.avoided}
        checkpoints = self._checkpoints()
        allowed = [c.step or 0 for c in checkpoints if (c.step, c.written) not in avoided]
        before = max(allowed, default=-1) + 1  # checkpoints of later steps need no verification
        while True:
            result = last_good_checkpoint(self._job.checkpoints, before_step=before)
            if result.good is None or (result.good.step, result.good.written) not in avoided:
                return result
            before = result.good.step or 0

    # -- processes -------------------------------------------------------------------------------------------------------

    def _run_ranks(self, is_again: bool) -> int:
        """Run the ranks on free devices from the last good checkpoint, and return torchrun's exit code."""
        slots = self._free_slots()[: self._job.ranks]
        search = self._last_good() if self._job.checkpoints.is_dir() else None
        good = search.good if search else None
        if is_again and good is None:
            headline = search.headline() if search else f"there is no folder {self._job.checkpoints}"
            raise UsageError(f"{headline}; run the command again to train from the beginning on what is not in cordon")
        self._record = replace(self._record, slots=tuple(slots), first_step=(good and good.step) or 0)
        write_record(self._path, self._record)
        start = f"from {good.shown_name}, step {good.step}" if good else "without a checkpoint"
        fewer = f" instead of {self._job.ranks}" if len(slots) < self._job.ranks else ""
        self._say(f"{count_text(len(slots), 'rank')}{fewer} on slots {listed(map(str, slots), 16)}, {start}")
        ranks = start_ranks(self._job.words, slots, good.path.resolve() if good else None, self._record.first_step)
        try:
            while (code := ranks.poll()) is None:
                self._note_tests()
                time.sleep(POLL_SECONDS)
        finally:
            end_process(ranks)
        return code if code >= 0 else 128 - code

    def _free_slots(self) -> list[int]:
        """The devices that are not in cordon, after starting self-tests of suspected ones.

        Waits for these tests only if no other device is free.
        """
        count = self._job.ranks + self._job.spares
        self._start_tests()
        for _ in range(2):
            if free := [slot for slot in range(count) if slot not in self._record.active(self._host)]:
                return free
            self._wait_for_tests()
        raise UsageError(
            f"no device is left: {count_text(count, 'device')} of this host {'is' if count == 1 else 'are'} in cordon; "
            f"repair it, and remove its entry from {self._path}"
        )

    def _start_tests(self) -> None:
        for slot, cordon in self._record.active(self._host).items():
            if cordon.status == "suspected" and slot not in self._tests and self._job.test_minutes:
                self._tests[slot] = start_self_test(slot, self._job.test_minutes)

    def _note_tests(self) -> None:
        """Record the results of self-tests that have ended."""
        for slot, test in [*self._tests.items()]:
            if (code := test.poll()) is None:
                continue
            del self._tests[slot]
            self._record = self._record.tested(slot, self._host, code)
            write_record(self._path, self._record)
            status = next(c.status for c in self._record.cordons if (c.slot, c.host) == (slot, self._host))
            self._say(f"the self-test of slot {slot} ended with {code}: its cordon is {status}")

    def _wait_for_tests(self) -> None:
        while self._tests:
            self._note_tests()
            time.sleep(POLL_SECONDS)


def _in_slot(slot: int) -> str:
    return f" in slot {slot}" if slot >= 0 else ""


def stopping_verdict(incident: Incident) -> FaultVerdict | None:
    """The verdict that stopped a job; None if the job continued.

    It is undetermined for a job that stops on any alarm.
    """
    verdict = incident.fault_verdict
    if verdict is None and incident.settings.get("on_alarm") == "stop":
        return not_executed_verdict(incident)
    return verdict if verdict is not None and verdict.exit_code else None
