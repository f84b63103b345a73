"""Computes the estimates of a PVF campaign from its store.

Every interval takes into account that one fault is scored on many samples. Sums over targets are weighted by their share of the
sampling law (`statistics.stratified`).

Failures in time (FIT) are failures per 10^9 hours. They are raw FIT per bit x bits x PVF, with the limits of the PVF: the rate of
single-bit faults after which an output (of the study's unit) would be wrong. The PVF must be for the faults that the raw rate
counts: one flip, with every bit equally likely, in memory that keeps its values (values computed in a run exist only briefly).
A PVF over elements satisfies this only if all elements have one width; otherwise a reason is given instead of a FIT. The raw
rate is given by the user and taken as exact: its own uncertainty, which is often larger, is not in the limits.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import StoreError, UsageError
from unsilent.basics.interval import Interval
from unsilent.campaigns.merging import command_without_shard
from unsilent.campaigns.stored_command import without_options
from unsilent.faults import Codec, codec
from unsilent.outcomes.pvf_options import PvfAnalysisOptions, PvfReportOptions
from unsilent.outcomes.tallies import PvfEstimator, Tally
from unsilent.report.heat import HeatMap
from unsilent.report.text import EstimateText, escape_unprintable, rate_text
from unsilent.statistics import Stratum, stratified
from unsilent.statistics.interim import confidence_at
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.memory_fit import memory_fit_rows
from unsilent.studies.pvf.records import ACCURACY, LookupRow, PvfResult, PvfRow, at_level, main_level
from unsilent.studies.pvf.row_scopes import (
    RowScope,
    SingleElementTrial,
    StoredTrials,
    layer_groups,
    make_rows,
    single_element_trials,
    target_groups,
)
from unsilent.studies.pvf.spec import PvfBaseline, PvfSpec, TensorInfo


def analyse(store: PvfStore, question: PvfEstimator) -> PvfResult:
    """The result of a store.

    Raises ``StoreError`` if the store has contents that no campaign writes.
    """
    try:
        return _result_of_question(store, question)
    except (KeyError, IndexError, OverflowError, ZeroDivisionError) as error:  # its parts do not fit together
        raise StoreError(
            f"the store is damaged: its contents are inconsistent ({type(error).__name__}: {error}); use a backup copy"
        ) from error


# Long because the result has so many fields, each of which is computed once, here.
def _result_of_question(store: PvfStore, question: PvfEstimator) -> PvfResult:
    spec, description = store.spec, store.baseline
    question = question.with_default_unit(spec.is_transient)
    unit = question.unit or "sample"
    stored = StoredTrials(store, unit)
    hits = [hit for rows in stored.rows.values() for hit in single_element_trials(rows, description)]
    counting = [hit for hit in hits if stored.is_counted(hit.row)]
    single = [h for h in counting if h.row.trial.flips == 1]
    views = [stored, *filter(None, [stored.lost_task_metric()])]
    groups, *lost = ([*_groups(view, single)] for view in views)
    scores = description.scores
    rows = make_rows(groups, lost[0] if lost else (), scores.loss_limits if scores else (0.0, 1.0), question)
    command = without_options(store.largest_budget()[1], PvfAnalysisOptions, PvfReportOptions)
    planned = PVF.count_planned_trials(store)
    if stored.trial_count >= planned:  # all shards are complete, whichever was requested last
        command = command_without_shard(command)
    if command.startswith("unsilent "):
        usual = PvfEstimator().with_default_unit(spec.is_transient)
        command = " ".join([command, *non_default_question_options(question, usual)])
    seconds, cpu = store.total_session_seconds()
    return PvfResult(
        **{name: getattr(spec, name) for name in ("workload", "per", "law", "seed", "threads")},
        transient=spec.is_transient,
        **{name: getattr(description, name) for name in ("info", "judge", "campaign", "golden_seconds", "versions")},
        fault=spec.fault if spec.faults is None else f"{spec.fault} {PurePath(spec.faults).name}",
        at=" ".join(spec.at),
        unit=unit,
        confidence=question.confidence,
        spec=spec.to_json(),
        command=command,
        store=str(store.path),
        samples=sum(description.samples),
        batches=len(description.samples),
        trials_done=stored.trial_count,
        trials_planned=planned,
        seconds=seconds,
        cpu_seconds=cpu,
        device=description.fingerprint.get("device", spec.device),
        dtype=dtype_of(spec, description),
        rows=tuple(rows),
        samples_of_trials=samples_of_trials(stored),
        graphed_trials=sum(row.graphed for rows in stored.rows.values() for row in rows),
        pilot_trials=sum(plan.pilot_size for plan in stored.plans.values() if plan.first_look_trials),
        heat_maps=heat_maps(hits, description, unit),
        lookups=()
        if spec.faults is not None  # such trials are not uniform over rows
        else lookup_rows(counting, description, unit, _over_looks(stored, question.confidence)),
        score_name=scores.name if scores else ACCURACY if lost else "",
        golden_score=scores.mean if scores else None,
        notes=(*description.notes, *_notes(rows, spec.is_transient)),
        memory_fit=memory_fit_rows(description.memory_parts, description.memories, stored, question),
        memories=description.memories,
    )


def _groups(stored: StoredTrials, single: Sequence[SingleElementTrial]) -> Iterator[RowScope]:
    """The scopes of all rows: targets at each number of flips, and layers by where single flips fell."""
    for flips in stored.spec.flips:
        yield from target_groups(stored, flips)
    if stored.spec.per == "component" and 1 in stored.spec.flips:
        yield from layer_groups(single, stored)


def samples_of_trials(stored: StoredTrials) -> dict[str, int]:
    """The number of samples that a trial evaluates, by reported target; empty if it evaluates all."""
    samples = {t.group or t.name: stored.spec.samples or 0 for t in stored.description.targets}
    samples |= {plan.group: plan.samples or samples[plan.group] for plan in stored.plans.values()}
    return samples if any(samples.values()) else {}


def _over_looks(stored: StoredTrials, confidence: float) -> float:
    """The confidence of a single interval, corrected if the campaign may have stopped at an interim look."""
    looks = [plan.look for plan in stored.plans.values() if plan.first_look_trials]
    return confidence_at(max(looks), confidence) if looks else confidence


def dtype_of(spec: PvfSpec, description: PvfBaseline) -> str:
    """The dtype to show: that of the model, or all corrupted dtypes if values of a run are corrupted."""
    corrupted = dtypes(description)
    if spec.is_transient:
        return " and ".join(filter(None, (", ".join(corrupted[:-1]), *corrupted[-1:]))) or "nothing"
    return spec.dtype or corrupted[0]


def non_default_question_options(question: PvfEstimator, usual: PvfEstimator) -> list[str]:
    """The command-line options of a question that differ from their defaults."""
    known = asdict(usual)
    return [f"--{key} {value}" for key, value in asdict(question).items() if value != known[key]]


def _notes(rows: Sequence[PvfRow], transient: bool) -> list[str]:
    notes = []
    all_are_masked = bool(rows) and all(r.masked == r.units for r in rows)
    if not transient and all_are_masked and sum(r.n for r in rows if r.level == "model") >= 50:
        notes.append("No fault changed a single bit of any output: check that run() uses the model passed to it.")
    return notes


def dtypes(description: PvfBaseline) -> tuple[str, ...]:
    """The dtypes of the corrupted tensors, the one with most elements first."""
    sizes: Counter[str] = Counter()
    for tensor in description.tensors:
        sizes[tensor.dtype] += tensor.elements
    return tuple(name for name, _ in sizes.most_common())


def heat_maps(hits: Sequence[SingleElementTrial], description: PvfBaseline, unit: str) -> tuple[HeatMap, ...]:
    """A heat map for each dtype that was hit by single flips."""
    result = []
    for name in dtypes(description):
        flips = [h for h in hits if h.bit is not None and h.tensor.dtype == name]
        if flips:
            result.append(_heat_map(flips, codec(name), description, unit))
    return tuple(result)


def _heat_map(flips: Sequence[SingleElementTrial], layout: Codec, description: PvfBaseline, unit: str) -> HeatMap:
    """The heat map of layers and bit positions, for the tensors of one dtype.

    If several targets share a cell, each is weighted by its share of the law, and, if all faults are tried, by the number of its
    faults in the cell.
    """
    shares = {t.name: t.share / max(t.slots, 1) for t in description.targets}
    counted = {t.name for t in description.targets if t.slots}
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for hit, share in _shares(flips, description, unit):
        assert hit.bit is not None
        cells[hit.tensor.layer, hit.bit][hit.row.trial.target].append(share)
    layers = tuple(dict.fromkeys(t.layer for t in description.tensors if t.dtype == layout.name))
    bits = tuple(range(layout.bits))

    def value(layer: str, bit: int) -> float | None:
        parts = cells.get((layer, bit))
        if not parts:
            return None
        weights = {name: shares[name] * (len(seen) if name in counted else 1) for name, seen in parts.items()}
        return float(sum(weights[name] * np.mean(seen) for name, seen in parts.items()) / sum(weights.values()))

    return HeatMap(
        dtype=layout.name,
        layers=layers,
        bits=bits,
        fields={b: _field(layout, b) for b in bits},
        estimate=tuple(tuple(value(layer, b) for b in bits) for layer in layers),
        n=tuple(tuple(sum(map(len, cells.get((layer, b), {}).values())) for b in bits) for layer in layers),
    )


def _shares(
    hits: Sequence[SingleElementTrial], description: PvfBaseline, unit: str
) -> Iterator[tuple[SingleElementTrial, float]]:
    """Each trial with the share of its units that are incorrect."""
    tally = Tally.of([hit.row.outcome_codes for hit in hits], description.samples, unit)
    return zip(hits, tally.incorrect_share_per_trial.tolist(), strict=True)


def _field(layout: Codec, bit: int) -> str:
    """The name of the field that a bit belongs to; ``value`` for the digits of an integer."""
    name = layout.field_of_bit(bit)
    return "value" if layout.kind == "int" and name == "mantissa" else name


Heats = NDArray[np.str_]


def lookup_classes(counts: Sequence[int]) -> Heats:
    """The class of each table row by its number of look-ups: ``hot``, ``warm`` or ``cold`` (see `LookupRow`)."""
    seen = np.asarray(counts, np.int64)
    order = np.argsort(-seen, kind="stable")
    before = np.cumsum(seen[order]) - seen[order]
    classes = np.full(seen.size, "warm")
    classes[order[before < seen.sum() / 2]] = "hot"
    classes[seen == 0] = "cold"
    return classes


def lookup_rows(
    hits: Sequence[SingleElementTrial], description: PvfBaseline, unit: str, confidence: float
) -> tuple[LookupRow, ...]:
    """The PVF of hot, warm and cold embedding rows, over all tables."""
    tables = {
        t.site: (t, lookup_classes(description.lookups[name]))
        for t in description.tensors
        if (name := t.site.removeprefix("param:")) in description.lookups
    }
    mine = list(_shares([h for h in hits if h.tensor.site in tables], description, unit))
    if not mine:
        return ()
    shares = {t.name: t.share for t in description.targets_at(1)}
    total = sum(t.elements for t, _ in tables.values())
    counts = {site: np.asarray(description.lookups[site.removeprefix("param:")]) for site in tables}
    out = []
    for heat in ("hot", "warm", "cold"):
        groups: dict[str, list[float]] = {name: [] for name in shares}
        for hit, share in mine:
            tensor, classes = tables[hit.tensor.site]
            if classes[hit.element // prod(tensor.shape[1:])] == heat:
                groups[hit.row.trial.target].append(share)
        rows = sum(int((classes == heat).sum()) for _, classes in tables.values())
        if not rows:
            continue
        weights = {name: shares[name] * _part(name, heat, tables.values(), description) for name in groups}
        mass = sum(weights.values())  # strata without a hit keep their weight
        whole = stratified([Stratum.of(g, weights[name] / mass) for name, g in groups.items()], confidence)
        out.append(
            LookupRow(
                lookup_class=heat,
                rows=rows,
                lookups=sum(int(counts[site][c == heat].sum()) for site, (_, c) in tables.items()),
                share_of_elements=sum(int((c == heat).sum()) * prod(t.shape[1:]) for t, c in tables.values()) / total,
                estimate=whole.estimate,
                low=whole.low,
                high=whole.high,
                n=sum(len(g) for g in groups.values()),
            )
        )
    return tuple(out)


def _part(target: str, heat: str, tables: Iterable[tuple[TensorInfo, Heats]], description: PvfBaseline) -> float:
    """The share of a target's elements that are embedding rows of a class."""
    info = next(t for t in description.targets if t.name == target)
    target_owner = {"component": info.component, "tensor": info.group}.get(info.level, info.layer)

    def owner(tensor: TensorInfo) -> str:
        names = {"component": tensor.component, "tensor": tensor.site.removeprefix("param:")}
        return names.get(info.level, tensor.layer)

    corrupted = sum(int((c == heat).sum()) * prod(t.shape[1:]) for t, c in tables if owner(t) == target_owner)
    return corrupted / info.elements


