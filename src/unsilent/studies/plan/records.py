"""Result records of ``unsilent plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unsilent.basics.interval import Interval
from unsilent.report.shown import Shown

BASELINES = ("random", "smallest first", "largest first")
"""Assignments that do not use failure rates: the mean over many random orders, and orders by size."""
HALF = 0.5
"""Fraction of a baseline's failure rate with which a plan is compared."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item in a plan: a part of the parameters that is protected as a whole.

    Attributes:
        name: Name of the tensor, with its rows or class of bits if the item is only a part of it.
        bytes: Size in bytes.
        share: Probability that a fault hits the item.
        rate: Contribution to the failure rate if the item is not protected, from all trials.
        blocks: Block to which the item is assigned, by the name of the budget.
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
        name: Budget as given in the options, or name of the limit.
        capacity: Bytes of protected memory; None for memories of an accelerator.
        used: Bytes used in each block, by the name of the block.
        optimal: Whether the solver proved that no other assignment is better, for the selecting half of the trials.
        predicted: Failure rate that remains, from the other half; its limits hold for all budgets together.
        baselines: Predicted failure rate that remains with each of `BASELINES`; those that do not fit into the blocks are
            missing.
        change: Remaining rate minus the rate without the plan, from the same trials as ``gains``, with joint limits.
        gains: Remaining rate minus `HALF` of the rate of each baseline, with joint limits. It is from the second campaign if
            there is one, else predicted. An upper limit below 0 shows that less than half remains.
        oracle, plan_by_truth: Lowest rate of any plan according to the truth (see `PlanResult`), and the rate of this plan.
        trials_factor: Factor on the number of trials for a prediction to within 20 %; None if it cannot be predicted.
        latency: Mean latency over all bytes; None for budgets.
        energy: Total energy of all bytes; None for budgets.
        second_campaign: Failure rate that remains in the second campaign, with joint limits; None without one.
        difference: ``predicted`` minus ``second_campaign``, with joint limits.
        differs: Whether the difference is significant, with Holm's correction for the number of budgets.
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
        bytes: Size of all parameters in bytes.
        unprotected: Failure rate without a plan (see ``compared_with``), from all trials, since nothing is selected here.
        compared_with: State without a plan, in words: no protection, or the memories of an accelerator that hold the parameters.
        truth: Source of the oracle's rates: a store that is taken as the truth, or all trials of the campaign. With the latter,
            the oracle's rate is on average a lower bound.
        fit_per_bit: Failures of one bit of memory per 1e9 hours; None if not known or not applicable to the campaign.
        items: All parts of the parameters, with the largest contributions first.
        curve: Pairs of protected bytes and the rate predicted to remain. Parts are protected one after the other, in descending
            order of the rate per byte in the selecting half.
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
