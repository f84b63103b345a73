"""Candidates for faults made by hand, by the class of outcomes that each is to show, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping

Recipe = tuple[float, str, float, str]
"""When (share of the run), what is struck (a phase, or ``param``), which of these (share of all in order), the fault model."""

SHARES = (0.7, 0.4, 0.9, 0.15)
DEPTHS = (1.0, 0.5, 0.0)
_SMALL = ("bitflip:bits=0", "bitflip:bits=3")
_LARGE = ("set:value=1e3", "set:value=1e9", "set:value=9e17", "set:value=1e25", "set:value=1e37")


def _ladder(whats: tuple[str, ...], models: tuple[str, ...], shares: tuple[float, ...] = SHARES) -> tuple[Recipe, ...]:
    return tuple(
        (share, what, depth, model) for share in shares for model in models for what in whats for depth in DEPTHS
    )


_WEIGHTS = ("scale:factor=-1,rate=1", "scale:factor=30,rate=1", "zero:rate=1", "scale:factor=3,rate=1", "set:value=1e4")
LADDERS: Mapping[str, tuple[Recipe, ...]] = {
    "masked": _ladder(("grad_wt", "fwd"), _SMALL),
    "immediate-nan": _ladder(("fwd",), ("set:value=nan,rate=1", "set:value=inf,rate=1")),
    "short-term-nan": _ladder(("grad_wt", "grad_in"), ("set:value=nan", "set:value=1e38", *_LARGE[::-1])),
    "sharp-degrade": _ladder(("param", "grad_wt"), (*_WEIGHTS, *_LARGE), (0.97, *SHARES)),
    "slow-degrade": _ladder(("param",), _WEIGHTS) + _ladder(("grad_in", "grad_wt", "fwd"), _LARGE),
    "sharp-slow-degrade": _ladder(("param", "grad_in"), (*_WEIGHTS, *_LARGE)),
    "low-test": _ladder(("fwd",), ("set:value=1e18", "set:value=1e24", "set:value=1e6"), (0.97, 0.99, 0.9, 0.7)),
}
"""By the class that is looked for."""
