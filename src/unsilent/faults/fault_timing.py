"""Times at which a fault acts: in one step, from a first to a last one, or always (a permanent fault)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Timed(Protocol):
    """Anything that says when it acts, such as a `Fault` and an `UnresolvedFault`."""

    @property
    def step(self) -> int | None: ...
    @property
    def first_step(self) -> int | None: ...
    @property
    def last_step(self) -> int | None: ...


T = TypeVar("T", bound=Timed)


def faults_in_step(faults: Iterable[T], step: int) -> list[T]:
    """The faults that act in a step: ``step`` names it, or it lies from ``first_step`` to ``last_step`` (None: open).

    A fault that says nothing of the kind always acts.

    A `UnresolvedFault` that acts in several steps corrupts the same elements in each of them, and draws the same values:
    hardware that is broken stays broken in one place.
    """
    return [fault for fault in faults if _acts(fault, step)]


def _acts(fault: Timed, step: int) -> bool:
    if fault.step is not None:
        return fault.step == step
    return (fault.first_step or 0) <= step and (fault.last_step is None or step <= fault.last_step)
