"""CPU seconds until PVFs of `cifar-resnet32` are known to ±20 % (or ±0.02 points) at 95 %, beside PyTorchFI 0.6.0.

Both strike the same weights (of convolutions and the linear layer, uniform over elements of a component, then over bits) and
ask the same question (is an image's answer wrong). Ours is a whole campaign, all rows together, set-up included; each fault
meets one batch of four images. PyTorchFI's trials are timed, and their number follows from the PVF and Wilson's interval: with
all images a fault, as it is mostly driven, and the variance between faults that our campaign saw; and with one image a fault,
right or wrong, where that is cheaper. It stops where the interval would be narrow enough, as if that were known beforehand.

Needs ``UNSILENT_CIFAR_WEIGHTS`` and ``UNSILENT_CIFAR_DATA`` (see docs/workloads.md) and the peers (``make bench``).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import peers
from unsilent.campaigns import Store
from unsilent.statistics import wilson
from unsilent.statistics.intervals import normal_quantile
from unsilent.studies.precision import FLOOR
from unsilent.studies.pvf import pvf
from unsilent.studies.rows import target_groups
from unsilent.studies.stored import Stored
from unsilent.workloads import load

RELATIVE, CONFIDENCE = 0.2, 0.95
AT = ("*conv*.weight", "linear.weight")
NAMES = {"usual": "{} images a fault", "best": "one image a fault where that is cheaper"}
BATCH = 4
"""Images a fault: more of them say little more about the fault, and cost more."""


def main(rounds: int, device: str) -> None:
    """Print the table."""
    files = {k: os.environ.get(f"UNSILENT_CIFAR_{k.upper()}") for k in ("weights", "data")}
    if not all(files.values()) or not peers.available():
        print("time_to_answer: needs UNSILENT_CIFAR_WEIGHTS, UNSILENT_CIFAR_DATA and the peers; skipped")
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "campaign.sqlite"
        options = {"batch": BATCH}
        result = pvf("cifar-resnet32", rel=RELATIVE, at=AT, options=options, one_batch=True, store=store, **files)
        cpu = result.cpu_seconds
        print(
            f"ours: {result.trials_done:,} trials, {cpu:.0f} s CPU, {1e3 * cpu / result.trials_done:.1f} ms a trial with set-up"
        )
        with Store(store) as opened:
            table(Stored(opened, "sample"), {(r.level, r.target): r for r in result.rows}, cpu, peer(files, rounds))


def peer(files: dict[str, Any], rounds: int) -> dict[int, float]:
    """CPU seconds of a trial of PyTorchFI by number of images; and of a bare forward, under minus that number."""
    from pytorchfi.core import fault_injection

    workload = load("cifar-resnet32", {}, **files)
    model, images = workload.model(), torch.cat(list(workload.batches()))
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    sizes = [m.weight.numel() for m in layers]
    found = {}
    for n in (1, BATCH, len(images)):
        x = images[:n]
        injector = fault_injection(model, n, list(x.shape[1:]), [nn.Conv2d, nn.Linear])
        golden = model(x).argmax(1)
        times, bare = [], []
        for _ in range(4 * rounds):
            begun = time.process_time()
            (layer,) = random.choices(range(len(layers)), weights=sizes)
            at = [[random.randrange(s)] for s in layers[layer].weight.shape] + [[None]] * 2
            location = dict(zip(("layer_num", "k", "dim1", "dim2", "dim3"), ([layer], *at), strict=False))
            corrupted = injector.declare_weight_fi(function=peers._flip, **location)
            with torch.no_grad():
                y = corrupted(x)
            (y.argmax(1) != golden) | ~y.isfinite().all(1)
            times.append(time.process_time() - begun)
            begun = time.process_time()
            with torch.no_grad():
                model(x)
            bare.append(time.process_time() - begun)
        found |= {n: statistics.median(times), -n: statistics.median(bare)}
        print(f"PyTorchFI, {n} images: {1e3 * found[n]:.1f} ms a trial, forward {1e3 * found[-n]:.1f} ms")
    return found


def needed(p: float, aim: float) -> int:
    """Trials after which Wilson's interval of so many right or wrong ones is narrow enough."""
    n = 100.0
    while wilson(p * n, n, CONFIDENCE).half_width > aim:
        n *= 1.02
    return round(n)


def table(stored: Stored, rows: dict[tuple[str, str], Any], cpu: float, trial: dict[int, float]) -> None:
    """A line for each row; PyTorchFI's components are campaigns of their own, its model row is one too."""
    images, done = max(trial), stored.trials
    print(f"{'':10}{'PVF %':>22}{'ours, trials':>14}{'one image':>12}{'s CPU':>9}{f'{images} images':>12}{'s CPU':>9}")
    best = usual = 0.0
    counts = dict.fromkeys(("best", "usual"), 0)
    for group in target_groups(stored, 1):
        if group.level not in ("model", "component"):
            continue
        row = rows[group.level, group.name]
        aim = max(RELATIVE * row.estimate, FLOOR)
        mass = sum(s.share for s in group.sample.strata)
        square = sum(s.share / mass * float((s.tally.shares**2).mean()) for s in group.sample.strata)
        one = needed(row.estimate, aim)
        many = round(normal_quantile(CONFIDENCE) ** 2 * (square - row.estimate**2) / aim**2)
        costs = one * trial[1], many * trial[images]
        if group.level == "component":
            best, usual = best + min(costs), usual + costs[1]
            counts["best"] += one if costs[0] <= costs[1] else many
            counts["usual"] += many
        value = f"{100 * row.estimate:.2f} [{100 * row.low:.2f}, {100 * row.high:.2f}]"
        print(f"{group.name:10}{value:>22}{row.n:>14,}{one:>12,}{costs[0]:>9.0f}{many:>12,}{costs[1]:>9.0f}")
    print(f"all components: ours {cpu:.0f} s CPU, pilot and set-up included")
    for how, spent in (("usual", usual), ("best", best)):
        fewer, cheaper = counts[how] / done, spent / counts[how] / (cpu / done)
        print(
            f"PyTorchFI, {NAMES[how].format(images)}: {spent:,.0f} s CPU, {spent / cpu:.1f} times: "
            f"{fewer:.1f} by fewer trials, {cheaper:.1f} by cheaper ones"
        )
