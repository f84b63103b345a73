"""How often ``unsilent timeline hang`` names the rank and the collective of a planted desync of real gloo processes.

    python -m benchmarks.timeline_hang [--cases 60]

Each case: 2 to 4 ranks call 8 random collectives, of the whole job or, in a job of 3 or 4 ranks, of a group of two of them; one
rank does one of `KINDS`. A skipped collective that is followed by an equal one leaves no trace in a dump: it is paired with the
next one, silently. So the collective is also counted as right where it is one of the equal ones that the report names instead.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from unsilent.timeline.dump import write_dump
from unsilent.timeline.hang import find_hang

KINDS = ("skip", "stop", "size", "operation", "subgroup")
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "barrier")
COUNT = 8
QUIET = 3.0
"""Seconds without a new collective after which a rank dumps."""
DEADLINE = 40.0


@dataclass(frozen=True)
class Case:
    """A job with one planted desync.

    Attributes:
        calls: Operation and elements of each collective.
        members: Of the group that runs them.
        rank, number: Of the planted desync; the first collective is 1.
    """

    kind: str
    world: int
    members: tuple[int, ...]
    calls: tuple[tuple[str, int], ...]
    rank: int
    number: int

    def own_calls(self, rank: int) -> list[tuple[str, int]]:
        """What a rank calls."""
        calls, at = list(self.calls), self.number - 1
        if rank != self.rank:
            return calls
        operation, elements = calls[at]
        if self.kind == "skip":
            del calls[at]
        elif self.kind in ("stop", "subgroup"):
            del calls[at:]
        elif self.kind == "size":
            calls[at] = operation, 2 * elements
        else:
            calls[at] = ("all_gather" if operation != "all_gather" else "all_reduce"), elements
        return calls


def draw_case(number: int) -> Case:
    """The case of this number; kinds take turns."""
    rng, kind = random.Random(number), KINDS[number % len(KINDS)]
    world = rng.choice((3, 4) if kind == "subgroup" else (2, 3, 4))
    members = tuple(sorted(rng.sample(range(world), 2))) if kind == "subgroup" else tuple(range(world))
    calls = [(rng.choice(OPERATIONS), rng.choice((8, 16))) for _ in range(COUNT)]
    at, rank = rng.randrange(1, COUNT + 1), rng.choice(members)
    if kind == "size":
        calls[at - 1] = "all_reduce", calls[at - 1][1]
    return Case(kind, world, members, tuple((name, 0 if name == "barrier" else size) for name, size in calls), rank, at)


def call(operation, elements, group, root, size):
    """The collective, not waited for."""
    x = torch.ones(elements)
    if operation == "all_reduce":
        return dist.all_reduce(x, group=group, async_op=True)
    if operation == "broadcast":
        return dist.broadcast(x, root, group=group, async_op=True)
    if operation == "all_gather":
        return dist.all_gather([torch.empty(elements) for _ in range(size)], x, group=group, async_op=True)
    return dist.barrier(group=group, async_op=True)


def rank_main(case: Case, rank: int, folder: Path) -> None:
    """Runs a rank until it is stuck or through, and dumps once."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / '.meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=case.world, timeout=timedelta(seconds=2 * DEADLINE)
    )
    store = dist.FileStore(str(folder / ".planted"), -1)
    group = dist.new_group(list(case.members)) if case.kind == "subgroup" else None
    progress = [0]

    def watch() -> None:
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET:
            if progress[0] != seen:
                seen, since = progress[0], time.monotonic()
            time.sleep(0.05)
        if not (folder / f".sized{rank}").exists():
            write_dump(folder)
        (folder / f".done{rank}").touch()
        time.sleep(2 * DEADLINE)

    threading.Thread(target=watch, daemon=True).start()
    if rank in case.members:
        for at, (operation, elements) in enumerate(case.own_calls(rank), 1):
            # Gloo ends the process that receives more than it expects: the others dump before the larger one is sent.
            is_sized = case.kind == "size" and at == case.number
            if is_sized and rank == case.rank:
                store.wait([str(other) for other in case.members if other != rank], timedelta(seconds=DEADLINE))
            work = call(operation, elements, group, case.members[0], len(case.members))
            progress[0] += 1
            if is_sized:
                write_dump(folder)
                (folder / f".sized{rank}").touch()
                store.set(str(rank), "dumped")
            try:
                work.wait()
            except RuntimeError:
                break  # of the sizes that differ
    time.sleep(2 * DEADLINE)


def run_case(case: Case, folder: Path) -> None:
    """Runs the ranks of a case in processes forked from this one, until each has written its dump; then ends them."""
    children = []
    for rank in range(case.world):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(folder / f".errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
                rank_main(case, rank, folder)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(child)
    end = time.monotonic() + DEADLINE
    wanted = [(folder / f".done{rank}", folder / f".sized{rank}") for rank in range(case.world)]
    while time.monotonic() < end and not all(done.exists() or sized.exists() for done, sized in wanted):
        time.sleep(0.05)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def named(folder: Path) -> tuple[set[int], int, int]:
    """Ranks that are named first, the number of the collective, and of the first equal one; of two ranks that differ, both."""
    result = find_hang([folder])
    if result.different:
        first = result.different[0]
        odd = [ranks for _, ranks in first.ways if len(ranks) <= len(result.ranks) / 2]
        return {rank for ranks in odd for rank in ranks}, first.number, first.since
    first = result.missing[0] if result.missing else None
    return (set(first.ranks), first.number, first.since or first.number) if first else (set(), 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline_hang", description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    asked = parser.parse_args()
    begun, rows = time.monotonic(), []
    for number in range(asked.cases):
        case = draw_case(number)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run_case(case, folder)
            ranks, at, since = named(folder)
        # Of two ranks that call different collectives, nothing says which is wrong: naming both is right.
        both = ranks == set(case.members) and len(ranks) == 2 and case.kind in ("skip", "size", "operation")
        row = {
            "rank": ranks == {case.rank} or both,
            "collective": at == case.number,
            "range": since <= case.number <= at,
        }
        rows.append((case, row))
        if not (row["rank"] and row["collective"]):
            print(
                f"case {number}: planted {case.kind} {case.rank} {case.number}, named {ranks} {since} to {at}",
                flush=True,
            )
    for kind in (*KINDS, "all"):
        own = [row for case, row in rows if kind in (case.kind, "all")]
        right = sum(row["rank"] and row["collective"] for row in own)
        ranges = sum(row["rank"] and row["range"] for row in own)
        print(f"{kind:10} {len(own):3} cases; rank and collective right: {right}; or one of equal ones: {ranges}")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
