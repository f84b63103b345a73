"""How well orders of queries find a planted cause, on incidents of which every query was executed and graded.

Run: ``python -m benchmarks.triage_ranking FARM [--seeds 5] [--test OTHER]``. All orders rank the same queries. They are learned
from incidents of even numbers and measured on those of odd ones, whose reports have other words; in S0 also the other way round.
Ablations are measured with one seed. Incidents without a right query are counted and left out. What was ranked is kept in
``FARM/triage_ranking.json``, and not ranked again as long as labels are the same: after a change of an order, remove it.
``--test``: searches through a collection of real incidents, with the model of all of FARM, and of these and half of OTHER.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from benchmarks import triage_metrics as metrics
from benchmarks.triage_metrics import FIGURES, SHARES, Fold, Ranked, folds_of, interval, is_counted, sign_test
from benchmarks.triage_orders import ABLATIONS, LEARNED, ORDERS, RUNBOOK, SEEDLESS, Collection, cost_order, order_of
from unsilent.events.incident_folder import INCIDENT_FILE
from unsilent.statistics.intervals import clopper_pearson
from unsilent.triage.bundle import Bundle
from unsilent.triage.farm.grading import grade
from unsilent.triage.farm.labelled import LABELS_FILE, LabelledIncident, read_labels
from unsilent.triage.farm.near_duplicates import distinct
from unsilent.triage.farm.planned import FAMILIES
from unsilent.triage.farm.real_job import KINDS
from unsilent.triage.findings import FindingKind
from unsilent.triage.investigation import RUNBOOK as RULES
from unsilent.triage.investigation import Order, investigate
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.ranking import model

RESULTS_FILE = "triage_ranking.json"
PLACED = 2
"""The grade from which on a finding names the place of the cause."""


class Results:
    """What was ranked of these labels, by split, fold, order and seed, in a file."""

    def __init__(self, path: Path, labels: Path) -> None:
        self._path, self._labels = path, hashlib.sha256(labels.read_bytes()).hexdigest()
        known = json.loads(path.read_text()) if path.exists() else {}
        self.rows: dict[str, list[list[object]]] = known["rows"] if known.get("labels") == self._labels else {}

    def of(self, key: str) -> list[Ranked]:
        """Rows of a key."""
        return [Ranked(*row) for row in self.rows[key]]  # type: ignore[arg-type]

    def add(self, key: str, rows: Sequence[Ranked]) -> None:
        """Keep them."""
        self.rows[key] = [[*asdict(one).values()] for one in rows]
        self._path.write_text(json.dumps({"labels": self._labels, "rows": self.rows}))


def key_of(fold: Fold, name: str, seed: int) -> str:
    """Of a row of results."""
    return f"{fold.split}|{fold.name}|{name}|{seed}"


def seeds_of(name: str, seeds: int) -> range:
    """Seeds of an order."""
    return range(1 if name in SEEDLESS | ABLATIONS else seeds)


def rank_fold(collection: Collection, fold: Fold, name: str, seed: int) -> list[Ranked]:
    """One order, learned and measured."""
    scores_of = ORDERS[name](collection, fold.train, seed)
    result = []
    for one in fold.test:
        example = collection.examples[one.folder]
        scores = scores_of(example)
        names = [own.query.template for own, _ in example.graded]
        grades = [graded.grade for _, graded in example.graded]
        costs = [(grades[n], TEMPLATES[names[n]].seconds) for n in cost_order(scores, names)]
        result.append(metrics.ranked(one, [grades[n] for n in order_of(scores, names)], costs))
    return result


def print_split(split: str, folds: Sequence[Fold], results: Results, seeds: int) -> None:
    """The table of a split, and the paired test of the learned order against the runbook."""
    test = [one for fold in folds for one in fold.test]
    count = sum(len(fold.train) for fold in folds) / len(folds)
    print(f"\n### {split}: {', '.join(fold.name for fold in folds)}\n")
    print(
        f"{len(test)} incidents measured, {distinct(test)} of them distinct; {count:.0f} learned from in a fold. The telemetry "
        f"of {sum(map(alike, folds))} is, coarsely, that of an incident that is learned from.\n"
    )
    print(f"| order | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    every: dict[str, list[Ranked]] = {}
    for name in ORDERS:
        every[name] = [
            row for fold in folds for seed in seeds_of(name, seeds) for row in results.of(key_of(fold, name, seed))
        ]
        cells = [figure_text(every[name], figure, by_family=split == "S3") for figure in FIGURES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    found = sign_test(every[LEARNED], every[RUNBOOK])
    print(
        f"\nLearned against the runbook: the first right query comes earlier in {found.earlier} incidents, later in "
        f"{found.later} (sign test, p = {found.p:.2g})."
    )


def alike(fold: Fold) -> int:
    """How many incidents have the coarse telemetry of one that is learned from, whatever its report."""
    seen = {one.group.partition("-")[2] for one in fold.train}
    return sum(one.group.partition("-")[2] in seen for one in fold.test)


def figure_text(rows: Sequence[Ranked], figure: str, by_family: bool) -> str:
    """A mean and its interval; shares in percent."""
    numbers = interval(rows, figure, by_family)
    if figure in SHARES:
        return "{:.0f} [{:.0f}, {:.0f}] %".format(*(100 * one for one in numbers))
    return "{:.2f} [{:.2f}, {:.2f}]".format(*numbers)


@dataclass(frozen=True)
class Search:
    """How a search ended: whether at the right place, or at one at all, and seconds by the table."""

    is_right: bool
    is_accused: bool
    seconds: float
    queries: int


def search(one: LabelledIncident, order: Order, adaptive: bool = True, has_verdict: bool = True) -> Search:
    """As ``unsilent triage --run`` goes; also as if the monitor had recorded no verdict."""
    with verdict_removed(one.folder) if not has_verdict else nullcontext(one.folder) as folder:
        found = investigate(folder, is_run=True, order=order, adaptive=adaptive)
    last, seconds = found.localised, sum(TEMPLATES[own.query.query.template].seconds for own in found.executed)
    is_right = False
    if last is not None:
        twin = Bundle(one.folder.parent / "twin")
        query = next(own.query.query for own in found.executed if own.finding is last)
        is_right = grade(one.planned, last, execute(twin, query)) >= PLACED
    return Search(is_right, last is not None and last.kind is not FindingKind.BENIGN, seconds, len(found.executed))


@contextmanager
def verdict_removed(folder: Path) -> Iterator[Path]:
    """A copy of the folder of an incident in which no verdict is recorded, while it lasts."""
    with tempfile.TemporaryDirectory() as copies:
        path = Path(copies, folder.name)
        shutil.copytree(folder, path)
        record = path / INCIDENT_FILE
        record.write_text(json.dumps({**json.loads(record.read_text()), "fault_verdict": None}))
        yield path


Halves = Sequence[tuple[Sequence[LabelledIncident], Sequence[LabelledIncident]]]
"""Pairs of incidents that are learned from, and such that are searched."""


def print_searches(title: str, halves: Halves, has_verdict: bool = True) -> None:
    """Searches through incidents with a fault, and through healthy ones."""
    every = [one for _, test in halves for one in test]
    sick = [one for one in every if not one.planned.is_healthy and not one.is_masked]
    healthy = sum(one.planned.is_healthy for one in every)
    print(f"\n### {title}: {len(sick)} incidents with a fault, {distinct(sick)} distinct, {healthy} healthy ones\n")
    print("| order | ends at the right place | at another | healthy, but accused | seconds | queries |")
    print("|---|---|---|---|---|---|")
    seconds = {}
    models = [model.train(train, 0) for train, _ in halves]
    for name, orders, adaptive in (
        ("learned, ranked anew", models, True), ("learned, first order", models, False),
        ("runbook, ranked anew", [RULES for _ in halves], True),
    ):  # fmt: skip
        found: list[Search] = []
        accused: list[bool] = []
        for order, (_, test) in zip(orders, halves, strict=True):
            for one in test:
                if one.planned.is_healthy:
                    accused.append(search(one, order, adaptive, has_verdict).is_accused)
                elif not one.is_masked:
                    found.append(search(one, order, adaptive, has_verdict))
        seconds[name] = [one.seconds for one in found]
        print(
            f"| {name} | {share_text([one.is_right for one in found])} "
            f"| {share_text([one.is_accused and not one.is_right for one in found])} | {share_text(accused)} "
            f"| {np.mean(seconds[name]):.1f} | {np.mean([one.queries for one in found]):.1f} |",
            flush=True,
        )
    gaps = np.subtract(seconds["learned, ranked anew"], seconds["learned, first order"])
    less, more = int((gaps < 0).sum()), int((gaps > 0).sum())
    p = binomtest(less, less + more).pvalue if less + more else 1.0
    print(
        f"\nRanked anew against the first order: fewer seconds in {less}, more in {more} incidents (sign test, p = {p:.2g})."
    )


def print_real_searches(simulated: Sequence[LabelledIncident], real: Sequence[LabelledIncident]) -> None:
    """Searches through real incidents, with the model of the simulated ones, and with that of these and the other half.

    Kinds of real incidents come one after the other, so that halves of whole rounds have all of them.
    """
    halves = [[one for one in real if one.planned.number // len(KINDS) % 2 == half] for half in (0, 1)]
    for has_verdict in (True, False):
        text = "with the verdict of the monitor" if has_verdict else "without it"
        print_searches(f"Learned from simulated incidents, searched {text}", [(simulated, real)], has_verdict)
        both = [([*simulated, *halves[1 - half]], halves[half]) for half in (0, 1)]
        print_searches(f"Learned from these and the other half, searched {text}", both, has_verdict)


def share_text(holds: Sequence[bool]) -> str:
    """How many of how many, with a 95 % interval."""
    if not holds:
        return "none looked at"
    found = clopper_pearson(sum(holds), len(holds))
    return f"{sum(holds)} of {len(holds)} [{100 * found.low:.0f}, {100 * found.high:.0f}] %"


def print_collection(incidents: Sequence[LabelledIncident]) -> None:
    """What there is, and what is left out."""
    faults = [one for one in incidents if not one.planned.is_healthy]
    masked = [one for one in faults if one.is_masked]
    without = [one for one in faults if not one.is_masked and not is_counted(one)]
    kinds = Counter(f"{one.planned.family}, {one.planned.kind}" for one in without + masked)
    print(
        f"{len(incidents)} incidents, {distinct(incidents)} of them distinct: {len(incidents) - len(faults)} healthy; of the "
        f"faults, {len(masked)} are masked and {len(without)} more have no right query, which are left out ("
        + "; ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
        + ")"
    )


def main() -> None:
    """Rank what was not ranked so far, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triage_ranking", description=__doc__)
    parser.add_argument("farm", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--test", type=Path)
    asked = parser.parse_args()
    incidents = read_labels(asked.farm / LABELS_FILE)
    print_collection(incidents)
    if asked.test:
        others = read_labels(asked.test / LABELS_FILE)
        print_collection(others)
        print_real_searches(incidents, others)
        return
    simulated = [one for one in incidents if one.planned.family in FAMILIES]
    collection = Collection(simulated)
    results = Results(asked.farm / RESULTS_FILE, asked.farm / LABELS_FILE)
    folds = [one for one in folds_of(simulated) if one.test]
    for fold in folds:
        for seed in range(asked.seeds):
            for name in (one for one in ORDERS if seed in seeds_of(one, asked.seeds)):
                if (key := key_of(fold, name, seed)) not in results.rows:
                    begun = time.perf_counter()
                    results.add(key, rank_fold(collection, fold, name, seed))
                    print(f"{key}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    for split in dict.fromkeys(one.split for one in folds):
        print_split(split, [one for one in folds if one.split == split], results, asked.seeds)
    print_searches("Searches, S0", [
        (one.train, [own for own in simulated if own.planned.number % 2 != place])
        for place, one in enumerate(one for one in folds if one.split == "S0")
    ])  # fmt: skip


if __name__ == "__main__":
    main()
