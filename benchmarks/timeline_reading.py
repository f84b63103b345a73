"""CPU time and memory of reading a large trace of the profiler.

    python -m benchmarks.timeline_reading [--events 1000000] [--without-msgspec]

The trace is written first, by a process of its own: steps of a training on CPUs under DDP, with nested operations and the
arguments that `record_shapes` adds, indented as the profiler indents it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unsilent.timeline import json_stream
from unsilent.timeline.kineto import read_traces

LAYERS, STEP_MICROSECONDS = 400, 1e6


def _event(name: str, start: float, duration: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    shapes = {"Input type": ["float", "float", ""], "Input Dims": [[128, 1024], [1024, 1024], []]}
    arguments = {
        "External id": int(start),
        "Record function id": 0,
        "Concrete Inputs": ["", "", "1"],
        **shapes,
        "Ev Idx": 7,
    }
    place = {"pid": 1, "tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": arguments}


def step_events(step: int) -> list[dict[str, Any]]:
    """The events of a step: operations of depth three, and a collective for every tenth layer."""
    begin, length = step * STEP_MICROSECONDS, STEP_MICROSECONDS / 3 / LAYERS
    events = [_event(f"ProfilerStep#{step}", begin, 0.99 * STEP_MICROSECONDS, "user_annotation")]
    for layer in range(2 * LAYERS):
        start, is_backward = begin + layer * length, layer >= LAYERS
        events.append(
            _event("autograd::engine::evaluate_function: X" if is_backward else "aten::linear", start, 0.9 * length)
        )
        for child in range(8):
            at = start + child * length / 10
            events.append(_event("aten::addmm", at, length / 12))
            events += [_event("aten::view", at + part * length / 50, length / 60) for part in range(3)]
        if is_backward and layer % 10 == 0:
            events.append(_event("c10d::allreduce_", start + 0.8 * length, length / 20))
            events.append(
                _event("gloo:all_reduce", start + 0.85 * length, length, "user_annotation", 2 + layer // 10 % 2)
            )
    return events


def write_trace(path: Path, count: int) -> None:
    """Write a trace with at least so many events."""
    information = {"backend": "gloo", "rank": 0, "world_size": 1}
    with path.open("w") as file:
        file.write(f'{{"schemaVersion": 1, "distributedInfo": {json.dumps(information)},\n "traceEvents": [\n')
        step = written = 0
        while written < count:
            events = step_events(step)
            file.write((",\n" if step else "") + ",\n".join(json.dumps(one, indent=2) for one in events))
            written, step = written + len(events), step + 1
        file.write('\n], "baseTimeNanoseconds": 1790000000000000000}\n')


def main() -> None:
    """Write a trace, read it, and print what that took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline_reading", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--without-msgspec", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write:
        write_trace(asked.write, asked.events)
        return
    if asked.without_msgspec:
        json_stream._fast_decoder = lambda: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        words = [sys.executable, "-m", "benchmarks.timeline_reading", "--events", str(asked.events), "--write", path]
        subprocess.run(words, check=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        recording = read_traces([path])
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{asked.events:,} events, {path.stat().st_size / 1e6:.0f} MB: {seconds:.2f} CPU s, peak {peak / 1024:.0f} MiB "
            f"({before / 1024:.0f} MiB before); {len(recording.operations):,} operations in {len(recording.steps)} steps"
        )


if __name__ == "__main__":
    main()
