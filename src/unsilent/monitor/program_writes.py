"""Distinguishes the program's own writes from faults, among tensors whose bits changed between two steps.

A write through ``p.data`` (``p.data.clamp_()`` after each step) leaves no trace: torch counts only writes to ``p``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from unsilent.events.event_kinds import LOGGER
from unsilent.monitor.signals.fingerprints import COUNTERS

FIRST_COMPARISONS = 5
"""A tensor that changes in one of its first comparisons is one that the program writes to."""
FIRST_STEPS = 20
"""Number of steps after which only the first comparison counts, because rotating fingerprints return to a tensor late."""
LEAST_AT_ONCE = 3
"""Least number of parameters, or of optimizer tensors, whose simultaneous change is taken for a write by the program, if they are
more than half of those compared."""
log = logging.getLogger(LOGGER)


class ProgramWrites:
    """Tensors that the program itself writes to, as far as they are known."""

    def __init__(self) -> None:
        self._comparisons: Counter[str] = Counter()
        self._written: set[str] = set()
        self._has_written_many = False

    def faults(self, step: int, changed: Sequence[str], compared: Sequence[str]) -> tuple[str, ...]:
        """Names of the changed tensors that the program has not written to itself."""
        self._comparisons.update(compared)
        changed = self._without_many_at_once(step, changed, compared) if changed else ()
        first = FIRST_COMPARISONS if step <= FIRST_STEPS else 1
        habits = {name for name in changed if self._comparisons[name] <= first} - self._written
        if habits:
            self._written |= habits
            log.warning(
                "step %d: bits of %s changed between two of the first steps; taken as a write of the program through .data, so "
                "they are not compared any more", step, ", ".join(sorted(habits)),
            )  # fmt: skip
        return tuple(name for name in changed if name not in self._written)

    def _without_many_at_once(self, step: int, changed: Sequence[str], compared: Sequence[str]) -> Sequence[str]:
        """The changed tensors, without parameters if most parameters changed.

        The tensors of optimizers are treated in the same way.
        """
        for is_state in (False, True):
            of_kind = {name for name in changed if _is_state(name) is is_state}
            number_compared = sum(_is_state(name) is is_state for name in compared)
            if len(of_kind) >= LEAST_AT_ONCE and 2 * len(of_kind) > number_compared:
                changed = [name for name in changed if name not in of_kind]
                if not self._has_written_many:
                    self._has_written_many = True
                    log.warning(
                        "step %d: bits of %d tensors, more than half of those compared, changed at once between two steps; taken "
                        "as a write of the program through .data, also when it comes again", step, len(of_kind),
                    )  # fmt: skip
        return changed


def _is_state(name: str) -> bool:
    return "/" in name or name.startswith(COUNTERS)
