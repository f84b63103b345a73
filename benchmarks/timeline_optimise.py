"""How much slower the settings that `unsilent timeline optimise` chooses are than the best of a measured grid (the regret).

    python -m benchmarks.timeline_optimise [--rounds 5] [--save raw.json]
    python -m benchmarks.timeline_optimise --read raw.json

Two ranks in network namespaces with slow links train networks of layers that compute by sleeping (see
`benchmarks.timeline_what_if`), in twelve configurations: rate of the links, number and size of layers, computation. Each is
recorded with DDP's default and the cost of collectives is measured; then every setting of a grid (sizes of buckets, gradients of
32 and 16 bits) and the chosen ones are measured in turns. The regret is the median time of the chosen setting over that of the
best one in the grid, minus 1; the noise floor is twice the standard error of that ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow_network import SlowNetwork
from benchmarks.timeline_what_if import Sleep
from unsilent.placement.measure import measure
from unsilent.timeline.ddp.model import MIB
from unsilent.timeline.ddp.optimise import PRECISIONS, optimise, predict
from unsilent.timeline.ddp.traces import ddp_job
from unsilent.timeline.link_costs import FLAT, reduction_costs
from unsilent.timeline.load import load_job

CONFIGURATIONS = list(itertools.product((200, 400), (6, 12), (362, 512, 724)))
"""Mbit/s of the links, layers, width of a layer (0.5, 1 and 2 MiB of parameters)."""
SECONDS = 0.01
CAPS = (1, 2, 3, 4, 6, 8)
BLOCK, RECORDED = 3, 10


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, value):
        return Sleep.apply(self.linear(value), SECONDS)


def trained(layers, width, caps, precision):
    """A step of a network under DDP with these settings."""
    torch.manual_seed(0)
    named = {} if not caps else {"bucket_cap_mb": caps[0]} if len(caps) == 1 else {"bucket_cap_mb_list": list(caps)}
    model = DistributedDataParallel(nn.Sequential(*(Layer(width) for _ in range(layers))), **named)
    if precision == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(2, width)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    return step


def rank_main(network, rank, configuration, options, folder):
    """One rank: measure the cost of collectives, record the default, read what was chosen, measure everything."""
    import time

    network.enter(rank)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    _, layers, width = configuration
    whole = layers * width * width * 4
    sweep = measure(
        (2,), ("node",), (2**18, MIB, 3 * MIB, *(size for size in (8 * MIB, whole) if size > 3 * MIB)), repeats=3
    )
    if rank == 0:
        sweep.save(folder / "sweep.json")
    step = trained(layers, width, (), "fp32")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=RECORDED, repeat=1),
        on_trace_ready=lambda one: one.export_chrome_trace(str(folder / f"trace-rank{rank}.json")),
    ) as profiler:  # fmt: skip
        for _ in range(RECORDED + 1):
            step()
            profiler.step()
    chosen = [None]
    distributed.barrier()
    if rank == 0:
        traces = load_job([folder / "trace-rank0.json", folder / "trace-rank1.json"])
        job = ddp_job(traces, reduction_costs(str(folder / "sweep.json"), 2)[FLAT])
        best = optimise(job.steps, job.cost)
        chosen = [
            {
                one.precision: [list(one.caps), one.mean, predict(job.steps, job.cost, (), one.precision).mean]
                for one in best
            }
        ]
    distributed.broadcast_object_list(chosen)
    settings = [((), precision) for precision in PRECISIONS]
    settings += [((cap,), precision) for cap in CAPS for precision in PRECISIONS]
    settings += [(tuple(caps), precision) for precision, (caps, *_) in chosen[0].items()]
    settings = list(dict.fromkeys(settings))
    steps = [trained(layers, width, *one) for one in settings]
    order, seconds = random.Random(0), [[] for _ in settings]
    for _ in range(options.rounds):
        numbers = list(range(len(settings)))
        order.shuffle(numbers)
        for number in numbers:
            steps[number]()
            for _ in range(BLOCK):
                begun = time.perf_counter()
                steps[number]()
                seconds[number].append(time.perf_counter() - begun)
    if rank == 0:
        rows = [[list(caps), precision, times] for (caps, precision), times in zip(settings, seconds, strict=True)]
        (folder / "result.json").write_text(json.dumps({"chosen": chosen[0], "rows": rows}))
    distributed.barrier()
    os._exit(0)


def run(configuration, options):
    """What was chosen and measured of one configuration."""
    network = SlowNetwork(2)
    try:
        network.limit(configuration[0])
        with tempfile.TemporaryDirectory() as name:
            children = []
            for rank in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        rank_main(network, rank, configuration, options, Path(name))
                    finally:
                        sys.excepthook(*sys.exc_info())
                        os._exit(1)
                children.append(child)
            if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
                raise SystemExit("a rank failed; see above")
            return json.loads((Path(name) / "result.json").read_text())
    finally:
        network.close()


def median_and_error(times):
    times = np.array(times)
    median = float(np.median(times))
    return median, 1.2533 * 1.4826 * float(np.median(abs(times - median))) / len(times) ** 0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path)
    options = parser.parse_args()
    raw = json.loads(options.read.read_text()) if options.read else {}
    regrets, floors, gains = [], [], []
    for configuration in CONFIGURATIONS:
        key = " ".join(map(str, configuration))
        if not options.read:
            raw[key] = run(configuration, options)
            if options.save:
                options.save.write_text(json.dumps(raw))
        result = raw[key]
        measured = {(tuple(caps), precision): median_and_error(times) for caps, precision, times in result["rows"]}
        precision = min(result["chosen"], key=lambda one: result["chosen"][one][1])
        chosen = measured[tuple(result["chosen"][precision][0]), precision]
        grid = [measured[(cap,), one] for cap in CAPS for one in PRECISIONS]
        best, default = min(grid), measured[(), "fp32"]
        regrets.append(chosen[0] / best[0] - 1)
        floors.append(2 * float(np.hypot(chosen[1] / chosen[0], best[1] / best[0])))
        gains.append(1 - chosen[0] / default[0])
        caps = result["chosen"][precision][0]
        print(f"{key}: chosen {caps} {precision} {chosen[0]:.3f} s, best of the grid {best[0]:.3f} s, regret "
              f"{100 * regrets[-1]:+.1f} % (noise floor {100 * floors[-1]:.1f} %), default {default[0]:.3f} s, gain "
              f"{100 * gains[-1]:.1f} %", flush=True)  # fmt: skip
    print(f"regret: median {100 * np.median(regrets):+.2f} % (median noise floor {100 * np.median(floors):.2f} %), largest "
          f"{100 * max(regrets):+.2f} %; gain over the default: median {100 * np.median(gains):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
