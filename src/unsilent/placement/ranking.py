"""Ranks the placements and reduction programs for a machine by predicted time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.lazy_numpy import np, npt
from unsilent.placement.cost import AlphaBeta, CostModel, StepCost, Traffic, traffic
from unsilent.placement.placements import Placement, placements
from unsilent.placement.programs import Program
from unsilent.placement.synthesis import MOST_STEPS, Grouping, Statement, Statements, statements
from unsilent.placement.system import System
from unsilent.report.shown import Shown

Divisors = tuple[int, ...]
"""Number of times that a payload was divided by each factor of the hierarchy."""


@dataclass(frozen=True)
class Reduction:
    """A reduction to place: its axes, payload and weight.

    Attributes:
        axes: Names of the axes over which devices reduce together.
        payload: Bytes of the whole input (for an all-gather, of the whole result) of each device.
        weight: Relative frequency or importance, compared with the other reductions.
        goal: One of `unsilent.placement.programs.GOALS`.
    """

    axes: tuple[str, ...]
    payload: float
    weight: float = 1.0
    goal: str = "all-reduce"


@dataclass(frozen=True)
class RankedStep:
    """A step of a program with its predicted time.

    ``payload``: bytes in the group with the largest payload.
    """

    statement: Statement
    payload: float
    cost: StepCost


@dataclass(frozen=True)
class RankedProgram:
    """A program on a placement with its predicted time.

    Attributes:
        levels: Numbers of the machine's levels that the hierarchy of the reduction has.
        hierarchy: Factors of the hierarchy.
        seconds: Predicted time in seconds.
        flat_seconds: Predicted seconds of a single collective over all devices of the reduction.
        steps: Steps of the program; empty if there is nothing to reduce.
    """

    levels: tuple[int, ...]
    hierarchy: tuple[int, ...]
    seconds: float
    flat_seconds: float
    steps: tuple[RankedStep, ...]

    @property
    def ratio(self) -> float:
        """Time of the flat collective over the time of this program."""
        return self.flat_seconds / self.seconds if self.seconds else 1.0

    @property
    def bottleneck(self) -> RankedStep | None:
        """The step with the longest predicted time, or None without steps."""
        return max(self.steps, key=lambda step: step.cost.seconds, default=None)

    def program(self) -> Program:
        """The program for ranks 0 .. k - 1, which stand for the k devices of the reduction."""
        return Program(prod(self.hierarchy), tuple(step.statement.step(self.hierarchy) for step in self.steps))

    def text(self, system: System) -> str:
        """Description of the program, with the names of the machine's levels."""
        names = [system.levels[at].name for at in self.levels]
        return "; ".join(statement_text(step.statement, names) for step in self.steps) or "nothing to reduce"


@dataclass(frozen=True)
class RankedPlacement:
    """A placement with the best programs of each reduction, fastest first."""

    placement: Placement
    seconds: float
    flat_seconds: float
    programs: tuple[tuple[RankedProgram, ...], ...]


@dataclass(frozen=True, repr=False)
class Ranking(Shown):
    """Placements on a machine, fastest first.

    Attributes:
        candidates: Number of pairs of a placement and a program that were compared, over all reductions.
        search_seconds: Time of the search in seconds.
    """

    REPORT = "unsilent.placement.report:report"
    system: System
    axes: Mapping[str, int]
    reductions: tuple[Reduction, ...]
    model: str
    limit: int
    placements: tuple[RankedPlacement, ...]
    candidates: int
    search_seconds: float


