"""Do the intervals cover, and are the estimates unbiased? Repeated campaigns against the truth of every single bit flip.

A small trained model gives the truth (`--trials all`); 20,000 campaigns of each design are drawn from that table and go through
the product's own planning and interval code. Run with ``make claims``; the figures are in docs/evidence/statistics.md.
"""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest

import unsilent
from unsilent.statistics import Stratum, bounded_mean, clopper_pearson, stratified
from unsilent.statistics.interim import confidence_at
from unsilent.statistics.planning import allocate, oracle_trials
from unsilent.studies.pvf.precision import PrecisionPlanner
from unsilent.studies.pvf.row_scopes import target_groups
from unsilent.studies.pvf.wanted_precision import Precision

REPEATS = int(os.environ.get("UNSILENT_REPEATS", 20_000))
WORKERS = int(os.environ.get("UNSILENT_WORKERS", 2))
SLACK = 3 * (0.05 * 0.95 / REPEATS) ** 0.5
"""Three Monte-Carlo errors of a coverage of 95 %."""
EXPECTED = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
COMPONENTS = ("layer0", "layer1", "layer2")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """All flips, and an adaptive campaign of the same model for its strata."""
    from claims import small_mlp

    folder = tmp_path_factory.mktemp("truth")
    workload = small_mlp.make()
    unsilent.pvf(workload, trials="all", store=folder / "all.sqlite")
    unsilent.pvf(workload, ci="5%", store=folder / "adaptive.sqlite")
    return folder / "all.sqlite", folder / "adaptive.sqlite"


@cache
def table(stores):
    from claims.simulated import Table

    return Table(*stores)


def faults_of(stores, component: str) -> np.ndarray:
    """Shares of wrong samples of every fault of a component, which are all equally likely."""
    known = table(stores)
    return np.concatenate([known.shares[t.name] for t in known.description.targets if t.component == component])


def in_parallel(job, stores, *more) -> list:
    """``job(stores, seeds, *more)`` over all repeats, in several processes."""
    chunks = np.array_split(np.arange(REPEATS), WORKERS * 20)
    with ProcessPoolExecutor(WORKERS) as pool:
        return [
            found for part in pool.map(job, *zip(*((stores, c, *more) for c in chunks), strict=True)) for found in part
        ]


def say(design: str, limits: np.ndarray, truth: float, extra: str = "", unbiased: bool = True) -> float:
    """Print what a design reached; ``limits`` float64[repeats, 3]: low, estimate, high. Its coverage; bias is an error."""
    low, estimate, high = limits.T
    covered = float(((low <= truth) & (truth <= high)).mean())
    error = estimate.std() / len(estimate) ** 0.5
    bias = (estimate.mean() - truth) / error if error else 0.0
    sides = f"low above {np.mean(low > truth):.4f} high below {np.mean(high < truth):.4f}"
    relative = f"bias {bias:+.1f} errors ({(estimate.mean() / truth - 1) * 100:+.2f} %)"
    width = f"half-width/truth {np.median(high - low) / 2 / truth:.2f} {extra}"
    print(f"{design:58} cover {covered:.4f} {sides} {relative} {width}", flush=True)
    assert not unbiased or abs(bias) <= 4
    return covered


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("expected", EXPECTED)
def test_uniform_faults_right_or_wrong_as_a_whole(stores, component, expected):
    """One unit a trial (a batch): Clopper-Pearson; and, for comparison, Wilson (SciPy's), which nothing here uses."""
    truth = float((faults_of(stores, component) > 0).mean())
    n = max(1, round(expected / truth))
    counts = np.random.default_rng(1).binomial(n, truth, REPEATS)
    known = {
        k: (clopper_pearson(k, n), binomtest(k, n).proportion_ci(method="wilson")) for k in np.unique(counts).tolist()
    }

    def limits(choose):
        chosen = {k: choose(*both) for k, both in known.items()}
        return np.array([(chosen[k].low, k / n, chosen[k].high) for k in counts.tolist()])

    name = f"{component}: {n} batches, expecting {expected:g}"
    exact = say(f"{name}, Clopper-Pearson", limits(lambda c, w: c), truth)
    say(f"{name}, Wilson", limits(lambda c, w: w), truth)
    assert exact >= 0.95 - SLACK


