"""Records the first verdict of a run in a folder beside the run's events: see `events.incident_folder`.

Everything is written in a separate thread, so that neither this rank nor a rank that waits for it waits for a disk. A failure to
write is logged once, and the training goes on.
"""

from __future__ import annotations

import logging
import queue
import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import leaves_in, tensors_in
from unsilent.basics.plainfiles import replace_file
from unsilent.basics.sizes import human_bytes
from unsilent.checkpoints.recent_loads import RecentSave, recent_saves
from unsilent.detectors.series import Series
from unsilent.events.event_kinds import LOGGER, Alarm, Started, Verdict
from unsilent.events.incident_folder import (
    BATCH_FILE,
    SERIES_FILE,
    STATE_FILE,
    Incident,
    RankPart,
    SavedCheckpoint,
    write_record,
)
from unsilent.monitor.recorder import Recorder
from unsilent.monitor.signals.row import SignalValues
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.recovery.tensor_files import host_copy, write_tensors
from unsilent.sites.modules import named_parameters
from unsilent.workloads.trainings.snapshots import model_tensors, stepped_parameters

QUERIED = {
    "uuid": "uuid",
    "pci": "pci.bus_id",
    "serial": "serial",
    "driver": "driver_version",
    "ecc mode": "ecc.mode.current",
    "ecc corrected": "ecc.errors.corrected.volatile.total",
    "ecc uncorrected": "ecc.errors.uncorrected.volatile.total",
    "ecc corrected, all time": "ecc.errors.corrected.aggregate.total",
    "ecc uncorrected, all time": "ecc.errors.uncorrected.aggregate.total",
    "retired pages": "retired_pages.double_bit.count",
}
"""Names of facts, and their names in nvidia-smi."""
QUERY_SECONDS = 10.0
MOST_XIDS = 10
XID = "NVRM: Xid ("


def gpu_facts(uuid: str) -> dict[str, str]:
    """Facts about a GPU by name, such as its serial number.

    ``xid``: the last driver errors in the kernel log, if the log is readable.

    Args:
        uuid: UUID as in nvidia-smi: ``GPU-…``.
    """
    query = f"--query-gpu={','.join(QUERIED.values())}"
    line = _output(["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"]).strip()
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(QUERIED):
        return {"uuid": uuid}
    facts = {name: cell for name, cell in zip(QUERIED, cells, strict=True) if cell and not cell.startswith("[")}
    return facts | _xids(_output(["dmesg"]).splitlines(), facts.get("pci", ""))


def _xids(lines: Sequence[str], pci: str) -> dict[str, str]:
    """The last driver errors of a GPU in lines of the kernel log.

    nvidia-smi writes the address of a device as 00000000:3B:00.0, the kernel as 0000:3b:00.
    """
    place = pci.lower().rpartition(".")[0][-len("0000:3b:00") :]
    wanted = f"{XID}PCI:{place}".lower()
    messages = [line[line.lower().index(wanted) :].strip() for line in lines if place and wanted in line.lower()]
    return {"xid": "; ".join(messages[-MOST_XIDS:])} if messages else {}


def _output(command: Sequence[str]) -> str:
    """Output of a program, or an empty text if it is missing, fails or takes too long."""
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=QUERY_SECONDS, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""


STEPS_BEFORE, STEPS_AFTER = 64, 16
"""Number of steps that were read, up to the verdict and after it, whose series are written."""
MOST_EVENTS = 100
"""Maximum number of alarms of a rank, of verdicts and of checkpoint files that are recorded; the first ones are kept."""
MOST_TENSOR_BYTES = 4 * 2**30
"""Maximum size in bytes of a rank's batch, and of its state."""
CLOSING_SECONDS = 60.0
"""Seconds that the end of a monitor waits for a disk."""
_log = logging.getLogger(LOGGER)


