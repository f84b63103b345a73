"""One run of the user's code in a child process: ``python -m unsilent.explain.child FOLDER NUMBER``.

``NUMBER.json`` in the folder describes the run (see `running.Launcher`); ``NUMBER.done.json`` is the report at its end. Output of
the user's code goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError, UserCodeError

_NO_RANDOM_ADDRESSES = 0x0040000


def main(folder: Path, number: int) -> None:
    """Execute one run, and write its report to a file."""
    try:
        job = json.loads((folder / f"{number}.json").read_text())
    except FileNotFoundError:  # the driver was interrupted while it started this process
        return
    if "addresses" in job["pinned"]:
        _fix_addresses()
    from unsilent.basics.child_processes import exit_with_parent
    from unsilent.campaigns.worker import as_picklable_error

    if "addresses" not in job["pinned"]:  # its thread creates objects in between
        exit_with_parent(job["driver"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    os.dup2(2, 1)
    try:
        values = _measure_step_times(job) if job["time_rounds"] else _run(job, folder)
    except UserCodeError as error:
        values = {"error": "user", "message": str(error), "trace": error.traceback_text}
    except UsageError as error:
        values = {"error": "usage", "message": str(error)}
    except Exception as error:
        defect = as_picklable_error(error)
        values = {"error": "internal", "message": str(defect), "trace": getattr(defect, "trace", "")}
    sys.stdout.flush()
    (folder / f"{number}.done.json").write_text(json.dumps(values))
    # Threads and open resources of the user's code must not keep the process alive, nor change its exit status.
    sys.stderr.flush()
    os._exit(0)


def _fix_addresses() -> None:
    """Start this process again without random memory addresses.

    Has no effect if the system refuses or is not Linux.
    """
    system = ctypes.CDLL(None)
    if not hasattr(system, "personality"):
        return
    system.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the driver
    personality = system.personality
    now = personality(0xFFFFFFFF)
    if now & _NO_RANDOM_ADDRESSES:
        return
    personality(now | _NO_RANDOM_ADDRESSES)
    if personality(0xFFFFFFFF) & _NO_RANDOM_ADDRESSES:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Execute a run and return its report, see `running.Run`."""
    import torch

    from unsilent.basics.user_code import set_script_arguments
    from unsilent.campaigns.code import versions
    from unsilent.explain.finals import FinalStateRecorder
    from unsilent.explain.loops import run_loop
    from unsilent.explain.operation_logger import OperationLogger
    from unsilent.explain.optimizer_steps import OptimizerStepCounter
    from unsilent.explain.pinning import SourceInterceptor
    from unsilent.explain.user_frames import UserFrameFinder

    set_script_arguments(job["ref"], job["arguments"])
    place = job["ref"].rpartition(":")[0]
    frames = UserFrameFinder(str(Path(place).expanduser().resolve()) if place.endswith(".py") else None)
    steps, finals, watch = OptimizerStepCounter(job["steps"]), FinalStateRecorder(), None
    with ExitStack() as stack:
        # All of this is imported by now, so that changed clocks and random numbers only affect the user's code.
        sources = SourceInterceptor(job["pinned"], job["number"], frames, job["threads"])
        stack.enter_context(steps)
        if job["final"]:
            stack.enter_context(finals)
        if job["file"]:
            watch = stack.enter_context(
                OperationLogger(folder / job["file"], frames, steps, zero_uninitialised="memory" in job["pinned"])
            )
        before: list[int] = []

        def loaded() -> None:
            steps.has_called_module = False
            before.append(watch.count if watch is not None else 0)

        returned = run_loop(job["ref"], steps, job["steps"], loaded)
        touched, threads = sources.sources_read(), torch.get_num_threads()
    reads = [(source, call, *line, direct) for source, call, line, direct in sources.reads]
    operations: dict[str, Any] = {}
    if watch is not None:
        operations = {"file": job["file"], "operations": watch.count, "own": watch.count - before[0]}
        operations |= {"names": watch.names, "places": watch.places, "origins": watch.origins}
        reads += [("memory", call, *line, True) for call, line in watch.uninitialised_allocations]
        touched |= {"memory"} if watch.uninitialised_allocations else set()
    final = finals.hashes(steps.optimizers, returned) if job["final"] else []
    about = {"versions": versions(), "threads": threads, "steps": steps.done, "called": steps.has_called_module}
    return about | {"touched": sorted(touched), "reads": reads, "final": final} | operations


def _measure_step_times(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the times of steps in a run, see `step_timer`.

    Nothing else is active between the program and torch.
    """
    import torch

    from unsilent.basics.user_code import set_script_arguments
    from unsilent.campaigns.code import versions
    from unsilent.explain.loops import run_loop
    from unsilent.explain.step_timer import StepTimer

    set_script_arguments(job["ref"], job["arguments"])
    with StepTimer(job["time_rounds"], job["steps"]) as timer:
        run_loop(job["ref"], timer, job["steps"] or sys.maxsize, lambda: None)
    timings = {"rounds": timer.rounds, "unmeasured": timer.unmeasured, "refused": sorted(timer.refused)}
    return {**timings, "versions": versions(), "threads": torch.get_num_threads(), "steps": timer.done}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
