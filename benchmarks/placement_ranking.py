"""Whether the reduction program that is measured fastest is among those predicted fastest, on nodes with slow links.

    python -m benchmarks.placement_ranking [--rates 50,200] [--payloads 128,512] [--rounds 5] [--save raw.json]
    python -m benchmarks.placement_ranking --machines 2x2x2 --rates 100,200,400 --payloads 64,128,192
    python -m benchmarks.placement_ranking --read raw.json

Nodes are network namespaces whose links `tc` limits (`benchmarks.slow_network`); ranks are gloo processes. A machine of three
levels has racks, whose nodes share an uplink of half the rate. A configuration is a machine, the axis that is reduced and the
levels over which it is placed, a rate of the links and a payload. All synthesised programs of each are run, interleaved and in
random order. Of the 1,635 over three levels 93 drawn at random are run, and places in the predicted order are among these.
Predictions come from a sweep of single collectives (`unsilent placement measure`) at the same rate: from the fitted latency and
bandwidth of all levels, and from the table of the sweep itself. The rate "none" is a control: gloo processes of one computer have
no hierarchy.

A program counts as fastest if its median is within the noise of the lowest one: two standard errors of a difference of medians,
from the scatter of the rounds. The chance level is that of so many programs drawn at random. The error of a prediction is
|predicted / measured - 1| of the median time of a program.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from math import comb
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from benchmarks.slow_network import SlowNetwork
from unsilent.placement.cost import AlphaBeta
from unsilent.placement.execution import ProcessGroups, ProgramRunner
from unsilent.placement.measure import MeasuredTable, Measurement, Sweep, fitted_system, measure
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.system import Level, System
from unsilent.statistics import clopper_pearson

ALL, SPLIT = {"data": 4}, {"data": 4, "tensor": 2}
MACHINES = (
    ((2, 2), ALL, ("node", "device")),
    ((2, 4), {"data": 8}, ("node", "device")),
    ((2, 4), SPLIT, ("node", "device")),
    ((4, 2), {"data": 8}, ("node", "device")),
    ((4, 2), SPLIT, ("node", "device")),
    ((2, 2, 2), SPLIT, ("rack", "node")),
    ((2, 2, 2), SPLIT, ("rack", "device")),
    ((2, 2, 2), SPLIT, ("node", "device")),
    ((2, 2, 2), {"data": 8}, ("rack", "node", "device")),
)
"""Levels of the machine, axes, and the levels over which the axis of the data extends."""
LEVELS = ("rack", "node", "device")
SMALLEST = 2**14
"""Bytes of a collective of the sweep; it has the smallest and the largest payload of the run beside it."""
MOST_PROGRAMS = 93
TOP = (1, 5, 10)


def level_names(counts):
    return LEVELS[-len(counts) :]


def ranked(system, axes, payload, spanned, model=None):
    """The placement whose reduction extends over these levels, and its programs, predicted fastest first."""
    ranking = rank_placements(system, axes, [Reduction(("data",), payload)], model, top=10**6)
    wanted = tuple(level_names(system.counts).index(name) for name in spanned)
    return next((p.placement, p.programs[0]) for p in ranking.placements if p.programs[0][0].levels == wanted)


def drawn(programs, seed):
    """The programs that are run, by name: all, or so many at random and the single all-reduce, in an order that says nothing."""
    by_name = {str(one.program()): one for one in programs}
    flat = next(name for name, one in by_name.items() if is_flat(one))
    names = sorted(by_name.keys() - {flat})
    if len(names) >= MOST_PROGRAMS:
        names = random.Random(seed).sample(names, MOST_PROGRAMS - 1)
    return {name: by_name[name] for name in [flat, *names]}


def is_flat(ranked_program):
    steps = ranked_program.program().steps
    return len(steps) == 1 and steps[0].collective == "all-reduce" and len(steps[0].groups) == 1


def run_job(network, counts, reductions, options, path):
    """Forks the ranks of one machine, which measure all its configurations."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(math.prod(counts)):
            child = os.fork()
            if child == 0:
                try:
                    network.enter(rank // counts[-1])
                    rank_main(network, rank, counts, reductions, options, Path(folder), path)
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise SystemExit("a rank failed; see above")


def rank_main(network, rank, counts, reductions, options, folder, path):
    torch.set_num_threads(1)
    meeting, world = f"file://{folder / 'meeting'}", math.prod(counts)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    groups, rows = ProcessGroups(), []
    before = json.loads(path.read_text())
    for rate in options.rates:
        distributed.barrier()
        if rank == 0:
            network.limit(rate)
        distributed.barrier()
        swept = sorted({SMALLEST, min(options.payloads), max(options.payloads)})
        sweep = measure(counts, level_names(counts), swept, options.rounds)
        for axes, spanned in reductions:
            for payload in options.payloads:
                times = time_programs(counts, axes, spanned, payload, options.rounds, groups)
                rows.append({"counts": counts, "axes": axes, "spanned": spanned, "payload": payload, "rate": rate})
                rows[-1]["times"] = times
                rows[-1]["sweep"] = [(m.collective, m.groups, m.payload, m.seconds) for m in sweep.rows]
                if rank == 0:
                    best = min(times, key=lambda program: np.median(times[program]))
                    path.write_text(json.dumps(before + rows))
                    what = f"{counts} {axes} over {', '.join(spanned)}, {payload >> 10} KiB at {rate}"
                    print(f"# {what}: {best}", file=sys.stderr, flush=True)
    distributed.barrier()
    os._exit(0)


def time_programs(counts, axes, spanned, payload, rounds, groups):
    """Seconds of the slowest rank by program, one per round; a first round is left out."""
    levels = tuple(Level(name, count, 1e9, 0) for name, count in zip(level_names(counts), counts, strict=True))
    placement, programs = ranked(System("any", levels), axes, payload, spanned)
    chosen = {name: one.program() for name, one in drawn(programs, payload).items()}
    members = placement.reduction_groups(("data",)).tolist()
    runners = {name: ProgramRunner(program, members=members, groups=groups) for name, program in chosen.items()}
    data, elapsed = torch.zeros(payload // 4), torch.zeros(1, dtype=torch.float64)
    times = {name: [] for name in runners}
    for number in range(rounds + 1):
        order = sorted(runners)
        random.Random(number).shuffle(order)
        for name in order:
            distributed.barrier()
            start = time.perf_counter()
            runners[name].run(data)
            elapsed[0] = time.perf_counter() - start
            distributed.all_reduce(elapsed, distributed.ReduceOp.MAX)
            if number:
                times[name].append(float(elapsed))
    return times


def judge(row):
    """One configuration: which programs are fastest, and at which place each prediction has the first of them."""
    counts, times = tuple(row["counts"]), row["times"]
    found = tuple(Measurement(c, tuple(map(tuple, g)), payload, seconds) for c, g, payload, seconds in row["sweep"])
    sweep = Sweep(level_names(counts), counts, "gloo", found)
    system = fitted_system(sweep)
    logs = np.log(np.array(list(times.values())))
    medians = np.median(logs, axis=1)
    scatter = math.sqrt(float(logs.var(axis=1, ddof=1).mean()))
    margin = 2 * 1.2533 * scatter * math.sqrt(2 / logs.shape[1])
    fastest = {name for name, value in zip(times, medians, strict=True) if value <= medians.min() + margin}
    best = min(times, key=lambda name: np.median(times[name]))
    places, errors = {}, {}
    for name, model in {"alpha-beta": AlphaBeta(system), "table": MeasuredTable(system, sweep)}.items():
        every = {str(p.program()): p for p in ranked(system, row["axes"], row["payload"], row["spanned"], model)[1]}
        order = [one for one in every if one in times]  # predicted fastest first
        places[name] = (min(order.index(one) for one in fastest) + 1, order.index(best) + 1)
        errors[name] = [abs(every[one].seconds / np.median(times[one]) - 1) for one in order]
    flat = next(name for name in times if is_flat(every[name]))
    return {
        "programs": len(times), "fastest": len(fastest), "best": best, "scatter": scatter, "places": places,
        "errors": errors,
        "seconds": float(np.median(times[best])), "ratio": float(np.median(times[flat]) / np.median(times[best])),
        "spread": float(math.exp(medians.max() - medians.min())), "levels": system.levels,
    }  # fmt: skip


def show(rows):
    """The table of configurations and the shares."""
    print("| machine | axes | data over | link, Mbit/s | payload, KiB | best, ms | flat / best | slowest / best | noise, % | "
          "ties | place: alpha-beta | table | error, %: alpha-beta | table | best program |")  # fmt: skip
    print("|" + "---|" * 15)
    judged = [(row, judge(row)) for row in rows]
    for row, result in judged:
        axes = ", ".join(f"{name}={size}" for name, size in row["axes"].items())
        cells = [
            str(list(row["counts"])), axes, ", ".join(row["spanned"]), row["rate"] or "none", row["payload"] >> 10,
            f"{1e3 * result['seconds']:.1f}", f"{result['ratio']:.2f}", f"{result['spread']:.1f}",
            f"{100 * result['scatter']:.0f}", f"{result['fastest']} of {result['programs']}",
            *(f"{tied} ({strict})" for tied, strict in result["places"].values()),
            *(f"{100 * np.median(errors):.0f}" for errors in result["errors"].values()), result["best"],
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    for title, chosen in (
        ("slow links", [result for row, result in judged if row["rate"]]),
        ("no slow level (control)", [result for row, result in judged if not row["rate"]]),
    ):
        if chosen:
            print(f"\n{title}: {len(chosen)} configurations")
            summarise(chosen)


def counted(hits):
    """``36 of 36 (90 – 100 %)``: with the limits of the exact 95 % interval."""
    found = clopper_pearson(sum(hits), len(hits))
    return f"{sum(hits)} of {len(hits)} ({100 * found.low:.1f} – {100 * found.high:.1f} %)"


def summarise(results):
    print("| prediction | top | fastest within noise is in it | single fastest is in it | chance within noise | "
          "chance single |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for model in ("alpha-beta", "table"):
        for top in TOP:
            tied = counted([r["places"][model][0] <= top for r in results])
            strict = counted([r["places"][model][1] <= top for r in results])
            sizes = [(r["programs"], r["fastest"]) for r in results]
            chance = np.mean([1 - comb(n - m, top) / comb(n, top) for n, m in sizes])
            single = np.mean([top / n for n, _ in sizes])
            print(f"| {model} | {top} | {tied} | {strict} | {chance:.0%} | {single:.0%} |")
    print(
        "\n| prediction | programs | error of the time: median | 90th percentile | of the ten predicted fastest: median |"
    )
    print("|---|---|---|---|---|")
    for model in ("alpha-beta", "table"):
        errors = np.concatenate([r["errors"][model] for r in results])
        first = np.concatenate([r["errors"][model][:10] for r in results])
        shown = (np.median(errors), np.quantile(errors, 0.9), np.median(first))
        print(f"| {model} | {len(errors):,} | {' | '.join(f'{one:.0%}' for one in shown)} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--rates", default="50,200", help="Mbit/s of a node's link (an uplink of a rack: half); none: no limit"
    )
    parser.add_argument("--payloads", default="128,512", help="KiB")
    parser.add_argument("--machines", default="2x2,2x4,4x2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path, nargs="*")
    options = parser.parse_args()
    if options.read:
        show([row for path in options.read for row in json.loads(path.read_text())])
        return
    options.rates = [None if rate == "none" else float(rate) for rate in options.rates.split(",")]
    options.payloads = [int(size) << 10 for size in options.payloads.split(",")]
    path = options.save or Path(tempfile.mkdtemp(), "raw.json")
    path.write_text("[]")
    for counts in [tuple(map(int, machine.split("x"))) for machine in options.machines.split(",")]:
        network = SlowNetwork(counts[-2], math.prod(counts[:-2]))
        try:
            run_job(network, counts, [reduced for known, *reduced in MACHINES if known == counts], options, path)
        finally:
            network.close()
    show(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
