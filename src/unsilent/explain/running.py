"""Starts runs of the user's code in processes of their own, and reads their reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from unsilent.basics.child_processes import kill_with_children
from unsilent.basics.errors import InternalError, UsageError, UserCodeError
from unsilent.explain.results import Machine

DEADLINE = 600.0
"""Default time limit of a run in seconds."""
SECONDS_BETWEEN = 10.0
"""Seconds between two progress lines of a long run."""
HASH_SEED = "PYTHONHASHSEED"
_LAST = 4294967295
Run = dict[str, Any]
"""Report of a run at its end: ``steps``, ``called``, ``touched``, ``reads``, ``final``, and if watched ``operations``, ``own``
(number of operations, without those while its file was read) and the tables of `records`."""
Notify = Callable[[str], None]


class Launcher:
    """Starts runs of one loop, one after the other, in a temporary folder.

    Args:
        ref: Name of the program to run.
        steps: Number of updates after which a run is ended; ``None`` for no limit.
        deadline: Time limit of a run in seconds.
        notify: Called with a line before every run, and every ten seconds during the run.
        arguments: ``sys.argv[1:]`` of the script.

    Attributes:
        folder: Folder with the files of runs.
        launched: Number of runs so far.
    """

    def __init__(
        self, ref: str, steps: int | None, deadline: float, notify: Notify, arguments: Sequence[str] = ()
    ) -> None:
        self.launched = 0
        self._arguments, self._begun = list(arguments), time.perf_counter()
        self._ref, self._steps, self._deadline, self._notify = ref, steps, deadline, notify
        self._plain: Run = {}
        """First run, in which nothing was pinned."""

    def __enter__(self) -> Launcher:
        self._temporary = tempfile.TemporaryDirectory(prefix="unsilent-explain-")
        self.folder = Path(self._temporary.name)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._temporary.cleanup()

    def run(
        self,
        pinned: Collection[str],
        number: int,
        *,
        log_operations: bool = True,
        hash_final_state: bool = False,
        threads: int | None = None,
        time_rounds: int | None = None,
    ) -> Run:
        """Execute one run, and return its report.

        ``number``: number among the compared runs; ``threads``: number of torch's threads, whatever the program sets.

        ``time_rounds``: number of rounds in which steps are timed instead (see `step_timer`).

        Raises ``UserCodeError`` for an error in the user's code, ``UsageError`` for a run that does not end or is killed.
        """
        name = self.launched
        self.launched += 1
        run_text = f"run {self.launched}" + (f", pinned: {', '.join(sorted(pinned))}" if pinned else "")
        self.report(run_text)
        job = {"ref": self._ref, "pinned": sorted(pinned), "number": number, "steps": self._steps, "threads": threads}
        job |= {"arguments": self._arguments, "time_rounds": time_rounds}
        job |= {"file": f"{name}.records" if log_operations else "", "final": hash_final_state, "driver": os.getpid()}
        (self.folder / f"{name}.json").write_text(json.dumps(job))
        self._process(name, run_text, self._environment({*pinned, "kernels"} if time_rounds else pinned, threads))
        run = _read_run(self.folder / f"{name}.done.json")
        self._plain = self._plain or run
        return run

    def report(self, text: str) -> None:
        """Report progress to the caller, with the seconds since the beginning."""
        self._notify(f"{text} ({time.perf_counter() - self._begun:.0f} s so far)")

    def delete_records(self, run: Run) -> None:
        """Delete the file with the operation records of a run."""
        if "file" in run:
            (self.folder / run["file"]).unlink(missing_ok=True)

    @property
    def machine(self) -> Machine:
        """Versions and settings of the machine on which the runs are made."""
        return Machine(self._plain["versions"], self._plain["threads"], own_hash_seed())

    def _environment(self, pinned: Collection[str], threads: int | None) -> dict[str, str]:
        """Environment variables of a run, based on those of the caller.

        Hash seeds of two runs differ, unless the caller has set a seed or it is pinned.
        """
        result = dict(os.environ)
        if "hash" in pinned or "addresses" in pinned:
            result[HASH_SEED] = "0"
        elif own_hash_seed() is None:
            result[HASH_SEED] = str(1 + self.launched * 2_654_435_761 % _LAST)
        if (count := 1 if "threads" in pinned else threads) is not None:
            result |= {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
        if "kernels" in pinned:
            result.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return result

    def _process(self, name: int, run_text: str, environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "unsilent.explain.child", str(self.folder), str(name)],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a separate process group: a kill reaches its children too
        )
        end = time.perf_counter() + self._deadline
        try:
            while (left := end - time.perf_counter()) > 0:
                try:
                    code = process.wait(min(left, SECONDS_BETWEEN))
                    break
                except subprocess.TimeoutExpired:
                    self.report(f"{run_text}: still running")
            else:
                raise UsageError(
                    f"{self._ref!r} did not finish within {self._deadline:g} s; "
                    "run fewer steps (--steps N) or allow more time (--deadline SECONDS)"
                )
        finally:
            kill_with_children(process)
            process.wait()
        if code < 0:
            raise UsageError(
                f"the process of {self._ref!r} was ended by {signal.Signals(-code).name}; run it without unsilent to see why"
            )
        if not (self.folder / f"{name}.done.json").exists():
            raise UsageError(f"{self._ref!r} ended its process with exit code {code}; it must return instead")


def check_limits(steps: int | None, deadline: float) -> None:
    """Raise ``UsageError`` for a number of steps or seconds that is too small."""
    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}; expected at least 1")
    if not deadline > 0:
        raise UsageError(f"--deadline is {deadline:g} s; expected more than 0")


def own_hash_seed() -> str | None:
    """The hash seed that the caller has set, or None."""
    seed = os.environ.get(HASH_SEED, "")
    return seed if seed.isdecimal() else None


def _read_run(path: Path) -> Run:
    run: Run = json.loads(path.read_text())
    kind = run.get("error")
    if kind == "user":
        raise UserCodeError(run["message"], run["trace"])
    if kind == "usage":
        raise UsageError(run["message"])
    if kind is not None:
        raise InternalError(run["message"], run["trace"])
    return run
