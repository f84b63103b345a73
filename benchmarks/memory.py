"""Does the fast engine hold the bytes that it says it holds? Announced bytes against the growth of resident memory.

Each model is tried in a process of its own: ``python -m benchmarks.memory NAME`` prints one JSON line.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import unsilent
from benchmarks.subjects import SUBJECTS, ZOO, draw
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.workloads import load
from unsilent.workloads.base import InferenceWorkload

TRIALS = 30
MIB = 1 << 20
COLUMNS = {
    "announced": "announced",
    "set-up": "built",
    "trials": "tried",
    "peak, set-up": "peak_built",
    "peak, trials": "peak_tried",
    "peak, plain": "peak_plain",
    "once": "once",
}


def resident() -> int:
    """Bytes of this process that are in memory, after giving back what is free."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:  # no glibc: free memory may be counted
        pass
    return _status("VmRSS")


def reset_peak() -> None:
    """From here on `peak` counts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that were in memory since `reset_peak`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def announced(engine: CachedEngine) -> int:
    """What the engine says it holds; where it does not say, the storages of its golden values."""
    held = getattr(engine, "held_bytes", None)
    if held is not None:
        return int(held() if callable(held) else held)
    storages = {
        h.untyped_storage().data_ptr(): h.untyped_storage().nbytes()
        for replayer in engine.replayers
        if replayer is not None
        for h in replayer.kept.values()
    }
    return sum(storages.values())


def named(name: str) -> InferenceWorkload:
    """A subject or a workload of the zoo."""
    return SUBJECTS[name].workload() if name in SUBJECTS else load(name)


def probe(name: str) -> dict[str, int]:
    """Growth of resident bytes by the fast engine, by trials; ``once``: by the first engine of a process."""
    torch.set_num_threads(1)
    fresh = resident()
    CachedEngine(unsilent.Workload(nn.Linear(2, 2), [torch.ones(1, 2)]))
    once = resident() - fresh
    workload = named(name)
    plain = PlainEngine(workload)
    faults = draw(plain.select_regions(["param:*"]), TRIALS)
    start = resident()
    reset_peak()
    for fault in faults[:3]:
        plain.trial(fault)
    peak_plain = peak() - start
    start = resident()
    reset_peak()
    engine = CachedEngine(workload)
    peak_built, built = peak() - start, resident() - start
    reset_peak()
    for fault in faults:
        engine.trial(fault)
    return {
        "once": once,
        "announced": announced(engine),
        "built": built,
        "tried": resident() - start,
        "peak_plain": peak_plain,
        "peak_built": peak_built,
        "peak_tried": peak() - start,
    }


def main(rounds: int, device: str) -> None:
    """Print the bytes of every model."""
    print(
        f"\nMemory in MiB: growth by the fast engine, after set-up and after {TRIALS} trials, and of the peak meanwhile;"
    )
    print("peak of plain trials; what the first fast engine of a process takes whatever the model (imports)")
    print(f"  {'':14}" + "".join(f"{head:>14}" for head in COLUMNS))
    for name in (*ZOO, *SUBJECTS):
        run = subprocess.run([sys.executable, "-m", "benchmarks.memory", name], stdout=subprocess.PIPE, check=True)
        got = json.loads(run.stdout.splitlines()[-1])
        print(f"  {name:14}" + "".join(f"{got[key] / MIB:14.1f}" for key in COLUMNS.values()), flush=True)


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
