"""Claim: the floor test calls clean runs at most as often as its level, and finds shifts; intervals over replicas cover.

Clean against clean, by thousands: numbers from known laws, and runs of a small network trained here in float32 (other in-batch
order, or other seeds). Run with ``make claims``; the figures are in docs/evidence/noise.md.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from scipy.stats import binom

from unsilent.basics.errors import UsageError
from unsilent.statistics.floor import noise_verdict, noise_verdicts, replicas_needed
from unsilent.statistics.groups import group_spread
from unsilent.statistics.null_distribution import Measure, NullDistribution, RunComparison
from unsilent.statistics.replica_spread import mean_over_pairs, sd_interval_from_variance, spread

REPEATS = int(os.environ.get("UNSILENT_FLOOR_REPEATS", 2000))
LEVEL = 0.05
ACCURACY = Measure("accuracy", margin=0.02, worse_direction="less")
LOSS, CHURN = Measure("loss", margin=0.1), Measure("churn", margin=0.05, is_distance=True)
UNIT = Measure("unit", margin=0.1, is_distance=True)
FOUR = [ACCURACY, LOSS, CHURN, UNIT]
RATE = np.float32(0.17)
"""Learning rate at which the last bits of a gradient grow into other predictions."""
CALLS = ("harmful", "detectable", "improved")


def at_most(share, level, count):
    """No more often than at this level, but for one chance in ten thousand (exact binomial); there are some sixty such checks."""
    assert binom.sf(round(share * count) - 1, count, level) > 1e-4, (share, level, count)


# Numbers from known laws: one row is one run, its difference from or distance to the twin in each measure.


def normal(rng, n):
    """Independent normal differences, log-normal distances."""
    x = rng.normal(size=(n, 4))
    x[:, 2:] = np.exp(x[:, 2:])
    return x


def heavy(rng, n):
    """One cause behind all measures, with heavy tails."""
    cause = rng.standard_t(2, (n, 1))
    x = cause + 0.5 * rng.standard_t(2, (n, 4))
    x[:, 2:] = np.abs(x[:, 2:])
    return x


def whole(rng, n):
    """Accuracy and churn in few whole samples, so most runs are tied."""
    x = rng.normal(size=(n, 4))
    x[:, 0] = rng.poisson(1, n) - rng.poisson(1, n)
    x[:, 2], x[:, 3] = rng.poisson(0.5, n), np.abs(x[:, 3])
    return x


def rare(rng, n):
    """One run in ten ends elsewhere."""
    x = normal(rng, n)
    x[rng.random(n) < 0.1] *= 50
    return x


LAWS = {law.__name__: law for law in (normal, heavy, whole, rare)}


def comparison(name, row, twin="twin", **more):
    return RunComparison(name, twin, dict(zip([m.name for m in FOUR], map(float, row), strict=True)), **more)


def null_of(rows):
    return NullDistribution([comparison(f"r{i}", row) for i, row in enumerate(rows)])


@pytest.mark.parametrize("law", LAWS)
def test_one_run_is_called_at_the_level(law):
    rng = np.random.default_rng(1)
    line = []
    for measures in ([LOSS], [CHURN], FOUR):
        for n in (19, 99):
            called = 0
            for _ in range(REPEATS):
                rows = LAWS[law](rng, n + 1)
                called += (
                    noise_verdict(comparison("run", rows[0]), null_of(rows[1:]), measures, level=LEVEL).word in CALLS
                )
            line.append(f"{100 * called / REPEATS:.1f}")
            at_most(called / REPEATS, LEVEL, REPEATS)
    print(f"\none run, % called, {law}: loss 19/99, churn 19/99, four measures 19/99: {' '.join(line)}")


@pytest.mark.parametrize("law", LAWS)
def test_many_runs_are_called_at_the_level(law):
    """Ten runs against one set of 199 clean ones: none corrupted (any call is false), and three corrupted (Holm, BH)."""
    rng = np.random.default_rng(2)
    repeats = REPEATS // 2
    any_false, any_single, rate, uncorrected = 0, 0, 0.0, 0
    for _ in range(repeats):
        rows = LAWS[law](rng, 209)
        null = null_of(rows[10:])
        clean = noise_verdicts([(comparison(f"s{i}", rows[i]), null) for i in range(10)], FOUR, level=LEVEL)
        any_false += any(v.word in CALLS for v in clean)
        uncorrected += sum(v.p <= LEVEL for v in clean)
        corrupted = rows[:10].copy()
        corrupted[:3, 3] += 1e4  # the weights of three, and nothing else of theirs
        questions = [(comparison(f"s{i}", row), null) for i, row in enumerate(corrupted)]
        found = noise_verdicts(questions, FOUR, level=LEVEL)
        any_single += any(f.beyond_noise for i, v in enumerate(found) for f in v.findings if i >= 3 or f.name != "unit")
        by_rate = noise_verdicts(questions, FOUR, level=LEVEL, correction="bh")
        calls = [v.word in CALLS for v in by_rate]
        rate += sum(calls[3:]) / max(1, sum(calls))
    print(
        f"\nten runs, {law}: % of single runs uncorrected {10 * uncorrected / repeats:.1f}, any of ten by Holm "
        f"{100 * any_false / repeats:.1f}; three corrupted: any false run or measure by Holm {100 * any_single / repeats:.1f}, "
        f"false share by BH {100 * rate / repeats:.1f}"
    )
    at_most(any_false / repeats, LEVEL, repeats)
    at_most(any_single / repeats, LEVEL, repeats)
    at_most(rate / repeats, LEVEL, repeats)
    at_most(uncorrected / repeats / 10, LEVEL, repeats)


@pytest.mark.parametrize("law", LAWS)
def test_masked_is_said_at_the_level(law):
    """An effect of just the margin in the loss, the margin as wide as the clean runs are."""
    rng = np.random.default_rng(3)
    line = []
    for n in (19, 99):
        wide = float(np.ptp(LAWS[law](rng, 4000)[:, 1], axis=0)) if law == "normal" else 30.0
        measure, said, none, proven = Measure("loss", margin=wide), 0, 0, 0
        for _ in range(REPEATS):
            rows = LAWS[law](rng, n + 1)
            null = null_of(rows[1:])
            none += noise_verdict(comparison("run", rows[0]), null, [measure], level=LEVEL).word == "masked"
            rows[0, 1] -= wide
            found = noise_verdict(comparison("run", rows[0]), null, [measure], level=LEVEL)
            said += found.word == "masked"
            proven += found.equivalence <= LEVEL
        at_most(said / REPEATS, LEVEL, REPEATS)
        at_most(proven / REPEATS, LEVEL, REPEATS)
        line.append(f"{100 * proven / REPEATS:.1f}, {100 * said / REPEATS:.1f}, {100 * none / REPEATS:.1f}")
    print(
        f"\n{law}, 19 and 99 clean, an effect of the margin: % equivalent by the test alone, masked; no effect: % masked: "
        + "; ".join(line)
    )


# Runs of a network that is trained here.


def data(seed, n):
    centres = np.random.default_rng(99).normal(size=(12, 8))
    rng = np.random.default_rng(seed)
    which = rng.integers(12, size=n)
    return (centres[which] + 0.9 * rng.normal(size=(n, 8))).astype(np.float32), which % 4


def train(seeds, orders, steps=200, batch=16):
    """Loss, predictions and weights of networks trained side by side, one for each seed; an order but 0 permutes within batches.

    Full float32 training by SGD with momentum; the order changes the sums of the gradients in their last bits and nothing else.
    """
    (x_all, y_all), (held, truth) = data(5, 512), data(6, 300)
    onehot, count = np.eye(4, dtype=np.float32)[y_all], len(seeds)
    first, second = np.empty((count, 8, 16), np.float32), np.empty((count, 16, 4), np.float32)
    rows = np.empty((count, steps, batch), np.int64)
    for i, (seed, order) in enumerate(zip(seeds, orders, strict=True)):
        rng = np.random.default_rng([seed, 1])
        first[i], second[i] = 0.5 * rng.normal(size=(8, 16)), 0.3 * rng.normal(size=(16, 4))
        rows[i] = rng.integers(512, size=(steps, batch))
        if order:
            rows[i] = np.random.default_rng([seed, 2, order]).permuted(rows[i], axis=1)
    speed = [np.zeros_like(first), np.zeros_like(second)]
    for t in range(steps):
        x, y = x_all[rows[:, t]], onehot[rows[:, t]]
        hidden = np.maximum(x @ first, 0)
        share = np.exp(scores := _centred(hidden @ second)) / np.exp(scores).sum(-1, keepdims=True)
        grad = (share - y) / np.float32(batch)
        back = (grad @ second.transpose(0, 2, 1)) * (hidden > 0)
        speed[0] = np.float32(0.9) * speed[0] + x.transpose(0, 2, 1) @ back
        speed[1] = np.float32(0.9) * speed[1] + hidden.transpose(0, 2, 1) @ grad
        first, second = first - RATE * speed[0], second - RATE * speed[1]
    scores = _centred((np.maximum(held @ first, 0) @ second).astype(np.float64))
    loss = (np.log(np.exp(scores).sum(-1)) - scores[:, np.arange(300), truth]).mean(axis=1)
    weights = np.concatenate([first.reshape(count, -1), second.reshape(count, -1)], axis=1).astype(np.float64)
    return loss, scores.argmax(-1), weights, truth


def _centred(scores):
    return scores - scores.max(-1, keepdims=True)


def compared(runs, i, twin, source):
    """Run i against the twin."""
    loss, predicted, weights, truth = runs
    unit = weights[[i, twin]] / np.linalg.norm(weights[[i, twin]], axis=1, keepdims=True)
    right = (predicted[[i, twin]] == truth).mean(axis=1)
    values = {
        "accuracy": float(right[0] - right[1]),
        "loss": float(loss[i] - loss[twin]),
        "churn": float((predicted[i] != predicted[twin]).mean()),
        "unit": float(np.linalg.norm(unit[0] - unit[1])),
    }
    return RunComparison(f"r{i}", f"r{twin}", values, source, same_bits=bool((weights[i] == weights[twin]).all()))


@pytest.mark.parametrize("source", ["IMPL", "ALGO"])
def test_real_training_is_called_at_the_level(source):
    """Each comparison has a twin, 19 clean runs and one more of its own: other in-batch orders, or other seeds."""
    called, single, spread, same = 0, np.zeros(4), [], 0
    for start in range(0, REPEATS, 50):
        groups = range(start, min(start + 50, REPEATS))
        seeds, orders = [], []
        for g in groups:
            seeds += [g] * 21 if source == "IMPL" else list(range(21 * g, 21 * g + 21))
            orders += list(range(21)) if source == "IMPL" else [0] * 21
        runs = train(seeds, orders)
        for k in range(len(groups)):
            twin = 21 * k
            every = [compared(runs, i, twin, source) for i in range(twin + 1, twin + 21)]
            null, one = NullDistribution(every[1:]), every[0]
            same += sum(c.same_bits for c in every)
            found = noise_verdict(one, null, FOUR, level=LEVEL)
            called += found.word in CALLS
            single += [noise_verdict(one, null, [m], level=LEVEL).word in CALLS for m in FOUR]
            spread.append([np.std([c.values["accuracy"] for c in every]), np.mean([c.values["churn"] for c in every])])
    sd, churn = np.mean(spread, axis=0)
    shares = " ".join(f"{m.name} {100 * s / REPEATS:.1f}" for m, s in zip(FOUR, single, strict=True))
    print(
        f"\n{source}: {REPEATS} comparisons of trained networks (mean accuracy sd {sd:.4f}, churn {churn:.3f}, "
        f"{same} of equal bits): % called, four measures {100 * called / REPEATS:.1f}; alone {shares}"
    )
    for share in (called / REPEATS, *single / REPEATS):
        at_most(share, LEVEL, REPEATS)
    assert churn > 0.001  # there was noise


@pytest.mark.parametrize("source", ["IMPL", "ALGO"])
def test_many_runs_of_real_training_are_called_at_the_level(source):
    """Families of ten clean runs, each family with a twin and 199 clean runs of its own."""
    families, false, at_all = REPEATS // 5, 0, 0
    for start in range(0, families, 5):
        count = min(5, families - start)
        seeds = np.arange(count * 210) + 10**6 + 210 * start
        orders = np.zeros(count * 210, int)
        if source == "IMPL":
            seeds, orders = 10**6 + start + np.repeat(np.arange(count), 210), np.tile(np.arange(210), count)
        runs = train(seeds.tolist(), orders.tolist())
        for twin in range(0, 210 * count, 210):
            every = [compared(runs, i, twin, source) for i in range(twin + 1, twin + 210)]
            null = NullDistribution(every[10:])
            found = noise_verdicts([(one, null) for one in every[:10]], FOUR, level=LEVEL)
            false += any(v.word in CALLS for v in found)
            at_all += sum(v.p is not None and v.p <= LEVEL for v in found)
    print(
        f"\n{source}: {families} families of ten clean trained networks: % of families with a call by Holm "
        f"{100 * false / families:.1f}; % of runs at p <= 0.05 uncorrected {10 * at_all / families:.1f}"
    )
    at_most(false / families, LEVEL, families)


@pytest.mark.parametrize("law", LAWS)
def test_what_a_fitted_null_calls(law):
    """Its level rests on the law: held where it is normal, and shown, not claimed, where it is not and the check passed."""
    rng = np.random.default_rng(7)
    line = []
    for n in (20, 100):
        for tests in (1, 70):
            called = kept = 0
            tried = REPEATS * (10 if tests > 1 and law == "normal" else 1)  # few calls are due
            for _ in range(tried):
                rows = LAWS[law](rng, n + 1)
                try:
                    null = null_of(rows[1:])
                    found = noise_verdict(
                        comparison("run", rows[0]), null, [LOSS], level=LEVEL, tests=tests, fitted=True
                    )
                except UsageError:
                    continue
                kept, called = kept + 1, called + (found.word in CALLS)
            line.append(f"{100 * called / max(1, kept):.2f} of {100 * kept / tried:.0f}")
            if law == "normal":
                at_most(called / kept, LEVEL / tests, kept)
    print(f"\nfitted, {law}: % called of % not refuted, 20 clean 1 / 70 tests, 100 clean 1 / 70: {', '.join(line)}")


def test_power_on_planted_shifts():
    """A shift of the loss in standard deviations of the clean runs, all normal."""
    rng = np.random.default_rng(4)
    repeats, shifts = REPEATS // 2, (0, 1, 2, 3, 4, 6, 8)
    designs = [([LOSS], 19, 1, False), ([LOSS], 99, 1, False), ([LOSS], 20, 1, True), (FOUR, 19, 1, False)]
    designs += [(FOUR, 99, 1, False), (FOUR, replicas_needed(LEVEL, 10), 10, False), ([LOSS], 20, 70, True)]
    table = {}
    for d, (measures, n, tests, fitted) in enumerate(designs):
        for shift in shifts:
            called = tried = 0
            while tried < repeats:
                rows = rng.normal(size=(n + 1, 4))
                rows[:, 2:] = np.exp(0.3 * rows[:, 2:])
                rows[0, 1] += shift
                try:
                    found = noise_verdict(
                        comparison("run", rows[0]), null_of(rows[1:]), measures, level=LEVEL, tests=tests, fitted=fitted
                    )
                except UsageError:
                    if not fitted:
                        raise
                    continue  # one fit in twenty is refuted by chance
                tried += 1
                called += found.word in CALLS
            table[d, shift] = called / tried
        name = f"{'fitted' if fitted else 'rank'}, {len(measures)} measures, {n} clean, {tests} tests"
        print(f"\npower, {name}: " + " ".join(f"{100 * table[d, s]:.0f}" for s in shifts), end="")
        at_most(table[d, 0], LEVEL / tests, repeats)
    assert table[0, 6] > 0.95
    assert table[1, 4] > 0.95
    assert table[4, 6] > 0.95
    assert table[5, 6] > 0.8


# Intervals of measures over replicas.


def odd(rng, n, rate):
    wrong = rng.random((n, 200)) < rate
    return (wrong[:, None] != wrong).mean(axis=2)


NUMBERS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "exponential": lambda rng, n: rng.exponential(size=n),
    "t of 4": lambda rng, n: rng.standard_t(4, n),
    "one run in ten elsewhere": lambda rng, n: (rng.random(n) < 0.1) + 0.1 * rng.normal(size=n),
    "two modes": lambda rng, n: rng.choice([0.7, 0.9], n),
}
KERNELS = {
    "churn, samples alone": lambda rng, n: odd(rng, n, 0.1),
    "churn, runs of their own rate": lambda rng, n: odd(rng, n, rng.beta(1, 9, (n, 1))),
    "distance, one cloud": lambda rng, n: _far(rng.normal(size=(n, 50))),
    "distance, runs of their own scale": lambda rng, n: _far(
        rng.normal(size=(n, 50)) * np.exp(0.5 * rng.normal(size=(n, 1)))
    ),
}


def _far(x):
    return np.linalg.norm(x[:, None] - x, axis=2)


def bootstrap(matrix, rng, draws=200):
    """Percentile limits over replicas drawn with replacement, pairs of one original left out; the alternative."""
    n = len(matrix)
    weights = rng.multinomial(n, np.full(n, 1 / n), draws).astype(float)
    pairs = weights.sum(axis=1) ** 2 - (weights**2).sum(axis=1)
    means = np.einsum("bi,ij,bj->b", weights, matrix, weights)[pairs > 0] / pairs[pairs > 0]
    return np.quantile(means, [0.025, 0.975])


SIZES = (3, 4, 5, 6, 10, 20, 50)


@pytest.mark.parametrize("law", NUMBERS)
def test_intervals_of_a_spread_cover(law):
    """The sd of a number; beside it the jackknife alone and the bootstrap."""
    rng = np.random.default_rng(5)
    draw = NUMBERS[law]
    truth = math.sqrt(np.mean([np.var(draw(rng, 100), ddof=1) for _ in range(20_000)]))
    line = []
    for n in SIZES:
        hits = alone = boot = 0
        for _ in range(REPEATS):
            x = draw(rng, n)
            found, kernel = spread(x).sd, (x[:, None] - x) ** 2 / 2
            hits += found.low <= truth <= found.high
            jackknife = sd_interval_from_variance(mean_over_pairs(kernel))
            alone += jackknife.low <= truth <= jackknife.high
            low, high = bootstrap(kernel, rng)
            boot += low <= truth**2 <= high
        line.append(f"{100 * hits / REPEATS:.0f} ({100 * alone / REPEATS:.0f}, {100 * boot / REPEATS:.0f})")
        if law in ("normal", "two modes"):
            assert hits / REPEATS > 0.93 - 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    print(f"\ncoverage of 95 %, sd, {law}: {SIZES} replicas, hull (jackknife alone, bootstrap): {', '.join(line)}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_intervals_cover(kernel):
    rng = np.random.default_rng(5)
    draw = KERNELS[kernel]
    truth = np.mean([mean_over_pairs(draw(rng, 100)).estimate for _ in range(2000)])
    line = []
    for n in (3, 5, 10, 20, 50):
        hits = boot = 0
        for _ in range(REPEATS):
            matrix = draw(rng, n)
            found = mean_over_pairs(matrix)
            hits += found.low <= truth <= found.high
            low, high = bootstrap(matrix, rng)
            boot += low <= truth <= high
        line.append(f"{100 * hits / REPEATS:.0f} ({100 * boot / REPEATS:.0f})")
        if n >= 10:
            assert hits / REPEATS > 0.92 - 3 * math.sqrt(0.05 * 0.95 / REPEATS)
    print(f"\ncoverage of 95 %, {kernel}: 3, 5, 10, 20, 50 replicas, jackknife (bootstrap): {', '.join(line)}")


def test_group_intervals_cover_and_groups_are_called_at_the_level():
    """Groups that differ in size alone: the common spread is covered, p values are uniform, and small groups stick out raw."""
    rng = np.random.default_rng(6)
    sizes = {
        "10": np.arange(500) < 10,
        "50": (np.arange(500) >= 10) & (np.arange(500) < 60),
        "440": np.arange(500) >= 60,
    }
    for common in (0.0, 0.05):
        rows = {name: [] for name in sizes}
        for k in range(REPEATS // 4):
            chance = np.clip(rng.beta(2, 5, 500) * 0.5 + 0.1 + common * rng.choice([-1, 1], (20, 1)), 0, 1)
            wrong = rng.random((20, 500)) < chance
            for g in group_spread(wrong, sizes, draws=99, seed=k):
                inside = g.common_sd.low <= common <= g.common_sd.high
                rows[g.name].append((g.sd.estimate, g.sd_by_size, inside, g.p <= LEVEL, g.corrected <= LEVEL))
        for name, found in rows.items():
            sd, by_size, inside, called, corrected = np.mean(found, axis=0)
            print(
                f"\ngroup of {name}, common sd {common}: raw sd {sd:.4f}, by size {by_size:.4f}, common covered "
                f"{100 * inside:.1f} %, called {100 * called:.1f} %, after Holm {100 * corrected:.1f} %",
                end="",
            )
            at_most(called, LEVEL, REPEATS // 4)
            assert inside > 0.9


def rates_of(kind, rng, common):
    """Wrong or not of 49 samples in 20 replicas: each rate of a sample moves with its replica, so that ``common`` is exact."""
    low, high = {"uncertain": (0.1, 0.6), "settled": (0.03, 0.1)}[kind]
    chance = rng.uniform(low, high, 49) + common * rng.choice([-1, 1], (20, 1))
    assert chance.min() >= 0
    return rng.random((20, 49)) < chance


@pytest.mark.parametrize("kind", ["uncertain", "settled"])
def test_what_a_group_has_in_common_is_covered(kind):
    """Also where it is nothing or little beside what single samples do."""
    rng, whole, line = np.random.default_rng(8), {"group": np.ones(49, bool)}, []
    for common in (0.0, 0.01, 0.02, 0.03):
        hits, high = 0, []
        for _ in range(REPEATS):
            (found,) = group_spread(rates_of(kind, rng, common), whole, draws=1)
            hits += found.common_sd.low <= common <= found.common_sd.high
            high.append(found.common_sd.high)
        assert hits / REPEATS > 0.9 - 3 * math.sqrt(0.09 / REPEATS)
        line.append(f"{common}: {100 * hits / REPEATS:.1f} (upper limit {np.median(high):.4f})")
    print(f"\ncoverage of 95 %, in common, 49 samples, 20 replicas, {kind}: " + ", ".join(line))
