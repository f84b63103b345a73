"""Sentences of the report on faulty training runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.replicas.noise_floor_records import ReplicaDifferences
from unsilent.report.estimates import has_few_trials
from unsilent.report.text import count_text, difference_text, duration_text, share_with_limits_text, upper_bound_text
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.judging import convergence_limits
from unsilent.studies.training.records import Contrast, TrainingPvfRow, TrainingResult, TrialGroup
from unsilent.studies.training.spec import PHASES

GUARD = "--guard"
END_TEXTS = {
    "end": "last step reached",
    "same-bits": "state again identical to the fault-free run's",
    "not-finite": "loss not finite",
    "horizon": "close to the fault-free run for the whole horizon",
    "raised": "error raised",
}
"""Texts for those of `END_REASONS` whose names do not explain them."""

ANY = "any"
KINDS = {"first": "first moment", "second": "second moment", "moving": "moving statistic", ANY: "any of these"}
OUTCOME_TEXTS = {
    TrainingOutcome.MASKED_BITWISE: "final state identical to the fault-free run's",
    TrainingOutcome.MASKED_BENIGN: "no difference beyond both noise floors",
    TrainingOutcome.IMMEDIATE_NAN: "loss not finite in the step of the fault",
    TrainingOutcome.SHORT_TERM_NAN: "loss not finite within {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "accuracy drops at once and is low at the end",
    TrainingOutcome.SLOW_DEGRADE: "accuracy declines over several steps, or the loss is not finite later",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "accuracy drops at once, then declines further",
    TrainingOutcome.LOW_TEST: "trains normally, but accuracy is low on held-out samples",
    TrainingOutcome.IMPROVED: "better than the fault-free run, beyond noise",
    TrainingOutcome.CRASHED: "the process crashed, raised an error or hung",
}
SOURCES = {
    "short_term": ("a loss that becomes non-finite within this many steps after the fault is short-term", "our choice"),
    "window": ("number of steps that the training metric is averaged over", "our choice"),
    "sharp_within": ("a drop within this many steps after the fault is sharp", "our choice"),
    "drop": (
        "share of the fault-free metric that a sharp drop loses",
        "our choice; in a published slow decline, one step loses 0.18",
    ),
    "gap": (
        "the final training metric is low if its distance below the fault-free run's exceeds this",
        "README of He et al.'s artifact: masked is about 2 %",
    ),
    "end": ("number of last steps over which the final training metric is averaged", "our choice"),
    "test_gap": (
        "held-out accuracy is low if its distance below the fault-free run's exceeds this",
        "our choice, as gap",
    ),
}
"""Meaning of each threshold, and the source of its default."""


def outcome_text(outcome: str, result: TrainingResult) -> str:
    """A short description of a class."""
    return OUTCOME_TEXTS[TrainingOutcome(outcome)].format(short_term=result.thresholds.short_term)


def events(interval: Interval) -> int:
    """The number of trials with the event that an interval estimates; 0 without an estimate."""
    return round((interval.estimate or 0.0) * interval.n)


def count_and_share_text(share: Interval, noun: str = "trial") -> str:
    """A count and a share with limits, like ``10 of 679 trials, 1.5 % [0.70, 2.7]``."""
    return f"{events(share):,} of {count_text(share.n, noun)}, {share_with_limits_text(share)}"


def thresholds(result: TrainingResult) -> list[tuple[str, str, str, str]]:
    """Name, value, meaning and source of each threshold."""
    return [(name, f"{getattr(result.thresholds, name):g}", *SOURCES[name]) for name in SOURCES]


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts of all classes except the masked ones, like ``8×immediate-nan, 9×low-test``."""
    names = [name for name in classes_with_trials(counts) if not name.startswith("masked")]
    return ", ".join(f"{counts[name]:,}×{name}" for name in names)


