"""What is said of run-to-run variation, as sentences and cells: shared by terminal and page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from unsilent.report.text import amount, clean, counted, listed, seconds, shown
from unsilent.sites.calls import OUTSIDE
from unsilent.statistics.groups import GroupSpread
from unsilent.statistics.intervals import Interval
from unsilent.statistics.replicas import FEW, greatest_sd
from unsilent.studies.noise_parting import DATA, DEALT, MOVED, PATH, RANDOM, START
from unsilent.studies.noise_records import Effect, FirstOperation, NoiseResult, VariantNoise

CALLED = 0.05
"""Corrected p value below which a group is said to vary more than others of its size."""
MEASURES = (
    "replicas",
    "different final states",
    "accuracy %, mean",
    "  sd, points",
    "loss, mean",
    "  sd",
    "churn %",
    "L2, unit sphere",
    "L2, raw",
    "parts at step",
    "churn from the twin %",
)
"""Rows of the table of variants."""
UNIT_MOST = 2.0
"""Greatest distance on the unit sphere."""
NAMELESS = "custom"
"""The name that a training of the user's has where none was given."""


def identical(found: VariantNoise) -> bool:
    """Whether all replicas ended in the same bits: then nothing differs, and nothing is estimated."""
    return found.distinct == 1


def cells(found: VariantNoise) -> list[str]:
    """What the table says of one variant, by the order of `MEASURES`."""
    same = identical(found)
    loss = found.loss
    return [
        f"{found.n}",
        f"{found.distinct}",
        f"{100 * found.accuracy.mean:.2f}",
        "0" if same else limits(found.accuracy.sd, 100, greatest_sd(found.n)),
        "–" if loss is None else amount(loss.mean),
        "–" if loss is None else "0" if same else limits(loss.sd),
        "0" if same else limits(found.churn, 100, 1.0),
        _distance(found.unit, same, UNIT_MOST),
        _distance(found.raw, same),
        parting_text(found),
        _range(found.twin_churn, 100),
    ]


def limits(interval: Interval, scale: float = 1.0, most: float = math.inf) -> str:
    """``1.2 [1.0, 1.5]``; ``–`` in place of an upper limit that says nothing: one at ``most``, the greatest there can be."""
    if interval.high >= most * (1 - 1e-9):
        if interval.estimate == 0:
            return "0 [0, –]"
        # Digits as if the upper limit were as far off as the lower one.
        text = shown(interval.estimate, interval.low, 2 * (interval.estimate or 0.0) - interval.low, scale)
        return f"{text.estimate} [{text.low}, –]"
    text = shown(interval.estimate, interval.low, interval.high, scale)
    if interval.estimate == 0 and not text.exact:
        return f"0 {text.limits}"  # a spread of nothing, not a count of no events
    return f"{text.estimate}{text.behind}"


def parting_text(found: VariantNoise) -> str:
    """The median step at which replicas part from the twin, and the range."""
    known = [step for step in found.partings if step is not None]
    if not known:
        return "never"
    middle = found.parting.estimate or 0.0
    text = "never" if math.isinf(middle) else f"{middle:g}"
    ends = f"{min(known)}…{max(known)}" if len(known) == found.n else f"{min(known)}…never"
    return text if min(known) == max(known) and len(known) == found.n else f"{text} ({ends})"


def group_cell(group: GroupSpread) -> str:
    """``4.1 of 3.3``: sd of its error in points, and that of a random group of its size; ``*`` where it varies more."""
    return f"{100 * (group.sd.estimate or 0):.2f} of {100 * group.by_size:.2f}" + (" *" if called(group) else "")


def called(group: GroupSpread) -> bool:
    """Whether it varies more than random groups of its size do."""
    return group.corrected < CALLED


def spreading(result: NoiseResult) -> list[VariantNoise]:
    """Variants whose replicas differ."""
    return [found for found in result.variants if not identical(found)]


def training_name(result: NoiseResult) -> str:
    """Of the training; of one without a name, file and function."""
    if result.workload != NAMELESS:
        return clean(result.workload)
    path, colon, function = str(result.spec.get("workload", NAMELESS)).rpartition(":")
    return clean(PurePath(path).name + colon + function)


def headline(result: NoiseResult) -> str:
    """The finding in one sentence: of the first variant that has both kinds of noise, else of the last that differs."""
    noisy = spreading(result)
    if not noisy:
        return _same_bits(result)
    found = next((v for v in noisy if v.name == "ALGO+IMPL"), noisy[-1])
    return (
        f"Two runs of {training_name(result)} with {clean(found.name)} disagree on {limits(found.churn, 100, 1.0)} % of "
        f"{result.samples:,} predictions, while accuracy has an sd of "
        f"{limits(found.accuracy.sd, 100, greatest_sd(found.n))} points"
    )


