"""What-ifs of FSDP2 against trainings that have the setting, on this computer.

    python -m benchmarks.timeline_fsdp [--rounds 2]

Two gloo ranks train five layers of 12 MiB that compute by sleeping. In each round, trainings with FSDP2's defaults and with each
of four settings (`SETTINGS`) are timed in turns, 20 steps of each; then 20 steps with the defaults are recorded, and all settings
are predicted from the recording. Printed: predicted and measured time of a step, in multiples of the default, and how much of the
recording the dependencies leave unexplained.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from unsilent.timeline.diagnosis import diagnose
from unsilent.timeline.load import load_job

LAYERS, PARAMETERS, STEPS, WARMUP = 5, 3 * 2**20, 20, 3
SETTINGS = {
    "default": {}, "reshard_after_forward=no": {"reshard_after_forward": False},
    "reduce_dtype=bf16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "fsdp wrap=2": {"wrap": 2}, "fsdp prefetch=2": {"prefetch": 2},
}  # fmt: skip


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient.clone()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))

    def forward(self, x):
        return Sleep.apply(x + self.weight[: len(x)])


def training(settings):
    """A step of a training; ``wrap``: layers of a unit, ``prefetch``: units that are gathered ahead in the backward pass."""
    options = dict(settings)
    wrap, prefetch = options.pop("wrap", 1), options.pop("prefetch", 1)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for begin in range(0, LAYERS, wrap):
        fully_shard(list(model[begin : begin + wrap]) if wrap > 1 else model[begin], **options)
    fully_shard(model)
    for number, layer in enumerate(model if prefetch > 1 else ()):
        layer.set_modules_to_backward_prefetch([model[number - k] for k in range(1, prefetch + 1) if k <= number])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(torch.randn(64, requires_grad=True)).square().mean().backward()
        optimizer.step()

    return step


def rank(what):
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    if what == "record":
        step = training({})
        for _ in range(STEPS + 7):
            step()
    else:
        trainings = {name: training(settings) for name, settings in SETTINGS.items()}
        seconds = {name: [] for name in trainings}
        for _ in range(WARMUP + STEPS):
            for name, step in trainings.items():
                distributed.barrier()
                begin = time.perf_counter()
                step()
                taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                distributed.all_reduce(taken, distributed.ReduceOp.MAX)
                seconds[name].append(float(taken))
        if distributed.get_rank() == 0:
            np.savez(what, **{name: of[WARMUP:] for name, of in seconds.items()})
    distributed.barrier()
    distributed.destroy_process_group()


def run(*command):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*start, *map(str, command)], check=True, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    questions = list(SETTINGS)[1:]
    for number in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run(__file__, "rank", folder / "measured.npz")
            traces = folder / "traces"
            run("-m", "unsilent", "timeline", "record", "--steps", STEPS, "-o", traces, __file__, "rank", "record")
            result = diagnose(load_job([traces]), questions)
            measured = np.load(folder / "measured.npz")
            base = measured["default"]
            share = 100 * result.slowdown.unexplained_share
            print(f"round {number + 1}: default {base.mean():.3f} s, unexplained gaps {share:.1f} %")
            for one in result.answers:
                other = measured[one.text]
                ratio = other.mean() / base.mean()
                error = ratio * sum(of.var(ddof=1) / len(of) / of.mean() ** 2 for of in (base, other)) ** 0.5
                predicted = one.predicted.sum() / one.recorded.sum()
                print(f"  {one.text}: predicted {predicted:.3f}, measured {ratio:.3f} ± {error:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2])
    else:
        main()