def ordered_groups(result: TrainingResult) -> dict[str, list[TrialGroup]]:
    """The groups by kind of grouping, in the order in which they are shown."""
    output = {}
    for kind, groups in result.groups.items():
        name = "what was corrupted" if kind == "phase" and result.parts else kind
        output[name] = sorted(groups, key=_phase) if kind == "phase" else list(groups)
        if kind == "part of the run":
            output[name] = sorted(groups, key=_numbers)
    return output


def worst_first(groups: Sequence[TrialGroup]) -> list[TrialGroup]:
    """Groups sorted by harmful share, the largest first; groups with few trials come last."""

    def order(group: TrialGroup) -> tuple[bool, float, float, int, str]:
        shares = -(group.harmful.estimate or 0.0), -(group.different.estimate or 0.0)
        return has_few_trials(group.harmful, group.n), *shares, -group.n, group.name

    return sorted(groups, key=order)


def most_vulnerable_first(parts: Sequence[TrainingPvfRow]) -> list[TrainingPvfRow]:
    """Targets sorted by training PVF, the largest first; targets with few trials come last."""
    return sorted(parts, key=lambda p: (has_few_trials(p.pvf, p.n), -(p.pvf.estimate or 0.0), -p.pvf.low))


def _phase(group: TrialGroup) -> int:
    return PHASES.index(group.name) if group.name in PHASES else len(PHASES)


def _numbers(group: TrialGroup) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,12}", group.name)]


def classes_with_trials(counts: Mapping[str, int]) -> list[str]:
    """Classes with at least one trial, in their order."""
    return [str(outcome) for outcome in TrainingOutcome if counts.get(str(outcome))]


FACTOR = 100.0
"""Factor in the sentence about conditions and for the lines in their figure."""


def headline(result: TrainingResult) -> str:
    """The main finding in one sentence."""
    if result.parts:
        return _pvf_headline(result)
    whole, runs = result.all_trials, f"{count_text(result.n, 'faulty training run')} of {result.workload}"
    harmful, latent, different = map(share_with_limits_text, (whole.harmful, whole.latent, whole.different))
    return (
        f"{harmful} of {runs} were harmful, {latent} silently (no error raised); {different} ended different from the fault-free "
        "run by more than noise"
    )


def _pvf_headline(result: TrainingResult) -> str:
    worst = most_vulnerable_first(result.parts)[0]
    many = count_text(len(result.parts), "target")
    if not any(part.failures for part in result.parts):
        corruptions, high = sum(part.n for part in result.parts), max(part.pvf.high for part in result.parts)
        return (
            f"None of {count_text(corruptions, 'corruption')} of {many} of {result.workload} ended in a convergence failure "
            f"(upper limit of training PVF: at most {upper_bound_text(high, 100)} % for each target)"
        )
    memory = f" ({worst.memory_kind})" if worst.memory_kind else ""
    return (
        f"`{worst.part or worst.target}`{memory} has the highest training PVF of {many} of {result.workload}: "
        f"{share_with_limits_text(worst.pvf)} of {worst.n:,} corruptions end in a convergence failure (exploratory: the order of "
        "targets is not tested)"
    )


def findings(result: TrainingResult) -> Iterator[str]:
    """Further findings, one sentence each."""
    if result.parts:
        yield pvf_text(result)
        targets = count_text(len(result.parts), "target")
        yield f"the following counts combine the trials of all {targets}, regardless of their size"
    yield from _classes(result)
    yield from map(contrast_text, result.contrasts)
    yield from _conditions(result)
    yield from guard_texts(result)
    yield from result.notes


def _classes(result: TrainingResult) -> Iterator[str]:
    whole = result.all_trials
    yield (
        f"different (beyond implementation noise): {count_and_share_text(whole.different)}; harmful (beyond the noise of seeds "
        f"as well): {count_and_share_text(whole.harmful)}"
    )
    harm = [name for name in classes_with_trials(whole.counts) if TrainingOutcome(name).harmful]
    latent, loud = (
        counts_text({name: whole.counts[name] for name in harm if TrainingOutcome(name).latent is kind})
        for kind in (True, False)
    )
    yield f"silent degradation (no error raised): {count_and_share_text(whole.latent)}" + (latent and f": {latent}")
    if loud:
        yield f"harm with an error or a loss that is not finite: {loud}"


