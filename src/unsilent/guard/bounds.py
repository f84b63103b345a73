"""Bounds of watched tensors by name: fixed ones, and others learnt from clean steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.detectors.moment_bounds import (
    FACTOR,
    CalibratedBounds,
    Floats,
    indices_beyond_bounds,
    updated_magnitudes,
)
from unsilent.guard.watched_tensors import KINDS, WatchedTensor

WARM_UP = 10
"""Number of steps from which a tensor's bound is learnt before it holds; values that are not finite always exceed it."""
_ANY = float(np.finfo(np.float64).max)
CALIBRATED, FIXED, NOT_FINITE, NEGATIVE = "calibrated", "fixed", "not finite", "negative"


class ExceededBound(NamedTuple):
    """A bound that a tensor exceeded: the tensor's number, its magnitude, the bound, and the rule behind the bound."""

    tensor_number: int
    largest_magnitude: float
    bound: float
    rule: str


class Bounds:
    """The currently watched tensors and their bounds.

    Args:
        factor: Factor of the calibrated bounds.
        fixed: Bounds by name that hold from the first step on.
    """

    def __init__(self, factor: float = FACTOR, fixed: Mapping[str, float] | None = None) -> None:
        self._factor = factor
        self._parts: list[WatchedTensor] = []
        self._rule = CalibratedBounds(np.zeros(0, np.int64), factor)
        self._known: dict[str, tuple[float, int]] = {}
        self._names: list[str] = []
        self.set_fixed_bounds(fixed or {}, FIXED)

    def set_fixed_bounds(self, fixed: Mapping[str, float], rule: str) -> None:
        """Replace all fixed bounds; ``rule`` is their name in alarms."""
        self._fixed_by_name, self._fixed_rule = dict(fixed), rule
        self._place_fixed()

    def update_tensors(self, parts: Sequence[WatchedTensor]) -> bool:
        """Set the watched tensors, and return whether their names changed.

        Bounds learnt for tensors with the same names are kept.
        """
        names = [part.name for part in parts]
        if names == self._names:
            return False
        self._store()
        self._names = names
        self._place([KINDS.index(part.kind) for part in parts])
        return True

    def learn(self, names: Sequence[str], largest: Floats) -> None:
        """Learn from earlier clean steps, float64[steps, n]; NaN if a tensor did not exist yet."""
        rows = np.atleast_2d(np.asarray(largest, dtype=np.float64))
        if rows.shape[1:] != (len(names),) or len(set(names)) != len(names):
            raise UsageError(
                f"largest has shape {list(rows.shape)} for {len(names)} names ({len(set(names))} distinct); "
                "expected [steps, names], with every name once"
            )
        if np.isinf(rows).any() or (rows < 0).any():
            raise UsageError("largest has an infinite or negative value; expected magnitudes of fault-free steps")
        self._store()
        known = [self._known.get(name, (0.0, 0)) for name in names]
        most = np.array([before for before, _ in known], dtype=np.float64)
        for row in rows:
            most = updated_magnitudes(most, row)
        counts = (~np.isnan(rows)).sum(0)
        for name, before, value, count in zip(names, known, most.tolist(), counts.tolist(), strict=True):
            self._known[name] = value, before[1] + count
        self._place(self._rule.kinds.tolist())

    @property
    def all_hold(self) -> bool:
        """Whether every tensor has a bound."""
        return bool(((self._rule.steps_seen >= WARM_UP) | ~np.isnan(self._fixed)).all())

    def learn_step(self, result: Floats, numbers: Sequence[int]) -> None:
        """Learn from a clean step: float64[n] for the tensors with the given numbers."""
        every = np.full(len(self._names), np.nan)
        every[numbers] = result
        self._rule.learn(every)

    def first_exceeded(self, result: Floats, numbers: Sequence[int]) -> ExceededBound | None:
        """The first bound that is exceeded, among the tensors with the given numbers; None if none is.

        ``result``: float64[n], their largest magnitudes.
        """
        limits = np.where(self._rule.steps_seen >= WARM_UP, self._rule.bounds, _ANY)
        limits = np.where(np.isnan(self._fixed), limits, self._fixed)[numbers]
        over = indices_beyond_bounds(result, limits)
        if not len(over):
            return None
        worst = int(over[0])
        limit, value = float(limits[worst]), float(result[worst])
        if not np.isfinite(value):
            rule = NOT_FINITE
        elif value < 0:
            rule = NEGATIVE
        else:
            rule = CALIBRATED if np.isnan(self._fixed[numbers[worst]]) else self._fixed_rule
        return ExceededBound(numbers[worst], value, limit, rule)

    def _store(self) -> None:
        values = zip(self._rule.largest.tolist(), self._rule.steps_seen.tolist(), strict=True)
        self._known.update(zip(self._names, values, strict=True))

    def _place(self, kinds: list[int]) -> None:
        """Build the arrays for the current tensors from the values stored by name."""
        known = [self._known.get(name, (0.0, 0)) for name in self._names]
        self._rule = CalibratedBounds(np.array(kinds, dtype=np.int64), self._factor)
        self._rule.largest[:] = [largest for largest, _ in known]
        self._rule.steps_seen[:] = [seen for _, seen in known]
        self._place_fixed()

    def _place_fixed(self) -> None:
        self._fixed: Floats = np.array([self._fixed_by_name.get(name, np.nan) for name in self._names], np.float64)