def rank_placements(
    system: System,
    axes: Mapping[str, int],
    reductions: Sequence[Reduction],
    model: CostModel | None = None,
    *,
    limit: int = MOST_STEPS,
    top: int = 10,
) -> Ranking:
    """Rank all placements with their best programs, fastest first.

    Args:
        system: The machine.
        axes: Sizes of the parallelism axes by name; their product is the number of devices.
        reductions: Reductions; times are added up with their weights.
        model: Model that predicts times; ``None`` for `AlphaBeta` with rings.
        limit: Maximum number of steps in a program.
        top: Number of programs kept for each placement and reduction.

    Raises:
        UsageError: Axes and machine do not fit, or a reduction names an axis that does not exist.
    """
    start = time.perf_counter()
    costs = AlphaBeta(system) if model is None else model
    if not reductions:
        raise UsageError("nothing is reduced; expected the names of one or more axes, like data")
    for reduction in reductions:
        _check(reduction, axes)
    ranked, candidates = [], 0
    for placement in placements(system.counts, axes):
        sets = [_ProgramSet(system, placement, reduction, costs, limit) for reduction in reductions]
        candidates += sum(len(program_set.seconds) for program_set in sets)
        best = tuple(program_set.best(top) for program_set in sets)
        total, flat = (
            sum(r.weight * value for r, value in zip(reductions, values, strict=True))
            for values in ([p[0].seconds for p in best], [p[0].flat_seconds for p in best])
        )
        ranked.append(RankedPlacement(placement, total, flat, best))
    ranked.sort(key=lambda placement: placement.seconds)
    return Ranking(
        system, dict(axes), tuple(reductions), costs.name, limit, tuple(ranked), candidates,
        time.perf_counter() - start,
    )  # fmt: skip


def _check(reduction: Reduction, axes: Mapping[str, int]) -> None:
    if not reduction.axes:
        raise UsageError("a reduction names no axis; expected one or more, like data")
    for name in reduction.axes:
        if name not in axes:
            raise unknown_name_error("axis", name, axes)
    if len(set(reduction.axes)) < len(reduction.axes):
        raise UsageError(f"the reduction {','.join(reduction.axes)} names an axis twice; name each once")
    if reduction.payload <= 0 or reduction.weight <= 0:
        raise UsageError(
            f"the reduction over {','.join(reduction.axes)} has {reduction.payload:g} bytes and weight {reduction.weight:g}; "
            "expected more than 0 of both"
        )


class _ProgramSet:
    """All programs of one reduction on one placement, with their predicted times."""

    def __init__(
        self, system: System, placement: Placement, reduction: Reduction, model: CostModel, limit: int
    ) -> None:
        factors = placement.factors(reduction.axes)
        self.levels = tuple(at for at, factor in enumerate(factors) if factor > 1)
        self.hierarchy = tuple(factors[at] for at in self.levels)
        self._plans = plans(len(self.levels), reduction.goal, limit)
        self._model, self._payload, self._system = model, reduction.payload, system
        self._groups = placement.reduction_groups(reduction.axes)
        self._traffic: dict[tuple[Grouping, tuple[float, ...]], Traffic] = {}

    @cached_property
    def costs(self) -> list[RankedStep]:
        """The distinct steps of all programs, with their costs."""
        return [self._step(statement, divisors) for statement, divisors in self._plans.steps]

    @cached_property
    def seconds(self) -> npt.NDArray[np.float64]:
        """Predicted time of each program."""
        times = np.array([*(step.cost.seconds for step in self.costs), 0.0])
        result: npt.NDArray[np.float64] = times[self._plans.table].sum(axis=1)
        return result

    def _step(self, statement: Statement, divisors: tuple[Divisors, ...]) -> RankedStep:
        small = [1 / prod(f**e for f, e in zip(self.hierarchy, factors, strict=True)) for factors in divisors]
        largest = max(small)
        key = statement.grouping, tuple(share / largest for share in small)
        loads = self._traffic.get(key)
        if loads is None:
            local = np.array(statement.grouping.groups(self.hierarchy))
            groups = self._groups[:, local].reshape(-1, local.shape[1])
            shares = np.array(key[1])[_small_groups(statement.grouping, local, self.hierarchy)]
            loads = self._traffic[key] = traffic(self._system, groups, np.tile(shares, len(self._groups)))
        payload = largest * self._payload
        return RankedStep(statement, payload, self._model.cost(statement.collective, loads, payload))

    def best(self, top: int) -> tuple[RankedProgram, ...]:
        """The ``top`` fastest programs, the shorter first among equally fast ones."""
        flat = float(self.seconds[0])
        order = np.argsort(np.round(self.seconds / (flat or 1.0), 9), kind="stable")[:top]
        return tuple(
            RankedProgram(
                self.levels, self.hierarchy, float(self.seconds[number]), flat,
                tuple(self.costs[at] for at in self._plans.table[number] if at < len(self.costs)),
            )
            for number in order
        )  # fmt: skip


