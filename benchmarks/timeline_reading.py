"""CPU time and memory of ``unsilent timeline`` on a large trace of the profiler.

    python -m benchmarks.timeline_reading [TRACE] [--megabytes 1000] [--without-msgspec]

The trace is a real one (a stored recording of DDP over gloo, or TRACE), whose events are repeated, later each time, until it has
that size, indented as the profiler indents it. It is analysed by a process of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "tests" / "timeline" / "data" / "ddp-rank0of2.json.gz"
STEP = "ProfilerStep#"
PROGRAM = """
import sys
from unsilent.cli.main import run
from unsilent.timeline import json_stream
if sys.argv.pop(1) == "without":
    json_stream._fast_decoder = lambda: None
sys.exit(run(["timeline", *sys.argv[1:]]))
"""


def shifted(event: dict[str, Any], seconds: float, steps: int, correlations: int) -> dict[str, Any]:
    """The same event of a later part of the recording."""
    result = dict(event)
    if "ts" in event:
        result["ts"] = round(float(event["ts"]) + 1e6 * seconds, 3)
    if event.get("name", "").startswith(STEP):
        result["name"] = f"{STEP}{int(event['name'].removeprefix(STEP)) + steps}"
    if "correlation" in event.get("args", {}):
        result["args"] = {**event["args"], "correlation": event["args"]["correlation"] + correlations}
    return result


def write_trace(source: Path, target: Path, size: int) -> int:
    """Write a trace of at least so many bytes; returns its number of events."""
    with gzip.open(source) as file:
        whole = json.load(file)
    events = whole.pop("traceEvents")
    timed = [one for one in events if one.get("ph") == "X"]
    ends = [float(one["ts"]) + float(one["dur"]) for one in timed]
    length = 1e-6 * (max(ends) - min(float(one["ts"]) for one in timed)) + 1e-4
    steps = len({one["name"] for one in timed if one["name"].startswith(STEP)})
    correlations = 1 + max(one.get("args", {}).get("correlation", 0) for one in timed)
    with target.open("w") as file:
        file.write(json.dumps(whole)[:-1] + ', "traceEvents": [\n')
        count = copy = written = 0
        while written < size:
            for one in events if copy == 0 else timed:
                text = json.dumps(shifted(one, copy * length, copy * steps, copy * correlations), indent=2)
                written += file.write(",\n" + text if count else text)
                count += 1
            copy += 1
        file.write("\n]}\n")
    return count


def main() -> None:
    """Write a trace, analyse it, and print what that took."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline_reading", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=STORED)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--without-msgspec", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        count = write_trace(asked.trace, path, asked.megabytes * 10**6)
        decoder = "without" if asked.without_msgspec else "with"
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", PROGRAM, decoder, path], check=True, stdout=subprocess.DEVNULL)
        used, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
        print(
            f"{path.stat().st_size / 1e6:.0f} MB, {count:,} events, {decoder} msgspec: peak {used.ru_maxrss / 1024:.0f} MiB, "
            f"{used.ru_utime + used.ru_stime:.1f} CPU s, {wall:.0f} s"
        )


if __name__ == "__main__":
    main()
