"""Result records of the PVF study, from which all reports are made.

This module also selects the rows of a result that are shown, and has gates for continuous integration: ``top_mlp<=0.01`` holds
if the *upper* limit of every matching row is at most 0.01.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.interval import Interval
from unsilent.campaigns.campaign_result import CampaignResult
from unsilent.report.estimates import has_few_trials
from unsilent.report.heat import HeatMap
from unsilent.report.text import listed, upper_bound_text
from unsilent.studies.pvf.memory_records import MemoryFacts, MemoryFitRow
from unsilent.studies.pvf.spec import PvfBaseline, PvfSpec

ACCURACY = "accuracy"
"""Task metric of workloads with labels but no score of their own."""


def flips_suffix(flips: int | None) -> str:
    """A suffix for names, like ``at 8 flips`` with a leading space; empty if the fault model sets the number."""
    return "" if flips is None else f" at {flips} flip{'s' if flips != 1 else ''}"


def samples_text(samples: Mapping[str, int]) -> str:
    """The number of samples per trial as text, like ``1`` or ``1 (embedding) or 4 (top_mlp)``."""
    by_count: dict[int, list[str]] = {}
    for name, count in samples.items():
        by_count.setdefault(count, []).append(name)
    named = {count or "all": names for count, names in sorted(by_count.items(), key=lambda item: item[0] or math.inf)}
    if len(named) == 1:
        return str(next(iter(named)))
    return " or ".join(f"{count} ({listed(names)})" for count, names in named.items())


@dataclass(frozen=True, slots=True)
class LostScore:
    """The mean of the fault-free score minus the faulty score, with limits.

    For accuracy this is the share of answers that are right without a fault but not with it; wrong answers that become right
    are not subtracted.
    """

    estimate: float | None
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval, least: float, most: float) -> LostScore:
        """Convert an interval between 0 and 1 to a loss between ``least`` and ``most``."""
        size = most - least

        def lost(share: float) -> float:
            result = least + share * size
            return 0.0 if abs(result) < 1e-12 * size else result  # 0 but for rounding

        estimate = None if interval.estimate is None else lost(interval.estimate)
        return cls(estimate, lost(interval.low), lost(interval.high))

    @property
    def perplexity_ratio(self) -> LostScore:
        """The loss of a log-likelihood per token, expressed as faulty over fault-free perplexity."""
        estimate = None if self.estimate is None else math.exp(self.estimate)
        return LostScore(estimate, math.exp(self.low), math.exp(self.high))


@dataclass(frozen=True, slots=True)
class PvfRow:
    """The estimate for one target at one number of flips."""

    target: str
    level: str
    """``model``, ``component``, ``layer``, ``tensor`` or ``bit``."""
    parent: str
    """Component of a layer or tensor, or layer of a bit; ``""`` for model and component."""
    flips: int | None
    """Faults drawn per trial; None if the fault model determines their number (a rate, a run, a count)."""
    estimate: float | None
    """PVF; None if no trial corrupted this target."""
    low: float
    high: float
    confidence: float
    n: int
    """Independent trials (faults) behind the estimate."""
    unit: str
    """Unit of one output: ``sample`` or ``batch``."""
    units: int
    """Samples (or batches) judged over all trials."""
    masked: int
    benign: int
    sdc: int
    due: int
    """Counts of units by outcome; PVF counts sdc + due. In a row over several targets they are plain sums without weights."""
    due_kinds: Mapping[str, int]
    """Count of ``due``, split into nonfinite, exception, crash and hang."""
    elements: int
    bits: int
    method: str
    """Method of the estimate and its interval, in a few words."""
    silent_share: float | None
    """Share of the incorrect outputs that are silent, weighted like the estimate; None without incorrect outputs."""
    incorrect_trials: int = 0
    """Trials in which at least one output was incorrect."""
    joint_low: float = 0.0
    joint_high: float = 1.0
    """Limits that hold together for all rows of this level and number of flips (Bonferroni); they show which rows differ."""
    outcome_mix: Mapping[str, float] = field(default_factory=dict)
    """Share of the units by outcome (masked, benign, sdc and the due kinds), with strata weighted by their share of the law."""
    widest_share_of_bits: float = 1.0
    """Share of the bits that belong to elements of the commonest width; a FIT from PVF x bits needs elements of one width."""
    score_lost: LostScore | None = None
    """Loss of score or accuracy; None without score and labels, or if its judge's decisions cannot be compared with labels."""

    @property
    def interval(self) -> Interval:
        """The estimate with its limits."""
        return Interval(self.estimate, self.low, self.high, self.confidence, self.n, self.method)


