"""Which canaries notice flipped bits of weights: images nearest to the decision boundary, constructed ones and random ones.

    python -m benchmarks.canaries digits-cnn --save canaries-digits.jsonl
    python -m benchmarks.canaries cifar-resnet32 --data FILE --weights FILE --save canaries-resnet32.jsonl

Canaries are chosen from the first half of the images; the other half says whether a flip changes an answer. All choices get the
same flips, drawn uniformly over weights and bits as campaigns of ``unsilent pvf`` draw them. A file that exists is continued.
All canaries are evaluated in one batch, by the cached engine, whose outcomes have the bits of plain runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unsilent.compare.canary_choice import BOUNDARY, CONSTRUCTED, RANDOM, choose_inputs, margins
from unsilent.engine import make_engine
from unsilent.faults import Population, fault_model
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.decision_judges import DecisionJudge, Top1, make_verdict
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.coverage.paired_tests import paired_differences
from unsilent.workloads.base import Workload
from unsilent.workloads.registry import load

SIZES = (1, 4, 16)
TOLERANCE = 1e-3
DRAWS = 3
"""Sets of random images."""
MODES = ("bits", "tolerance", "labels")
SETS = (BOUNDARY, CONSTRUCTED, *(f"{RANDOM} {n}" for n in range(DRAWS)))
GROUP = 8
EVAL = {"digits-cnn": 450}


@dataclass(frozen=True)
class Top1WithDifference(DecisionJudge):
    """Top1, whose severity is the largest difference of a score as a part of the largest magnitude of that sample's scores."""

    DIMENSIONS = 2

    def rows(self, output):
        return output

    def compare(self, golden, faulty):
        with np.errstate(all="ignore"):
            gap = np.abs(faulty - golden).max(1) / np.abs(golden).max(1)
        return make_verdict(golden.argmax(1) != faulty.argmax(1), gap)


def subject(name, data, weights, images):
    """The workload with its canaries in the first batch and held-out images in others, and margins of each choice."""
    whole = load(name, {"eval": str(images)}, data=data, weights=weights)
    model, samples = whole.model(), torch.cat(list(whole.batches()))
    half = len(samples) // 2
    candidates = Workload(model, [samples[:half]], name=name)
    chosen = [
        choose_inputs(candidates, model, candidates.batches(), SIZES[-1], choice, seed, candidates.name)[0]
        for choice, seed in [(BOUNDARY, 0), (CONSTRUCTED, 0), *((RANDOM, n) for n in range(DRAWS))]
    ]
    with torch.no_grad():
        for label, part in zip(SETS, chosen, strict=True):
            gaps = margins(Top1(), model(part))
            exact = model.double()(part.double()).argmax(1)
            rounding = int((exact != model.float()(part).argmax(1)).sum())
            print(
                f"# {label}: margins {gaps.min():.2g} to {gaps.max():.2g}; labels that float64 changes: {rounding}",
                flush=True,
            )
    return Workload(model, [torch.cat(chosen), *samples[half:].split(64)], name=name, judge=Top1WithDifference())


def run(asked):
    """Adds flips to the file until enough of them change an answer, or time is over."""
    path, begun = Path(asked.save), time.process_time()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = sum(row["held_out"] > 0 for row in rows)
    workload = subject(asked.workload, asked.data, asked.weights, asked.images or EVAL.get(asked.workload, 300))
    if found >= asked.faults:
        return rows
    engine = make_engine(workload)
    population, model = Population(engine.select_regions(("param:*",))), fault_model("bitflip")
    with path.open("a", encoding="utf-8") as file:
        while found < asked.faults and time.process_time() - begun < 60 * asked.minutes:
            numbers = range(len(rows), len(rows) + GROUP)
            drawn = [model.draw(population, np.random.default_rng([0, number]), "per-element") for number in numbers]
            for number, faults, outcome in zip(numbers, drawn, engine.trials(drawn), strict=True):
                canaries, others = outcome.batches[0], np.concatenate([b.codes for b in outcome.batches[1:]])
                row = {
                    "number": number, "site": faults[0].site, "bit": int(faults[0].operands[0]).bit_length() - 1,
                    "codes": canaries.codes.tolist(), "severity": [float(f"{s:.4g}") for s in canaries.severity],
                    "held_out": int((others == Outcome.SDC).sum()), "loud": int((others == Outcome.NONFINITE).sum()),
                    "touched": int((others != Outcome.MASKED).sum()),
                }  # fmt: skip
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                found += row["held_out"] > 0
            file.flush()
    print(f"# {len(rows)} flips, {found} change an answer; {time.process_time() - begun:.0f} CPU s of this run")
    return rows


