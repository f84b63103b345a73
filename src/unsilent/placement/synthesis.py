"""Synthesis of reduction programs: all valid sequences of collectives over a hierarchy that reach a goal.

A statement is a collective, a form and levels of the hierarchy of the reducing devices (level 0 is all of them, level
``j`` one component of the first ``j`` factors). The forms are those of P2 (Xie et al., MLSys 2022): *inside* (the
devices of each slice are a group), *parallel* (the i-th devices of all slices of one ancestor are a group) and *master*
(only their first devices are). Which sequences are valid depends on the number of levels, not on their sizes, as long
as each is at least 2 (checked in the tests against a search at the real sizes). So the search runs at size 2 per
level and its statements are then instantiated at the real sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.placement.programs import (
    COLLECTIVES,
    GOALS,
    Program,
    State,
    Step,
    initial_state,
    reached,
    try_apply,
)

MOST_STEPS = 5
"""Maximum number of steps in a program, as published."""
MOST_LEVELS = 4
"""Maximum number of levels of a hierarchy that is searched; four take seconds."""
FORMS = ("inside", "parallel", "master")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, order=True)
class Grouping:
    """A rule that divides the devices of a hierarchy into groups.

    Attributes:
        form: One of `FORMS`.
        level: The level of the slices.
        ancestor: The level under which slices are combined; for *inside*, the level itself.
    """

    form: str
    level: int
    ancestor: int

    def groups(self, hierarchy: Sequence[int]) -> Groups:
        """The groups of a hierarchy of this size, in ascending order of ranks."""
        devices = prod(hierarchy)
        size = prod(hierarchy[self.level :])
        if self.form == "inside":
            return tuple(tuple(range(first, first + size)) for first in range(0, devices, size))
        outer = prod(hierarchy[self.ancestor :])
        places = range(size) if self.form == "parallel" else range(1)
        return tuple(
            tuple(range(first + place, first + outer, size)) for first in range(0, devices, outer) for place in places
        )


@dataclass(frozen=True)
class Statement:
    """A collective together with a grouping, for hierarchies of any size."""

    collective: str
    grouping: Grouping

    def step(self, hierarchy: Sequence[int]) -> Step:
        """The step of this statement in a hierarchy of this size."""
        return Step(self.collective, self.grouping.groups(hierarchy))


Statements = tuple[Statement, ...]


def groupings(hierarchy: Sequence[int]) -> tuple[Grouping, ...]:
    """All groupings with at least two devices per group, without duplicates."""
    by_groups: dict[Groups, Grouping] = {}
    depth = len(hierarchy)
    candidates = [Grouping("inside", level, level) for level in range(depth)] + [
        Grouping(form, level, ancestor)
        for form in FORMS[1:]
        for level in range(1, depth + 1)
        for ancestor in range(level)
    ]
    for grouping in candidates:
        groups = grouping.groups(hierarchy)
        if len(groups[0]) > 1:
            by_groups.setdefault(groups, grouping)
    return tuple(by_groups.values())


def search(
    hierarchy: Sequence[int], goal: str = "all-reduce", limit: int = MOST_STEPS, idle_broadcast: bool = False
) -> list[Statements]:
    """All valid programs of at most ``limit`` statements for a hierarchy.

    Programs have no steps that change nothing.

    Args:
        hierarchy: Factors of the number of reducing devices, outermost first, each at least 2.
        goal: One of `GOALS`.
        limit: Maximum number of statements in a program.
        idle_broadcast: Whether a broadcast that changes nothing in some group, but something in another, is accepted.
    """
    return _Search(tuple(hierarchy), goal, idle_broadcast).programs(limit)


class _Search:
    """Graph of the states that programs can reach, expanded on demand."""

    def __init__(self, hierarchy: tuple[int, ...], goal: str, idle_broadcast: bool) -> None:
        self._goal, self._idle = goal, idle_broadcast
        self._start = initial_state(prod(hierarchy), goal)
        statements = [Statement(c, g) for c in COLLECTIVES for g in groupings(hierarchy)]
        self._steps = [(statement, statement.step(hierarchy)) for statement in statements]
        self._edges: dict[State, list[tuple[Statement, State]]] = {}

    def programs(self, limit: int) -> list[Statements]:
        """All programs that lead from the initial state to the goal, shortest first."""
        fringe = {self._start}
        for _ in range(limit):
            fringe = {after for state in fringe for _, after in self.edges(state)} - self._edges.keys()
        distance = self._distances()
        paths: list[Statements] = []
        self._walk(self._start, limit, (), distance, paths)
        return sorted(paths, key=len)

    def edges(self, state: State) -> list[tuple[Statement, State]]:
        """Statements that are valid in a state and change it, each with the following state."""
        if state not in self._edges:
            tried = ((s, try_apply(step, state, self._idle)) for s, step in self._steps)
            done = reached(state, self._goal)
            self._edges[state] = [] if done else [(s, a) for s, a in tried if not isinstance(a, str) and a != state]
        return self._edges[state]

    def _distances(self) -> dict[State, int]:
        """Number of steps from each expanded state to the goal, for states that can reach it."""
        before: dict[State, list[State]] = {}
        for state, edges in self._edges.items():
            for _, after in edges:
                before.setdefault(after, []).append(state)
        fringe = {state for state in before if reached(state, self._goal)}
        distance = dict.fromkeys(fringe, 0)
        while fringe:
            fringe = {b for state in fringe for b in before.get(state, ()) if b not in distance}
            steps = max(distance.values()) + 1
            distance.update(dict.fromkeys(fringe, steps))
        return distance

    def _walk(
        self, state: State, left: int, path: Statements, distance: dict[State, int], programs: list[Statements]
    ) -> None:
        if distance.get(state, left + 1) > left:
            return
        if distance[state] == 0:
            programs.append(path)
            return
        for statement, after in self._edges[state]:
            self._walk(after, left - 1, (*path, statement), distance, programs)


@lru_cache(maxsize=64)
def statements(depth: int, goal: str = "all-reduce", limit: int = MOST_STEPS) -> tuple[Statements, ...]:
    """All programs for hierarchies of ``depth`` levels, as statements.

    Raises:
        UsageError: The goal is unknown, or there are too many levels or steps to search.
    """
    if goal not in GOALS:
        raise unknown_name_error("goal", goal, GOALS)
    if depth > MOST_LEVELS:
        raise UsageError(
            f"the reduction spans {depth} levels of the system; expected at most {MOST_LEVELS}; combine levels of it"
        )
    if not 1 <= limit <= MOST_STEPS:
        raise UsageError(f"the length limit is {limit}; expected 1 to {MOST_STEPS} steps")
    return tuple(search((2,) * depth, goal, limit)) if depth else ((),)


def synthesise(hierarchy: Sequence[int], goal: str = "all-reduce", limit: int = MOST_STEPS) -> Iterator[Program]:
    """All programs for a hierarchy, shortest first, as explicit steps over ranks.

    Args:
        hierarchy: Factors of the number of reducing devices, outermost first; factors of 1 are left out.
        goal: One of `GOALS`.
        limit: Maximum number of steps in a program.

    Raises:
        UsageError: See `statements`; also for a factor below 1.
    """
    if any(factor < 1 for factor in hierarchy):
        raise UsageError(f"the hierarchy {list(hierarchy)} has a level of size {min(hierarchy)}; expected 1 or more")
    real = tuple(factor for factor in hierarchy if factor > 1)
    for program in statements(len(real), goal, limit):
        yield Program(prod(real), tuple(statement.step(real) for statement in program))
