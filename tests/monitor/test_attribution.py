"""Which rank is suspected, from what all ranks say of one step; and what follows from step to step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.detectors.rule import ALARM, NORMAL, WARNING
from unsilent.monitor.attribution import UNDETERMINED, Suspect, divergent_replicas, suspect_of
from unsilent.monitor.exchange import RankRow
from unsilent.monitor.suspicion import Suspicion


def rows(*said, step=9):
    """Of each rank: its score, or a dictionary."""
    return [
        RankRow(step, **one) if isinstance(one, dict) else RankRow(step, ALARM if one else NORMAL, one) for one in said
    ]


CHANGED = {"changed": 1, "level": ALARM, "score": float("inf")}
TABLE = [
    ((0, 0, 0), None),
    ((0,), None),
    ((5,), Suspect(0, "one rank")),
    ((CHANGED,), Suspect(0, "one rank")),
    ((0, 5), Suspect(1, "own history")),
    ((0, CHANGED), Suspect(1, "fingerprint")),
    ((50, CHANGED), Suspect(1, "fingerprint")),
    ((CHANGED, CHANGED), Suspect(UNDETERMINED, "bits changed in 2 ranks")),
    ((5, 16), Suspect(1, "own history")),
    ((5, 15), Suspect(UNDETERMINED, "2 ranks found something alike: data, software, or a fault in a state that they share")),
    ((5, float("inf")), Suspect(1, "own history")),
    ((float("inf"), float("inf")), Suspect(UNDETERMINED, "2 ranks found something alike: data, software, or a fault in a state "
                                           "that they share")),
    ((0, 0, {"replicas": 7}), Suspect(2, "vote")),
    ((0, 5, {"replicas": 7}), Suspect(2, "vote")),
    ((CHANGED, 0, {"replicas": 7}), Suspect(0, "fingerprint")),
    ((0, {"replicas": 7}), Suspect(UNDETERMINED, "2 versions of the parameters without a majority")),
    ((5, {"replicas": 7}), Suspect(0, "own history")),
    (({"replicas": 1}, {"replicas": 2}, {"replicas": 3}),
     Suspect(UNDETERMINED, "3 versions of the parameters without a majority")),
    ((0, 0, {"replicas": 7}, {"replicas": 7}), Suspect(UNDETERMINED, "2 versions of the parameters without a majority")),
    (({"replicas": 9}, 0, 0, 0), Suspect(0, "vote")),
    ((0, 0, 0, {"replicas": 7}, {"replicas": 7}), Suspect(UNDETERMINED, "2 ranks differ from the majority")),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), TABLE)
def test_the_suspect_of_a_step(said, expected):
    assert suspect_of(rows(*said)) == expected


def test_replicas_that_do_not_count_are_no_suspicion():
    assert suspect_of(rows(0, 0, {"replicas": 7}), replicas_count=False) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_divergent_ranks_are_those_without_the_majority(sums):
    found = divergent_replicas(sums)
    majority = [value for value in set(sums) if 2 * sums.count(value) > len(sums)]
    if len(set(sums)) == 1:
        assert found == []
    elif majority:
        assert found == [rank for rank, one in enumerate(sums) if one != majority[0]]
    else:
        assert found == list(range(len(sums)))


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_ranks(scores, random):
    order = list(range(len(scores)))
    random.shuffle(order)
    one, other = suspect_of(rows(*scores)), suspect_of(rows(*[scores[n] for n in order]))
    assert (one is None) == (other is None)
    if one is not None and one.rank != UNDETERMINED:
        assert order[other.rank] == one.rank


@given(
    st.builds(
        RankRow, st.integers(0, 2**40), st.integers(0, 2), st.floats(), st.integers(-1, 2**31), st.integers(0, 1),
        st.integers(0, 1), st.integers(0, 9), st.integers(0, 2**63 - 1), st.integers(1, 4096), st.integers(1, 4096),
        st.integers(1, 4096), st.integers(1, 999), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1),
    )
)  # fmt: skip
def test_rows_are_whole_numbers_on_the_way(row):
    words = np.array(row.to_words(), dtype=np.int64).tolist()
    assert repr(RankRow.from_words(words)) == repr(row)


# -- from step to step ---------------------------------------------------------------------------------------------


def follow(suspicion, *steps, interval=4):
    """Whether each step brings a new suspect."""
    return [suspicion.follow(suspicion.relevant(one), interval) for one in steps]


def test_a_suspect_is_new_once():
    suspicion = Suspicion(True, ALARM)
    assert follow(suspicion, rows(0, 5), rows(0, 6), rows(0, 0), rows(0, 5), rows(7, 0)) == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_a_rank_that_was_like_the_others_again_may_differ_once_more():
    def compared(step, differs):
        return [RankRow(step, replicas=one) for one in (1, 1, 1 + differs)]

    found = follow(Suspicion(True, ALARM), *[compared(step, step in (30, 33, 36, 50)) for step in range(30, 60)])
    assert [30 + n for n, is_new in enumerate(found) if is_new] == [30, 50]
    restored = compared(30, True), compared(26, False), compared(27, True)
    assert follow(Suspicion(True, ALARM), *restored) == [True, False, True]


def test_something_else_in_the_same_rank_is_new():
    lasting, more = ([RankRow(step, ALARM, 5.0, is_new=new)] for step, new in ((9, 0), (10, 1)))
    assert follow(Suspicion(False, ALARM), lasting, lasting, more, lasting) == [True, False, True, False]
    warned = [RankRow(9, WARNING, 0.9, is_new=1)]
    assert follow(Suspicion(False, ALARM), lasting, warned) == [True, False]


def test_lower_levels_are_not_relevant():
    warning = rows(0, {"level": WARNING, "score": 0.9})
    assert follow(Suspicion(True, ALARM), warning) == [False]
    assert follow(Suspicion(True, WARNING), warning) == [True]


def differing(suspicion, *steps, interval=4):
    """The ranks that differ in each step, and whether that is new."""
    result = []
    for one in steps:
        suspicion.follow(one, interval)
        result.append((suspicion.differing, suspicion.is_difference_new))
    return result


def replicas(step, *sums, **changes):
    return [RankRow(step, replicas=one, **(changes if rank == 1 else {})) for rank, one in enumerate(sums)]


def test_ranks_that_differ_are_named_as_long_as_it_lasts():
    two = [replicas(step, 1, 1 + (step > 30)) for step in (30, 31, 32)]
    assert differing(Suspicion(True, ALARM), *two) == [((), False), ((0, 1), True), ((0, 1), False)]
    four = [replicas(step, 1, 1 + (step > 30), 1, 1) for step in (30, 31, 32)]
    assert differing(Suspicion(True, ALARM), *four) == [((), False), ((1,), True), ((1,), False)]


def test_a_rank_whose_bits_changed_is_the_one_that_differs():
    steps = replicas(30, 1, 1, changed=1), replicas(31, 1, 2), replicas(32, 1, 2)
    assert differing(Suspicion(True, ALARM), *steps) == [((), False), ((1,), False), ((1,), False)]
    later = [replicas(step, 1, 1 + (step == 60)) for step in range(33, 61)]
    assert differing(Suspicion(True, ALARM), *steps, *later)[-1] == ((0, 1), True)


def test_ranks_that_began_alike_are_compared_from_the_first_step_on():
    assert differing(Suspicion(True, ALARM, begins_alike=True), replicas(2, 1, 2)) == [((0, 1), True)]


def test_replicas_that_differ_from_the_start_are_not_compared():
    early, late = ([RankRow(step, replicas=one) for one in (1, 1, 2)] for step in (3, 30))
    suspicion = Suspicion(True, ALARM)
    assert follow(suspicion, early, late) == [False, False]
    suspicion = Suspicion(True, ALARM)
    assert follow(suspicion, late, late) == [True, False]
    assert follow(Suspicion(False, ALARM), late) == [False]