def noticed(rows):
    """By set, mode and size: bool[flips], whether any of the first canaries of the set shows the flip."""
    codes = np.array([row["codes"] for row in rows]).reshape(len(rows), len(SETS), SIZES[-1])
    severity = np.array([row["severity"] for row in rows]).reshape(codes.shape)
    loud = codes == Outcome.NONFINITE
    by_mode = {
        "bits": codes != Outcome.MASKED,
        "tolerance": loud | ~(severity <= TOLERANCE),
        "labels": loud | (codes == Outcome.SDC),
    }
    return {
        (label, mode, size): shown[:, number, :size].any(1)
        for mode, shown in by_mode.items() for number, label in enumerate(SETS) for size in SIZES
    }  # fmt: skip


def smallest_difference(pairs, discordant):
    """The smallest difference of two paired shares that McNemar's test at 5 % shows with 80 % power, by the normal approximation.

    Connor 1987 (Biometrics 43); ``discordant``: share of pairs that one of both notices.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        psi = max(discordant, middle)
        needed = (1.959964 * math.sqrt(psi) + 0.841621 * math.sqrt(psi - middle**2)) / math.sqrt(pairs)
        low, high = (low, middle) if middle >= needed else (middle, high)
    return high


def show(rows):
    """Tables of shares and of paired differences."""
    flags, changing = noticed(rows), np.array([row["held_out"] > 0 for row in rows])
    for title, mask in (("all flips", np.ones(len(rows), bool)), ("flips that change an answer", changing)):
        if mask.any():
            print(f"\n{title}: {mask.sum()}")
            show_shares(flags, mask)
            show_differences(flags, mask)
    unseen = ~np.any([flags[label, "bits", SIZES[-1]] for label in SETS], 0)
    quiet, bits = np.array([row["touched"] == 0 for row in rows]), np.array([row["bit"] for row in rows])
    print(
        f"\nseen by no canary of any set, bit for bit: {unseen.sum()} of {len(rows)} flips; of these, {(unseen & quiet).sum()} "
        f"change no bit of an answer to a held-out image either, and {(unseen & changing).sum()} change an answer; "
        f"{(unseen & (bits < 12)).sum()} are of the 12 lowest bits"
    )
    loud = np.array([row["loud"] > 0 and row["held_out"] == 0 for row in rows])
    print(f"flips that give NaN or infinity for a held-out image and change no answer silently: {loud.sum()}")


def show_shares(flags, mask):
    print(
        "| compared | k | boundary | constructed | random 0 | random, lowest to highest draw |\n|---|---|---|---|---|---|"
    )
    for mode in MODES:
        for size in SIZES:
            cells, total = [], int(mask.sum())
            for label in SETS[:3]:
                hits = int(flags[label, mode, size][mask].sum())
                limits = clopper_pearson(hits, total)
                cells.append(f"{100 * hits / total:.1f} [{100 * limits.low:.1f}, {100 * limits.high:.1f}]")
            shares = [100 * float(flags[label, mode, size][mask].mean()) for label in SETS[2:]]
            print(f"| {mode} | {size} | {' | '.join(cells)} | {min(shares):.1f} to {max(shares):.1f} |")


def show_differences(flags, mask):
    pairs = ((BOUNDARY, SETS[2]), (CONSTRUCTED, BOUNDARY))
    keys = [(one, other, mode, size) for one, other in pairs for mode in MODES for size in SIZES]
    gaps = [flags[a, m, k][mask].astype(float) - flags[b, m, k][mask] for a, b, m, k in keys]
    print("\n| difference | compared | k | points | only first | only second | p (Holm) | detectable |")
    print("|---|---|---|---|---|---|---|---|")
    for (a, b, mode, size), one in zip(keys, paired_differences(gaps, 0.95), strict=True):
        gap, total = one.difference, int(mask.sum())
        least = smallest_difference(total, (one.only_one + one.only_other) / total)
        points = f"{100 * gap.estimate:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
        counts = f"{one.only_one} | {one.only_other} | {one.p_value:.2g}"
        print(f"| {a} − {b} | {mode} | {size} | {points} | {counts} | {100 * least:.1f} |")


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.canaries", description=__doc__)
    parser.add_argument("workload", choices=("digits-cnn", "cifar-resnet32"))
    parser.add_argument("--data")
    parser.add_argument("--weights")
    parser.add_argument("--images", type=int, help="half are candidates, half are held out; default 450 or 300")
    parser.add_argument("--faults", type=int, default=500, help="that change an answer of a held-out image")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--save", required=True)
    torch.set_num_threads(1)
    show(run(parser.parse_args()))


if __name__ == "__main__":
    main()
