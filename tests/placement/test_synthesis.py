"""Synthesised programs against a search by brute force, and the counts of published hierarchies."""

from __future__ import annotations

from collections import Counter

import pytest

from oracles.reduction_oracle import all_groupings, all_programs
from unsilent.basics.errors import UsageError
from unsilent.placement.programs import check, states
from unsilent.placement.ranking import divided
from unsilent.placement.synthesis import groupings, search, statements, synthesise

HIERARCHIES = [(2, 2), (2, 4), (4, 2), (3, 2)]


def as_sets(hierarchy, programs):
    return [tuple((s.collective, tuple(sorted(s.grouping.groups(hierarchy)))) for s in program) for program in programs]


@pytest.mark.parametrize("hierarchy", [*HIERARCHIES, (2, 2, 2), (2, 3, 2), (2, 1, 2)])
def test_groupings_are_those_of_the_coordinates_each_once(hierarchy):
    found = [tuple(sorted(one.groups(hierarchy))) for one in groupings(hierarchy)]
    assert len(found) == len(set(found))
    assert set(found) == set(all_groupings(hierarchy))


@pytest.mark.parametrize("goal", ["all-reduce", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("hierarchy", HIERARCHIES)
def test_every_valid_program_is_found_and_no_other(hierarchy, goal):
    found = as_sets(hierarchy, search(hierarchy, goal))
    assert len(found) == len(set(found))
    assert set(found) == set(all_programs(hierarchy, goal, 5))


def test_every_valid_program_of_three_levels_up_to_four_steps_is_found():
    assert set(as_sets((2, 2, 2), search((2, 2, 2), limit=4))) == set(all_programs((2, 2, 2), "all-reduce", 4))


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["all-reduce", "reduce-scatter", "all-gather"])
def test_every_valid_program_of_three_levels_is_found(goal):
    assert set(as_sets((2, 2, 2), search((2, 2, 2), goal))) == set(all_programs((2, 2, 2), goal, 5))


@pytest.mark.parametrize(
    ("hierarchy", "by_length", "idle"),
    [
        ((2, 2), [1, 4, 24, 42, 22], False),
        ((2, 4), [1, 4, 24, 42, 22], False),
        ((4, 2), [1, 4, 24, 42, 22], False),
        ((2, 2, 2), [1, 6, 59, 319, 1250], False),
        ((2, 2), 104, True),
        ((2, 2, 2), 1803, True),
    ],
)
def test_counts_of_programs(hierarchy, by_length, idle):
    programs = search(hierarchy, idle_broadcast=idle)
    if idle:
        assert len(programs) == by_length
    else:
        lengths = Counter(map(len, programs))
        assert [lengths[n] for n in range(1, 6)] == by_length


@pytest.mark.parametrize(("hierarchy", "limit"), [((3, 3), 5), ((2, 8), 4), ((4, 4), 4), ((5, 2), 5), ((2, 3, 2), 4)])
def test_programs_depend_on_the_number_of_levels_alone(hierarchy, limit):
    assert set(search(hierarchy, limit=limit)) == set(statements(len(hierarchy), "all-reduce", limit))


@pytest.mark.parametrize("goal", ["all-reduce", "reduce-scatter", "all-gather"])
def test_programs_at_other_sizes_are_proven_valid(goal):
    for hierarchy, limit in (((3, 4), 5), ((2, 3, 2), 3)):
        programs = list(synthesise(hierarchy, goal, limit))
        assert programs
        for program in programs:
            check(program, goal)


@pytest.mark.parametrize("goal", ["all-reduce", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("hierarchy", [(3, 4), (2, 3, 2)])
def test_payloads_of_steps_are_the_chunks_that_devices_hold(hierarchy, goal):
    k = 12
    for program, real in zip(statements(len(hierarchy), goal, 4), synthesise(hierarchy, goal, 4), strict=True):
        trace = list(states(real, goal))
        for at, (statement, divisors) in enumerate(divided(program, len(hierarchy), goal)):
            state = trace[at + 1] if statement.collective == "all-gather" else trace[at]
            roots = {group[0] for group in real.steps[at].groups}
            rows = max(sum(bool(state[d] >> (c * k) & ((1 << k) - 1)) for c in range(k)) for d in roots)
            shares = []
            for one in divisors:
                share = k
                for factor, power in zip(hierarchy, one, strict=True):
                    share /= factor**power
                shares.append(share)
            assert max(shares) == rows


def test_one_device_needs_no_program():
    assert [p.steps for p in synthesise((1, 1))] == [()]


@pytest.mark.parametrize(
    ("hierarchy", "goal", "limit", "message"),
    [
        ((2, 0), "all-reduce", 5, "level of size 0"),
        ((2, 2), "allreduce", 5, "did you mean 'all-reduce'"),
        ((2, 2), "all-reduce", 6, "expected 1 to 5"),
        ((2,) * 5, "all-reduce", 5, "spans 5 levels"),
    ],
)
def test_what_cannot_be_searched_is_refused(hierarchy, goal, limit, message):
    with pytest.raises(UsageError, match=message):
        list(synthesise(hierarchy, goal, limit))
