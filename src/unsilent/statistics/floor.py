"""Verdicts on whether runs differ from clean runs by more than noise: p values, margins and one word.

| word | meaning |
|---|---|
| `identical` | the bits equal those of the clean twin; nothing is tested |
| `harmful` | beyond noise, and at least one measure is worse by its margin or more |
| `improved` | better, beyond noise, and no measure is worse beyond noise |
| `detectable` | beyond noise, but neither harmful nor improved |
| `masked` | not beyond noise, and an equivalence test shows that every measure is within its margin |
| `undecided` | none of these; more replicas or a wider margin would be needed to decide |

The level limits two kinds of error, each over all runs judged together: reporting noise as a difference, and reporting an effect
of the margin or more as ``masked``. If the clean runs are equal in bits, there is no noise, and every difference is beyond noise
without a test. The size of an effect is the run's value minus the median of the clean values.

Runs with the same bits as the twin are excluded from the correction for many tests if no clean run has these bits, because the
remaining runs are then still exchangeable. Otherwise they are included with p = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.statistics import noise_p_values
from unsilent.statistics.comparing import benjamini_hochberg, holm
from unsilent.statistics.null_distribution import Measure, NullDistribution, RunComparison
from unsilent.statistics.verdicts import MeasureResult, NoiseVerdict, measure_result, verdict_sentence, verdict_word

Correction = Literal["holm", "bh"]
_TITLES = {"holm": "Holm", "bh": "Benjamini-Hochberg"}
_Question = tuple[RunComparison, NullDistribution]


def noise_verdict(
    observed: RunComparison,
    null: NullDistribution,
    measures: Sequence[Measure],
    *,
    level: float = 0.05,
    tests: int = 1,
    fitted: bool = False,
) -> NoiseVerdict:
    """The verdict on one run; ``tests`` is the number of runs that the study tests, including this one.

    >>> clean = NullDistribution([RunComparison(f"r{i}", "twin", {"loss": i / 100}) for i in range(19)])
    >>> found = noise_verdict(RunComparison("corrupted", "twin", {"loss": 0.5}), clean, [Measure("loss", margin=0.1)])
    >>> found.word, found.p
    ('harmful', 0.05)
    """
    return noise_verdicts([(observed, null)], measures, level=level, tests=tests, fitted=fitted)[0]


def noise_verdicts(
    questions: Sequence[_Question],
    measures: Sequence[Measure],
    *,
    level: float = 0.05,
    correction: Correction = "holm",
    tests: int | None = None,
    fitted: bool = False,
) -> list[NoiseVerdict]:
    """The verdicts on many runs, each tested against its own clean comparisons, corrected together.

    Args:
        questions: Comparison of each run, with the clean comparisons it is tested against.
        measures: Measures to test, with their margins; several are combined into one p value per run.
        level: Probability of any false positive (holm), or expected share of false positives among all positives (bh).
        correction: Correction for many runs: Holm or Benjamini-Hochberg.
        tests: Number of runs in the whole study if ``questions`` has only some of them.
        fitted: Whether p values come from a fitted distribution, which is checked for fit, instead of ranks.

    Raises:
        UsageError: the clean comparisons are too few for the level and the number of runs, not exchangeable, or not fit.
    """
    if not 0 < level < 1 or not measures:
        raise UsageError(
            f"level is {level}, with {len(measures)} measures; expected a level between 0 and 1 and at least one measure"
        )
    if len({m.name for m in measures}) < len(measures):
        raise UsageError("a measure is given twice; give each measure once")
    for observed, null in questions:
        null.check_comparable(observed, measures)
    by_bits = [null.has_no_noise or (observed.same_bits and null.has_no_identical) for observed, null in questions]
    tested_questions = [question for question, bits in zip(questions, by_bits, strict=True) if not bits]
    size = max(len(tested_questions), (len(questions) if tests is None else tests) - sum(by_bits))
    if not fitted:
        for _, null in tested_questions:
            _refuse_few(null.n, level, size, correction)
    tested = iter(
        _Family(tested_questions, measures, level, correction, size, fitted).verdicts() if tested_questions else []
    )
    return [
        _verdict_without_test(*question, measures, level, size) if bits else next(tested)
        for question, bits in zip(questions, by_bits, strict=True)
    ]


def replicas_needed(level: float, tests: int = 1, correction: Correction = "holm") -> int:
    """The least number of clean replicas with which a rank test can be significant at this level.

    >>> replicas_needed(0.05), replicas_needed(0.05, tests=70)
    (19, 1399)
    """
    return math.ceil(round((tests if correction == "holm" else 1) / level, 6)) - 1


def _refuse_few(n: int, level: float, tests: int, correction: Correction) -> None:
    needed = replicas_needed(level, tests, correction)
    if n < needed:
        each = f"{level / tests:.2g} per test" if correction == "holm" and tests > 1 else f"{level:g}"
        raise UsageError(
            f"{n} clean replicas are too few for level {level:g} over {tests} test{'s' * (tests > 1)}: the smallest possible "
            f"p value is 1/{n + 1}, above {each}; make at least {needed} replicas, or ask for a fitted null distribution"
        )


@dataclass(frozen=True, slots=True)
class _Family:
    """Runs that are tested together; ``size`` also counts the runs of the study that are not given here."""

    questions: Sequence[_Question]
    measures: Sequence[Measure]
    level: float
    correction: Correction
    size: int
    fitted: bool

    def verdicts(self) -> list[NoiseVerdict]:
        """The verdict on each run, in order."""
        raw = [self._p(observed, null) for observed, null in self.questions]
        p = np.array([p_values for p_values, _ in raw])
        runs, single = self._corrected_p_values(p)
        equivalence = self._corrected_for_all_runs([within for _, within in raw])
        return [
            self._verdict(question, p[i], runs[i], single[i], equivalence[i])
            for i, question in enumerate(self.questions)
        ]

    def _p(self, observed: RunComparison, null: NullDistribution) -> tuple[NDArray[np.float64], float]:
        """P values of a run's measures, and the p value of its equivalence."""
        if observed.same_bits:
            return np.ones(len(self.measures)), 1.0
        x = np.array([observed.values[m.name] for m in self.measures], dtype=np.float64)
        if self.fitted:
            fit = noise_p_values.FittedNull(null, self.measures)
            return fit.beyond_noise_p_values(x), fit.within_margin_p_value(x)
        clean = null.values(self.measures)
        return noise_p_values.beyond_noise_p_values(x, clean, self.measures), noise_p_values.within_margin_p_value(
            x, clean, self.measures
        )

    def _corrected_for_all_runs(self, p: list[float]) -> list[float]:
        """P values corrected for all runs of the study; runs not given here count as not significant."""
        whole = [*p, *[1.0] * (self.size - len(p))]
        return (holm(whole) if self.correction == "holm" else benjamini_hochberg(whole))[: len(p)]

    def _corrected_p_values(self, p: NDArray[np.float64]) -> tuple[list[float], NDArray[np.float64]]:
        """Corrected p values of the runs, and of single measures, float64[runs, measures]."""
        if self.correction == "holm":
            single = step_down(p, self.size)
            return [float(row.min()) for row in single], single
        runs = self._corrected_for_all_runs([float(row.min()) for row in p])
        # Measures of significant runs are tested at the level times the share of significant runs (Benjamini & Bogomolov 2014).
        largest = max(1, sum(_below(run_p, self.level) for run_p in runs))
        return runs, np.minimum(1.0, p * self.size / largest)

    def _verdict(
        self,
        question: _Question,
        p: NDArray[np.float64],
        corrected: float,
        single: NDArray[np.float64],
        equivalence: float,
    ) -> NoiseVerdict:
        observed, null = question
        if observed.same_bits:
            return _verdict_without_test(observed, null, self.measures, self.level, self.size)
        findings = tuple(
            measure_result(observed, null, m, _below(float(single[k]), self.level), float(p[k]), float(single[k]))
            for k, m in enumerate(self.measures)
        )
        word = verdict_word(findings, _below(equivalence, self.level))
        method = "fitted (normal; log-normal for distances)" if self.fitted else "rank"
        many = self.size > 1
        how = f"{method}, {null.n} clean comparisons, p {corrected:.3g}"
        how += f" after {_TITLES[self.correction]} over {self.size} tests" * many + f", level {self.level:g}"
        if flat := [m.name for m in self.measures if null.is_constant(m)]:
            how += f"; all clean comparisons have the same {', '.join(flat)}, so only the rank is used"
        return NoiseVerdict(
            run=observed.run,
            word=word,
            p=float(p.min()),
            corrected_p=corrected,
            equivalence=equivalence,
            n=null.n,
            tests=self.size,
            level=self.level,
            method=method + f", {_TITLES[self.correction]}" * many,
            findings=findings,
            sentence=f"{verdict_sentence(word, findings, equivalence)} ({how})",
        )