class IncidentWriter:
    """Writes the files of one rank in the folder of an incident.

    Args:
        folder: Folder that gets a folder for each incident.
        run: Identifies the run; the same in all ranks.
        device: Device that this rank computes on.
        has_tensors: Whether batch and state are written.

    Attributes:
        path: Folder of the incident; ``None`` if there is none so far.
    """

    def __init__(self, folder: Path, run: str, device: torch.device, has_tensors: bool = True) -> None:
        self._above, self._run, self._device = folder.absolute(), run, device  # the job may go to another folder
        self.path: Path | None = None
        self._recorder = Recorder(most=STEPS_BEFORE + STEPS_AFTER)
        self._series: Sequence[Series] = ()
        self._steps_to_come = 0
        self._step, self._is_step_known, self._has_tensors = -1, False, has_tensors
        self._batches: list[Any] = []
        self._again_from: int | None = None
        self._facts: dict[str, str] = {}
        self._incident: Incident | None = None
        self._part: RankPart | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def add_row(self, step: int, series: Sequence[Series], signals: SignalValues, seconds: float) -> None:
        """Add the signals of one step."""
        self._series = series
        self._recorder.add(step, signals, seconds)
        if self._steps_to_come:
            self._steps_to_come -= 1
            if not self._steps_to_come:
                self._write_series()

    def begin(self, verdict: Verdict, alarms: Sequence[Alarm], started: Started) -> Path:
        """Begin the record of the first verdict, and return its folder.

        The folder is written afterwards, in a thread.

        Args:
            verdict: Verdict of all ranks.
            alarms: Alarms of this rank so far.
            started: Event of this rank at its start.
        """
        self.path = self._above / f"{(started.first_step or 0) + verdict.step}-{self._run}"
        self._step, first = verdict.step, tuple(alarms[:MOST_EVENTS])
        if verdict.rank == 0:
            self._incident = Incident(
                run=self._run, step=verdict.step, first_step=started.first_step or 0,
                suspect=verdict.suspect, reason=verdict.reason, tensor=verdict.tensor,
                host=verdict.host, device=verdict.device, world_size=started.world_size, time=verdict.time,
                settings=started.settings, versions=started.versions, alarms=first, verdicts=(verdict,),
                checkpoints=tuple(map(_saved_checkpoint, recent_saves())),
            )  # fmt: skip
            self._later(self._write_incident)
        digests = {name: _digest(state) for name, state in generator_states().items()}
        rank, host, device = verdict.rank, started.host, started.device
        self._part = RankPart(rank=rank, host=host, device=device, alarms=first, generators=digests)
        self._steps_to_come = STEPS_AFTER
        self._write_series()
        self._later(self._find_facts)
        return self.path

    def begin_again(self) -> None:
        """Called when a loop goes back to a state before the alarm."""
        self._again_from = None
        self._is_step_known = bool(self._batches)

    def add_iteration(self, step: int, state: Callable[[], Any], batch: Any) -> None:
        """Record the state and batch of an iteration if it belongs to the step of the alarm.

        Called before each iteration that is executed again; only the first execution is recorded.

        Args:
            step: Step of the monitor.
            state: Returns the present state: nested tensors and plain values.
            batch: Batch of the iteration, in the same way.
        """
        if self._again_from is None:
            self._again_from = step
        if self._part is None or step != self._step or self._is_step_known or not self._has_tensors:
            return
        try:
            if not self._batches:
                self._write_tensors(STATE_FILE, _copy_on_cpu(STATE_FILE, state()))
                since = self._again_from if self._again_from < step else None
                self._part = replace(self._part, state_step=step, state_since=since)
            self._batches.append(_copy_on_cpu(BATCH_FILE, batch))
            self._write_tensors(BATCH_FILE, list(self._batches))
        except Exception as error:
            self._is_step_known = True
            self._part = replace(self._part, problems=(*self._part.problems, kind_and_line(error)))
        self._later(self._write_part)

    def add_verdict(self, verdict: Verdict) -> None:
        """Record a later verdict of the same run."""
        if self._incident is not None and len(self._incident.verdicts) < MOST_EVENTS:
            self._incident = replace(self._incident, verdicts=(*self._incident.verdicts, verdict))
            self._later(self._write_incident)

    def add_fault_verdict(self, verdict: FaultVerdict) -> None:
        """Record the verdict on the kind of fault."""
        if self._incident is not None:
            self._incident = replace(self._incident, fault_verdict=verdict)
            self._later(self._write_incident)

    def close(self) -> None:
        """Wait until all files are written, for at most `CLOSING_SECONDS`."""
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
        """Schedule writing of the series and their steps."""
        assert self._part is not None
        self._part = replace(self._part, series_steps=self._recorder.steps)
        recording, file = self._recorder.recording(self._series), self._own_folder / SERIES_FILE
        self._later(self._write_part)
        self._later(lambda: replace_file(file, recording.content()))

    def _write_tensors(self, name: str, value: Any) -> None:
        """Schedule writing of nested CPU tensors to a file of this name."""
        file = self._own_folder / name
        self._later(lambda: write_tensors(file, value))

    def _later(self, write: Callable[[], object]) -> None:
        """Schedule a function that writes something in the thread of the writer."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unsilent incident", daemon=True)
            self._thread.start()
        self._jobs.put(write)


def training_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of a training: model, optimizers and random generators.

    Parameters and buffers are listed by name, as is the state of each optimizer.

    Tensors are not copied.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model)}

    def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
        stepped = stepped_parameters(optimizer, names)
        state = {name: dict(optimizer.state[p]) for name, p in stepped.items() if p in optimizer.state}
        groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        return {"kind": type(optimizer).__name__, "state": state, "groups": groups}

    states = [of_optimizer(optimizer) for optimizer in optimizers]
    return {"model": model_tensors(model), "optimizers": states, "generators": generator_states()}


def generator_states() -> dict[str, Any]:
    """The states of the global random generators, and of the current CUDA device's generator.

    They are tensors and plain values.
    """
    numpys = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "torch": torch.random.get_rng_state(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": torch.from_numpy(numpys["state"]["key"])}},
        "python": random.getstate(),
    }
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states[f"cuda:{device}"] = torch.cuda.get_rng_state(device)
    return states


def _digest(value: Any) -> str:
    result = xxhash.xxh3_128()
    for path, leaf in leaves_in(value):
        result.update(repr(path).encode())
        result.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return result.hexdigest()


def _copy_on_cpu(name: str, value: Any) -> Any:
    """A copy in CPU memory.

    Raises ``UsageError`` if the file of this name would be too large.
    """
    size = sum(tensor.nbytes for tensor in tensors_in(value))
    if size > MOST_TENSOR_BYTES:
        raise UsageError(
            f"{name} is not written, as it would be {human_bytes(size)}; at most {human_bytes(MOST_TENSOR_BYTES)} are"
        )
    return host_copy(value)


def _saved_checkpoint(save: RecentSave) -> SavedCheckpoint:
    manifest = save.manifest
    files = {name or save.path.name: manifest.files[name].xxh3_128 for name in list(manifest.files)[:MOST_EVENTS]}
    return SavedCheckpoint(
        path=str(save.path), step=manifest.step, time=save.time, manifest=str(save.manifest_path), files=files
    )
