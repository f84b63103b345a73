"""The view of necessary conditions: what optimizers and normalisation layers remember after a fault, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.look import INK, SOFT, Figure, figure, label
from unsilent.report.look import points as marks
from unsilent.studies.training.curves import power
from unsilent.studies.training.figures import look
from unsilent.studies.training.records import Point
from unsilent.studies.training.sentences import FACTOR
from unsilent.studies.training.spec import WATCHED

HISTORY, MOVING = (WATCHED.index("first"), WATCHED.index("second")), (WATCHED.index("moving"),)
TITLES = {HISTORY: "largest gradient history, × golden's", MOVING: "largest moving statistic, × golden's"}
MOST = 3000
"""Harmless trials that are drawn; of the others all are."""
LEAST = 1e-3
"""Ratios below it lie at the lower edge."""


def conditions_figure(points: Sequence[Point]) -> Figure | None:
    """Gradient history against moving statistics, a mark for each trial; where one kind is not there, a row for each class.

    None where neither is. What is no number lies beyond the upper edge, what is zero or missing at the lower one.
    """
    kept = drawn(points)
    sides = [side for side in (HISTORY, MOVING) if any(ratio(point, side) is not None for point in kept)]
    if not sides:
        return None
    names = [str(o) for o in TrainingOutcome if any(point.outcome == o for point in kept)]
    scales = [_Scale([ratio(point, side) for point in kept]) for side in sides]
    traces = []
    for name in names:  # harmless ones come first, so the others lie above them
        mine = [(i, point) for i, point in enumerate(kept) if point.outcome == name]
        xs = [scales[0].place(ratio(point, sides[0]), _spread(i, 0)) for i, point in mine]
        if len(sides) == 2:
            ys = [scales[1].place(ratio(point, sides[1]), _spread(i, 1)) for i, point in mine]
        else:
            ys = [names.index(name) + 0.6 * (_spread(i, 1) - 0.5) for i, _ in mine]
        colour, symbol = look(name)
        size = 6 if name.startswith("masked") else 10
        marker = {"color": colour, "symbol": symbol, "size": size, "line": {"color": INK, "width": 0.5}}
        total = sum(point.outcome == name for point in points)
        hover = [_hover(point) for _, point in mine]
        traces.append(marks(f"{label(name)} {total:,}", xs, ys, hover, marker))
    if len(sides) == 2:
        height, yaxis = 560, {**scales[1].axis(), "title": {"text": TITLES[MOVING]}}
    else:
        rows = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.4, -0.6]}
        height, yaxis = 150 + 44 * len(names), {**rows, "automargin": True}
    return figure(
        traces,
        height,
        xaxis={**scales[0].axis(), "title": {"text": TITLES[sides[0]]}},
        yaxis=yaxis,
        shapes=[line for scale, along in zip(scales, ("x", "y"), strict=False) for line in scale.lines(along)],
        margin={"l": 84, "r": 28, "t": 34, "b": 56},
    )


def drawn(points: Sequence[Point]) -> list[Point]:
    """All points that are not masked, and `MOST` of the others, evenly taken."""
    calm = [i for i, point in enumerate(points) if point.outcome.startswith("masked")]
    every = -(-len(calm) // MOST) or 1
    left = set(calm) - set(calm[::every])
    return [point for i, point in enumerate(points) if i not in left]


def ratio(point: Point, side: Sequence[int]) -> float | None:
    """The largest of the ratios of one side; None where there is none."""
    known = [point.ratios[i] for i in side if i < len(point.ratios)]
    return max((x for x in known if x is not None), default=None)


class _Scale:
    """One logarithmic axis in decades, with room below for what is zero or missing and above for what is no number."""

    def __init__(self, values: Sequence[float | None]) -> None:
        finite = [x for x in values if x is not None and math.isfinite(x)]
        within = [x for x in finite if x >= LEAST]
        self.low = math.floor(math.log10(min([*within, 0.1])))
        self.high = max(math.ceil(math.log10(max([*within, FACTOR]))), 3)
        span = self.high - self.low
        self._band = 0.07 * span
        self.below = any(x is None or x < LEAST for x in values)
        self.above = len(finite) < sum(x is not None for x in values)

    def place(self, value: float | None, apart: float) -> float:
        """In decades; marks of one edge are set ``apart``, from 0 to 1, so that they can be told."""
        jitter = (0.25 + 0.5 * apart) * self._band
        if value is None or value < LEAST:
            return round(self.low - jitter, 3)
        return round(self.high + jitter if not math.isfinite(value) else math.log10(value), 3)

    def axis(self) -> Figure:
        """Range and ticks."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200) if (self.high - self.low) / n <= 9)
        first = math.ceil(self.low / every) * every
        ticks: Mapping[float, str] = {float(k): power(k) for k in range(first, self.high + 1, every)}
        edges = {self.low - 0.5 * self._band: "0, none"} if self.below else {}
        over = {self.high + 0.5 * self._band: "∞, NaN"} if self.above else {}
        named = {
            **edges,
            **{k: t for k, t in ticks.items() if not over or k < self.high - 0.3 * self._band or k == 2},
            **over,
        }
        ends = [self.low - (self._band if self.below else 0.02), self.high + (self._band if self.above else 0.02)]
        return {"tickvals": list(named), "ticktext": list(named.values()), "range": ends}

    def lines(self, along: str) -> list[Figure]:
        """At the factor that counts as large, and at the edges."""
        other = "y" if along == "x" else "x"
        places = [(math.log10(FACTOR), {"color": INK, "width": 1.3, "dash": "dash"})]
        soft = {"color": SOFT, "width": 0.6, "dash": "dot"}
        places += [(float(edge), soft) for edge, there in ((self.low, self.below), (self.high, self.above)) if there]
        ends = {f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper", "layer": "below"}
        return [{"type": "line", f"{along}0": at, f"{along}1": at, "line": line, **ends} for at, line in places]


def _spread(number: int, along: int) -> float:
    """Evenly spread numbers from 0 to 1, the same each time; those of two axes fill a square evenly (Roberts' R2)."""
    return ((0.7548776662466927, 0.5698402909980532)[along] * number) % 1.0


def _hover(point: Point) -> str:
    values = zip(WATCHED, point.ratios, strict=False)
    told = [f"{name} {'–' if x is None else f'{x:.3g}'}" for name, x in values]
    return f"<b>{label(point.trial, 60)}</b><br>{label(point.outcome)}<br>{', '.join(told)}"
