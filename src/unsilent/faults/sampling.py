"""Drawing of distinct numbers, uniformly or by weight, without a list of all candidates.

`draw_distinct` draws a uniform subset. `successive_sample_counts` is weighted sampling without replacement: slots are drawn
one by one, and a slot that was already drawn is drawn again (successive sampling; counts per group follow Wallenius'
distribution). It runs the equivalent race of exponential clocks (Efraimidis and Spirakis, 2006): every slot
rings after an Exp(weight) time, and the first k to ring are the sample. Slots of one group share a weight, so
only counts per group are needed until few slots remain.

Invariants: the cost grows with k and the number of groups, never with the number of slots (unless k is over half
of them); sampling always terminates, even if k is the number of slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_ROUNDS = 6
_WORD = (1 << 64) - 1
_RACE = 4096  # number of clocks that are raced one by one


def draw_distinct(rng: np.random.Generator, total: int, k: int) -> Ints:
    """Draw ``k`` distinct numbers of ``range(total)``, in ascending order, with every set equally likely."""
    if k == 1:
        return rng.integers(total, size=1)
    if 2 * k > total:  # draw the excluded numbers instead, because redrawing collisions would be slow
        is_drawn = np.ones(total, dtype=np.bool_)
        is_drawn[draw_distinct(rng, total, total - k)] = False
        return np.flatnonzero(is_drawn)
    result = np.unique(rng.integers(total, size=k))
    while result.size < k:
        result = np.unique(np.concatenate([result, rng.integers(total, size=k - result.size)]))
    return result


def successive_sample_counts(rng: np.random.Generator, slots: Ints, weight: npt.NDArray[np.float64], k: int) -> Ints:
    """Numbers of drawn slots per group when ``k`` distinct slots are drawn one by one with given weights.

    ``slots`` int64[R]: number of slots in each group; ``weight`` float64[R], positive: weight of each single slot
    in a group; ``k <= slots.sum()``. Returns int64[R], each at most its entry in ``slots``, with sum ``k``.
    """
    taken, pool, need = np.zeros_like(slots), slots.copy(), k
    window = np.inf  # the clocks of the pool ring within this time from now; exponential clocks have no memory
    while 0 < need < pool.sum() and pool.sum() > _RACE:
        step = window / 2 if np.isfinite(window) else need / float(weight @ pool)
        rung = rng.binomial(pool, np.minimum(np.expm1(-weight * step) / np.expm1(-weight * window), 1.0))
        if (count := int(rung.sum())) <= need:
            taken, pool, need, window = taken + rung, pool - rung, need - count, window - step
        else:
            pool, window = rung, step
    if need == pool.sum():
        return np.asarray(taken + pool)
    if need:
        group = np.repeat(np.arange(slots.size), pool)
        chance = rng.random(group.size)
        times = -np.log1p(chance * np.expm1(-weight[group] * window)) / weight[group]
        first = np.argpartition(times, need - 1)[:need]
        taken += np.bincount(group[first], minlength=slots.size)
    return taken


def shuffled_index(k: int, total: int) -> int:
    """The ``k``-th number of ``range(total)`` in a fixed shuffled order.

    Uses a Feistel network over the next even power of two, repeated until the result is in the range (Black and Rogaway
    2002).
    """
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = k >> half, k & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_splitmix64(right, number) & mask)
        k = left << half | right
        if k < total:
            return k


def _splitmix64(value: int, key: int) -> int:
    """The hash Splitmix64 (Steele, Lea and Flood 2014) of a value under a key."""
    x = (value + (key + 1) * 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
