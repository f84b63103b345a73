"""``python -m benchmarks.fuzz_checkpoints --files 200000 --seed 1 --state FILE``: damaged checkpoints of every format, in bulk.

Runs the cases of ``tests/checkpoints/fuzzing.py`` in processes with 1 GiB of memory above what they begin with and 10 seconds
for every file. What is done is kept in the state file: the same command goes on where it was interrupted. Ends with exit code 1
where something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from checkpoints.fuzz_seeds import write_seeds
from checkpoints.fuzzing import PATIENCE, SECONDS, Finding, Fuzzer, install_audit, limit_memory

BATCH = 500
LONGEST_SILENCE = 2 * PATIENCE * SECONDS
"""Seconds without a word from a process, after which it hangs where Python cannot interrupt it."""


def work(
    seeds: dict[str, list[Path]], folder: Path, seed: int, formats: list[str], numbers: range, pipe: Connection
) -> None:
    """Run some cases in a process of their own; one message for each."""
    faulthandler.enable()
    os.fsync = lambda _: None  # waiting for the disk is not what is tested
    fuzzer = Fuzzer(seeds, folder / "case", seed, formats)
    install_audit()
    os.chdir(folder)
    warnings.simplefilter("error")
    fuzzer.run_seeds()
    limit_memory()
    for number in numbers:
        try:
            pipe.send((number, *fuzzer.run(number), ""))
        except Finding as finding:
            pipe.send((number, "any", "finding", str(finding)))
    pipe.close()


class State:
    """Outcomes of batches, a line of JSON each."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.done, self.counts, self.findings = path, set(), Counter(), []
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) != settings:
            raise SystemExit(f"{path} is of other settings: {lines[0]}; give another --state")
        for line in lines[1:]:
            with contextlib.suppress(ValueError):  # a line that was being written
                self._add(json.loads(line))
        if not lines:
            path.write_text(json.dumps(settings) + "\n")

    def add(self, batch: int, counts: Counter[str], findings: list[str]) -> None:
        """Keep a finished batch."""
        entry = {"batch": batch, "counts": dict(counts), "findings": findings}
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
        self._add(entry)

    def _add(self, entry: dict[str, Any]) -> None:
        self.done.add(entry["batch"])
        self.counts.update(entry["counts"])
        self.findings += entry["findings"]


def run_batch(context: Any, seeds: dict[str, list[Path]], folder: Path, asked: Any, numbers: range) -> Any:
    """Run a batch, also where a process dies or hangs; yields while it waits, and returns counts and findings."""
    counts: Counter[str] = Counter()
    findings: list[str] = []
    at = numbers.start
    while at < numbers.stop:
        ours, theirs = context.Pipe(duplex=False)
        rest = range(at, numbers.stop)
        process = context.Process(target=work, args=(seeds, folder, asked.seed, asked.formats, rest, theirs))
        process.start()
        theirs.close()
        heard = time.monotonic()
        while at < numbers.stop:
            if not ours.poll():
                if time.monotonic() - heard > LONGEST_SILENCE:
                    process.kill()
                yield ours
                continue
            try:
                number, format_name, outcome, finding = ours.recv()
            except EOFError:
                break
            heard, at = time.monotonic(), number + 1
            counts[f"{format_name}: {outcome}"] += 1
            findings += [finding] if finding else []
        process.join()
        ours.close()
        if at < numbers.stop:
            findings.append(f"case {asked.seed}/{at}: the process ended with {process.exitcode}")
            counts["any: finding"] += 1
            at += 1
    return counts, findings


def main() -> None:
    """Run what the state file does not have yet and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_checkpoints", description=__doc__)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--formats", nargs="*", default=[], help="only these")
    asked = parser.parse_args()
    state = State(asked.state, {"seed": asked.seed, "formats": asked.formats, "batch": BATCH})
    context = multiprocessing.get_context("fork")
    memory_disk = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="fuzz", dir=memory_disk if memory_disk.is_dir() else None))
    begin = time.monotonic()
    try:
        seeds = write_seeds(root / "seeds")
        waiting = [n for n in range(-(-asked.files // BATCH)) if n not in state.done]
        running: dict[int, Any] = {}
        while waiting or running:
            while waiting and len(running) < asked.jobs:
                batch = waiting.pop(0)
                folder = root / f"batch{batch}"
                folder.mkdir()
                numbers = range(batch * BATCH, min(asked.files, (batch + 1) * BATCH))
                running[batch] = run_batch(context, seeds, folder, asked, numbers)
            pipes = []
            for batch, steps in list(running.items()):
                try:
                    pipes.append(next(steps))
                except StopIteration as end:
                    state.add(batch, *end.value)
                    del running[batch]
                    shutil.rmtree(root / f"batch{batch}", ignore_errors=True)
                    for finding in end.value[1]:
                        print(finding, flush=True)
            if pipes:
                wait(pipes, 1.0)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    total = sum(state.counts.values())
    print(f"{total:,} files with seed {asked.seed} ({time.monotonic() - begin:.0f} s this time)")
    for key, count in sorted(state.counts.items()):
        print(f"{key:45}{count:>10,}")
    print(f"{len(state.findings)} findings")
    sys.exit(bool(state.findings))


if __name__ == "__main__":
    main()
