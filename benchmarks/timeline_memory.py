"""What-ifs of memory against trainings that have the setting, on this computer.

    python -m benchmarks.timeline_memory [--rounds 2]

Six blocks of two linear layers, with GELU within them or ReLU after each layer, are trained on one core. In each round, the plain
training, one with `torch.utils.checkpoint` around each block and two with accumulated gradients (2 and 4 parts of a batch) are
timed in turns, then recorded with memory events, each by a process of its own. Printed: peak memory and time of a step, predicted
from the plain recording and measured, in multiples of the plain training.
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
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint

from unsilent.timeline.load import load_job
from unsilent.timeline.memory import memory_peaks
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer

BLOCKS, WIDTH, BATCH, STEPS, RECORDED = 6, 256, 512, 30, 10
SETTINGS = ("plain", "recompute=block*", "accumulate=2", "accumulate=4")


def training(setting, has_relu):
    torch.manual_seed(0)

    def block():
        inner, last = (nn.ReLU(), [nn.ReLU()]) if has_relu else (nn.GELU(), [])
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), inner, nn.Linear(4 * WIDTH, WIDTH), *last)

    model = nn.Sequential(*[block() for _ in range(BLOCKS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    word, _, count = setting.partition("=")
    parts = int(count) if word == "accumulate" else 1

    def step():
        optimizer.zero_grad()
        for x in torch.randn(BATCH, WIDTH).chunk(parts):
            for number, one in enumerate(model):
                with record_function(f"block{number}"):
                    x = checkpoint(one, x, use_reentrant=False) if word == "recompute" else one(x)
            (x.square().mean() / parts).backward()
        optimizer.step()

    return step


def record(setting, has_relu, file):
    """Write the trace of some steps."""
    step = training(setting, has_relu)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True,
        schedule=schedule(wait=0, warmup=2, active=RECORDED, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(file),
    ) as profiler:  # fmt: skip
        for _ in range(RECORDED + 2):
            step()
            profiler.step()


def recording(setting, has_relu, folder):
    """The job of some steps that a process of its own recorded: the profiler counts memory for the whole process."""
    file = folder / f"{setting.replace('*', '')}.json"
    command = [sys.executable, __file__, "record", setting, str(int(has_relu)), str(file)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return load_job([file])


def compare(has_relu, folder):
    trainings = {setting: training(setting, has_relu) for setting in SETTINGS}
    seconds = {setting: [] for setting in SETTINGS}
    for _ in range(STEPS):
        for setting, step in trainings.items():
            begin = time.perf_counter()
            step()
            seconds[setting].append(time.perf_counter() - begin)
    jobs = {setting: recording(setting, has_relu, folder) for setting in SETTINGS}
    base = np.array(seconds["plain"][3:])
    print(f"{'ReLU' if has_relu else 'GELU'}: plain step {1e3 * base.mean():.0f} ms")
    for one in answer(Replay(jobs["plain"]), SETTINGS[1:]):
        measured = np.array(seconds[one.text][3:])
        ratio = measured.mean() / base.mean()
        error = ratio * sum(of.var(ddof=1) / len(of) / of.mean() ** 2 for of in (base, measured)) ** 0.5
        predicted = [f"{of.mean() / one.recorded.mean():.3f}" for of in (one.predicted, one.longest) if of is not None]
        peak = memory_peaks(jobs[one.text])[0].bytes
        print(
            f"  {one.text}: peak predicted {one.peak[1] / one.peak[0]:.4f}, measured {peak / one.peak[0]:.4f}; "
            f"time predicted {' to '.join(predicted)}, measured {ratio:.3f} ± {error:.3f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    torch.set_num_threads(1)
    for _ in range(parser.parse_args().rounds):
        for has_relu in (False, True):
            with tempfile.TemporaryDirectory() as name:
                compare(has_relu, Path(name))


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        torch.set_num_threads(1)
        record(sys.argv[2], sys.argv[3] == "1", sys.argv[4])
    else:
        main()
