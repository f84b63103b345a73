"""Which collectives of ranks are matched, and what is said of the others."""

from __future__ import annotations

import pytest

from unsilent.timeline.matching import RankCollective, match_collectives

A, B = ("gloo:all_reduce", 64), ("gloo:all_reduce", 128)


def match(*ranks, group="", sequences=None, communications=None):
    """Matches lists of (step, kind) of each rank; operations are numbered rank * 100 + k."""
    taken = []
    for rank, rows in enumerate(ranks):
        for at, (step, kind) in enumerate(rows):
            sequence = sequences[rank][at] if sequences else None
            communication = communications[rank][at] if communications else None
            taken.append(RankCollective(100 * rank + at, rank, group, step, *kind, sequence, communication))
    result = match_collectives(taken, {group: range(len(ranks))})
    together = {}
    for operation, number in result.numbers.items():
        together.setdefault(number, []).append(operation)
    return sorted(map(sorted, together.values())), result.notes


def test_the_order_within_a_step_counts():
    rows = [(0, A), (0, B), (1, A)]
    assert match(rows, rows) == ([[0, 100], [1, 101], [2, 102]], ())


def test_a_difference_ends_the_matching_of_its_step_alone():
    pairs, notes = match([(0, A), (0, A), (0, B), (1, A)], [(0, A), (0, B), (0, B), (1, A)])
    assert pairs == [[0, 100], [3, 103]]
    assert notes == (
        "4 collectives in complete steps differ between ranks and were not matched: gloo:all_reduce of 128 bytes on rank 1 (2), "
        "gloo:all_reduce of 64 bytes on rank 0 (1), gloo:all_reduce of 128 bytes on rank 0 (1); 2 were matched",
    )


def test_a_rank_without_one_of_a_group_is_reported():
    pairs, notes = match([(0, A)], [])
    assert pairs == []
    assert len(notes) == 1


def test_what_was_recorded_before_the_first_step_is_matched_only_where_equal():
    assert match([(-1, B), (0, A)], [(0, A)]) == ([[1, 100]], ())
    assert match([(-1, B), (0, A)], [(-1, B), (0, A)])[0] == [[0, 100], [1, 101]]


def test_groups_are_matched_apart():
    taken = [RankCollective(rank, rank, f"g{rank % 2}", 0, *A) for rank in range(4)]
    numbers = match_collectives(taken, {"g0": [0, 2], "g1": [1, 3]}).numbers
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ([5, 6, 7], [4, 5, 6], [[0, 101], [1, 102]]),  # rank 1 began to record earlier
        ([5, 6, 7], [5, 6, 6], [[0, 100], [1, 101], [2, 102]]),  # one number twice: by order
        ([5, 7, 9], [5, 7, 9], [[0, 100], [1, 101], [2, 102]]),  # gaps: by order
        ([5, 6, None], [5, 6, None], [[0, 100], [1, 101], [2, 102]]),
    ],
)
def test_numbers_of_a_trace_are_believed_only_where_they_are_sound(first, second, pairs):
    rows = [(0, A)] * 3
    assert match(rows, rows, sequences=[first, second])[0] == pairs


def test_numbers_that_contradict_name_or_size_are_not_believed():
    rows = [(0, A), (0, B)]
    assert match(rows, rows, sequences=[[1, 2], [2, 3]])[0] == [[0, 100], [1, 101]]


def test_the_number_of_a_communication_may_have_gaps():
    rows = [(0, A)] * 2
    assert match(rows, rows, communications=[[10, 900], [900, 10]])[0] == [[0, 101], [1, 100]]


def test_ranks_that_begin_two_collectives_in_another_order_are_matched():
    """As gloo does with broadcasts that are launched one after the other."""
    pairs, notes = match([(0, A), (0, B), (0, A)], [(0, B), (0, A), (0, A)])
    assert pairs == [[0, 101], [1, 100], [2, 102]]
    assert notes == ()
