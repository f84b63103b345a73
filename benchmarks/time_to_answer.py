"""CPU seconds until each PVF is known to ±20 % (or ±0.02 points) at 95 %: by default, by tuned commands, and by PyTorchFI 0.6.0.

A figure of ours is the CPU time of the whole process and its workers, start and set-up included. Commands take turns, once for
each seed, in shuffled order. The oracle knows the outcomes of every stratum (those of all campaigns of a workload together) and
looks once: no campaign with the same strata and intervals needs fewer trials.

PyTorchFI corrupts the same weights (convolutions and the linear layer, uniform over elements of a component, then over bits)
and counts images whose answer is wrong. Its trials are timed, and their number follows from the PVF and Wilson's interval as if
both were known beforehand: with all images a fault, as it is mostly driven, and with as many of them as are cheapest.

``cifar-*`` need files, ``UNSILENT_CIFAR_DATA``, ``UNSILENT_CIFAR_WEIGHTS`` (ResNet-32) and ``UNSILENT_CIFAR20_WEIGHTS``; see
docs/concepts/workloads.md. PyTorchFI needs ``make bench``.
"""

from __future__ import annotations

import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import peers
from unsilent.outcomes.tallies import PvfEstimator, Tally
from unsilent.statistics import Stratum
from unsilent.statistics.intervals import normal_quantile
from unsilent.statistics.planning import oracle_trials
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.row_scopes import RowScope, StoredTrials, target_groups
from unsilent.studies.pvf.wanted_precision import Precision
from unsilent.workloads import load

RELATIVE, CONFIDENCE = 0.2, 0.95
PRECISION = Precision.parse(None, f"{RELATIVE:.0%}")
SEEDS = (0, 1, 2)
DEFAULT: tuple[str, ...] = ()
SEVERAL = 4
FEW, SOME, ALL = ("--samples", "1"), ("--samples", str(SEVERAL)), ("--samples", "all")
TUNED: Mapping[str, Sequence[tuple[str, ...]]] = {
    "cifar-resnet20": (FEW, SOME),
    "cifar-resnet32": (FEW, SOME),
    "digits-vit": (FEW, SOME, ("--samples", "16")),
    "chargpt": (FEW, SOME),
    "dlrm": (FEW, SOME, ("--samples", "16"), ALL),
}
"""Commands that somebody who knows the workload might give."""
PEER_AT = ("--at", "*conv*.weight", "--at", "linear.weight")
"""What PyTorchFI can corrupt in `cifar-resnet32`."""


def main(rounds: int, device: str) -> None:
    """Print the tables."""
    data, weights = os.environ.get("UNSILENT_CIFAR_DATA"), os.environ.get("UNSILENT_CIFAR_WEIGHTS")
    files = {"cifar-resnet20": os.environ.get("UNSILENT_CIFAR20_WEIGHTS"), "cifar-resnet32": weights}
    torch.set_num_threads(1)
    for name, tuned in TUNED.items():
        if name in files and not (data and files[name]):
            print(f"{name}: needs UNSILENT_CIFAR_DATA and its weights; skipped")
            continue
        own = ("--data", str(data), "--weights", str(files[name])) if name in files else ()
        print_commands(name, run_all(name, [DEFAULT, *tuned], (*own, "--device", device)))
    if not (data and weights and peers.available()):
        print("PyTorchFI: needs UNSILENT_CIFAR_DATA, UNSILENT_CIFAR_WEIGHTS and the peers (make bench); skipped")
        return
    own = ("--data", data, "--weights", weights, "--device", device, *PEER_AT)
    runs = run_all("cifar-resnet32", [DEFAULT, SOME], own)
    print_peer(runs[DEFAULT], runs[SOME], peer(weights, data, rounds))


@dataclass
class Run:
    """One campaign of ours. ``outcomes``: by stratum, shares of wrong samples of all its trials; ``groups``: reported rows."""

    cpu: float
    trials: int
    samples: dict[str, int]
    groups: list[RowScope]
    outcomes: dict[str, np.ndarray] = field(default_factory=dict)


def run_all(
    name: str, commands: Sequence[tuple[str, ...]], common: tuple[str, ...]
) -> dict[tuple[str, ...], list[Run]]:
    """Runs of every command with every seed."""
    found: dict[tuple[str, ...], list[Run]] = {command: [] for command in commands}
    chance = random.Random(0)
    for seed in SEEDS:
        for command in chance.sample(commands, len(commands)):
            found[command].append(run(name, (*common, *command, "--seed", str(seed))))
    return found


