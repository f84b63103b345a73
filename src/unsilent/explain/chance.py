"""Probability that chance makes a few runs agree.

Runs are compared with the first of their set. What is said here takes the comparisons for independent of each other, which
those of one set are only about.
"""

from __future__ import annotations

from itertools import count

RARE_DIFFERENCE_SHARE = 0.1
"""Share of runs in which a difference must show to be reported where all runs agree."""
DIFFERING_SETS_NEEDED = 2
"""Times that runs have to part again before a guess is reported as found: once alone could be chance as well."""
_CHANCE = 0.03


def probability_of_missing(runs: int, share: float = RARE_DIFFERENCE_SHARE) -> float:
    """How likely all runs agree though a difference shows in a share of them: in none of these runs, or in all.

    >>> round(probability_of_missing(3), 2)
    0.73
    """
    return float((1 - share) ** runs + share**runs)


def probability_of_chance_agreement(plain: int, pinned: int) -> float:
    """How likely ``pinned`` comparisons all agree by chance, where of ``plain`` ones the last and another did not.

    The posterior predictive of a share of which nothing is known (uniform): a pin that does nothing leaves it as it is.

    >>> round(probability_of_chance_agreement(2, 6), 3)
    0.012
    """
    less, more = plain - 1, plain - 1 + pinned
    return less * (less + 1) * (less + 2) / (more * (more + 1) * (more + 2))


def agreeing_runs_needed(plain: int) -> int:
    """How many comparisons have to agree until chance is unlikely (3 %): 4, 7, 9, ... for ``plain`` of 2, 3, 4, ..."""
    return next(pinned for pinned in count() if probability_of_chance_agreement(plain, pinned) < _CHANCE)
