"""Checks of the thresholds of rules."""

from __future__ import annotations

import math

from unsilent.basics.errors import UsageError


def check_at_least(rule: str, least: float, **thresholds: float) -> None:
    """Raise ``UsageError`` for a threshold below ``least`` or not finite."""
    for name, value in thresholds.items():
        if not (math.isfinite(value) and value >= least):
            raise UsageError(f"rule {rule!r}: {name} is {value:g}; expected a number of {least:g} or more")


def check_above(rule: str, limit: float, **thresholds: float) -> None:
    """Raise ``UsageError`` for a threshold that is not above ``limit`` or not finite."""
    for name, value in thresholds.items():
        if not (math.isfinite(value) and value > limit):
            raise UsageError(f"rule {rule!r}: {name} is {value:g}; expected a number above {limit:g}")


def check_share(rule: str, **shares: float) -> None:
    """Raise ``UsageError`` for a share that is not between 0 and 1, neither included."""
    for name, value in shares.items():
        if not 0 < value < 1:
            raise UsageError(f"rule {rule!r}: {name} is {value:g}; expected a number above 0 and below 1")


def check_order(rule: str, higher: tuple[str, float], lower: tuple[str, float]) -> None:
    """Raise ``UsageError`` unless the threshold ``higher`` is above ``lower``; both are given with their names."""
    if not higher[1] > lower[1]:
        raise UsageError(
            f"rule {rule!r}: thresholds out of order: {higher[0]} is {higher[1]:g} and {lower[0]} is {lower[1]:g}; "
            f"expected {higher[0]} above {lower[0]}"
        )
