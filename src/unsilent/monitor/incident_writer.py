"""Records the first verdict of a run in a folder beside its events: see `events.incident_folder`.

Everything is written in a thread of its own, so that neither this rank nor one that waits for it waits for a disk. What cannot be
written is logged once, and the training goes on.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from unsilent.checkpoints.recent_saves import RecentSave, recent_saves
from unsilent.detectors.series import Series
from unsilent.errors import kind_and_line
from unsilent.events.device_facts import gpu_facts
from unsilent.events.event_kinds import Alarm, Started, Verdict
from unsilent.events.incident_folder import SERIES_FILE, Incident, RankPart, SavedCheckpoint, write_record
from unsilent.events.sinks import LOGGER
from unsilent.monitor.recorder import Recorder
from unsilent.monitor.signals.row import SignalValues
from unsilent.plainfiles import replace_file
from unsilent.recovery.fault_verdict import FaultVerdict

STEPS_BEFORE, STEPS_AFTER = 64, 16
"""Steps that were read, up to the verdict and after it, whose series are written."""
MOST_EVENTS = 100
"""First alarms of a rank, verdicts and files of a checkpoint that are recorded."""
CLOSING_SECONDS = 60.0
"""That the end of a monitor waits for a disk."""
_log = logging.getLogger(LOGGER)


class IncidentWriter:
    """The part of one rank.

    Args:
        folder: With a folder for each incident.
        run: Identifies the run; the same in all ranks.
        device: That this rank computes on.

    Attributes:
        path: The folder of the incident; None: there is none so far.
    """

    def __init__(self, folder: Path, run: str, device: torch.device) -> None:
        self._above, self._run, self._device = folder.absolute(), run, device  # the job may go to another folder
        self.path: Path | None = None
        self._recorder = Recorder(most=STEPS_BEFORE + STEPS_AFTER)
        self._series: Sequence[Series] = ()
        self._steps_to_come = 0
        self._facts: dict[str, str] = {}
        self._incident: Incident | None = None
        self._part: RankPart | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def add_row(self, step: int, series: Sequence[Series], signals: SignalValues, seconds: float) -> None:
        """The signals of one more step."""
        self._series = series
        self._recorder.add(step, signals, seconds)
        if self._steps_to_come:
            self._steps_to_come -= 1
            if not self._steps_to_come:
                self._write_series()

    def begin(self, verdict: Verdict, alarms: Sequence[Alarm], started: Started) -> Path:
        """The first verdict of the run; the folder, which is written after this.

        Args:
            verdict: Of all ranks.
            alarms: Of this rank, so far.
            started: What this rank said at its start.
        """
        self.path = self._above / f"{verdict.step}-{self._run}"
        first = tuple(alarms[:MOST_EVENTS])
        if verdict.rank == 0:
            self._incident = Incident(
                run=self._run, step=verdict.step, suspect=verdict.suspect, reason=verdict.reason, tensor=verdict.tensor,
                host=verdict.host, device=verdict.device, world_size=started.world_size, time=verdict.time,
                settings=started.settings, versions=started.versions, alarms=first, verdicts=(verdict,),
                checkpoints=tuple(map(_saved, recent_saves())),
            )  # fmt: skip
            self._later(self._write_incident)
        self._part = RankPart(
            rank=verdict.rank, host=started.host, device=started.device, alarms=first, generators=generator_digests()
        )
        self._steps_to_come = STEPS_AFTER
        self._write_series()
        self._later(self._find_facts)
        return self.path

    def add_verdict(self, verdict: Verdict) -> None:
        """A later verdict of the same run."""
        if self._incident is not None and len(self._incident.verdicts) < MOST_EVENTS:
            self._incident = replace(self._incident, verdicts=(*self._incident.verdicts, verdict))
            self._later(self._write_incident)

    def add_fault_verdict(self, verdict: FaultVerdict) -> None:
        """What kind of fault it was."""
        if self._incident is not None:
            self._incident = replace(self._incident, fault_verdict=verdict)
            self._later(self._write_incident)

    def close(self) -> None:
        """Wait until all is written, for at most `CLOSING_SECONDS`."""
        if self._thread is None:
            return
        if self._steps_to_come:
            self._write_series()
        self._jobs.put(None)
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            _log.warning("the record of the incident in %s is not complete, as its disk does not answer", self.path)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _write_incident(self) -> None:
        assert self.path is not None
        assert self._incident is not None
        write_record(self.path, self._incident)

    def _write_part(self) -> None:
        assert self._part is not None
        write_record(self._own_folder, replace(self._part, device_facts=self._facts))

    def _find_facts(self) -> None:
        if self._device.type == "cuda":
            self._facts = gpu_facts(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
            self._write_part()

    def _work(self) -> None:
        while (write := self._jobs.get()) is not None:
            try:
                write()
            except Exception as error:
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning(
                        "cannot record the incident in %s: %s; the job goes on", self.path, kind_and_line(error)
                    )

    # -- by the training ---------------------------------------------------------------------------------------

    @property
    def _own_folder(self) -> Path:
        assert self.path is not None
        assert self._part is not None
        return self.path / f"rank{self._part.rank}"

    def _write_series(self) -> None:
        """Have the series written, with their steps."""
        assert self._part is not None
        self._part = replace(self._part, series_steps=self._recorder.steps)
        content, file = self._recorder.recording(self._series).content(), self._own_folder / SERIES_FILE
        self._later(self._write_part)
        self._later(lambda: replace_file(file, content))

    def _later(self, write: Callable[[], object]) -> None:
        """Have something written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unsilent incident", daemon=True)
            self._thread.start()
        self._jobs.put(write)


def generator_digests() -> dict[str, str]:
    """Digests of the states of the global random generators, and of those of CUDA devices in use, by name."""
    numpys = np.random.get_state(legacy=False)
    states = {
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "numpy": repr(numpys["state"]["pos"]).encode() + numpys["state"]["key"].tobytes(),
        "python": repr(random.getstate()).encode(),
    }
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states[f"torch, cuda:{device}"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return {name: xxhash.xxh3_128_hexdigest(state) for name, state in states.items()}


def _saved(one: RecentSave) -> SavedCheckpoint:
    files = {
        name or one.path.name: one.manifest.files[name].xxh3_128 for name in list(one.manifest.files)[:MOST_EVENTS]
    }
    return SavedCheckpoint(
        path=str(one.path), step=one.manifest.step, time=one.time, manifest=str(one.manifest_path), files=files
    )
