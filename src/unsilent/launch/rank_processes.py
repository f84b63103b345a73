"""The processes of a job on this host: ranks started by torchrun, one per slot, and self-tests of a slot."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.events.host import FIRST_STEP, SLOT
from unsilent.launch.child import RESUME_FROM, SLOTS

GPUS = "CUDA_VISIBLE_DEVICES"
END_SECONDS = 10.0
"""Seconds within which a process can end by itself."""


def check_slots(count: int, environment: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if the list of visible GPUs has fewer entries than there are slots."""
    visible = environment.get(GPUS, "")
    if visible and (visible_count := len(visible.split(","))) < count:
        raise UsageError(
            f"{GPUS} lists {visible_count}, but --nproc and --spare ask for {count} devices; list as many, or ask for fewer"
        )


def slots_environment(slots: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that sees only the GPUs of some slots, numbered from 0 in their order."""
    result = dict(environment)
    if environment.get(GPUS) != "":  # an empty list hides all GPUs
        visible = environment[GPUS].split(",") if GPUS in environment else None
        result[GPUS] = ",".join(visible[slot] if visible else str(slot) for slot in slots)
    return result


def start_ranks(
    words: Sequence[str], slots: Sequence[int], resume_from: Path | None, first_step: int
) -> subprocess.Popen[bytes]:
    """Start torchrun with a rank on each slot; each rank runs ``unsilent`` with the given words.

    The training continues from a checkpoint of step ``first_step``.
    """
    environment = slots_environment(slots, os.environ)
    environment |= {SLOTS: ",".join(map(str, slots)), FIRST_STEP: str(first_step)}
    environment.pop(RESUME_FROM, None)
    if resume_from is not None:
        environment[RESUME_FROM] = str(resume_from)
    ranks = ["--standalone", f"--nproc-per-node={len(slots)}", "-m", "unsilent", *words]
    return _start("torch.distributed.run", ranks, environment)


def start_self_test(slot: int, minutes: float) -> subprocess.Popen[bytes]:
    """Start ``unsilent selftest`` for a slot; only its errors are printed."""
    environment = slots_environment([slot], os.environ) | {SLOT: str(slot)}
    return _start("unsilent", ["selftest", "--quiet", "--minutes", f"{minutes:g}"], environment, subprocess.DEVNULL)


def _start(
    module: str, words: Sequence[str], environment: Mapping[str, str], output: int | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unsilent.launch.child", str(os.getpid()), module, *words]
    # A session of its own: Ctrl-C is for the launcher, which then ends it.
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its ranks with SIGTERM, or with SIGKILL if it does not react."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()
