"""Result records of ``unsilent plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unsilent.basics.interval import Interval
from unsilent.report.shown import Shown

BASELINES = ("random", "smallest first", "largest first")
"""Assignments that do not look at failure rates: the mean of many random orders, and orders by size."""
HALF = 0.5
"""The part of a baseline's failure rate that a plan is compared with."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item in a plan: a part of the parameters that is protected as a whole.

    Attributes:
        name: Of the tensor, or with its rows or class of bits.
        bytes: That it takes.
        share: Probability that a fault hits it.
        rate: Its contribution to the failure rate if it is not protected, from all trials.
        blocks: The block that it is assigned to, by the name of the budget.
    """

    name: str
    bytes: float
    share: float
    rate: float
    blocks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlannedBudget:
    """The plan for one budget, or for one limit of the latency or energy of an accelerator.

    Failure rates are shares of single faults that make an output incorrect.

    Attributes:
        name: As it was given.
        capacity: Bytes of protected memory; None for memories of an accelerator.
        used: Bytes in each block, by its name.
        optimal: Whether the solver proved that no other assignment is better, by the selecting half of the trials.
        predicted: Failure rate that remains, from the other half; its limits hold for all budgets together.
        baselines: The same of `BASELINES`; missing where that order does not fit into the blocks.
        change: Remaining rate minus that without the plan, by the trials of ``gains`` and with joint limits.
        gains: Remaining rate minus `HALF` of that of each baseline, with joint limits: of the second campaign where there is
            one, else predicted. An upper limit below 0 shows that at most half remains.
        oracle, plan_by_truth: The lowest rate that any plan reaches by the truth (see `PlanResult`), and that of this one.
        trials_factor: How many times more trials would predict to within 20 %; None where that cannot be foreseen.
        latency: Mean over all bytes; energy: of all bytes; None for budgets.
        second_campaign: Failure rate that remains in the second campaign, with joint limits; None without one.
        difference: ``predicted`` minus ``second_campaign``, with joint limits.
        differs: Whether a difference is shown, with Holm's correction for the number of budgets.
    """

    name: str
    capacity: float | None
    used: Mapping[str, float]
    optimal: bool
    predicted: Interval
    baselines: Mapping[str, Interval]
    change: Interval
    gains: Mapping[str, Interval]
    oracle: float
    plan_by_truth: float
    trials_factor: float | None
    latency: float | None = None
    energy: float | None = None
    second_campaign: Interval | None = None
    difference: Interval | None = None
    differs: bool | None = None


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult(Shown):
    """The plans for all budgets.

    Attributes:
        bytes: Of all parameters.
        unprotected: Failure rate without a plan (see ``compared_with``), from all trials, which select nothing here.
        compared_with: What that is: without protection, or in which memories of an accelerator the parameters are.
        truth: What the oracle goes by: a store that is taken for the truth, or all trials of the campaign, which makes its rate a
            lower bound on average.
        fit_per_bit: Failures of one bit of memory per 1e9 hours; None: not known, or not applicable to the campaign.
        items: All parts of the parameters, those that contribute most first.
        curve: Bytes protected and the rate predicted to remain, where parts are protected one after the other, those with the
            highest rate per byte by the selecting half first.
    """

    REPORT = "unsilent.studies.plan.report:report"
    workload: str
    store: str
    fault: str
    law: str
    granularity: str
    unit: str
    confidence: float
    bytes: float
    trials: int
    unprotected: Interval
    compared_with: str
    truth: str
    budgets: tuple[PlannedBudget, ...]
    items: tuple[PlannedItem, ...]
    curve: tuple[tuple[float, float], ...]
    command: str
    fit_per_bit: float | None = None
    validation_store: str = ""
    validation_seed: int | None = None
    validation_trials: int = 0

    @property
    def raw_fit(self) -> float | None:
        """The number of faults in all parameters per 1e9 hours; None if it is not known."""
        return None if self.fit_per_bit is None else self.fit_per_bit * 8 * self.bytes