def clustered(stores, seeds, component, n):
    faults, found, known = faults_of(stores, component), [], {}
    for seed in seeds:
        drawn = np.sort(faults[np.random.default_rng(seed).integers(faults.size, size=n)])
        key = drawn.tobytes()
        if key not in known:
            known[key] = bounded_mean(drawn)
        found.append((known[key].low, known[key].estimate, known[key].high))
    return found


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("expected", EXPECTED)
def test_uniform_faults_scored_on_many_samples(stores, component, expected):
    faults = faults_of(stores, component)
    n = max(1, round(expected / float(faults.mean())))
    limits = np.array(in_parallel(clustered, stores, component, n))
    name = f"{component}: {n} faults x 64 samples, n p = {expected:g}"
    assert say(name, limits, float(faults.mean())) >= 0.95 - SLACK


def two_stage(stores, seeds, component, totals):
    """For every seed the limits of each total; one pilot decides for all of them, as most time goes into deciding."""
    known, found = table(stores), []
    targets = [t for t in known.description.targets if t.component == component]
    mass = sum(t.share for t in targets)

    def strata(rng, sizes, centres):
        return [
            Stratum.of(known.shares[t.name][rng.integers(known.shares[t.name].size, size=n)], t.share / mass, c)
            for t, n, c in zip(targets, sizes, centres, strict=True)
        ]

    for seed in seeds:
        rng = np.random.default_rng(seed)
        pilot = strata(rng, [24] * len(targets), [0.0] * len(targets))
        wanted = np.array(allocate(pilot, 0.3 * known.truth[component]))
        limits = []
        for total in totals:
            sizes = np.maximum(1, np.round(wanted * total / wanted.sum())).astype(int)
            got = stratified(strata(rng, sizes, [s.mean for s in pilot]))
            limits.append((got.low, got.estimate, got.high))
        found.append(limits)
    return found


@pytest.mark.parametrize("component", COMPONENTS)
def test_strata_allocated_by_a_pilot(stores, component):
    """As many trials as the uniform design has, sorted by classes of bits; beside an oracle that knows all variances."""
    known = table(stores)
    totals = sorted({max(12, round(expected / known.truth[component])) for expected in EXPECTED})
    limits = np.array(in_parallel(two_stage, stores, component, totals))
    targets = [t for t in known.description.targets if t.component == component]
    spread = sum(t.share * known.shares[t.name].std() for t in targets) / sum(t.share for t in targets)
    for number, total in enumerate(totals):
        oracle = 1.96 * spread / total**0.5 / known.truth[component]
        name = f"{component}: {total} faults in strata, n p = {total * known.truth[component]:.2f}"
        assert say(name, limits[:, number], known.truth[component], f"oracle {oracle:.2f}") >= 0.95 - SLACK


DESIGNS = {
    "all samples": {"samples": 0},
    "1 sample": {"samples": 1},
    "4 samples": {"samples": 4},
    "chosen, samples are dear": {"samples": None, "cost": (1.0, 10.0)},
    "chosen, trials are dear": {"samples": None, "cost": (100.0, 1.0)},
    "chosen, samples are free": {"samples": None, "cost": (1.0, 0.0)},
}
"""Samples of a trial, and what a trial and each of its samples cost."""