FIT_REQUIREMENT = (
    "FIT needs the PVF of parameters for single flips of any bit, drawn per element (--fault bitflip "
    "--flips 1 --law per-element)"
)
MIXED_WIDTHS_REASON = "mixed element widths"
ONE_WIDTH = 0.99
"""Share of the bits that must belong to elements of one width; the error of FIT is at most the remaining share."""


@dataclass(frozen=True, slots=True)
class FitRow:
    """The FIT of one target.

    ``unmasked_fit`` is the rate of faults before the model masks any; ``reason`` explains why there is no FIT.
    """

    row: PvfRow
    unmasked_fit: float
    estimate: float | None
    low: float | None
    high: float | None
    reason: str = ""

    @property
    def text(self) -> EstimateText:
        """The FIT and its limits as text."""
        return EstimateText("–", "–", "–") if self.interval is None else rate_text(self.interval)

    @property
    def interval(self) -> Interval | None:
        """The interval of the FIT; None if there is no FIT."""
        return None if self.reason else self.row.interval.scaled(self.unmasked_fit)


def check_rate(fit_per_bit: float, transient: bool = False) -> float:
    """Return the fault rate; raises ``UsageError`` if it is invalid or does not apply to the faults.

    ``transient``: faults are injected into values of a run.
    """
    if not (math.isfinite(fit_per_bit) and fit_per_bit >= 0):
        raise UsageError(
            f"--fit-per-bit is {fit_per_bit!r}; expected a rate of 0 or more, in failures per 1e9 hours and bit"
        )
    if transient:
        raise UsageError(
            "--fit-per-bit is a fault rate of parameters in memory, but the targets are values of a run, or the memories of an "
            "accelerator, which have rates of their own; omit --fit-per-bit, or run a campaign at 'param:*'"
        )
    return fit_per_bit


