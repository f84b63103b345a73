"""CPU seconds until PVFs of `cifar-resnet32` are known to ±20 % (or ±0.02 points) at 95 %, beside PyTorchFI 0.6.0.

Both corrupt the same weights (of convolutions and the linear layer, uniform over elements of a component, then over bits) and
ask the same question (is an image's answer wrong). Ours is a whole campaign, all rows together, set-up included; each fault
meets one batch of four images. PyTorchFI's trials are timed, and their number follows from the PVF and Wilson's interval: with
all images a fault, as it is mostly driven, and with as many of them as are cheapest, by the variance between faults that our
campaign saw. It stops where the interval would be narrow enough, as if that were known beforehand.

Needs ``UNSILENT_CIFAR_WEIGHTS`` and ``UNSILENT_CIFAR_DATA`` (see docs/concepts/workloads.md) and the peers (``make bench``).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import peers
from unsilent.statistics import wilson
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.precision import LEAST_HALF_WIDTH
from unsilent.studies.pvf.row_scopes import StoredTrials, target_groups
from unsilent.studies.pvf.study import pvf
from unsilent.workloads import load

RELATIVE, CONFIDENCE = 0.2, 0.95
AT = ("*conv*.weight", "linear.weight")
NAMES = {"usual": "{} images a fault", "best": "as many images a fault as are cheapest"}
SEEDS = (0, 1, 2)
BATCH = 4
"""Images a fault: more of them say little more about the fault, and cost more."""


def main(rounds: int, device: str) -> None:
    """Print the table."""
    files = {k: os.environ.get(f"UNSILENT_CIFAR_{k.upper()}") for k in ("weights", "data")}
    if not all(files.values()) or not peers.available():
        print("time_to_answer: needs UNSILENT_CIFAR_WEIGHTS, UNSILENT_CIFAR_DATA and the peers; skipped")
        return
    torch.set_num_threads(1)
    trial = peer(files, rounds)
    runs = sorted((ours(files, seed) for seed in SEEDS), key=lambda run: run.cpu)
    for run in runs:
        print(f"ours, seed {run.seed}: {run.stored.trial_count:,} trials, {run.cpu:.0f} s CPU with set-up")
    table(runs[len(runs) // 2], trial)


class Run(NamedTuple):
    """One campaign of ours."""

    seed: int
    cpu: float
    stored: StoredTrials
    rows: dict[tuple[str, str], Any]


def ours(files: dict[str, Any], seed: int) -> Run:
    """A whole campaign, until all rows are precise enough."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "campaign.sqlite"
        asked = {"rel": RELATIVE, "at": AT, "options": {"batch": BATCH}, "one_batch": True, "seed": seed}
        result = pvf("cifar-resnet32", store=store, **asked, **files)
        with PvfStore(store) as opened:
            return Run(
                seed, result.cpu_seconds, StoredTrials(opened, "sample"), {(r.level, r.target): r for r in result.rows}
            )


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


def table(run: Run, trial: dict[int, float]) -> None:
    """A line for each row; PyTorchFI's components are campaigns of their own, its model row is one too.

    Its trials with b images: of variance v/b for what differs from image to image, plus what a fault does to all alike, which our
    campaign shows.
    """
    images = sorted(n for n in trial if n > 0)
    heads = "".join(f"{f'{n} images':>12}{'s CPU':>8}" for n in images)
    print(f"seed {run.seed:<6}{'PVF %':>20}{'ours, trials':>14}{heads}")
    spent: dict[str, list[tuple[int, float]]] = {"best": [], "usual": []}
    for group in target_groups(run.stored, 1):
        if group.level not in ("model", "component"):
            continue
        row = run.rows[group.level, group.name]
        mass = sum(s.share for s in group.sample.strata)
        square = sum(s.share / mass * float((s.tally.incorrect_share_per_trial**2).mean()) for s in group.sample.strata)
        p = row.estimate
        alike = ((square - p**2) * BATCH / (p * (1 - p)) - 1) / (BATCH - 1)
        one = needed(p, max(RELATIVE * p, LEAST_HALF_WIDTH))
        counts = {n: round(one * (alike + (1 - alike) / n)) for n in images}
        costs = [(counts[n], counts[n] * trial[n]) for n in images]
        if group.level == "component":
            spent["best"].append(min(costs, key=lambda cost: cost[1]))
            spent["usual"].append(costs[-1])
        value = f"{100 * p:.2f} [{100 * row.low:.2f}, {100 * row.high:.2f}]"
        print(f"{group.name:11}{value:>20}{row.n:>14,}" + "".join(f"{n:>12,}{cpu:>8.0f}" for n, cpu in costs))
    print(f"all components: ours {run.cpu:.0f} s CPU, pilot and set-up included")
    for how, costs in spent.items():
        trials, cpu = sum(n for n, _ in costs), sum(c for _, c in costs)
        fewer, cheaper = trials / run.stored.trial_count, cpu / trials / (run.cpu / run.stored.trial_count)
        print(
            f"PyTorchFI, {NAMES[how].format(images[-1])}: {trials:,} trials, {cpu:,.0f} s CPU, {cpu / run.cpu:.1f} times: "
            f"{fewer:.1f} by fewer trials, {cheaper:.1f} by cheaper ones"
        )
