"""What programs mean: against Boolean matrices and loops, and what is said of a program that sums wrongly."""

from __future__ import annotations

import random

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.placement.programs import (
    COLLECTIVES,
    Program,
    Step,
    apply,
    check,
    initial_state,
    reached,
    states,
)


def oracle(collective, matrices):
    """The matrices of a group after a collective, by the published table; None where it is not valid."""
    held = [[chunk for chunk in range(len(m)) if m[chunk].any()] for m in matrices]
    total = sum(m.astype(int) for m in matrices)
    empty = np.zeros_like(matrices[0])
    if collective == "broadcast":
        root = matrices[0]
        included = all(not (m & ~root).any() for m in matrices)
        changes = any((m != root).any() for m in matrices)
        return [root] * len(matrices) if root.any() and included and changes else None
    if not all(held):
        return None
    if collective == "all-gather":
        same = len({len(h) for h in held}) == 1
        apart = all(not set(a) & set(b) for n, a in enumerate(held) for b in held[:n])
        return [total > 0] * len(matrices) if same and apart else None
    if any(h != held[0] for h in held) or (total > 1).any():
        return None
    if collective == "all-reduce":
        return [total > 0] * len(matrices)
    if collective == "reduce":
        return [total > 0] + [empty] * (len(matrices) - 1)
    if len(held[0]) % len(matrices):
        return None
    parts = []
    for part in np.split(np.array(held[0]), len(matrices)):
        own = empty.copy()
        own[part] = (total > 0)[part]
        parts.append(own)
    return parts


def random_step(k, rng, last):
    """Disjoint groups of equal size in any order, not necessarily of all devices; now and then those of the last step."""
    if last and rng.random() < 0.5:
        return Step(rng.choice(COLLECTIVES), last.groups)
    ranks = rng.sample(range(k), k)
    size = rng.choice([n for n in range(2, k + 1) if k % n == 0])
    groups = [tuple(ranks[at : at + size]) for at in range(0, k, size)]
    return Step(rng.choice(COLLECTIVES), tuple(groups[: rng.randint(1, len(groups))]))


def as_array(state):
    """A state as bool[devices, chunks, contributions]."""
    k = len(state)
    return np.array(
        [[[value >> (chunk * k + other) & 1 for other in range(k)] for chunk in range(k)] for value in state], bool
    )


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_steps_do_to_every_state_what_the_table_says(k):
    rng, valid, invalid = random.Random(k), dict.fromkeys(COLLECTIVES, 0), dict.fromkeys(COLLECTIVES, 0)
    for _ in range(800):
        state = initial_state(k, rng.choice(["all-reduce", "all-gather"]))
        step = None
        for _ in range(5):
            step, before = random_step(k, rng, step), as_array(state)
            expected = before.copy()
            for group in step.groups:
                after = oracle(step.collective, [before[rank] for rank in group])
                if after is None:
                    break
                expected[list(group)] = after
            else:
                state = apply(step, state)
                assert (as_array(state) == expected).all(), (step, before)
                valid[step.collective] += 1
                continue
            with pytest.raises(UsageError):
                apply(step, state)
            invalid[step.collective] += 1
    assert min(*valid.values(), *invalid.values()) >= 10, (valid, invalid)


HALVES = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            [("all-reduce", HALVES), ("all-reduce", ((0, 1, 2, 3),))],
            "double counting: device 1 of group (0, 1, 2, 3) brings",
        ),
        ([("reduce-scatter", HALVES), ("all-reduce", HALVES)], "hold different chunks, so that a sum would lose data"),
        ([("reduce", HALVES), ("all-reduce", HALVES)], "device 1 of group (0, 1) holds nothing (empty)"),
        ([("broadcast", HALVES)], "lost data: device 1 of group (0, 1) holds what the root 0 does not"),
        ([("reduce", HALVES), ("broadcast", ((1, 0),))], "device 1, the root of group (1, 0), holds nothing (empty)"),
        ([("all-reduce", HALVES), ("broadcast", HALVES)], "the broadcast changes nothing in group (0, 1)"),
        ([("reduce-scatter", ((0, 1, 2, 3),)), ("reduce-scatter", HALVES)], "different chunks"),
        ([("reduce-scatter", ((0, 1),)), ("all-gather", ((0, 2),))], "hold different numbers of chunks, 2, 4"),
        ([("all-gather", HALVES)], "hold the same chunk, so that one copy would be lost data"),
        ([("reduce-scatter", ((0, 1, 2),))], "the 4 chunks held by group (0, 1, 2) are not divisible by its 3 devices"),
        ([("all-reduce", HALVES)], "data is lost: chunk 0 of device 0 lacks the contribution of device 2"),
        ([("reduce", ((0, 1, 2, 3),))], "data is lost: device 1 ends with nothing"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_program_that_sums_wrongly_is_refused_with_the_reason(steps, text):
    with pytest.raises(UsageError, match=r"is not valid here|is not a valid all-reduce") as caught:
        check(Program(4, tuple(Step(*step) for step in steps)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Step("allreduce", ((0, 1),)), "did you mean 'all-reduce'?"),
        (lambda: Step("reduce", ((0, 1), (1, 2))), "share a rank"),
        (lambda: Step("reduce", ((0,),)), "groups of at least two ranks"),
        (lambda: Step("reduce", ()), "groups of at least two ranks"),
        (lambda: Program(4, (Step("reduce", ((0, 4),)),)), "rank 4 of “reduce {0,4}” is not one of the 4 devices"),
        (lambda: Program(0, ()), "at least one device"),
        (lambda: check(Program(2, ()), "sum"), "unknown goal 'sum'"),
    ],
)
def test_what_is_no_program_is_refused(make, text):
    with pytest.raises(UsageError) as caught:
        make()
    assert text in str(caught.value)


def test_goals_are_reached_by_one_collective_over_all_devices():
    everyone = (tuple(range(6)),)
    for goal in ("all-reduce", "reduce-scatter", "all-gather"):
        program = Program(6, (Step(goal, everyone),))
        before, after = states(program, goal)
        assert reached(after, goal)
        assert not reached(before, goal)
        check(program, goal)
    with pytest.raises(UsageError, match="one chunk each, all different"):
        check(Program(6, (Step("all-reduce", everyone),)), "reduce-scatter")


def test_a_broadcast_that_is_idle_in_one_group_is_valid_only_on_request():
    reduced = apply(Step("reduce", ((0, 1),)), initial_state(4))
    state = apply(Step("all-reduce", ((2, 3),)), reduced)
    step = Step("broadcast", HALVES)
    with pytest.raises(UsageError, match="changes nothing in group"):
        apply(step, state)
    assert apply(step, state, idle_broadcast=True) == apply(Step("broadcast", ((0, 1),)), state)


def test_a_program_is_shown_as_text_and_as_python():
    program = Program(4, (Step("reduce", HALVES), Step("all-reduce", ((0, 2),)), Step("broadcast", HALVES)))
    assert str(program) == "reduce {0,1} {2,3}; all-reduce {0,2}; broadcast {0,1} {2,3}"
    assert eval(repr(program)) == program
    assert str(Program(1, ())) == "nothing to do"