def make_fit_row(row: PvfRow, fit_per_bit: float) -> FitRow:
    """The FIT of one row: the fault rate per bit, times bits, times PVF."""
    raw = fit_per_bit * row.bits
    if row.widest_share_of_bits < ONE_WIDTH:
        return FitRow(row, raw, None, None, None, MIXED_WIDTHS_REASON)
    return FitRow(row, raw, None if row.estimate is None else raw * row.estimate, raw * row.low, raw * row.high)


def fit_rows(result: PvfResult, fit_per_bit: float) -> tuple[FitRow, ...]:
    """The FIT of the rows with one flip, the largest first, then that of the model.

    Empty if the fault model is not a bit flip in parameters, drawn per element. Rows without a wrong output are ranked by their
    upper limit, so that large parts stay visible.
    """
    check_rate(fit_per_bit)
    if result.transient or result.fault != "bitflip" or result.law != "per-element":
        return ()
    level = main_level(result)
    single = [row for row in result.rows if row.flips == 1]
    parts = [make_fit_row(row, fit_per_bit) for row in at_level(single, level) if level != "model"]
    parts.sort(key=lambda f: -1.0 if f.high is None else f.estimate or f.high, reverse=True)
    return (*parts, *(make_fit_row(row, fit_per_bit) for row in at_level(single, "model")))


def fit_versus_pvf_text(rows: Sequence[FitRow]) -> str:
    """A sentence for the case that the target with the most FIT does not have the highest PVF."""
    parts = [f for f in rows if f.row.level != "model" and f.estimate is not None]
    if len(parts) < 2:
        return ""
    most = max(parts, key=lambda f: f.estimate or 0.0)
    worst = max(parts, key=lambda f: (f.row.estimate or 0.0, f.row.high))
    more = most.unmasked_fit * most.row.joint_low > worst.unmasked_fit * worst.row.joint_high
    if most.row.target == worst.row.target or not more or most.row.joint_high >= worst.row.joint_low:
        return ""
    return (
        f"{escape_unprintable(most.row.target)} has more FIT than {escape_unprintable(worst.row.target)} "
        f"although its PVF is lower: it holds {most.row.bits / max(worst.row.bits, 1):,.0f} times as many bits."
    )
