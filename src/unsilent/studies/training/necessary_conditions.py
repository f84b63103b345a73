"""Analyses the values that precede latent harm, and the effect of the guard.

He et al. (ISCA 2023) state that every latent outcome is preceded by a very large gradient history or moving variance within two
iterations of the fault. The paper defines "very large" in its body, which we have not read: the factors here are our own. The
largest magnitude of each value is compared with the largest of the fault-free run. The guard's share counts faults whose outcome
without the guard is known.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from unsilent.campaigns.spec import TrialId
from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.dots import rows_axis
from unsilent.report.theme import INK, SOFT, Figure, figure, label
from unsilent.report.theme import marker_series as marks
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.plots import outcome_style, power_of_ten_text
from unsilent.studies.training.records import (
    ConditionPoint,
    GuardDetection,
    GuardResult,
    JudgedTrial,
    NecessaryCondition,
)
from unsilent.studies.training.sentences import ANY, FACTOR
from unsilent.studies.training.spec import HISTORY_KINDS, RANDOM, TrainingBaseline, TrainingRow

FACTORS = (10.0, 100.0, 1e4)


def condition_points(trials: Sequence[JudgedTrial], baseline: TrainingBaseline) -> tuple[ConditionPoint, ...]:
    """Each trial's largest values within two steps of the fault, relative to the golden run's largest."""
    golden = np.array([[np.nan if x is None else x for x in row] for row in baseline.history_magnitudes])
    usual = [np.nan if np.isnan(column).all() else float(np.nanmax(column)) for column in golden.T]
    return tuple(ConditionPoint(str(trial.row.trial), str(trial.outcome), _ratios(trial, usual)) for trial in trials)


def _ratios(trial: JudgedTrial, usual: Sequence[float]) -> tuple[float | None, ...]:
    seen = trial.row.history_magnitudes
    if not len(seen):
        return (None,) * len(HISTORY_KINDS)
    return tuple(
        None if np.isnan(most) or np.isnan(column).all() or not most > 0 else float(np.nanmax(column)) / most
        for column, most in zip(seen.T, usual, strict=True)
    )


def necessary_condition_tables(
    trials: Sequence[JudgedTrial], result: Sequence[ConditionPoint], confidence: float
) -> tuple[NecessaryCondition, ...]:
    """A contingency table for each pair of a kind of history value and a factor.

    Trials without values are left out.
    """
    pairs = [
        (trial, point) for trial, point in zip(trials, result, strict=True) if any(r is not None for r in point.ratios)
    ]
    kinds = [kind for i, kind in enumerate(HISTORY_KINDS) if any(point.ratios[i] is not None for _, point in pairs)]
    return tuple(_condition(kind, factor, pairs, confidence) for kind in (*kinds, ANY) for factor in FACTORS)


def _condition(
    kind: str, factor: float, pairs: Sequence[tuple[JudgedTrial, ConditionPoint]], confidence: float
) -> NecessaryCondition:
    table = {(kind, large): 0 for kind in ("latent", "harmless", "loud") for large in (True, False)}
    different = {True: 0, False: 0}
    for trial, point in pairs:
        ratios = point.ratios if kind == ANY else (point.ratios[HISTORY_KINDS.index(kind)],)
        large = any(r is not None and r > factor for r in ratios)
        table["latent" if trial.outcome.latent else "loud" if trial.outcome.harmful else "harmless", large] += 1
        different[large] += trial.by_implementation.latent
    hit, missed, false, clear = (table[what, large] for what in ("latent", "harmless") for large in (True, False))
    sensitivity, specificity, of_different = (
        clopper_pearson(events, whole, confidence)
        for events, whole in ((hit, hit + missed), (clear, clear + false), (different[True], sum(different.values())))
    )
    counts, loud = (hit, missed, false, clear), (table["loud", True], table["loud", False])
    return NecessaryCondition(kind, factor, *counts, sensitivity, specificity, *loud, of_different)


HISTORY, MOVING = (HISTORY_KINDS.index("first"), HISTORY_KINDS.index("second")), (HISTORY_KINDS.index("moving"),)
TITLES = {HISTORY: "largest value in gradient history / golden", MOVING: "largest moving statistic / golden"}
MOST = 3000
"""Approximate maximum number of masked trials in the figure; all other trials are shown."""
LEAST = 1e-3
"""Ratio below which marks are placed at the lower edge."""


def conditions_figure(points: Sequence[ConditionPoint]) -> Figure | None:
    """The figure of gradient history against moving statistics, with one mark per trial.

    If only one kind of value exists, the figure has one row per class.

    The result is ``None`` if neither kind exists. Values that are not finite are placed beyond the upper edge, zero and missing
    values at the lower edge.
    """
    drawn = points_to_plot(points)
    sides = [side for side in (HISTORY, MOVING) if any(ratio(point, side) is not None for point in drawn)]
    if not sides:
        return None
    names = [str(o) for o in TrainingOutcome if any(point.outcome == o for point in drawn)]
    scales = [_Scale([ratio(point, side) for point in drawn]) for side in sides]
    traces = []
    for name in names:  # harmless ones come first, so the others are drawn above them
        mine = [(i, point) for i, point in enumerate(drawn) if point.outcome == name]
        xs = [scales[0].place(ratio(point, sides[0]), _spread(i, 0)) for i, point in mine]
        if len(sides) == 2:
            ys = [scales[1].place(ratio(point, sides[1]), _spread(i, 1)) for i, point in mine]
        else:
            ys = [names.index(name) + 0.6 * (_spread(i, 1) - 0.5) for i, _ in mine]
        colour, symbol = outcome_style(name)
        size = 6 if name.startswith("masked") else 10
        marker = {"color": colour, "symbol": symbol, "size": size, "line": {"color": INK, "width": 0.5}}
        total = sum(point.outcome == name for point in points)
        hover = [_hover(point) for _, point in mine]
        traces.append(marks(f"{label(name)} {total:,}", xs, ys, hover, marker))
    if len(sides) == 2:
        height, yaxis = 560, {**scales[1].axis(), "title": {"text": TITLES[MOVING]}}
    else:
        height, yaxis = 150 + 44 * len(names), rows_axis(names)
    return figure(
        traces,
        height,
        xaxis={**scales[0].axis(), "title": {"text": TITLES[sides[0]]}},
        yaxis=yaxis,
        shapes=[line for scale, along in zip(scales, ("x", "y"), strict=False) for line in scale.lines(along)],
        margin={"l": 84, "r": 28, "t": 34, "b": 56},
    )


def points_to_plot(points: Sequence[ConditionPoint]) -> list[ConditionPoint]:
    """All points that are not masked, and about `MOST` evenly selected masked ones."""
    calm = [i for i, point in enumerate(points) if point.outcome.startswith("masked")]
    every = -(-len(calm) // MOST) or 1
    left = set(calm) - set(calm[::every])
    return [point for i, point in enumerate(points) if i not in left]


def ratio(point: ConditionPoint, side: Sequence[int]) -> float | None:
    """The largest ratio of a point among the given kinds of values; None if there is none."""
    known = [point.ratios[i] for i in side if i < len(point.ratios)]
    return max((x for x in known if x is not None), default=None)


class _Scale:
    """A logarithmic axis with extra room for zero or missing values and for values that are not finite."""

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
        """The position of a value on the axis.

        ``apart``, from 0 to 1, separates marks that would overlap at an edge.
        """
        jitter = (0.25 + 0.5 * apart) * self._band
        if value is None or value < LEAST:
            return round(self.low - jitter, 3)
        return round(self.high + jitter if not math.isfinite(value) else math.log10(value), 3)

    def axis(self) -> Figure:
        """The range and the ticks of the axis."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200) if (self.high - self.low) / n <= 9)
        first = math.ceil(self.low / every) * every
        ticks: Mapping[float, str] = {float(k): power_of_ten_text(k) for k in range(first, self.high + 1, every)}
        edges = {self.low - 0.5 * self._band: "0, missing"} if self.below else {}
        over = {self.high + 0.5 * self._band: "∞, NaN"} if self.above else {}
        free = {k: text for k, text in ticks.items() if not over or k < self.high - 0.3 * self._band or k == 2}
        named = {**edges, **free, **over}
        ends = [self.low - (self._band if self.below else 0.02), self.high + (self._band if self.above else 0.02)]
        return {"tickvals": list(named), "ticktext": list(named.values()), "range": ends}

    def lines(self, along: str) -> list[Figure]:
        """The lines at the factor that counts as large and at the edges of the axis."""
        across = "y" if along == "x" else "x"
        places = [(math.log10(FACTOR), {"color": INK, "width": 1.3, "dash": "dash"})]
        soft = {"color": SOFT, "width": 0.6, "dash": "dot"}
        places += [(float(edge), soft) for edge, there in ((self.low, self.below), (self.high, self.above)) if there]
        ends = {f"{across}0": 0, f"{across}1": 1, f"{across}ref": "paper", "layer": "below"}
        return [{"type": "line", f"{along}0": at, f"{along}1": at, "line": line, **ends} for at, line in places]