@dataclass(frozen=True)
class Plans:
    """All programs for a number of levels, as a table of steps.

    Attributes:
        steps: Different steps of the programs: a statement, and how its groups' payloads were divided before.
        table: Numbers of the steps of each program, int[programs, limit]; ``len(steps)`` after the end of a program.
    """

    steps: tuple[tuple[Statement, tuple[Divisors, ...]], ...]
    table: npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def plans(depth: int, goal: str, limit: int) -> Plans:
    """All programs for ``depth`` levels, with the payload of each step; the first is the flat collective."""
    programs = statements(depth, goal, limit)
    numbers: dict[tuple[Statement, tuple[Divisors, ...]], int] = {}
    rows = [[numbers.setdefault(step, len(numbers)) for step in divided(p, depth, goal)] for p in programs]
    table = np.full((len(rows), limit), len(numbers))
    for row, steps in zip(table, rows, strict=True):
        row[: len(steps)] = steps
    return Plans(tuple(numbers), table)


def divided(program: Statements, depth: int, goal: str = "all-reduce") -> list[tuple[Statement, tuple[Divisors, ...]]]:
    """The statements of a program, with the divisors of the payload of each group.

    The divisors give the number of divisions of the payload by each factor, at two devices per level.

    The payload is the input of a collective, or the result of an all-gather. Groups of a step may differ.
    """
    small = (2,) * depth
    first: Divisors = (int(goal == "all-gather"),) * depth
    held = dict.fromkeys(range(2**depth), first)
    result = []
    for statement in program:
        groups = _groups(statement.grouping, small)
        spans = _spans(statement.grouping, depth)
        sign = {"reduce-scatter": 1, "all-gather": -1}.get(statement.collective, 0)
        before = {group: held[group[0]] for group in groups}
        after = {g: tuple(e + sign * s for e, s in zip(b, spans, strict=True)) for g, b in before.items()}
        result.append((statement, tuple((after if sign < 0 else before).values())))
        for group in groups:
            for rank in group:
                held[rank] = after[group]
    return result


def _small_groups(
    grouping: Grouping, groups: npt.NDArray[np.int64], hierarchy: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Number of the equivalent group at two devices per level, for each group of a hierarchy.

    Programs distinguish the first component of a level from the others, but not the others from each other.
    """
    coordinates = np.minimum(np.unravel_index(groups[:, 0], hierarchy), 1)
    first = np.ravel_multi_index(tuple(coordinates), (2,) * len(hierarchy))
    numbers = {group[0]: number for number, group in enumerate(_groups(grouping, (2,) * len(hierarchy)))}
    return np.array([numbers[rank] for rank in first.tolist()])


@lru_cache(maxsize=1024)
def _groups(grouping: Grouping, hierarchy: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return grouping.groups(hierarchy)


@lru_cache(maxsize=1024)
def _spans(grouping: Grouping, depth: int) -> tuple[int, ...]:
    """For each level, 1 if a group extends over it and otherwise 0."""
    last = depth if grouping.form == "inside" else grouping.level
    return tuple(int(grouping.ancestor <= at < last) for at in range(depth))


def statement_text(statement: Statement, names: Sequence[str]) -> str:
    """Description of a statement.

    ``names``: names of the levels of its hierarchy.
    """
    grouping, depth = statement.grouping, len(names)
    if grouping.form == "inside":
        where = "over all devices" if grouping.level == 0 else f"inside each {names[grouping.level - 1]}"
    else:
        devices = f"the {names[grouping.level - 1]}s" if grouping.level < depth else "the devices"
        where = f"across {devices}" if grouping.form == "parallel" else f"across the first devices of {devices}"
        if grouping.ancestor:
            where += f" of each {names[grouping.ancestor - 1]}"
    return f"{statement.collective} {where}"
