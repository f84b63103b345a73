"""From a faulty device to the end of the training: jobs of 4 gloo ranks under ``unsilent run --isolate``, one after another.

    python -m benchmarks.isolation [--runs 20] [--folder FOLDER]

A device computes wrongly from a drawn step on: another one in each run. Every other run has a spare. Two launchers are killed by
SIGKILL: one once the incident has its verdict, one once the device is in cordon; the same command is then started again. In one
run the newest checkpoint is corrupt. Each run must put this device in cordon, start from no other checkpoint than the last good
one, and end with the bits of a job that torchrun alone starts from that checkpoint at that number of ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.isolated_training import EVERY, STEPS
from unsilent.events.incident_folder import FOLDER
from unsilent.launch.cordon_file import NAME, read_record

RANKS = 4
FIRST_FAULT = 25
"""A rule judges a series once it has read 20 values of it."""
KILLED = {5: "verdict", 12: "cordon"}
"""Runs whose launcher is killed, and after what."""
CORRUPT = 17
"""The run whose newest checkpoint is corrupt."""
LIMIT_SECONDS = 600.0
SCRIPT = Path(__file__).with_name("isolated_training.py")


@dataclass(frozen=True)
class IsolatedRun:
    """One job.

    Attributes:
        slot, step: Of the fault.
        spares: Number of spare devices.
        killed: After what the launcher is killed; empty: it is not.
        is_corrupt: Whether the newest checkpoint of before the fault is.
    """

    slot: int
    step: int
    spares: int = 0
    killed: str = ""
    is_corrupt: bool = False

    @property
    def good_step(self) -> int:
        """Of the checkpoint that the job must continue from."""
        return (self.step // EVERY - self.is_corrupt) * EVERY - (self.step % EVERY == 0) * EVERY

    @property
    def ranks(self) -> int:
        """That the job must continue with."""
        return RANKS - 1 + self.spares


def drawn_runs(count: int) -> list[IsolatedRun]:
    """Runs with faults in changing ranks."""
    draw = random.Random(0)
    return [
        IsolatedRun(
            number % RANKS, draw.randrange(FIRST_FAULT, STEPS), number % 2, KILLED.get(number, ""), number == CORRUPT
        )
        for number in range(count)
    ]


def problems_of(run: IsolatedRun, folder: Path, references: References) -> list[str]:
    """Run one job in an empty folder; in what it differs from what it must do, in words."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULTY_SLOT": str(run.slot), "FAULTY_FROM": str(run.step)}
    if run.is_corrupt:
        environment["CORRUPT_STEP"] = str(run.step // EVERY * EVERY - (run.step % EVERY == 0) * EVERY)
    command = [
        sys.executable, "-m", "unsilent", "run", "--isolate", "--nproc", str(RANKS), "--spare", str(run.spares),
        "--checkpoints", "checkpoints", "--events", "events.jsonl", "--sampling", "fixed:1", "--selftest-minutes", "0",
        str(SCRIPT), "checkpoints",
    ]  # fmt: skip
    if run.killed:
        kill_launcher(command, folder, environment, MOMENTS[run.killed])
    with open(folder / "log", "a") as log:
        code = subprocess.run(
            command, cwd=folder, env=environment, stdout=log, stderr=log, check=False, timeout=LIMIT_SECONDS
        ).returncode
    record = read_record(folder / NAME)
    found = {
        "exit code": (code, 0),
        "slots in cordon": ([one.slot for one in record.cordons], [run.slot]),
        "incidents": ([one.step for one in record.handled], [run.step]),
        "checkpoint": (record.first_step, run.good_step),
        "ranks": (len(record.slots), run.ranks),
    }
    problems = [
        f"{name} {value}, expected {expected}" for name, (value, expected) in found.items() if value != expected
    ]
    if not problems and not same_bits(checkpoints / f"step-{STEPS}.pt", references.end_of(run, checkpoints)):
        problems.append("other bits at the end than a clean start from that checkpoint")
    return problems


def kill_launcher(
    command: list[str], folder: Path, environment: Mapping[str, str], is_time: Callable[[Path], bool]
) -> None:
    """Start a job, and kill its launcher with SIGKILL at a moment."""
    with open(folder / "log", "a") as log:
        launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_time(folder):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job ended before it could be killed; see {folder / 'log'}")
            time.sleep(0.001)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()


def has_verdict(folder: Path) -> bool:
    """Whether an incident has its verdict."""
    return any('"fault_verdict"' in one.read_text() for one in (folder / FOLDER).glob("*/incident.json"))


def has_cordon(folder: Path) -> bool:
    """Whether a device is in cordon."""
    return bool(read_record(folder / NAME).cordons)


MOMENTS = {"verdict": has_verdict, "cordon": has_cordon}


class References:
    """Ends of jobs that torchrun alone started, by their checkpoint and number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def end_of(self, run: IsolatedRun, checkpoints: Path) -> Path:
        """The last checkpoint of a clean job from the same one, which must have the same bits in all runs."""
        own = self._folder / f"{run.good_step}-{run.ranks}"
        start = own / "start" / f"step-{run.good_step}.pt"
        given = checkpoints / start.name
        if not own.exists():
            (own / "start").mkdir(parents=True)
            for one in (given, given.with_name(f"{given.name}.manifest.json")):
                shutil.copy(one, own / "start" / one.name)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNSILENT_RESUME_FROM": str(start)}
            subprocess.run(
                [*command, str(SCRIPT), str(own)],
                env=environment,
                check=True,
                capture_output=True,
                timeout=LIMIT_SECONDS,
            )
        if not same_bits(given, start):
            raise RuntimeError(f"{given} has other bits than that of an earlier run")
        return own / f"step-{STEPS}.pt"


def same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints of the training hold the same bits."""
    states = [torch.load(path, weights_only=True) for path in (one, other)]
    parts = [[*state["model"].values(), *moments(state)] for state in states]
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*parts, strict=True))


def moments(state: dict[str, dict[str, dict[int, dict[str, torch.Tensor]]]]) -> list[torch.Tensor]:
    """All of the optimizer's state."""
    return [tensor for one in state["optimizer"]["state"].values() for tensor in one.values()]


def main() -> None:
    """Run the jobs, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    folder = (asked.folder or Path(tempfile.mkdtemp())).resolve()
    references, right = References(folder / "references"), 0
    for number, run in enumerate(drawn_runs(asked.runs)):
        begun = time.monotonic()
        problems = problems_of(run, folder / f"run-{number}", references)
        right += not problems
        print(
            f"{number:2d} {run} {time.monotonic() - begun:4.0f} s: {'; '.join(problems) or 'as expected'}", flush=True
        )
    print(f"{right} of {asked.runs} runs ended as expected; see {folder}")


if __name__ == "__main__":
    main()
