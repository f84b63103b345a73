"""The check that a training is restored bit for bit.

Four ways are checked: a second run, and restoring a snapshot in new objects, in the same objects and in a new process.
A training that is not restored bit for bit cannot serve as a clean twin. Missing state is found by further training:
after a few steps it changes some tensor, and the first such tensor is named.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.user_code import set_script_arguments
from unsilent.workloads.registry import Origin, load_training, origin_of
from unsilent.workloads.trainings.base import Seeds, TrainingState, TrainingWorkload
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

STEPS = 3
SECONDS = 600
"""Largest number of seconds that a new process may take."""
ADVICE = "everything that a step depends on must be in the state, or follow from its seeds and counters"


@dataclass(frozen=True)
class RestoreCheckResult:
    """The ways of restoring that were checked, all of which gave the same bits.

    ``why_not_new_process``: the reason why a new process was not checked (None if it was).
    """

    ways_checked: tuple[str, ...]
    why_not_new_process: str | None = None


def check_restorable(
    workload: TrainingWorkload, *, steps: int = STEPS, seeds: int | Seeds = 0, new_process: bool = True
) -> RestoreCheckResult:
    """Check that a training gives the same bits after it was restored in each way.

    It trains ``steps`` steps, takes a snapshot, trains as many steps more, and compares every tensor. Raises
    ``UsageError`` that names the way, the step and the first tensor that differs.
    """
    if steps < 1:
        raise UsageError(f"steps is {steps}; expected at least 1")
    state = workload.start(seeds)
    _run(workload, state, steps)
    snapshot = workload.snapshot(state)
    restored = _through_file(workload, snapshot)
    # State that a snapshot lacks shows only in later steps, so all snapshots of the later steps are compared.
    wanted = _trail(workload, state, steps)
    if text := first_snapshot_difference(snapshot, restored):
        raise UsageError(
            f"workload {workload.name!r}: a snapshot changed while the training continued: {text}; let the snapshot hold copies "
            "of tensors"
        )

    def repeated() -> TrainingState:
        again = workload.start(seeds)
        _run(workload, again, steps)
        return again

    def in_place() -> TrainingState:
        workload.restore_into(state, restored)
        return state

    ways: dict[str, Callable[[], TrainingState]] = {
        "run again": repeated,
        "restored into fresh objects": lambda: workload.restore(restored),
        "restored into the same objects": in_place,
    }
    for way, come_back in ways.items():
        back = come_back()
        _compare(workload, way, steps, [restored, *wanted], [workload.snapshot(back), *_trail(workload, back, steps)])
    origin = origin_of(workload)
    if origin is None or not new_process:
        text = "not asked for"
        if not origin:
            text = "load the workload by its name or file.py:name to check restoring in a new process, too"
        return RestoreCheckResult(tuple(ways), text)
    way, trail = "restored in a new process", _trail_in_new_process(workload, origin, restored, steps)
    _compare(workload, way, steps, [restored, *wanted], trail)
    return RestoreCheckResult((*ways, way))


def _run(workload: TrainingWorkload, state: TrainingState, steps: int) -> None:
    for _ in range(steps):
        workload.step(state)


def _trail(workload: TrainingWorkload, state: TrainingState, steps: int) -> list[Any]:
    """A snapshot and the loss after each of the next steps, and an evaluation after the last step."""
    trail = []
    for _ in range(steps):
        record = workload.step(state)
        trail.append({**_through_file(workload, workload.snapshot(state)), "loss of the step": record.loss})
    evaluation = workload.evaluate(state)
    held_out = {"loss": float(evaluation.loss), "predictions": torch.from_numpy(np.array(evaluation.predictions))}
    trail[-1]["evaluation"] = held_out
    return trail


def _through_file(workload: TrainingWorkload, snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot saved to a file and read again, so that it shares no memory with the training."""
    file = io.BytesIO()
    try:
        torch.save(snapshot, file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
    except Exception as error:
        raise UsageError(
            f"workload {workload.name!r}: a snapshot cannot be saved and read with weights_only=True ({first_line(error)}); "
            "use tensors, numbers, texts, lists and dicts"
        ) from None
    if text := first_snapshot_difference(snapshot, read):
        raise UsageError(f"workload {workload.name!r}: a snapshot differs after saving and reading it: {text}")
    return dict(read)


def _compare(workload: TrainingWorkload, way: str, steps: int, wanted: list[Any], result: list[Any]) -> None:
    """Raise unless two lists of snapshots have the same bits.

    Each list has the restored snapshot first, then one after each step.
    """
    for number, (a, b) in enumerate(zip(wanted, result, strict=True)):
        if text := first_snapshot_difference(a, b):
            when = f"{number} step{'s' if number > 1 else ''} later" if number else "immediately"
            raise UsageError(
                f"workload {workload.name!r} is not restored bit for bit after {steps} steps: {way}, its state differs {when}: "
                f"{text}; {ADVICE}"
            )


def _trail_in_new_process(
    workload: TrainingWorkload, origin: Origin, snapshot: Mapping[str, Any], steps: int
) -> list[Any]:
    """The restored snapshot and the trail from a new process that loads the workload itself."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(dict(snapshot), folder / "snapshot.pt")
        request = {"ref": origin.ref, "options": dict(origin.options), "data": origin.data, "steps": steps}
        request |= {"threads": torch.get_num_threads()}
        (folder / "request.json").write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-m", __name__, name], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
            raise UsageError(f"workload {workload.name!r} cannot be restored in a new process: {last}")
        return list(torch.load(folder / "trail.pt", weights_only=True))


def _run_new_process(folder: Path) -> None:
    """Restore the snapshot and run the steps, in the new process."""
    request = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(request["threads"])
    set_script_arguments(request["ref"])
    workload = load_training(request["ref"], request["options"], data=request["data"])
    state = workload.restore(torch.load(folder / "snapshot.pt", weights_only=True))
    torch.save([workload.snapshot(state), *_trail(workload, state, request["steps"])], folder / "trail.pt")


if __name__ == "__main__":
    _run_new_process(Path(sys.argv[1]))