def _spread(number: int, along: int) -> float:
    """A number from 0 to 1, the ``number``-th of an evenly spread sequence for one of two axes."""
    return ((0.7548776662466927, 0.5698402909980532)[along] * number) % 1.0


def _hover(point: ConditionPoint) -> str:
    values = zip(HISTORY_KINDS, point.ratios, strict=False)
    parts = [f"{name} {'–' if x is None else f'{x:.3g}'}" for name, x in values]
    return f"<b>{label(point.trial, 60)}</b><br>{label(point.outcome)}<br>{', '.join(parts)}"


DETECTION_STEPS = 2
"""Maximum number of steps from the fault to an alarm that comes in time for going back two steps."""
LARGE_FAULT_FACTOR = 1e4
SIZES = (1.0, 1e2, 1e4, 1e8)
"""Limits between groups of fault sizes, as multiples of the largest value in the tensor before the fault."""


def guard_result(
    trials: Sequence[JudgedTrial], guarded: Mapping[TrialId, TrainingRow], confidence: float
) -> GuardResult | None:
    """The result of the trials that were repeated under the guard; None if there are none."""
    # Long because it counts the same pairs of trials in four ways.
    different = [(t, guarded[t.row.trial]) for t in trials if t.is_different and t.row.trial in guarded]
    if not different:
        return None
    pairs = [(trial, again) for trial, again in different if trial.is_harmful]
    edges = (0.0, *SIZES, math.inf)
    names = [f"up to {SIZES[0]:g}", *(f"{a:g} to {b:g}" for a, b in itertools.pairwise(SIZES))]
    names.append(f"above {SIZES[-1]:g}")
    by_size = [(relative_injected_size(trial.row), again) for trial, again in pairs]
    sizes = tuple(
        _caught(name, [again for size, again in by_size if low < size <= high or low == size == 0], confidence)
        for name, low, high in zip(names, edges, edges[1:], strict=False)
    )
    groups: dict[str, list[TrainingRow]] = {}
    for trial, again in pairs:
        target = trial.row.trial.target
        groups.setdefault(trial.row.injection.phase if target == RANDOM else target, []).append(again)
    alarms = [again for _, again in pairs if again.detected_after is not None]
    kinds = Counter(again.error.partition(":")[2].strip().partition(" of ")[0] for again in alarms)
    return GuardResult(
        large_fault_factor=LARGE_FAULT_FACTOR,
        different=_caught("all different", [again for _, again in different], confidence),
        all_harmful=_caught("all harmful", [again for _, again in pairs], confidence),
        large_harmful=_caught(
            f"over {LARGE_FAULT_FACTOR:g} x the largest value before",
            [again for size, again in by_size if size > LARGE_FAULT_FACTOR],
            confidence,
        ),
        sizes=sizes,
        groups=tuple(_caught(name, groups[name], confidence) for name in sorted(groups)),
        late_alarms=sum((again.detected_after or 0) > DETECTION_STEPS for again in alarms),
        stopped=sum(again.end_reason == "stopped" for _, again in pairs),
        alarms=dict(kinds),
    )


def relative_injected_size(row: TrainingRow) -> float:
    """The largest injected magnitude as a multiple of the largest magnitude in the fault-free tensor; 0 if unknown."""
    if math.isinf(row.injected_max):
        return math.inf
    if math.isnan(row.injected_max):
        return 0.0
    if not row.reference_max > 0:
        return math.inf if row.injected_max > 0 else 0.0
    return row.injected_max / row.reference_max


def _caught(name: str, rows: Sequence[TrainingRow], confidence: float) -> GuardDetection:
    alarms = [row for row in rows if row.detected_after is not None and row.detected_after <= DETECTION_STEPS]
    within = [row for row in alarms if row.end_reason != "stopped"]
    same = sum(row.bit_identical for row in within)
    return GuardDetection(name, len(rows), len(within), same, clopper_pearson(len(within), len(rows), confidence))
