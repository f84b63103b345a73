"""What is said of struck trainings, as sentences: shared by terminal and page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.text import clean, counted, seconds, signed
from unsilent.report.training_cells import (
    ANY,
    KINDS,
    counts_text,
    events,
    in_percent,
    of_all,
    part_name,
    rate,
    seen,
    top,
)
from unsilent.studies.trainings.records import Contrast, TrainingResult

FACTOR = 100.0
"""The factor of the sentence about conditions, and of the lines in their figure."""


def headline(result: TrainingResult) -> str:
    """The finding in one sentence."""
    if result.parts:
        return _pvf_headline(result)
    name = clean(result.workload)
    harm, latent = result.whole.harmful, result.whole.latent
    if not events(harm):
        return f"Of {counted(result.n, 'struck training')} of {name} none came to harm (at most {top(harm)} %)"
    quiet = (
        "none without a sign of it" if not events(latent) else f"{in_percent(latent)} without any error to tell of it"
    )
    return f"{in_percent(harm)} of {counted(result.n, 'struck training')} of {name} came to harm, {quiet}"


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
    harm = [TrainingOutcome(name) for name in seen(counts) if TrainingOutcome(name).harmful]
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
        yield f"not seen (each at most {top(absent[0].harmful)} %): {', '.join(group.name for group in absent)}"


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
        f"a gradient history or moving statistic above {FACTOR:g} times golden's largest (our threshold) within two steps of "
        "the fault"
    )
    latent, others = found.hit + found.missed, found.false + found.clear
    if not latent:
        yield f"no trial ended in latent harm, so nothing is known of what comes before it; {what}: {found.false:,} of {others:,}"
        return
    yield (
        f"{what} came before {found.hit:,} of {counted(latent, 'latent outcome')} (sensitivity {in_percent(found.sensitivity)}) "
        f"and in {found.false:,} of {others:,} harmless ones (specificity {in_percent(found.specificity)}){_alone(result)}; "
        f"of those whose harm shows itself in {found.loud_with:,} of {found.loud_with + found.loud_without:,}"
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
        f"in brackets {100 * result.confidence:g} % limits ({clean(result.whole.harmful.method)}); limits of differences: "
        f"Zou & Donner, {joint_text(result)}; harmful: neither masked nor improved; latent: degraded or low on held-out "
        "samples, without an error",
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


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):+.2g} to {100 * max(values):+.2g}"