def run(name: str, words: tuple[str, ...]) -> Run:
    """One campaign, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "campaign.sqlite"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = ("pvf", name, "--rel", f"{RELATIVE:.0%}", *words, "--store", str(store), "--quiet")
        subprocess.run([sys.executable, "-m", "unsilent", *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with PvfStore(store) as opened:
            stored = StoredTrials(opened, "sample")
            samples = {plan.group: plan.samples for plan in stored.plans.values()}
            found = Run(cpu, stored.trial_count, samples, target_groups(stored, 1))
            for target in stored.description.targets:
                codes = [row.outcome_codes for row in stored.counted_rows(target, 1, None)]
                tally = Tally.of(codes, stored.description.samples, "sample")
                found.outcomes[target.name] = tally.incorrect_share_per_trial
            return found


def print_commands(name: str, runs: Mapping[tuple[str, ...], list[Run]]) -> None:
    """A line for each command, the best tuned one against the default, and the bound."""
    print(f"\n{name}: {len(SEEDS)} seeds")
    for command, own in runs.items():
        cpu = " ".join(f"{one.cpu:.1f}" for one in own)
        trials = statistics.mean(one.trials for one in own)
        chosen = "" if command else f"  samples of a trial: {own[0].samples}"
        print(
            f"  {' '.join(command) or 'default':34} mean {mean(own):7.1f} s CPU ({cpu}), {trials:9,.0f} trials{chosen}"
        )
    best = min((command for command in runs if command), key=lambda command: mean(runs[command]))
    print(f"  default / best tuned ({' '.join(best)}): {mean(runs[DEFAULT]) / mean(runs[best]):.2f}")
    needed = oracle(runs[DEFAULT])
    ratio = statistics.mean(one.trials for one in runs[DEFAULT]) / needed
    print(f"  oracle: {needed:,} trials of all targets together; default / oracle: {ratio:.2f}")


def mean(runs: Sequence[Run]) -> float:
    """CPU seconds."""
    return statistics.mean(run.cpu for run in runs)


def oracle(runs: Sequence[Run]) -> int:
    """Trials that a design needs which knows the outcomes of every stratum, over all reported targets."""
    outcomes = {name: np.concatenate([run.outcomes[name] for run in runs]) for name in runs[0].outcomes}
    total = 0
    for group in runs[0].groups:
        if group.level == "model":
            continue
        whole = sum(target.share for target in group.targets)
        strata = [Stratum.of(outcomes[target.name], target.share / whole) for target in group.targets]
        aim = PRECISION.target_half_width(sum(s.weight * s.mean for s in strata))
        total += oracle_trials(strata, aim, CONFIDENCE)
    return total


def peer(weights: str, data: str, rounds: int) -> dict[int, float]:
    """CPU seconds of a trial of PyTorchFI by number of images; and of a bare forward, under minus that number."""
    from pytorchfi.core import fault_injection

    workload = load("cifar-resnet32", {}, weights=weights, data=data)
    model, images = workload.model(), torch.cat(list(workload.batches()))
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    sizes = [m.weight.numel() for m in layers]
    found = {}
    for n in (1, 4, len(images)):
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
    z2 = normal_quantile(CONFIDENCE) ** 2
    n = 100.0
    while math.sqrt(z2 * (n * p * (1 - p) + z2 / 4)) / (n + z2) > aim:
        n *= 1.02
    return round(n)


def rows(run: Run) -> Iterator[tuple[RowScope, float, float, float]]:
    """Component rows and the model's: scope, estimate and limits."""
    for group in run.groups:
        if group.level in ("model", "component"):
            interval = PvfEstimator(unit="sample").estimate(group.sample)
            assert interval.estimate is not None
            yield group, interval.estimate, interval.low, interval.high


def print_peer(runs: Sequence[Run], several: Sequence[Run], trial: Mapping[int, float]) -> None:
    """A line for each row; PyTorchFI's components are campaigns of their own, its model row is one too.

    Its trials with n images: of variance v/n for what differs from image to image, plus what a fault does to all alike, which our
    campaigns of several images a trial (``several``) show.
    """
    run = sorted(runs, key=lambda run: run.cpu)[len(runs) // 2]
    shared = {}
    for group, p, _, _ in rows(several[0]):
        whole = sum(s.share for s in group.sample.strata)
        square = sum(
            s.share / whole * float((s.tally.incorrect_share_per_trial**2).mean()) for s in group.sample.strata
        )
        shared[group.name] = ((square - p**2) * SEVERAL / (p * (1 - p)) - 1) / (SEVERAL - 1)
    images = sorted(n for n in trial if n > 0)
    heads = "".join(f"{f'{n} images':>12}{'s CPU':>8}" for n in images)
    print(f"{'':11}{'PVF %':>20}{'ours, trials':>14}{heads}")
    spent: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for group, p, low, high in rows(run):
        one = needed(p, PRECISION.target_half_width(p))
        alike = shared[group.name]
        counts = {n: round(one * (alike + (1 - alike) / n)) for n in images}
        costs = [(counts[n], counts[n] * trial[n]) for n in images]
        if group.level == "component":
            spent["at its best"].append(min(costs, key=lambda cost: cost[1]))
            spent[f"with {images[-1]} images a fault"].append(costs[-1])
        value = f"{100 * p:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
        count = sum(len(s.tally.outcome_counts) for s in group.sample.strata)
        print(f"{group.name:11}{value:>20}{count:>14,}" + "".join(f"{n:>12,}{cpu:>8.0f}" for n, cpu in costs))
    print(f"all components: ours {' '.join(f'{one.cpu:.1f}' for one in runs)} s CPU, pilot and set-up included")
    for how, costs in spent.items():
        trials, cpu = sum(n for n, _ in costs), sum(c for _, c in costs)
        print(f"PyTorchFI {how}: {trials:,} trials, {cpu:,.0f} s CPU, {cpu / mean(runs):.1f} times ours")