def contrast_text(result: Contrast) -> str:
    """A sentence on the difference between two groups, and on whether it is significant."""
    gap = result.difference
    word = "higher" if gap.low > 0 else "lower" if gap.high < 0 else ""
    first, second = (
        f"{share_with_limits_text(share)} of {count_text(share.n, 'trial')}" for share in (result.one, result.other)
    )
    return (
        f"share of {result.name} trials, {result.first} against {result.second} (same fault models): {first} against {second}, "
        f"difference {difference_text(gap, ' points')}: "
        f"{f'the share is {word} for {result.first}' if word else 'no difference is shown'}"
    )


def _conditions(result: TrainingResult) -> Iterator[str]:
    """Sentences on the values that preceded latent harm, for all kinds together at `FACTOR`."""
    value = next((c for c in result.conditions if c.kind == ANY and c.factor == FACTOR), None)
    if value is None:
        return
    what = (
        f"within two steps of the fault, an optimizer moment or a moving statistic exceeded {FACTOR:g} times the largest value "
        "of its kind in the fault-free run (our threshold)"
    )
    latent, others = value.true_positives + value.false_negatives, value.false_positives + value.true_negatives
    if not latent:
        yield (
            f"no trial ended in silent degradation, so it is not known what precedes it; {what} in "
            f"{value.false_positives:,} of {others:,} harmless trials"
        )
        return
    yield (
        f"{what} in {value.true_positives:,} of {count_text(latent, 'trial')} that ended in silent degradation (sensitivity "
        f"{share_with_limits_text(value.sensitivity)}) and in {value.false_positives:,} of {others:,} harmless trials "
        f"(specificity {share_with_limits_text(value.specificity)})"
    )


def convergence_limits_of(result: TrainingResult) -> tuple[float, float]:
    """The `convergence_limits` of a result."""
    return convergence_limits(result.golden_test, result.floors, result.margin)


def pvf_text(result: TrainingResult) -> str:
    """A sentence on what counts as a convergence failure."""
    least, different = convergence_limits_of(result)
    return (
        "training PVF: the share of corruptions that end in a convergence failure: a crash, a loss that is not finite, or a "
        f"held-out accuracy below {100 * least:.2f} % ({100 * result.margin:g} points below the worst fault-free replica of "
        "either noise floor); column different: the same share, with the limit taken from implementation noise alone (accuracy "
        f"below {100 * different:.2f} %)"
    )


def guard_texts(result: TrainingResult) -> Iterator[str]:
    """Sentences on the faults that the guard caught."""
    output = result.guard
    if output is None:
        if GUARD in result.command.split() and not result.all_trials.different.estimate:
            yield "no faulty run ended different, so none was repeated under the guard"
        return
    whole = output.all_harmful
    caught = count_and_share_text(whole.share, "harmful fault")
    yield (
        f"within two steps of the fault, the guard caught {caught}; of all faults whose runs ended different, it caught "
        f"{count_and_share_text(output.different.share, 'fault')}; of the harmful faults caught, "
        f"{whole.recovered_identical:,} ended with exactly the final state of the fault-free run"
    )
    rest = [
        (output.late_alarms, "caught later than two steps after the fault"),
        (output.stopped, "stopped because an alarm came again after the guard restored an earlier state"),
    ]
    if parts := [f"{count:,} {what}" for count, what in rest if count]:
        yield f"other harmful faults under the guard: {', '.join(parts)}"
    if output.alarms:
        alarms = ", ".join(f"{kind} {count:,}" for kind, count in output.alarms.items())
        yield f"alarms of the guard on harmful faults, by what raised them: {alarms}"