def step_down(p: NDArray[np.float64], runs: int) -> NDArray[np.float64]:
    """Holm correction over runs whose measures are already corrected; p and result float64[runs, measures].

    In ascending order, each p value is multiplied by the number of runs with measures that are not yet rejected. Before the first
    false rejection these include every run with an unaffected measure, so the probability of any false rejection is at most the
    level. With one measure this is Holm's method.
    """
    adjusted, left = np.ones_like(p), np.full(len(p), p.shape[1])
    absent, worst = runs - len(p), 0.0
    for flat in np.argsort(p, axis=None, kind="stable").tolist():
        run, k = divmod(flat, p.shape[1])
        worst = max(worst, min(1.0, float(p[run, k]) * (int((left > 0).sum()) + absent)))
        adjusted[run, k] = worst
        left[run] -= 1
    return adjusted


def _verdict_without_test(
    observed: RunComparison, null: NullDistribution, measures: Sequence[Measure], level: float, tests: int
) -> NoiseVerdict:
    """The verdict without a test, for a run with equal bits or clean comparisons without noise."""
    findings: tuple[MeasureResult, ...] = tuple(measure_result(observed, null, m, beyond=False) for m in measures)
    if observed.same_bits:
        text = verdict_sentence("identical", findings)
        return NoiseVerdict(observed.run, "identical", None, None, None, null.n, tests, level, "bits", findings, text)
    findings = tuple(
        measure_result(observed, null, m, beyond=f.effect != 0) for m, f in zip(measures, findings, strict=True)
    )
    word = verdict_word(findings, equivalent=False) if any(f.beyond_noise for f in findings) else "detectable"
    text = (
        f"{verdict_sentence(word, findings)} (no test: the {null.n} clean comparisons have equal bits, so "
        f"every difference is beyond noise)"
    )
    return NoiseVerdict(observed.run, word, None, None, None, null.n, tests, level, "bits", findings, text)


def _below(p: float, level: float) -> bool:
    """Whether p is at most the level, within rounding."""
    return p <= level * (1 + 1e-12)
