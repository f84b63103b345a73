"""The precision that ``--ci`` and ``--rel`` request."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.basics.sizes import parse_share

LEAST_HALF_WIDTH = 0.0002
"""Half-width that is always enough for a requested relative one, which an estimate of zero could never reach."""


@dataclass(frozen=True)
class Precision:
    """The half-width that rows must reach: ``max(relative * estimate, absolute)``.

    ``rows``: globs of the names of rows that must reach it; empty for all rows.
    """

    absolute: float
    relative: float = 0.0
    rows: tuple[str, ...] = ()

    @classmethod
    def parse(cls, ci: str | None, rel: str | None) -> Precision | None:
        """Parse the texts of ``--ci`` and ``--rel``, like ``0.1%`` or ``model=0.1%``; None if both are None."""
        if ci is None and rel is None:
            return None
        parts = {"--ci": (ci or "").rpartition("="), "--rel": (rel or "").rpartition("=")}
        if ci is not None and rel is not None and parts["--ci"][0] != parts["--rel"][0]:
            raise UsageError(f"--ci {ci} and --rel {rel} are for different rows; name the same rows in both")
        names, _, width = parts["--ci"]
        absolute = LEAST_HALF_WIDTH if ci is None else parse_share("--ci", width, "0.1%, 0.001 or model=0.1%")
        if rel is None:
            return cls(absolute, rows=_globs(names))
        names, _, width = parts["--rel"]
        return cls(absolute, parse_share("--rel", width, "20%, 0.2 or model=20%"), _globs(names))

    def target_half_width(self, estimate: float) -> float:
        """The half-width that is required for an estimate."""
        return max(self.absolute, self.relative * estimate)

    def is_reached_by(self, interval: Interval) -> bool:
        """Whether an interval is narrow enough."""
        return interval.estimate is not None and interval.half_width <= self.target_half_width(interval.estimate)

    def __str__(self) -> str:
        floor = f"±{100 * self.absolute:.4g} points"
        width = (
            f"±{100 * self.relative:.4g} % of the estimate or {floor}, whichever is wider" if self.relative else floor
        )
        return f"{width}, for {', '.join(self.rows)}" if self.rows else width


def _globs(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
