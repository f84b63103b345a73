"""The report of ``unsilent attack``."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING

from unsilent.basics.interval import known_value
from unsilent.compare.attacks.evaluation import RULES, WHITEBOX_AGREEMENT, Scores
from unsilent.report.estimates import Estimate, machine_table, measured, rows_across
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.text import count_text, duration_text, share_with_limits_text
from unsilent.statistics.comparing import paired
from unsilent.statistics.intervals import clopper_pearson

if TYPE_CHECKING:
    from unsilent.compare.attacks.attacking import AttackResult

UNIT = "input"
NOTES = (
    "evasive: the deployed model is wrong and the original right; wrong: the deployed model is wrong, also where the original is",
    "any step: counts the first input that succeeds with the attacked pair, if it also does with the deployed models; last step: "
    "counts the input of the last step (apgd: the one with the best objective), of the last restart that included it",
    "evasive top-5: evasive, and the wrong answer is none of the original's five most likely classes",
    "pgd, pgd-original and noise are controls: the attack finds more inputs than a control where the interval of their "
    "difference lies above 0",
    "found inputs are not rounded to the 256 levels of an image file: saving them as images may change the answers",
)


def report(result: AttackResult) -> Report:
    """Report on an attack."""
    estimates = [row for scores in result.scores.values() for row in _estimates(result, scores)]
    differences = [row for name in result.scores if name != result.attack for row in _differences(result, name)]
    shares = [Column.share(f"evasive, {rule}") for rule in RULES]
    wrong = [Column.share(f"wrong, {rule}", priority=1) for rule in RULES]
    columns = (Column.text("attack"), *shares, Column.share("evasive top-5, any step", priority=2), *wrong)
    table = Table.of(rows_across(estimates, "measure"), columns, "share of attacked inputs")
    pair = Column.text("attack", lambda row: f"{result.attack} minus {row['attack']}")
    gaps = (pair, *(Column.points(f"evasive, {rule}") for rule in RULES))
    compared = Table.of(rows_across(differences, "measure"), gaps, "difference on the same inputs")
    return Report(
        "unsilent/attack/1", "attack", f"{result.attack} on {result.workload}, {result.adapter}", _headline(result),
        machine_table([*estimates, *_clean(result)], ["attack", "measure", ""]),
        numbers=(
            ("inputs attacked", f"{result.n:,}", "the original, the deployed model and its twin get them right"),
            ("clean disagreement", share_with_limits_text(result.clean), "original right, deployed wrong, without an attack"),
        ),
        findings=tuple(_findings(result)),
        sections=(Section("Attacks", "Each attack with the same limits and steps on the same inputs.", (table, compared)),),
        facts=(
            ("largest allowed change", f"{result.budget.eps:.4g} of the valid range"), ("steps", f"{result.budget.steps:,}"),
        ),
        notes=NOTES,
    )  # fmt: skip


def _headline(result: AttackResult) -> str:
    counts = [
        f"{rule}: " + ", ".join(f"{name} {int(scores.evasive[rule].sum()):,}" for name, scores in result.scores.items())
        for rule in RULES
    ]
    return (
        f"Of {count_text(result.n, 'input')} that the original, the deployed model and its twin get right, attacks made evasive "
        f"(wrong for the deployed model, right for the original): {'; '.join(counts)}."
    )


def _findings(result: AttackResult) -> Iterator[str]:
    original, deployed = map(share_with_limits_text, result.accuracy)
    yield f"right without an attack: the original {original}, the deployed model {deployed}"
    how = "whitebox" if result.is_whitebox else f"not called whitebox, below {100 * WHITEBOX_AGREEMENT:g} %"
    yield (
        "the twin, a differentiable copy whose gradients the attacks use, answers like the deployed model for "
        f"{share_with_limits_text(result.twin_agreement)} of clean inputs: {how}"
    )
    yield from result.how
    for name, scores in result.scores.items():
        points = 100 * float(scores.confidence_change.mean())
        steps = "" if isnan(scores.steps) else f"first evasive after {scores.steps:.1f} steps on average; "
        yield (
            f"{name}: {steps}at the last step the deployed model gives the label a probability {abs(points):.1f} points "
            f"{'lower' if points >= 0 else 'higher'} than the original; "
            f"largest change {scores.largest_change:.3g} of the valid range; "
            f"{duration_text(scores.seconds)} of CPU time"
        )


def _estimates(result: AttackResult, scores: Scores) -> list[Estimate]:
    kinds = {"evasive": scores.evasive, "evasive top-5": scores.evasive_top5, "wrong": scores.wrong}
    events = {f"{kind}, {rule}": by_rule[rule] for kind, by_rule in kinds.items() for rule in RULES}
    measures = {n: clopper_pearson(int(seen.sum()), len(seen), result.confidence) for n, seen in events.items()}
    measures["confidence change"] = known_value(float(scores.confidence_change.mean()), result.n)
    return measured({"attack": scores.attack}, measures, UNIT)


def _clean(result: AttackResult) -> list[Estimate]:
    measures = {"clean disagreement": result.clean, "agreement of twin": result.twin_agreement,
                "accuracy, original": result.accuracy[0], "accuracy, deployed": result.accuracy[1]}  # fmt: skip
    return measured({"attack": ""}, measures, UNIT)


def _differences(result: AttackResult, control: str) -> list[Estimate]:
    gaps = {}
    for rule in RULES:
        of_attack, of_control = (result.scores[name].evasive[rule].double() for name in (result.attack, control))
        gaps[f"evasive, {rule}"] = paired((of_attack - of_control).numpy(), result.confidence)
    return measured({"attack": control}, gaps, UNIT)