def adaptive(stores, seeds, absolute, relative, design):
    from claims.simulated import Remembering, campaign

    known, found = table(stores), []
    for seed in seeds:
        question = Remembering(unit="sample")
        sim = campaign(
            known, PrecisionPlanner(Precision(absolute, relative), question, 10**9), int(seed), **DESIGNS[design]
        )
        rows = {}
        for group in target_groups(sim, 1):
            got = question.estimate(group.sample)
            first = stratified(
                [
                    Stratum.of(
                        s.tally.incorrect_share_per_trial,
                        s.share / sum(x.share for x in group.sample.strata),
                        s.expected_mean,
                    )
                    for s in sim.at(group, 0).strata
                ],
                confidence_at(0, 0.95),
            )
            rows[group.name] = (got.low, got.estimate, got.high, first.low, first.estimate, first.high)
        plans = sim.plans.values()
        pilot = sum(p.pilot_size for p in plans)
        found.append((rows, sim.trials, sim.seconds, pilot, [p.samples for p in plans], max(p.look for p in plans)))
    return found


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("absolute", "relative"), [(0.0002, 0.2), (0.01, 0.0)])
def test_campaigns_that_stop_when_they_are_precise(stores, absolute, relative, design):
    """Pilot, allocation, looks, stopping: at the look that stopped them, and at the first look whatever came after."""
    found = in_parallel(adaptive, stores, absolute, relative, design)
    _, trials, seconds, pilots, samples, looks = zip(*found, strict=True)
    chosen = dict(zip(*np.unique(samples, return_counts=True), strict=True))
    print(
        f"{design}, {Precision(absolute, relative)}: {np.mean(trials):.0f} trials (sd {np.std(trials):.0f}), "
        f"{np.mean(pilots):.0f} of them pilots, cost {np.mean(seconds):.0f}, samples {chosen}, "
        f"stopped at look {np.bincount(looks).tolist()}"
    )
    if "dear" in design or "free" in design:
        assert (np.mean(samples) > 2) == ("samples are dear" not in design)
    limits = defaultdict(list)
    for rows, *_ in found:
        for name, values in rows.items():
            limits[name].append(values)
    for name, values in limits.items():
        truth = table(stores).truth[name]
        at_end, at_first = np.array(values)[:, :3], np.array(values)[:, 3:]
        stopped = f"{name}, {design}: {Precision(absolute, relative)}, when it stopped"
        assert say(stopped, at_end, truth, unbiased=False) >= 0.95 - SLACK  # stopping favours what looks precise
        assert say(f"{name}: … at the first look ({confidence_at(0, 0.95):.2%})", at_first, truth) >= 0.95 - SLACK


def finer(stores, component, key, samples):
    """Strata of a component by class of bits and ``key(magnitude quarter, bit)``, with the truth of each for so many samples."""
    from claims import small_mlp

    values = {
        f"param:{name}": p.detach().reshape(-1).numpy() for name, p in small_mlp.make().model().named_parameters()
    }
    known, strata = table(stores), []
    targets = [t for t in known.description.targets if t.component == component]
    sizes = np.abs(np.concatenate([v for site, v in values.items() if f":{component}." in site]))
    edges = np.quantile(sizes, [0.25, 0.5, 0.75])
    for target in targets:
        places = known.places[target.name]
        keys = [key(int(np.searchsorted(edges, abs(values[site][element]))), bit) for site, element, bit in places]
        weight = target.share / sum(t.share for t in targets)
        for one in sorted(set(keys)):
            shares = known.shares[target.name][[k == one for k in keys]]
            outcomes = Stratum.of(shares, weight * len(shares) / len(keys))
            if samples == 1:
                wrong = float(shares.mean())
                outcomes = Stratum(outcomes.weight, np.array([0.0, 1.0]), 1e6 * np.array([1 - wrong, wrong]))
            strata.append(outcomes)
    return strata


@pytest.mark.parametrize("samples", [1, 64])
@pytest.mark.parametrize("component", COMPONENTS)
def test_what_finer_strata_and_predictions_could_save(stores, component, samples):
    """Fewest trials that know everything, for 20 %; and with no variance at all, as if each outcome had been predicted."""
    aim = 0.2 * table(stores).truth[component]
    designs = {
        "classes of bits": lambda quarter, bit: 0,
        "classes and quarters of magnitude": lambda quarter, bit: quarter,
        "single bits": lambda quarter, bit: bit,
        "single bits and quarters of magnitude": lambda quarter, bit: (bit, quarter),
    }
    needed = {name: oracle_trials(finer(stores, component, key, samples), aim) for name, key in designs.items()}
    usual = finer(stores, component, designs["classes of bits"], samples)
    needed["every outcome predicted"] = oracle_trials(
        [Stratum(s.weight, np.array([s.mean]), np.array([1.0])) for s in usual], aim
    )
    for name, trials in needed.items():
        print(
            f"{component}, {samples} samples, {name}: {trials} trials ({trials / needed['classes of bits'] - 1:+.0%})"
        )
    assert min(needed.values()) == needed["every outcome predicted"] > 0
