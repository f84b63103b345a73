"""What is said of struck trainings, as sentences and cells: shared by terminal, page and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unsilent.campaigns.trainings.spec import PHASES
from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.text import clean, counted, seconds, shown, signed
from unsilent.statistics.intervals import Interval
from unsilent.studies.trainings.records import Caught, Condition, Contrast, Group, Part, TrainingResult

FACTOR = 100.0
"""The factor of the sentence about conditions, and of the lines in their figure."""
ANY = "any"
KINDS = {"first": "first moment", "second": "second moment", "moving": "moving statistic", ANY: "any of these"}
TOLD = {
    TrainingOutcome.MASKED_BITWISE: "ends with golden's bits",
    TrainingOutcome.MASKED_BENIGN: "other bits, nothing that counts",
    TrainingOutcome.IMMEDIATE_NAN: "loss not finite in the fault's step",
    TrainingOutcome.SHORT_TERM_NAN: "loss not finite within {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "drops at once, low at the end",
    TrainingOutcome.SLOW_DEGRADE: "declines over more steps, or loses its loss later",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines on",
    TrainingOutcome.LOW_TEST: "trains as it should, low on held-out samples",
    TrainingOutcome.IMPROVED: "beyond noise the better way",
    TrainingOutcome.CRASHED: "died, raised, or hung",
}
BRIEF = {
    TrainingOutcome.MASKED_BITWISE: "golden's bits",
    TrainingOutcome.MASKED_BENIGN: "no difference that counts",
    TrainingOutcome.IMMEDIATE_NAN: "loss lost in that step",
    TrainingOutcome.SHORT_TERM_NAN: "loss lost in {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "drops at once, stays low",
    TrainingOutcome.SLOW_DEGRADE: "declines in more steps",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines on",
    TrainingOutcome.LOW_TEST: "low on held-out data alone",
    TrainingOutcome.IMPROVED: "better, beyond noise",
    TrainingOutcome.CRASHED: "died, raised, or hung",
}
"""`TOLD` for a narrow column."""
SOURCES = {
    "short_term": ("steps after the fault's in which a lost loss is short-term", "ours"),
    "window": ("steps that the training metric is averaged over", "ours"),
    "sharp_within": ("steps after the fault's in which a drop is sharp", "ours"),
    "drop": (
        "share of golden's metric that a sharp drop takes",
        "ours; a published slow decline loses 0.18 in one step",
    ),
    "gap": ("of the training metric at the end that is low", "README of He et al.'s artifact: masked is about 2 %"),
    "end": ("last steps that the metric is averaged over for that", "ours"),
    "test_gap": ("of held-out accuracy that is low", "ours, as gap"),
}
"""What each threshold is, and where its default comes from."""


def told(outcome: str, result: TrainingResult, brief: bool = False) -> str:
    """What a class is, in a few words."""
    words = BRIEF if brief else TOLD
    return words[TrainingOutcome(outcome)].format(short_term=result.thresholds.short_term)


def rate(found: Interval) -> str:
    """``3.8 % [2.5, 5.6]``; of no event or of nothing but events the one limit that there is."""
    if found.estimate is None:
        return "no trial"
    text = shown(found.estimate, found.low, found.high)
    if found.estimate == 0:
        return f"none (at most {text.high} %)"
    if found.estimate == 1:
        return f"all (at least {text.low} %)"
    return f"{text.estimate} % {text.limits}"


def events(found: Interval) -> int:
    """Of ``n`` trials how many; 0 where there is none."""
    return round((found.estimate or 0.0) * found.n)


def of_all(found: Interval, noun: str = "trial") -> str:
    """``10 of 679 trials, 1.5 % [0.70, 2.7]``, ``none of 679 trials (at most 0.55 %)``."""
    if not found.n:
        return f"no {noun}"
    count, text = events(found), shown(found.estimate, found.low, found.high)
    if not count:
        return f"none of {counted(found.n, noun)} (at most {text.high} %)"
    if count == found.n:
        return f"all of {counted(found.n, noun)} (at least {text.low} %)"
    return f"{count:,} of {counted(found.n, noun)}, {text.estimate} % {text.limits}"


def headline(result: TrainingResult) -> str:
    """The finding in one sentence."""
    if result.parts:
        return _pvf_headline(result)
    name = clean(result.workload)
    harm, latent = result.whole.harmful, result.whole.latent
    if not events(harm):
        return f"Of {counted(result.n, 'struck training')} of {name} none came to harm (at most {_top(harm)} %)"
    quiet = "none without a sign of it" if not events(latent) else f"{_percent(latent)} without any error to tell of it"
    return f"{_percent(harm)} of {counted(result.n, 'struck training')} of {name} came to harm, {quiet}"


def _pvf_headline(result: TrainingResult) -> str:
    worst = max(result.parts, key=lambda part: (part.pvf.estimate or 0.0, part.pvf.low))
    many = counted(len(result.parts), "target")
    if not worst.failures:
        return f"No corruption of {many} of {clean(result.workload)} ended in a convergence failure"
    return (
        f"Of {many} of {clean(result.workload)} {part_name(worst)} is the most vulnerable: {_percent(worst.pvf)} of "
        f"{worst.n:,} corruptions end in a convergence failure"
    )


def findings(result: TrainingResult) -> Iterator[str]:
    """What else is told in sentences."""
    if result.parts:
        yield pvf_text(result)
        yield f"what follows counts the trials of all {counted(len(result.parts), 'target')} together, whatever their size"
    yield from _classes(result)
    yield from map(contrast_text, result.contrasts)
    yield from _conditions(result)
    if result.guard is not None:
        yield from guard_texts(result)
    yield from map(clean, result.notes)


def _classes(result: TrainingResult) -> Iterator[str]:
    counts = result.whole.counts
    harm = [TrainingOutcome(name) for name in _seen(counts) if TrainingOutcome(name).harmful]
    latent, loud = ({str(name): counts[name] for name in harm if name.latent is kind} for kind in (True, False))
    yield f"latent harm, which no error tells of: {of_all(result.whole.latent)}" + (
        f": {counts_text(latent)}" if latent else ""
    )
    if loud:
        yield f"harm that shows itself: {counts_text(loud)}"
    by_name = {group.name: group for group in result.classes}
    same = by_name.get(TrainingOutcome.MASKED_BITWISE)
    if same is not None:
        yield f"ended with golden's very bits: {of_all(same.harmful)}"
    absent = [group for group in result.classes if not group.n]
    if absent and result.n:
        yield f"not seen (each at most {_top(absent[0].harmful)} %): {', '.join(group.name for group in absent)}"


def contrast_text(found: Contrast) -> str:
    """One group against another, and whether they are shown to differ."""
    first, second, gap = clean(found.first), clean(found.second), found.difference
    points = signed(gap.estimate, gap.low, gap.high)
    word = "more" if gap.low > 0 else "less" if gap.high < 0 else "no difference is shown"
    if word != "no difference is shown":
        word = f"{first} faults did {word}"
    return (
        f"{clean(found.name)}, {first} against {second} with the same fault models: {rate(found.one)} of {found.one.n:,} against "
        f"{rate(found.other)} of {found.other.n:,}, {points.estimate} points{points.behind}: {word}"
    )


def _conditions(result: TrainingResult) -> Iterator[str]:
    """The contingency of all kinds together at `FACTOR`."""
    found = next((c for c in result.conditions if c.kind == ANY and c.factor == FACTOR), None)
    if found is None:
        return
    what = (
        f"a gradient history or moving statistic above {FACTOR:g} times golden's largest within two steps of the fault"
    )
    latent, others = found.hit + found.missed, found.false + found.clear
    if not latent:
        yield f"no trial ended in latent harm, so nothing is known of what comes before it; {what}: {found.false:,} of {others:,}"
        return
    yield (
        f"{what} came before {found.hit:,} of {counted(latent, 'latent outcome')} (sensitivity {_percent(found.sensitivity)}) "
        f"and in {found.false:,} of {others:,} other trials (specificity {_percent(found.specificity)}){_alone(result)}"
    )


def _alone(result: TrainingResult) -> str:
    """How many latent outcomes each kind by itself came before."""
    kinds = [c for c in result.conditions if c.factor == FACTOR and c.kind != ANY]
    if len(kinds) < 2:
        return ""
    return "; alone: " + ", ".join(f"{KINDS.get(c.kind, clean(c.kind))} {c.hit:,}" for c in kinds)


def least_accuracy(result: TrainingResult) -> float:
    """Held-out accuracy below which a run has not converged."""
    return result.golden_test + min(result.floor.accuracy) - result.margin


def pvf_text(result: TrainingResult) -> str:
    """What a convergence failure is."""
    return (
        f"training PVF: the share of corruptions that end in a convergence failure, that is held-out accuracy below "
        f"{100 * least_accuracy(result):.2f} % ({100 * result.margin:g} points below the worst fault-free replica), a loss that "
        "is not finite, or a crash"
    )


def guard_texts(result: TrainingResult) -> Iterator[str]:
    """What the guard saved."""
    found = result.guard
    if found is None:
        return
    whole, large = found.all, found.largest
    yield f"the guard caught {of_all(whole.share, 'harmful fault')}, within two steps"
    yield f"of faults that wrote more than {found.large:,.0f} times what was usual it caught {of_all(large.share)}"
    if whole.within:
        bits = "all" if whole.identical == whole.within else f"{whole.identical:,} of {whole.within:,}"
        yield f"runs that it caught in time and rolled back: {bits} ended with golden's very bits"
    rest = [(found.late, "caught later than that"), (found.stopped, "stopped: it tripped again after going back")]
    if parts := [f"{count:,} {what}" for count, what in rest if count]:
        yield f"under the guard: {', '.join(parts)}"
    if found.alarms:
        yield "alarms: " + ", ".join(f"{clean(kind)} {count:,}" for kind, count in found.alarms.items())


def how(result: TrainingResult) -> list[str]:
    """How trials were judged and what they cost: lines under the tables."""
    return [
        f"{counted(result.steps, 'step')} of {clean(result.workload)}, {counted(result.parameters, 'parameter')}, optimizer "
        f"{clean(' and '.join(dict.fromkeys(result.optimizers)) or 'none')}; fault-free held-out accuracy "
        f"{100 * result.golden_test:.2f} %",
        *floor_texts(result),
        f"in brackets {100 * result.confidence:g} % limits ({clean(result.whole.harmful.method)}); limits of differences: Zou & "
        "Donner; harmful: neither masked nor improved; latent: degraded or low on held-out samples, without an error",
        cost_text(result),
        f"{seconds(result.seconds)} in all sessions, {seconds(result.cpu_seconds)} of CPU time",
    ]


def floor_texts(result: TrainingResult) -> Iterator[str]:
    """The fault-free replicas, and the test against them."""
    floor = result.floor
    n = len(floor.accuracy)
    head = (
        f"each trial is judged beside its fault-free twin (golden) and {counted(n, 'fault-free replica')} "
        f"(switches: {clean(floor.switches)})"
    )
    if all(floor.same):
        yield f"{head} that all ended with the twin's bits: any difference counts as beyond noise"
        return
    yield (
        f"{head} whose held-out accuracy is {_span(floor.accuracy)} points from golden's, and whose predictions differ in up "
        f"to {100 * max(floor.churn):.2g} % of {counted(result.samples, 'sample')}"
    )
    yield (
        f"beyond noise: p of a rank test of held-out accuracy and loss is at most {100 * result.level:g} %, for each trial by "
        f"itself ({n} replicas give {100 / (n + 1):.2g} % at the least), so that share of "
        "runs that differ as replicas do is called beyond it by chance; harm that accuracy tells must also exceed a threshold"
    )


def cost_text(result: TrainingResult) -> str:
    """What a trial cost."""
    cost = result.cost
    ends = ", ".join(f"{clean(reason)} {count:,}" for reason, count in cost.ends.items())
    return (
        f"a trial ran {100 * cost.steps:.1f} % of a full run's steps ({100 * cost.bound:.1f} % if each went to its end) and took "
        f"{100 * cost.seconds:.1f} % of its time, {cost.per_hour:,.0f} trials an hour with one worker; runs ended by: {ends}"
        + horizon_text(result.spec)
    )


def horizon_text(spec: Mapping[str, object]) -> str:
    """What ``horizon`` means, where there is one."""
    horizon = spec.get("horizon")
    if not isinstance(horizon, Mapping):
        return ""
    return f"; horizon: taken for masked after {horizon.get('steps')} steps inside the fault-free band"


def thresholds(result: TrainingResult) -> list[tuple[str, str, str, str]]:
    """Name, value, what it is, and where its default comes from."""
    return [(name, f"{getattr(result.thresholds, name):g}", *SOURCES[name]) for name in SOURCES]


def part_name(part: Part) -> str:
    """``block1 (param)``."""
    return clean(part.part or part.target) + (f" ({clean(part.what)})" if part.what else "")


def class_cells(group: Group) -> list[str]:
    """Name, count, share and its limits."""
    share = shown(group.harmful.estimate, group.harmful.low, group.harmful.high)
    return [clean(group.name), f"{group.n:,}", share.estimate, share.limits]


def example(result: TrainingResult, outcome: str) -> str:
    """The first stored example of a class; nothing where there is none."""
    found = next((curve for curve in result.curves if curve.outcome == outcome), None)
    if found is None:
        return ""
    return clean(found.trial) + (" (made by hand)" if found.made else "")


def group_cells(group: Group) -> list[str]:
    """n, harmful and latent share with limits, and which classes that are not masked."""
    harm = shown(group.harmful.estimate, group.harmful.low, group.harmful.high)
    latent = shown(group.latent.estimate, group.latent.low, group.latent.high)
    return [f"{group.n:,}", harm.estimate, harm.limits, latent.estimate, counts_text(group.counts)]


def plainly(share: Interval) -> str:
    """``3.8 [2.5, 5.6]`` in percent, ``0 [0, 31]``; ``–`` of no trial."""
    return _percent(share).replace(" %", "") if share.n else "–"


def counts_text(counts: Mapping[str, int]) -> str:
    """``8×immediate-nan, 9×low-test``: of all classes but the masked ones; no blank parts a count from its class."""
    return ", ".join(f"{counts[name]:,}×{name}" for name in _seen(counts) if not name.startswith("masked"))


def condition_cells(found: Condition) -> list[str]:
    """Kind and factor, the four counts, sensitivity and specificity with limits."""
    counts = [f"{x:,}" for x in (found.hit, found.missed, found.false, found.clear)]
    kind = clean(KINDS.get(found.kind, found.kind))
    return [kind, f"{found.factor:,.0f}", *counts, plainly(found.sensitivity), plainly(found.specificity)]


def part_cells(part: Part) -> list[str]:
    """Target, what of it, elements, trials, failures, PVF and limits."""
    text = shown(part.pvf.estimate, part.pvf.low, part.pvf.high)
    counts = [f"{x:,}" for x in (part.elements, part.n, part.failures)]
    return [clean(part.part or part.target), clean(part.what), *counts, text.estimate, text.limits]


def caught_cells(found: Caught) -> list[str]:
    """Size, faults, caught within two steps, share and limits, ended with golden's bits."""
    text = shown(found.share.estimate, found.share.low, found.share.high)
    return [
        clean(found.name), f"{found.n:,}", f"{found.within:,}", text.estimate, text.limits if found.n else "–",
        f"{found.identical:,}",
    ]  # fmt: skip


