"""Whether steps take what `unsilent timeline` predicts: for buckets that were not recorded, and for a rank that is made slow.

    python -m benchmarks.timeline_what_if [--rates 50,200] [--rounds 12] [--save raw.json]
    python -m benchmarks.timeline_what_if --read raw.json

Two ranks in network namespaces whose links `tc` limits (`benchmarks.slow_network`) train one network under DDP with different
buckets, and with a slow second rank. Layers compute by sleeping, so that ranks do not compete for cores. Every configuration is
measured without a profiler, some steps of one and then of the next, in an order that changes from round to round. Then the
cost of collectives is measured (`unsilent placement measure`), and a few steps of the configurations in `BASES` are recorded.

A cell is a base and another configuration at one rate: the graph of the base with the planted change, against what was measured
of the other. Its error is that of the ratio of both step times. Cells count whose measured effect is at least three noise floors
(twice the standard error of a difference of medians).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow_network import SlowNetwork
from unsilent.placement.measure import measure
from unsilent.timeline.ddp.model import MIB, assign_buckets
from unsilent.timeline.ddp.traces import ddp_job
from unsilent.timeline.link_costs import FLAT, reduction_costs
from unsilent.timeline.load import load_job

LAYERS, WIDTH = 12, 181  # 128 KiB each
SLEEP = {50: 0.018, 200: 0.006}
"""Seconds that a layer computes, forward and backward each, by the rate of the links."""
CAPS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)
DELAYS = (0.1, 0.25)
"""Of the second rank's forward pass, in multiples of the computation of a step."""
BASES = ("cap 0.25", "cap 0.75")
BLOCK, RECORDED = 4, 12
SWEPT = (2**16, 2**18, 2**20, 3 * 2**19)


class Sleep(torch.autograd.Function):
    """Takes so many seconds forward, and as many backward."""

    @staticmethod
    def forward(context, value, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return value.view_as(value)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds

    def forward(self, value):
        return Sleep.apply(self.linear(value), self.seconds)


class Configuration:
    """A network under DDP with these buckets; ``delay``: seconds that this rank's forward pass is longer."""

    def __init__(self, cap, seconds, delay=0.0):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(*(Layer(seconds) for _ in range(LAYERS))), bucket_cap_mb=cap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs, self.delay = torch.randn(4, WIDTH), delay

    def step(self):
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        time.sleep(self.delay)
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - begun


def rank_main(network, rank, rate, options, folder):
    """One rank: measure all configurations, then record the bases."""
    network.enter(rank)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    seconds = SLEEP[rate]
    every = {f"cap {cap:g}": Configuration(cap, seconds) for cap in CAPS}
    for base in BASES:
        for delay in DELAYS:
            length = delay * 2 * LAYERS * seconds * (rank == 1)
            every[f"{base} delay {delay:g}"] = Configuration(float(base.split()[1]), seconds, length)
    order, measured = random.Random(rate), {name: [] for name in every}
    for one in every.values():
        one.step()  # buckets are built anew after it
    for _ in range(options.rounds):
        names = list(every)
        order.shuffle(names)
        for name in names:
            every[name].step()
            measured[name] += [every[name].step() for _ in range(BLOCK)]
    for base in BASES:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True,
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=RECORDED, repeat=1),
            on_trace_ready=lambda profiler, base=base: profiler.export_chrome_trace(
                str(folder / f"{base.replace(' ', '-')}-rank{rank}.json")
            ),
        ) as profiler:  # fmt: skip
            for _ in range(RECORDED + 2):
                every[base].step()
                profiler.step()
    sweep = measure((2,), ("node",), SWEPT, repeats=3)
    if rank == 0:
        sweep.save(folder / "sweep.json")
        (folder / "measured.json").write_text(json.dumps(measured))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)


def run(rate, options):
    """Seconds of the steps of every configuration; and by base, those predicted of every other one."""
    network = SlowNetwork(2)
    try:
        network.limit(rate)
        with tempfile.TemporaryDirectory() as name:
            folder, children = Path(name), []
            for rank in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        rank_main(network, rank, rate, options, folder)
                    finally:
                        sys.excepthook(*sys.exc_info())
                        os._exit(1)
                children.append(child)
            if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
                raise SystemExit("a rank failed; see above")
            measured = json.loads((folder / "measured.json").read_text())
            predicted = {
                base: predictions(sorted(folder.glob(f"{base.replace(' ', '-')}-rank*")), base, rate) for base in BASES
            }
    finally:
        network.close()
    return measured, predicted


def predictions(traces, base, rate):
    """Ratio of the step time of each other configuration to that of the recorded base, as predicted from its traces."""
    job = ddp_job(load_job(traces), reduction_costs(str(traces[0].parent / "sweep.json"), len(traces))[FLAT])

    def seconds(cap, steps=job.steps):
        return steps.step_seconds(assign_buckets(steps.sizes.tolist(), [round(cap * MIB)]), job.cost).mean()

    cap = float(base.split()[1])
    own, computed = seconds(cap), 2 * LAYERS * SLEEP[rate]
    result = {f"cap {other:g}": seconds(other) / own for other in CAPS}
    for delay in DELAYS:
        result[f"{base} delay {delay:g}"] = seconds(cap, delayed(job.steps, 1, delay * computed)) / own
    print(
        f"{rate} Mbit/s, {base}: model {own:.4f} s, recorded {job.recorded.mean():.4f} s, {job.cost}", file=sys.stderr
    )
    return result


def delayed(steps, rank, seconds):
    """Steps in which a rank takes longer, before its backward pass."""
    before = steps.before.copy()
    before[rank] = np.maximum(before[rank] + seconds, 0)
    return replace(steps, before=before)


def cells(raw):
    """Rate, base, other, measured and predicted ratio, noise floor of the measured one."""
    for rate, (measured, predicted) in raw.items():
        for base, ratios in predicted.items():
            for other, ratio in ratios.items():
                if other == base:
                    continue
                one, two = np.array(measured[base]), np.array(measured[other])
                errors = [
                    1.2533 * 1.4826 * np.median(abs(x - np.median(x))) / len(x) ** 0.5 / np.median(x)
                    for x in (one, two)
                ]
                truth = float(np.median(two) / np.median(one))
                yield rate, base, other, truth, ratio, 2 * float(np.hypot(*errors)) * truth


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", default="50,200")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path)
    options = parser.parse_args()
    if options.read:
        raw = json.loads(options.read.read_text())
    else:
        raw = {rate: run(int(rate), options) for rate in options.rates.split(",")}
        if options.save:
            options.save.write_text(json.dumps(raw))
    counted = []
    for rate, base, other, truth, ratio, floor in cells(raw):
        counts = abs(truth - 1) >= 3 * floor
        error = 100 * abs(ratio / truth - 1)
        counted += [error] * counts
        print(f"{rate:>4} Mbit/s  {base:>9} -> {other:<22} measured {truth:6.3f} +- {floor:.3f}  predicted {ratio:6.3f}  "
              f"error {error:5.2f} %{'' if counts else '  (below three noise floors)'}")  # fmt: skip
    if counted:
        draws = np.random.default_rng(0).choice(counted, (2000, len(counted)))
        low, high = np.quantile(np.median(draws, 1), (0.025, 0.975))
        print(f"{len(counted)} cells: median error {np.median(counted):.2f} % [{low:.2f}, {high:.2f}], "
              f"90th percentile {np.quantile(counted, 0.9):.2f} %")  # fmt: skip


if __name__ == "__main__":
    main()
