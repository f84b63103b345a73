"""Where faults fall: chi-square tests against the two laws, rates, and exact enumeration of repeated draws.

Seeds are fixed, so a test either always passes or never does; the bound 1e-4 leaves room for an unlucky seed and none
for a wrong law at these sample sizes.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.faults import Population, Region, fault_model, sampling

UNLIKELY = 1e-4


def fits(counts, probabilities):
    """Chi-square goodness of fit of a Counter to a dict of probabilities."""
    assert set(counts) <= set(probabilities)
    n = sum(counts.values())
    observed = [counts[key] for key in probabilities]
    expected = [n * p for p in probabilities.values()]
    assert min(expected) > 5
    assert math.isclose(sum(probabilities.values()), 1)
    assert stats.chisquare(observed, expected).pvalue > UNLIKELY


def corrupted_bits(faults):
    return [(f.site, e, b) for f in faults for e, b in f.bit_positions()]


def draws(text, regions, n, law="per-element", seed=1):
    model, rng, population = fault_model(text), np.random.default_rng(seed), Population(regions)
    return [model.draw(population, rng, law) for _ in range(n)]


MIXED = [
    Region("a", "float32", (2, 3)),
    Region("b", "int8", (4,)),
    Region("c", "float16", (9,), np.array([8, 1])),
]


def test_per_element_is_uniform_over_elements_then_bits():
    counts = Counter(corrupted_bits(f)[0] for f in draws("bitflip", MIXED, 12000))
    wanted = {}
    for r in MIXED:
        for e in range(r.numel) if r.elements is None else r.elements.tolist():
            wanted |= {(r.site, e, b): 1 / 12 / r.codec.bits for b in range(r.codec.bits)}
    fits(counts, wanted)


def test_per_tensor_is_uniform_over_tensors_first():
    counts = Counter(corrupted_bits(f)[0] for f in draws("bitflip", MIXED, 12000, "per-tensor"))
    wanted = {}
    for r in MIXED:
        for e in range(r.numel) if r.elements is None else r.elements.tolist():
            wanted |= {(r.site, e, b): 1 / 3 / r.eligible_count / r.codec.bits for b in range(r.codec.bits)}
    fits(counts, wanted)


def test_tensors_without_the_bits_are_left_out():
    for law, wanted in (("per-element", {"a": 6 / 8, "c": 2 / 8}), ("per-tensor", {"a": 1 / 2, "c": 1 / 2})):
        fits(Counter(f[0].site for f in draws("bitflip:bits=exponent", MIXED, 3000, law)), wanted)


@pytest.mark.parametrize("law", ["per-element", "per-tensor"])
def test_many_flips_of_one_tensor_are_a_uniform_set(law):
    regions = [Region("a", "int8", (3,))]
    counts = Counter(b for f in draws("bitflip:count=5", regions, 3000, law) for b in corrupted_bits(f))
    fits(counts, {("a", e, b): 1 / 24 for e in range(3) for b in range(8)})


def one_by_one(weights, k):
    """Probability of each set of ``k`` when drawing one by one, collisions drawn again: all orders enumerated."""
    found = Counter()
    for order in itertools.permutations(weights, k):
        left, p = sum(weights.values()), 1.0
        for slot in order:
            p *= weights[slot] / left
            left -= weights[slot]
        found[frozenset(order)] += p
    return found


@pytest.mark.parametrize("race", [0, 4096], ids=["in counts", "clock by clock"])
@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.slow
def test_repeated_draws_match_enumeration(k, race, monkeypatch):
    monkeypatch.setattr(sampling, "_RACE", race)
    regions = [Region("a", "float32", (4,)), Region("b", "float32", (1,)), Region("c", "float32", (2,))]
    weights = {(r.site, e, 31): 1 / 3 / r.eligible_count for r in regions for e in range(r.eligible_count)}
    drawn = draws(f"bitflip:bits=sign,count={k}", regions, 4000, "per-tensor")
    fits(Counter(frozenset(corrupted_bits(f)) for f in drawn), one_by_one(weights, k))


@pytest.mark.parametrize("race", [0, 4096])
@pytest.mark.slow
def test_repeated_draws_match_enumeration_in_mixed_dtypes(race, monkeypatch):
    monkeypatch.setattr(sampling, "_RACE", race)
    regions = [Region("a", "float32", (2,)), Region("b", "float16", (3,))]
    weights = {("a", e, b): 1 / 8 for e in range(2) for b in range(23, 31)}
    weights |= {("b", e, b): 1 / 5 for e in range(3) for b in range(10, 15)}
    pairs = one_by_one(weights, 2)
    kinds = Counter()
    for pair, p in pairs.items():
        kinds[tuple(sorted(slot[0] for slot in pair))] += p
    drawn = draws("bitflip:bits=exponent,count=2", regions, 4000)
    fits(Counter(tuple(sorted(slot[0] for slot in corrupted_bits(f))) for f in drawn), kinds)


@pytest.mark.parametrize("race", [0, 3, 4096], ids=["in counts", "both", "clock by clock"])
@pytest.mark.slow
def test_counts_by_group_match_enumeration(race, monkeypatch):
    """One slot as heavy as the ten others together: it is the first in half of all draws."""
    monkeypatch.setattr(sampling, "_RACE", race)
    rng, slots, weight = np.random.default_rng(0), np.array([1, 10]), np.array([10.0, 1.0])
    first = Counter(
        int(sampling.successive_sample_counts(rng, slots, weight, 1)[0]) for _ in range(60_000 if race == 0 else 15_000)
    )
    fits(first, {0: 0.5, 1: 0.5})
    second = Counter(int(sampling.successive_sample_counts(rng, slots, weight, 2)[0]) for _ in range(5_000))
    fits(second, {1: 1 / 2 + 1 / 2 * 10 / 19, 0: 1 / 2 * 9 / 19})


@pytest.mark.parametrize("text", ["bitflip:rate=0.03", "zero:rate=0.2"])
def test_rate_corrupts_every_slot_alike(text):
    model = fault_model(text)
    total, p, n = model.capacity(MIXED), model.pattern.p, 4000
    drawn = draws(text, MIXED, n)
    if text.startswith("bitflip"):
        sizes, slots = [len(corrupted_bits(f)) for f in drawn], Counter(s for f in drawn for s in corrupted_bits(f))
    else:
        sizes = [sum(map(len, f)) for f in drawn]
        slots = Counter((x.site, e) for f in drawn for x in f for e in x.elements.tolist())
    assert len(slots) == total
    assert stats.chisquare(list(slots.values())).pvalue > UNLIKELY
    pmf = stats.binom(total, p).pmf(range(total + 1))
    low, high = stats.binom(total, p).ppf([0.01, 0.99]).astype(int)
    wanted = {low: pmf[: low + 1].sum(), high: pmf[high:].sum()} | {i: pmf[i] for i in range(low + 1, high)}
    fits(Counter(min(max(s, low), high) for s in sizes), wanted)


def test_rate_at_its_ends():
    assert draws("bitflip:rate=0", MIXED, 1) == [()]
    (everything,) = draws("bitflip:rate=1", MIXED, 1)
    assert len(corrupted_bits(everything)) == fault_model("bitflip").capacity(MIXED) == 6 * 32 + 4 * 8 + 2 * 16


@pytest.mark.parametrize("law", ["per-element", "per-tensor"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_near_capacity(law, missing):
    capacity = fault_model("bitflip").capacity(MIXED)
    (faults,) = draws(f"bitflip:count={capacity - missing}", MIXED, 1, law)
    assert len(set(corrupted_bits(faults))) == capacity - missing


def test_near_capacity_with_a_tensor_a_million_times_smaller():
    regions = [Region("big", "float32", (1000, 300)), Region("small", "float32", (1,))]
    (faults,) = draws("bitflip:bits=exponent,count=2399990", regions, 1, "per-tensor")
    assert sum(len(f.bit_positions()) for f in faults) == 2399990
    assert len(faults[1].bit_positions()) == 8  # with half of all draws, none of it is left


@pytest.mark.parametrize(("law", "pair", "triple"), [("per-element", (6, 6), (4, 4)), ("per-tensor", (8, 4), (6, 2))])
def test_runs_start_anywhere_they_fit(law, pair, triple):
    """``pair`` and ``triple``: one in how many runs of two and of three starts at a given place of a, and of c."""
    regions = [
        Region("a", "int8", (5,)),
        Region("b", "int8", (1,)),
        Region("c", "int8", (9,), np.array([7, 2, 3])),
    ]
    for n, (in_a, in_c), along_c in ((2, pair, [(2, 7), (2, 3)]), (3, triple, [(2, 3, 7)])):
        drawn = draws(f"zero:run={n}", regions, 3000, law)
        wanted = {("a", tuple(range(i, i + n))): 1 / in_a for i in range(6 - n)}
        wanted |= {("c", elements): 1 / in_c for elements in along_c}
        fits(Counter((f[0].site, tuple(f[0].elements.tolist())) for f in drawn), wanted)


@pytest.mark.parametrize(
    ("text", "law_of"),
    [
        ("burst:length=3", {0b111 << i: 1 / 6 for i in range(6)}),
        ("burst:length=2,bits=0-2+5-6", {0b11: 1 / 3, 0b110: 1 / 3, 0b1100000: 1 / 3}),
        ("stuck:bits=sign+0-1", {1: 1 / 3, 2: 1 / 3, 128: 1 / 3}),
        ("bitflip:run=1", {1 << i: 1 / 8 for i in range(8)}),
        ("random", dict.fromkeys(range(256), 1 / 256)),
        ("multibit:flips=2,bits=0-3", {a | b: 1 / 6 for a, b in itertools.combinations((1, 2, 4, 8), 2)}),
        ("multibit:flips=3,bits=sign+0-2,block=9", {135 - x: 1 / 4 for x in (1, 2, 4, 128)}),
        ("uniform:low=0.5,high=4.5", {1: 1 / 4, 2: 1 / 4, 3: 1 / 4, 4: 1 / 4}),
        ("uniform:low=0.5,high=1.5,sign=random", {1: 1 / 2, 255: 1 / 2}),
        ("copy", {i: 1 / 4 for i in range(5) if i != 2}),
    ],
)
def test_what_is_drawn_after_the_element_is_uniform(text, law_of):
    region = [Region("a", "int8", (5,), np.array([2]))]
    fits(Counter(int(f[0].operands[0]) for f in draws(text, region, 3000)), law_of)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_random_is_uniform_over_finite_words(dtype):
    region = Region("a", dtype, (1,))
    finite = [w for w in range(256) if np.isfinite(region.codec.decode(w))]
    assert len(finite) == {"float8_e4m3fn": 254, "float8_e5m2": 248}[dtype]
    found = Counter(int(f[0].operands[0]) for f in draws("random", [region], 4000))
    assert set(found) == set(finite)
    fits(found, {w: 1 / len(finite) for w in finite})


@given(total=st.integers(1, 200), data=st.data())
def test_distinct(total, data):
    k = data.draw(st.integers(0, total))
    found = sampling.draw_distinct(np.random.default_rng(k), total, k)
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(found.tolist()))
    assert found.size == k
    assert not k or 0 <= found[0] <= found[-1] < total


@given(
    groups=st.lists(st.tuples(st.integers(0, 30_000), st.floats(1e-9, 1.0)), min_size=1, max_size=6),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_successive_counts_add_up(groups, share, seed):
    slots, weight = np.array([g[0] for g in groups]), np.array([g[1] for g in groups])
    k = int(share * slots.sum())
    taken = sampling.successive_sample_counts(np.random.default_rng(seed), slots, weight, k)
    assert taken.sum() == k
    assert (taken <= slots).all()
    assert (taken >= 0).all()


def test_a_rate_has_no_per_tensor_law():
    with pytest.raises(UsageError, match=r"rate=0\.5 corrupts each element or bit with the same probability"):
        draws("bitflip:rate=0.5", MIXED, 1, "per-tensor")