def training_method_lines(result: TrainingResult) -> list[str]:
    """Notes on how trials were judged and what they cost, for display under the tables."""
    return [
        f"{count_text(result.steps, 'step')} of {result.workload}, {count_text(result.parameters, 'parameter')}, optimizer "
        f"{' and '.join(dict.fromkeys(result.optimizers)) or 'none'}; fault-free held-out accuracy "
        f"{100 * result.golden_test:.2f} %",
        *floor_texts(result),
        f"in brackets: {100 * result.confidence:g} % limits ({result.all_trials.harmful.method}); {joint_text(result)}",
        "different: crashed, not finite, or off by more than a threshold and beyond implementation noise; harmful: crashed, "
        "not finite, or worse by more than a threshold and beyond the noise of seeds as well; silent or latent: harmful "
        "without an error (degraded, or low accuracy on held-out samples)",
        cost_text(result),
        f"{duration_text(result.seconds)} in all sessions, {duration_text(result.cpu_seconds)} of CPU time",
    ]


def joint_text(result: TrainingResult) -> str:
    """A sentence on the limits of differences, and on which limits hold jointly."""
    many = len(result.contrasts)
    joint = f"limits of differences (Zou & Donner) hold for all {many} together (Bonferroni); " if many else ""
    return f"{joint}limits in a table hold for each row separately, so comparing rows is exploratory"


def floor_texts(result: TrainingResult) -> Iterator[str]:
    """Sentences on the two noise floors, and on the test against them."""
    floors = result.floors
    exceeded = ", so every difference exceeds this noise"
    yield f"implementation noise: {_floor(floors.implementation, result, exceeded)}"
    no_seed = ": no seed changes this training, so harm is judged by implementation noise alone"
    yield f"noise of seeds: {_floor(floors.seeds, result, no_seed)}"
    n = min(len(floors.implementation.accuracy), len(floors.seeds.accuracy))
    yield (
        f"beyond a noise floor means: a rank test of held-out accuracy and loss gives p of at most {100 * result.level:g} % (the "
        f"smallest possible p with {n} replicas is {upper_bound_text(1 / (n + 1), 100)} %). Each trial is tested "
        f"separately, so up to {100 * result.level:g} % of faults without an effect count as beyond the floor by chance. A "
        "difference in accuracy must also exceed a threshold"
    )


def _floor(floor: ReplicaDifferences, result: TrainingResult, if_identical: str) -> str:
    """A description of the differences between replicas.

    ``if_identical`` is appended if there are none.
    """
    head = f"{count_text(len(floor.accuracy), 'fault-free replica')} (switches: {floor.switches})"
    if all(floor.identical_to_twin):
        return f"{head} that all ended in the final state of the fault-free twin (golden){if_identical}"
    return (
        f"{head} whose held-out accuracy differs from that of the fault-free twin (golden) by {_span(floor.accuracy)} points, "
        f"and whose predictions differ in up to {upper_bound_text(max(floor.churn), 100)} % of "
        f"{count_text(result.samples, 'sample')}"
    )


def cost_text(result: TrainingResult) -> str:
    """A sentence on the cost of a trial."""
    cost = result.cost
    ends = ", ".join(f"{END_TEXTS.get(reason, reason)} {count:,}" for reason, count in cost.end_reasons.items())
    return (
        f"on average, a trial ran {100 * cost.steps:.1f} % of a full run's steps ({100 * cost.steps_without_early_end:.1f} % if "
        f"none had ended early) and took {100 * cost.seconds:.1f} % of its time; one worker runs {cost.per_hour:,.0f} trials per "
        f"hour; why runs ended: {ends}{masked_horizon_text(result.spec)}"
    )


def masked_horizon_text(spec: Mapping[str, object]) -> str:
    """A clause on the early end of runs; empty if runs do not end early."""
    horizon = spec.get("horizon")
    if not isinstance(horizon, Mapping):
        return ""
    return f"; horizon: a run is counted as masked after {horizon.get('steps')} steps close to the fault-free run"


def _span(values: Sequence[float]) -> str:
    return f"{100 * min(values):+.2g} to {100 * max(values):+.2g}" if any(values) else "0"