@dataclass(frozen=True, slots=True)
class LookupRow:
    """The PVF of one class of embedding rows, by how often they are looked up."""

    lookup_class: str
    """``hot`` (the busiest rows that take half of all look-ups), ``warm`` (the other rows looked up), ``cold`` (never)."""
    rows: int
    lookups: int
    share_of_elements: float
    estimate: float | None
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, repr=False)
class PvfResult(CampaignResult):
    """The result of a PVF campaign."""

    KIND: ClassVar[str] = "unsilent.studies.pvf.kind:PVF"
    workload: str
    info: Mapping[str, Any]
    fault: str
    at: str
    per: str
    law: str
    unit: str
    judge: str
    seed: int
    confidence: float
    spec: Mapping[str, Any]
    """Campaign spec as JSON values."""
    command: str
    """Exact command that reproduces the campaign."""
    store: str
    campaign: str
    """Campaign hash."""
    samples: int
    batches: int
    trials_done: int
    trials_planned: int
    seconds: float
    cpu_seconds: float
    golden_seconds: float
    """Time of one fault-free evaluation of all batches."""
    versions: Mapping[str, str]
    device: str
    dtype: str
    """Dtype of ``--dtype``, else the commonest dtype of the parameters; for faults in values of a run, every corrupted dtype."""
    threads: int
    rows: tuple[PvfRow, ...]
    heat_maps: tuple[HeatMap, ...]
    """Heat map of each dtype that single flips fell on, the dtype with most elements first."""
    lookups: tuple[LookupRow, ...]
    notes: tuple[str, ...] = field(default=())
    """Sentences on limitations of these numbers that a reader must see."""
    imprecise_rows: tuple[str, ...] = ()
    """Sentences on rows that were not allowed enough trials for the requested precision."""
    samples_of_trials: Mapping[str, int] = field(default_factory=dict)
    """Samples of one batch that a trial evaluates, by reported target (0: all); empty if all trials evaluate all samples."""
    pilot_trials: int = 0
    """Trials that only decided the number of other trials; 0 if there was no pilot, or if there are only pilot trials."""
    graphed_trials: int = 0
    """Trials that CUDA graphs evaluated."""
    transient: bool = False
    """Whether values of one evaluation were corrupted (operations, inputs, caches) rather than parameters."""
    score_name: str = ""
    """Name of the task metric whose loss is shown: that of the workload's score, else "accuracy"; empty without a metric."""
    golden_score: float | None = None
    """Fault-free mean of the workload's score; None without a score."""
    memory_fit: tuple[MemoryFitRow, ...] = ()
    """Failure rates of the memories of an accelerator, by memory, pattern, component, layer and of the model."""
    memories: tuple[MemoryFacts, ...] = ()

    @property
    def measure(self) -> str:
        """The name of the estimate: ``PVF`` for faults in parameters, otherwise ``P(incorrect)``."""
        return "P(incorrect)" if self.transient else "PVF"

    @property
    def nothing_reaches(self) -> bool:
        """Whether memories are described, but no fault passes their protection often enough to be tried."""
        return bool(self.memory_fit) and not self.rows

    @property
    def measure_text(self) -> str:
        """The name of the estimate, with the counted events if memories have protection."""
        return f"{self.measure} of {EVENTS_COMING_THROUGH}" if self.memories else self.measure


EVENTS_COMING_THROUGH = "events that come through the protection"
"""Name of events in memories that are neither corrected nor reported."""
ALL_PARAMETERS = "param:*"
"""Default address of faults: every parameter of the model."""
LEVELS = ("component", "layer", "tensor")
MOST_LAYERS_SHOWN = 20
"""Rows of layers (and tensors) that a terminal shows; others are counted."""


