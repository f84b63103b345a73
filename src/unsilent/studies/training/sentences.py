"""What is said of faulty training runs: words for shares, classes and groups, and the sentences made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.text import clean, counted, seconds, shown, signed
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.judging import least_accuracies
from unsilent.studies.training.kind import FloorValues
from unsilent.studies.training.records import Contrast, Group, Part, TrainingResult
from unsilent.studies.training.spec import PHASES

ANY = "any"
KINDS = {"first": "first moment", "second": "second moment", "moving": "moving statistic", ANY: "any of these"}
TOLD = {
    TrainingOutcome.MASKED_BITWISE: "final state identical to the fault-free run's",
    TrainingOutcome.MASKED_BENIGN: "no difference beyond both noise floors",
    TrainingOutcome.IMMEDIATE_NAN: "loss not finite in the step of the fault",
    TrainingOutcome.SHORT_TERM_NAN: "loss not finite within {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "accuracy drops at once, low at the end",
    TrainingOutcome.SLOW_DEGRADE: "accuracy declines over several steps, or the loss is not finite later",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines further",
    TrainingOutcome.LOW_TEST: "trains normally, low on held-out samples",
    TrainingOutcome.IMPROVED: "better, beyond noise",
    TrainingOutcome.CRASHED: "crashed, raised or hung",
}
BRIEF = {
    TrainingOutcome.MASKED_BITWISE: "identical final state",
    TrainingOutcome.MASKED_BENIGN: "no difference beyond noise",
    TrainingOutcome.IMMEDIATE_NAN: "loss not finite at once",
    TrainingOutcome.SHORT_TERM_NAN: "loss not finite in {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "drops at once, stays low",
    TrainingOutcome.SLOW_DEGRADE: "declines in more steps",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines further",
    TrainingOutcome.LOW_TEST: "low on held-out data alone",
    TrainingOutcome.IMPROVED: "better, beyond noise",
    TrainingOutcome.CRASHED: "crashed, raised or hung",
}
"""`TOLD` for a narrow column."""
SOURCES = {
    "short_term": ("steps after the fault within which a loss that is not finite is short-term", "ours"),
    "window": ("steps that the training metric is averaged over", "ours"),
    "sharp_within": ("steps after the fault within which a drop is sharp", "ours"),
    "drop": (
        "share of the fault-free metric that a sharp drop loses",
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


def rate(interval: Interval) -> str:
    """``3.8 % [2.5, 5.6]``; of no event or of nothing but events the one limit that there is."""
    if interval.estimate is None:
        return "no trial"
    text = shown(interval.estimate, interval.low, interval.high)
    if interval.estimate == 0:
        return f"none (at most {text.high} %)"
    if interval.estimate == 1:
        return f"all (at least {text.low} %)"
    return f"{text.estimate} % {text.limits}"


def events(interval: Interval) -> int:
    """Of ``n`` trials how many; 0 where there is none."""
    return round((interval.estimate or 0.0) * interval.n)


def of_all(interval: Interval, noun: str = "trial") -> str:
    """``10 of 679 trials, 1.5 % [0.70, 2.7]``, ``none of 679 trials (at most 0.55 %)``."""
    if not interval.n:
        return f"no {noun}"
    count, whole = events(interval), f"of {counted(interval.n, noun)}"
    if count in (0, interval.n):
        word, _, limit = rate(interval).partition(" ")
        return f"{word} {whole} {limit}"
    return f"{count:,} {whole}, {rate(interval)}"


def thresholds(result: TrainingResult) -> list[tuple[str, str, str, str]]:
    """Name, value, what it is, and where its default comes from."""
    return [(name, f"{getattr(result.thresholds, name):g}", *SOURCES[name]) for name in SOURCES]


def part_name(part: Part) -> str:
    """``block1 (param)``."""
    return clean(part.part or part.target) + (f" ({clean(part.what)})" if part.what else "")


def example(result: TrainingResult, outcome: str) -> str:
    """The first stored example of a class; nothing where there is none."""
    value = next((curve for curve in result.curves if curve.outcome == outcome), None)
    if value is None:
        return ""
    return clean(value.trial) + (" (made by hand)" if value.made else "")


def plainly(share: Interval) -> str:
    """``3.8 [2.5, 5.6]`` in percent, ``0 [0, 31]``; ``–`` of no trial."""
    return in_percent(share).replace(" %", "") if share.n else "–"


def counts_text(counts: Mapping[str, int]) -> str:
    """``8×immediate-nan, 9×low-test``: of all classes but the masked ones; no blank parts a count from its class."""
    return ", ".join(f"{counts[name]:,}×{name}" for name in seen(counts) if not name.startswith("masked"))


def ordered_groups(result: TrainingResult) -> dict[str, list[Group]]:
    """Groups by what trials are told apart, in the order of reading: phases as a step has them, parts of the run by number."""
    output = {}
    for kind, groups in result.groups.items():
        name = "what was corrupted" if kind == "phase" and result.parts else kind
        output[name] = sorted(groups, key=_phase) if kind == "phase" else list(groups)
        if kind == "part of the run":
            output[name] = sorted(groups, key=_numbers)
    return output


def worst_first(groups: Sequence[Group]) -> list[Group]:
    """Groups with the largest harmful share first; among equals those with more different trials, then with more trials."""

    def order(group: Group) -> tuple[float, float, int, str]:
        return -(group.harmful.estimate or 0.0), -(group.different.estimate or 0.0), -group.n, group.name

    return sorted(groups, key=order)


def _phase(group: Group) -> int:
    return PHASES.index(group.name) if group.name in PHASES else len(PHASES)


def _numbers(group: Group) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,12}", group.name)]


def seen(counts: Mapping[str, int]) -> list[str]:
    """Classes with at least one trial, in their order."""
    return [str(outcome) for outcome in TrainingOutcome if counts.get(str(outcome))]


def in_percent(interval: Interval) -> str:
    """``3.8 % [2.5, 5.6]``, ``0 % [0, 31]``."""
    text = shown(interval.estimate, interval.low, interval.high)
    return f"{text.estimate if interval.estimate else 0} % {text.limits}"


def top(interval: Interval) -> str:
    return shown(interval.estimate, interval.low, interval.high).high


FACTOR = 100.0
"""The factor of the sentence about conditions, and of the lines in their figure."""


def headline(result: TrainingResult) -> str:
    """The finding in one sentence."""
    if result.parts:
        return _pvf_headline(result)
    name = clean(result.workload)
    harm, latent, different = result.whole.harmful, result.whole.latent, result.whole.different
    ended = f"{in_percent(different) if events(different) else 'none'} ended different"
    if not events(harm):
        return f"Of {counted(result.n, 'faulty training run')} of {name} none were harmful (at most {top(harm)} %), {ended}"
    quiet = "none of them silently" if not events(latent) else f"{in_percent(latent)} silently (no error raised)"
    return f"{in_percent(harm)} of {counted(result.n, 'faulty training run')} of {name} were harmful, {quiet}; {ended}"


def _pvf_headline(result: TrainingResult) -> str:
    worst = max(result.parts, key=lambda part: (part.pvf.estimate or 0.0, part.pvf.low))
    many = counted(len(result.parts), "target")
    if not worst.failures:
        return f"No corruption of {many} of {clean(result.workload)} ended in a convergence failure"
    return (
        f"Of {many} of {clean(result.workload)} {part_name(worst)} has the highest estimate: {in_percent(worst.pvf)} of "
        f"{worst.n:,} corruptions end in a convergence failure (exploratory: no order of targets is tested)"
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
    yield (
        f"different, beyond implementation noise: {of_all(result.whole.different)}; harmful, beyond the noise of seeds as well: "
        f"{of_all(result.whole.harmful)}"
    )
    harm = [TrainingOutcome(name) for name in seen(counts) if TrainingOutcome(name).harmful]
    latent, loud = ({str(name): counts[name] for name in harm if name.latent is kind} for kind in (True, False))
    yield f"silent degradation (no error raised): {of_all(result.whole.latent)}" + (
        f": {counts_text(latent)}" if latent else ""
    )
    if loud:
        yield f"harm with an error or a loss that is not finite: {counts_text(loud)}"
    by_name = {one.name: one for one in result.classes}
    same = by_name.get(TrainingOutcome.MASKED_BITWISE)
    if same is not None:
        yield f"final state identical to the fault-free run: {of_all(same.share)}"
    absent = [one for one in result.classes if not one.n]
    if absent and result.n:
        yield f"classes not observed (each at most {top(absent[0].share)} %): {', '.join(one.name for one in absent)}"


def contrast_text(result: Contrast) -> str:
    """One group against another, and whether they are shown to differ."""
    first, second, gap = clean(result.first), clean(result.second), result.difference
    points = signed(gap.estimate, gap.low, gap.high)
    word = "more" if gap.low > 0 else "less" if gap.high < 0 else "no difference is shown"
    if word != "no difference is shown":
        word = f"{first} faults did {word}"
    return (
        f"{clean(result.name)}, {first} against {second} with the same fault models: {rate(result.one)} of {result.one.n:,} "
        f"against {rate(result.other)} of {result.other.n:,}, {points.estimate} points{points.behind}: {word}"
    )


def _conditions(result: TrainingResult) -> Iterator[str]:
    """The contingency of all kinds together at `FACTOR`."""
    value = next((c for c in result.conditions if c.kind == ANY and c.factor == FACTOR), None)
    if value is None:
        return
    what = (
        f"a gradient history or moving statistic above {FACTOR:g} times the fault-free run's largest (our threshold) within two "
        "steps of the fault"
    )
    latent, others = value.hit + value.missed, value.false + value.clear
    if not latent:
        yield f"no trial ended in silent degradation, so it is not known what precedes it; {what}: {value.false:,} of {others:,}"
        return
    yield (
        f"{what} came before {value.hit:,} of {counted(latent, 'latent outcome')} (sensitivity {in_percent(value.sensitivity)}) "
        f"and in {value.false:,} of {others:,} harmless ones (specificity {in_percent(value.specificity)}){_alone(result)}; "
        f"of {counted(value.different.n, 'outcome')} latent by implementation noise alone before {events(value.different):,}; "
        f"of harm that is not silent in {value.loud_with:,} of {value.loud_with + value.loud_without:,}"
    )


def _alone(result: TrainingResult) -> str:
    """How many latent outcomes each kind by itself came before."""
    kinds = [c for c in result.conditions if c.factor == FACTOR and c.kind != ANY]
    if len(kinds) < 2:
        return ""
    return "; alone: " + ", ".join(f"{KINDS.get(c.kind, clean(c.kind))} {c.hit:,}" for c in kinds)


def least_accuracy(result: TrainingResult) -> tuple[float, float]:
    """See `least_accuracies`."""
    return least_accuracies(result.golden_test, result.floors, result.margin)


def pvf_text(result: TrainingResult) -> str:
    """What a convergence failure is."""
    least, different = least_accuracy(result)
    return (
        f"training PVF: the share of corruptions that end in a convergence failure, that is held-out accuracy below "
        f"{100 * least:.2f} % ({100 * result.margin:g} points below the worst fault-free replica of either floor), a loss that "
        f"is not finite, or a crash; different: by implementation noise alone, below {100 * different:.2f} %"
    )


def guard_texts(result: TrainingResult) -> Iterator[str]:
    """What the guard saved."""
    output = result.guard
    if output is None:
        return
    whole, large = output.all, output.largest
    different = of_all(output.different.share, "different trial")
    if whole.n:
        yield f"the guard caught {of_all(whole.share, 'harmful fault')}, within two steps; {different}"
    else:
        yield f"no harmful fault occurred under the guard; it caught {different}"
    if large.n:
        yield f"of faults that wrote over {output.large:,.0f} times the largest value before, it caught {of_all(large.share)}"
    if whole.within:
        bits = "all" if whole.identical == whole.within else f"{whole.identical:,} of {whole.within:,}"
        yield f"harmful faults that it caught in time: {bits} ended with a final state identical to the fault-free run"
    rest = [(output.late, "caught later than that"), (output.stopped, "stopped: another alarm after going back")]
    if parts := [f"{count:,} {what}" for count, what in rest if count]:
        yield f"under the guard: {', '.join(parts)}"
    if output.alarms:
        yield "alarms: " + ", ".join(f"{clean(kind)} {count:,}" for kind, count in output.alarms.items())


def how(result: TrainingResult) -> list[str]:
    """How trials were judged and what they cost: lines under the tables."""
    return [
        f"{counted(result.steps, 'step')} of {clean(result.workload)}, {counted(result.parameters, 'parameter')}, optimizer "
        f"{clean(' and '.join(dict.fromkeys(result.optimizers)) or 'none')}; fault-free held-out accuracy "
        f"{100 * result.golden_test:.2f} %",
        *floor_texts(result),
        f"in brackets {100 * result.confidence:g} % limits ({clean(result.whole.harmful.method)}); limits of differences: "
        f"Zou & Donner, {joint_text(result)}",
        "different: lost, or off by a threshold and beyond implementation noise; harmful: lost, or worse by a threshold and "
        "beyond the noise of seeds as well; silent: harmful without an error (degraded, or low on held-out samples)",
        cost_text(result),
        f"{seconds(result.seconds)} in all sessions, {seconds(result.cpu_seconds)} of CPU time",
    ]


def joint_text(result: TrainingResult) -> str:
    """Which limits hold together."""
    many = len(result.contrasts)
    return (f"joint over {many} (Bonferroni); " if many else "") + (
        "rows of a table have limits of their own: comparing them is exploratory"
    )


def floor_texts(result: TrainingResult) -> Iterator[str]:
    """The two noise floors, and the test against them."""
    floors = result.floors
    yield f"implementation noise: {_floor(floors.implementation, result)}" + (
        ", so every difference is beyond it" if all(floors.implementation.same) else ""
    )
    yield f"noise of seeds: {_floor(floors.seeds, result)}" + (
        ": no seed changes this training, so harm is judged by implementation noise alone"
        if all(floors.seeds.same)
        else ""
    )
    n = min(len(floors.implementation.accuracy), len(floors.seeds.accuracy))
    yield (
        f"beyond a floor: p of a rank test of held-out accuracy and loss is at most {100 * result.level:g} %, for each trial by "
        f"itself ({n} replicas give {100 / (n + 1):.2g} % at the least), so that share of runs that differ as its replicas do is "
        "called beyond it by chance; a difference in accuracy must also exceed a threshold"
    )


def _floor(floor: FloorValues, result: TrainingResult) -> str:
    head = f"{counted(len(floor.accuracy), 'fault-free replica')} (switches: {clean(floor.switches)})"
    if all(floor.same):
        return f"{head} that all ended in the final state of the fault-free twin (golden)"
    return (
        f"{head} whose held-out accuracy is {_span(floor.accuracy)} points from that of the fault-free twin (golden), and whose "
        f"predictions differ in up to {100 * max(floor.churn):.2g} % of {counted(result.samples, 'sample')}"
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
    return f"; horizon: counted as masked after {horizon.get('steps')} steps inside the fault-free band"


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):+.2g} to {100 * max(values):+.2g}"
