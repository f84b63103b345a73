"""How often a verdict names what was planted: anomalies of every kind in small trainings, with the real monitor and replays.

Run: ``nice -n 19 python -m benchmarks.incident_verdicts ROWS.jsonl [--per-kind 100] [--ranks 4]``. Each incident is one line of
the file; the same command goes on where it was ended, and prints the table at its end. One gang of processes runs all incidents,
for starting torch takes seconds; where a rank does not come back in time, the incident counts as one without a verdict.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from unsilent.incidents.plant import WORKLOADS, PlantedIncident, plant
from unsilent.incidents.planted_job import run_planted
from unsilent.statistics.intervals import clopper_pearson

CELLS = (
    ("transient", 1.0), ("device", 1.0), ("device", 0.3), ("device", 0.1), ("device", 0.02), ("checkpoint", 1.0),
    ("data", 1.0), ("numerics", 1.0), ("benign", 1.0),
)  # fmt: skip
LONGEST = 180.0
"""Seconds without a new row after which a gang is ended."""
NO_ANSWER = {"found_step": -1, "suspect": -1, "found": "no answer"}


def incidents(per_kind: int, ranks: int) -> list[PlantedIncident]:
    """All incidents, so that a run that is ended early has some of every cell."""
    return [
        plant(
            kind,
            probability=p,
            world_size=ranks,
            seed=number // 2 + 1000 * round(100 * p),
            workload=WORKLOADS[number % 2],
        )
        for number in range(per_kind)
        for kind, p in CELLS
    ]


def key_of(incident: PlantedIncident) -> str:
    """Names an incident in the file."""
    return f"{incident.kind} {incident.probability} {incident.world_size} {incident.seed} {incident.workload}"


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_row(path: Path, incident: PlantedIncident, outcome: dict, seconds: float) -> None:
    row = {"key": key_of(incident), **asdict(incident), **outcome, "seconds": round(seconds, 2)}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run_rank(rank: int, ranks: int, meeting: str, path: Path, left: list[PlantedIncident]) -> None:
    """One process of the gang."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    for incident in left:
        begun = time.perf_counter()
        verdict = run_planted(incident, rank)
        if ranks > 1:
            dist.barrier()
        if rank == 0:
            outcome = {"found_step": None, "suspect": -1, "found": "", "code": "", "reason": ""}
            if verdict is not None:
                outcome = {"found_step": verdict.step, "suspect": verdict.suspect, "found": verdict.fault}
                outcome |= {"code": verdict.code, "reason": verdict.reason}
            write_row(path, incident, outcome, time.perf_counter() - begun)
    if ranks > 1:
        dist.destroy_process_group()


def run_gang(path: Path, wanted: list[PlantedIncident], ranks: int) -> None:
    """Run what is not in the file yet; a gang that hangs is ended, and its incident counts as one without a verdict."""
    context = multiprocessing.get_context("spawn")
    while left := _left(path, wanted):
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder, "meeting"))
            gang = [context.Process(target=run_rank, args=(n, ranks, meeting, path, left)) for n in range(ranks)]
            for one in gang:
                one.start()
            before, since = len(read_rows(path)), time.monotonic()
            while all(one.is_alive() for one in gang) and time.monotonic() - since < LONGEST:
                time.sleep(0.5)
                if (now := len(read_rows(path))) > before:
                    before, since = now, time.monotonic()
            for one in gang:
                one.join(5.0)
                one.kill()
            if any(one.exitcode != 0 for one in gang) and (rest := _left(path, wanted)):
                write_row(path, rest[0], dict.fromkeys(("code", "reason"), "") | NO_ANSWER, LONGEST)


def _left(path: Path, wanted: list[PlantedIncident]) -> list[PlantedIncident]:
    done = {row["key"] for row in read_rows(path)}
    return [one for one in wanted if key_of(one) not in done]


def print_table(rows: list[dict]) -> None:
    """A row for each cell: right verdicts of those with an alarm, with a 95 % interval, and what the others were."""
    found = ("transient", "device", "checkpoint", "numerics", "benign", "data", "undetermined", "no answer")
    print(f"| planted | ranks | without an alarm | alarms | right, % | {' | '.join(found)} |")
    print(f"|---|---|---|---|---|{'---|' * len(found)}")
    wrong = total = 0
    for ranks in sorted({row["world_size"] for row in rows}):
        for kind, p in CELLS:
            cell = [r for r in rows if (r["kind"], r["probability"], r["world_size"]) == (kind, p, ranks)]
            alarms = [r for r in cell if r["found_step"] is not None]
            if not alarms:
                continue
            counts = Counter(r["found"] for r in alarms)
            right = sum(r["found"] == kind and (kind != "device" or r["suspect"] == r["rank"]) for r in alarms)
            interval = clopper_pearson(right, len(alarms))
            name = f"{kind}, p = {p:g}" if kind == "device" else kind
            print(
                f"| {name} | {ranks} | {len(cell) - len(alarms)} | {len(alarms)} | {100 * right / len(alarms):.1f} "
                f"[{100 * interval.low:.1f}, {100 * interval.high:.1f}] | {' | '.join(str(counts[one]) for one in found)} |"
            )
            total += len(alarms)
            wrong += len(alarms) - right + (counts["device"] if kind == "benign" else 0)
    print(f"\nWrong verdicts, a device named for a benign alarm counted twice: {wrong} of {total}.")


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.incident_verdicts", description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="print the table of what there is, and run nothing")
    asked = parser.parse_args()
    if not asked.table:
        run_gang(asked.rows, incidents(asked.per_kind, asked.ranks), asked.ranks)
    print_table(read_rows(asked.rows))


if __name__ == "__main__":
    main()