class ResultRow(Protocol):
    """A row of a result, or of a comparison of two results."""

    @property
    def target(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def flips(self) -> int | None: ...


R = TypeVar("R", bound=ResultRow)


def main_level(result: PvfResult) -> str:
    """The level that figures compare: component, else layer, else tensor, else ``model``."""
    present = {row.level for row in result.rows}
    return next((level for level in LEVELS if level in present), "model")


def at_level(rows: Sequence[R], *levels: str) -> list[R]:
    """The rows of some levels, in the order of the targets, with flips ascending."""
    level_rows = [row for level in levels for row in rows if row.level == level]
    place = {key: i for i, key in enumerate(dict.fromkeys((row.level, row.target) for row in level_rows))}
    return sorted(level_rows, key=lambda row: (place[row.level, row.target], row.flips is None, row.flips or 0))


def headline_flips(rows: Sequence[ResultRow]) -> int | None:
    """The number of flips for a headline: 1 if present, else the smallest; None without a number."""
    known = {row.flips for row in rows if row.flips is not None}
    return (1 if 1 in known else min(known)) if known else None


def vulnerability_key(row: PvfRow) -> tuple[bool, float, float]:
    """The sort key of a row by vulnerability; rows with few trials or no estimate are lowest."""
    return (not has_few_trials(row, row.n), -1.0 if row.estimate is None else row.estimate, row.high)


def layer_rows(rows: Sequence[R], order: Callable[[R], Any], numbers: Callable[[R], object]) -> list[R]:
    """The sorted rows of layers and tensors, without layers that equal their component."""
    shown = {(row.target, row.flips, numbers(row)) for row in rows if row.level == "component"}
    mine = at_level(rows, "layer", "tensor")
    more = [row for row in mine if row.target != row.parent or (row.target, row.flips, numbers(row)) not in shown]
    return sorted(more, key=order)


def is_pooled(result: PvfResult) -> bool:
    """Whether some row combines several targets or strata."""
    strata = result.spec.get("strata", "none") != "none"
    return strata or len({row.target for row in at_level(result.rows, main_level(result))}) > 1


def components_with_own_layer(rows: Sequence[ResultRow]) -> frozenset[str]:
    """Components that have both a layer of their own name and other layers."""
    result = [(row.target, row.parent) for row in rows if row.level == "layer"]
    others = {parent for target, parent in result if target != parent}
    return frozenset(target for target, parent in result if target == parent and parent in others)


def row_label(row: ResultRow, components_with_own_layer: frozenset[str]) -> str:
    """The name of a row's target, marked if a component has the same name.

    ``components_with_own_layer`` is what `components_with_own_layer` found.
    """
    is_component = row.level == "layer" and row.target == row.parent in components_with_own_layer
    return f"{row.target} (itself)" if is_component else row.target


_GATE = re.compile(r"\s*(?P<target>[^@<>=]+?)(?:@(?P<flips>\d{1,9}))?\s*<=\s*(?P<limit>[0-9.eE+-]+)(?P<percent>%?)\s*$")


@dataclass(frozen=True)
class Gate:
    """A condition ``TARGET[@FLIPS]<=LIMIT``; without ``@FLIPS`` it must hold at every number of flips."""

    target: str
    flips: int | None
    limit: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse a condition; raises ``UsageError`` for an invalid one."""
        match = _GATE.match(text)
        try:
            limit = float(match["limit"]) / (100 if match["percent"] else 1) if match else -1.0
        except ValueError:
            limit = -1.0
        if match is None or not 0 <= limit <= 1:
            raise UsageError(
                f"cannot read --assert {text!r}; expected TARGET<=LIMIT with a limit from 0 to 1, like 'top_mlp<=0.01' "
                "or 'top_mlp<=1%'"
            )
        return cls(match["target"], int(match["flips"]) if match["flips"] else None, limit)

    def check(self, spec: PvfSpec, description: PvfBaseline) -> None:
        """Raise ``UsageError`` if the campaign will have no row that the gate is about."""
        if not description.targets:
            raise UsageError(
                f"--assert is about P(incorrect) of {EVENTS_COMING_THROUGH}, but there is no trial, because nothing or too "
                "little does; omit --assert"
            )
        names = {"model", *(t.name for t in description.targets), *(t.component for t in description.targets)}
        names |= {t.layer for t in description.tensors}
        if self.target not in names:
            raise unknown_name_error("target of --assert", self.target, names)
        if self.flips is not None and self.flips not in spec.flips:
            raise unknown_name_error("number of flips of --assert", str(self.flips), map(str, spec.flips))

    def rows(self, result: PvfResult) -> list[PvfRow]:
        """The rows that the gate is about; raises ``UsageError`` if there are none."""
        output = [r for r in result.rows if r.target == self.target and self.flips in (None, r.flips)]
        if output:  # a component and its only layer may have the same name: take the coarser level
            return [r for r in output if r.level == output[0].level]
        if self.flips is None:
            raise unknown_name_error("target of --assert", self.target, {r.target for r in result.rows})
        known = {f"{r.target}@{r.flips}" for r in result.rows}
        raise unknown_name_error("target of --assert", f"{self.target}@{self.flips}", known)

    @property
    def text(self) -> str:
        """The condition as text, with the limit in percent."""
        return f"{self.target}{'' if self.flips is None else f'@{self.flips}'}<={100 * self.limit:g}%"

    def failures(self, result: PvfResult) -> list[str]:
        """A line of text for each row whose upper limit exceeds the limit of the gate."""
        return [
            f"{r.target}{flips_suffix(r.flips)}: the upper limit {upper_bound_text(r.high, 100)} % is above "
            f"{100 * self.limit:g} % (estimate {'none' if r.estimate is None else f'{100 * r.estimate:.3g} %'}, n {r.n})"
            for r in self.rows(result)
            if r.high > self.limit
        ]


@dataclass(frozen=True, slots=True)
class PvfCurves:
    """The rows to draw as curves, by target, with the model last.

    ``left_out`` counts the targets that are not drawn; ``missing`` names those that no trial corrupted.
    """

    series: Mapping[str, Sequence[PvfRow]]
    left_out: int
    missing: tuple[str, ...]

    @property
    def flips(self) -> list[int]:
        """The numbers of flips, ascending."""
        return sorted({row.flips for rows in self.series.values() for row in rows if row.flips is not None})

    @property
    def target_count(self) -> int:
        """The number of targets besides the model."""
        return sum(rows[0].level != "model" for rows in self.series.values())