def ordered_groups(result: TrainingResult) -> dict[str, list[Group]]:
    """Groups by what trials are told apart, in the order of reading: phases as a step has them, parts of the run by number."""
    found = {}
    for kind, groups in result.groups.items():
        name = "what was struck" if kind == "phase" and result.parts else kind
        found[name] = sorted(groups, key=_phase) if kind == "phase" else list(groups)
        if kind == "part of the run":
            found[name] = sorted(groups, key=_numbers)
    return found


def worst_first(groups: Sequence[Group]) -> list[Group]:
    """Groups with the largest harmful share first; among equals those with more trials."""
    return sorted(groups, key=lambda group: (-(group.harmful.estimate or 0.0), -group.n, group.name))


def _phase(group: Group) -> int:
    return PHASES.index(group.name) if group.name in PHASES else len(PHASES)


def _numbers(group: Group) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,12}", group.name)]


def _seen(counts: Mapping[str, int]) -> list[str]:
    """Classes with at least one trial, in their order."""
    return [str(outcome) for outcome in TrainingOutcome if counts.get(str(outcome))]


def _percent(found: Interval) -> str:
    """``3.8 % [2.5, 5.6]``, ``0 % [0, 31]``."""
    text = shown(found.estimate, found.low, found.high)
    return f"{text.estimate if found.estimate else 0} % {text.limits}"


def _top(found: Interval) -> str:
    return shown(found.estimate, found.low, found.high).high


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):+.2g} to {100 * max(values):+.2g}"
