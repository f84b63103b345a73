"""Which rows of a result are shown where: levels, order, the most vulnerable ones, and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from unsilent.studies.pvf.records import PvfResult, PvfRow

EVERYTHING = "param:*"
"""Where faults fall unless it is said: every parameter of the model."""
LEVELS = ("component", "layer", "tensor")
TOP = 20
"""Rows of layers (and tensors) that a terminal shows; the rest is counted."""


class Named(Protocol):
    """A row of a result, or of two that are compared."""

    @property
    def target(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def flips(self) -> int | None: ...


R = TypeVar("R", bound=Named)


def main_level(result: PvfResult) -> str:
    """The level that figures compare: components, else layers, else tensors; ``model`` where there is nothing else."""
    present = {row.level for row in result.rows}
    return next((level for level in LEVELS if level in present), "model")


def at_level(rows: Sequence[R], *levels: str) -> list[R]:
    """The rows of these levels: targets in the order of the result, each with its numbers of flips ascending."""
    kept = [row for level in levels for row in rows if row.level == level]
    place = {key: i for i, key in enumerate(dict.fromkeys((row.level, row.target) for row in kept))}
    return sorted(kept, key=lambda row: (place[row.level, row.target], row.flips is None, row.flips or 0))


def first_flips(rows: Sequence[Named]) -> int | None:
    """The number of flips a single sentence is about: 1 where tried, else the smallest, None for a rate."""
    known = {row.flips for row in rows if row.flips is not None}
    return (1 if 1 in known else min(known)) if known else None


def rank(row: PvfRow) -> tuple[float, float]:
    """Sort key: vulnerability; no estimate counts as lowest, ties go by the upper limit."""
    return (-1.0 if row.estimate is None else row.estimate, row.high)


def layers(rows: Sequence[R], order: Callable[[R], Any], numbers: Callable[[R], object]) -> list[R]:
    """Layers and tensors, sorted; a component that is one layer of the same name and ``numbers`` is shown already."""
    shown = {(row.target, row.flips, numbers(row)) for row in rows if row.level == "component"}
    mine = at_level(rows, "layer", "tensor")
    more = [row for row in mine if row.target != row.parent or (row.target, row.flips, numbers(row)) not in shown]
    return sorted(more, key=order)


def pooled(result: PvfResult) -> bool:
    """Whether a row sums up several targets or strata: its counts are plain sums, its shares weighted by the law."""
    strata = result.spec.get("strata", "none") != "none"
    return strata or len({row.target for row in at_level(result.rows, main_level(result))}) > 1


def itself(rows: Sequence[Named]) -> frozenset[str]:
    """Components with layers beside one of their own name, which is what happens in the component itself."""
    found = [(row.target, row.parent) for row in rows if row.level == "layer"]
    others = {parent for target, parent in found if target != parent}
    return frozenset(target for target, parent in found if target == parent and parent in others)


def name_of(row: Named, own: frozenset[str]) -> str:
    """The target's name, told apart from its component's; ``own`` is what `itself` found."""
    return f"{row.target} (itself)" if row.level == "layer" and row.target == row.parent in own else row.target