def _same_bits(result: NoiseResult) -> str:
    """Where no variant varies: whether each is the clean twin, too."""
    others = [clean(found.name) for found in result.variants if any(step is not None for step in found.partings)]
    if not others:
        return "Runs with the same switches do not differ: they end in the same bits"
    named = " and ".join(part for part in (", ".join(others[:-1]), others[-1]) if part)
    return f"Replicas of each variant end in the same bits; {named} in other bits than the clean twin"


def findings(result: NoiseResult) -> Iterator[str]:
    """What else is told in sentences."""
    for found in result.variants:
        if found.fixed:
            told = "end in the same bits" if identical(found) else f"end in {found.distinct} different states"
            yield f"{clean(found.name)}: {counted(found.n, 'run')} {told}"
    for found in result.variants:
        if found.first is not None:
            first = f"{clean(found.first.replica)} parts first, at step {found.first.step}"
            yield f"{clean(found.name)}: {first}: {first_text(found.first)}"
    yield from (_parts(found) for found in spreading(result) if found.groups)
    for found in spreading(result):
        if unsure := [clean(g.name) for g in found.groups if g.unsure(CALLED)]:
            yield f"{clean(found.name)}: {listed(unsure)}: p = {CALLED} within its Monte-Carlo error"
    if any(not found.fixed and found.n < FEW for found in result.variants):
        yield f"fewer than {FEW} replicas: intervals are wide and may miss runs that end elsewhere"
    for found in result.variants:
        for note in found.notes:
            yield f"{clean(found.name)}: {clean(note)}"
    yield from map(clean, result.notes)


def _parts(found: VariantNoise) -> str:
    """Which groups vary more than others, and what is left of a large raw sd once size is counted."""
    more = [clean(g.name) for g in found.groups if called(g)]
    said = f"{listed(more)} {'varies' if len(more) == 1 else 'vary'} more than random groups of that size"
    if not more:
        said = "none varies more than random groups of its size"
    whole = found.accuracy.sd.estimate
    most = max(found.groups, key=lambda g: g.sd.estimate or 0.0)
    told = f"{clean(found.name)}: of {counted(len(found.groups), 'group')} {said}"
    if not whole or not most.sd.estimate:
        return told
    return (
        f"{told}; the largest raw sd, of {clean(most.name)}, is {most.sd.estimate / whole:.1f} times that of accuracy "
        f"(a random group of its size: {most.by_size / whole:.1f} times)"
    )


def how(result: NoiseResult) -> list[str]:
    """Lines under the tables."""
    return [
        "sd: over replicas (n - 1); churn and L2: mean over pairs; in brackets "
        f"{100 * result.confidence:g} % limits, from leaving out one replica at a time (for an sd at least those of a normal "
        "sample); – where nothing bounds it",
        f"parts at step: median over replicas, counted from 0, where weights differ from those of the clean twin; "
        f"{result.steps:,} steps a run",
        f"a rank test against these replicas can give p = {result.smallest_p:.2g} at the least",
        f"{seconds(result.seconds)} in all sessions, {seconds(result.cpu_seconds)} of CPU time",
    ]


def first_text(found: FirstOperation) -> str:
    """Where runs part, as one clause."""
    module = f"of {found.module}" if found.module not in ("", OUTSIDE) else ""
    where = " ".join(part for part in (found.phase, module) if part)
    what = clean(f"{found.kernel} ({where})" if where else found.kernel)
    texts = {
        MOVED: f"{what} takes other elements of the same tensor",
        START: "the weights that it starts from",
        DATA: f"{what} is given other values",
        RANDOM: f"{what} draws other numbers",
        DEALT: f"{what} deals the same random numbers to other elements",
        PATH: f"another operation runs, {what}",
    }
    return texts.get(found.kind, f"{what} gives other bits for the same values")


def effect_how(found: Effect) -> str:
    """What a switch does, and where runs part by it."""
    first = found.first
    return clean(found.how) + ("" if first is None else f", first at step {first.step}: {first_text(first)}")


def effect_text(changes: bool | None) -> str:
    """The word for what a switch does."""
    return "not here" if changes is None else "yes" if changes else "no"


def _distance(interval: Interval | None, same: bool, most: float = math.inf) -> str:
    return "–" if interval is None else "0" if same else limits(interval, most=most)


def _range(values: tuple[float, ...], scale: float) -> str:
    low, high = scale * min(values), scale * max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g}…{high:.3g}"
