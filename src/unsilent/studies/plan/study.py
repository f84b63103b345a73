"""Plans which parameters of a stored PVF campaign to protect with a given amount of memory.

Protected memory corrects faults. A plan selects the parameters in it so that the remaining failure rate, ``sum share x PVF`` over
all unprotected parameters, is smallest. One half of the trials of each stratum selects, the other half predicts, so the selection
does not bias the prediction. `unsilent.studies.plan.validation` checks the prediction with a second campaign.

This study reads stores of ``unsilent pvf`` and runs its validation as such a campaign. No other study imports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.basics.option_function import OBSERVER, Argument, option_function
from unsilent.basics.options import Request
from unsilent.basics.sizes import human_bytes
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.stored_command import stored_options
from unsilent.outcomes.pvf_options import PvfReportOptions
from unsilent.statistics.comparing import difference
from unsilent.studies.plan.assignment import (
    Assignment,
    Floats,
    Ints,
    Memory,
    assign_in_order,
    optimal_assignment,
    protected_memory,
)
from unsilent.studies.plan.items import ItemTrials, ParameterItems
from unsilent.studies.plan.memories import CurrentPlace, accelerator_memory, pareto_memories, parse_capacity
from unsilent.studies.plan.records import BASELINES, HALF, PlannedBudget, PlannedItem, PlanResult
from unsilent.studies.plan.spec import DEFAULT_BUDGETS, PlanOptions
from unsilent.studies.plan.stored_items import read_items
from unsilent.studies.plan.validation import run_validation
from unsilent.studies.pvf.analysis import FIT_REQUIREMENT, ONE_WIDTH, check_rate
from unsilent.studies.pvf.kind import PvfStore

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload

RANDOM_ORDERS = 100
"""Number of random assignments whose mean is the baseline; they depend only on the items."""
ASKED_PRECISION = 0.2
"""Relative half-width for `PlannedBudget.trials_factor`."""


def _plan(arguments: Mapping[str, Any]) -> PlanResult:
    workload = arguments["workload"]
    live = None if workload is None or isinstance(workload, str) else workload
    named = {**arguments, "workload": workload if live is None else getattr(workload, "name", None)}
    request = Request.from_call((PlanOptions,), named)
    return make_plan(request[PlanOptions], request.command_line("plan", PlanOptions), arguments["observer"], live)


plan = option_function(
    "plan",
    _plan,
    (PlanOptions,),
    "Which parameters to protect with each budget, and the failure rate that remains.\n\n"
    "Arguments are the options of ``unsilent plan``, by the same names and with the same defaults.",
    module=__name__,
    further=(
        Argument(
            "workload",
            "str | InferenceWorkload | None",
            "The workload of the second campaign, where it is not built in: a name, or a live workload.",
        ),
        OBSERVER,
    ),
    returns=PlanResult,
)


def make_plan(
    options: PlanOptions, command: str = "", observer: Observer | None = None, live: InferenceWorkload | None = None
) -> PlanResult:
    """Make the plan for the given options; ``command`` is the command line that repeats it."""
    with PvfStore(options.store) as store:
        store.check_has_trials()
        items = read_items(store, options.granularity, options.unit)
        sizes, rates = items.sizes, items.selection_rates()
        memories, most, now = _memories(options, items, rates)
        fit_per_bit = _fit_per_bit(options, store, most)
        unplanned = np.ones(sizes.size) if now is None else next(iter(memories.values())).residuals(now.blocks)
        true_rates = items.pooled_rates() if options.truth is None else _true_rates(options, items)
        second = run_validation(store, items.items, options, live, observer) if options.validate else None
        joint = 1 - (1 - options.confidence) / len(memories)
        choices = {name: optimal_assignment(rates, sizes, memory) for name, memory in memories.items()}
        planning = Planning(options, items, true_rates, unplanned, second.trials if second else None, joint)
        budgets = [planning.planned_budget(name, memory, choices[name]) for name, memory in memories.items()]
        if second:
            remaining = [memory.residuals(choices[name].choice) for name, memory in memories.items()]
            budgets = planning.with_differences(budgets, remaining, second.trials)
        used = {name: [m.blocks[b].name for b in choices[name].choice.tolist()] for name, m in memories.items()}
        return PlanResult(
            workload=store.spec.workload, store=str(options.store), fault=store.spec.fault, law=store.spec.law,
            granularity=options.granularity, unit=options.unit, confidence=options.confidence,
            bytes=float(sizes.sum()) / 8, trials=sum(1 for _ in store.rows()),
            unprotected=items.pooled().rate(unplanned, options.confidence),
            compared_with="without protection" if now is None else now.words,
            truth="all trials of the campaign" if options.truth is None else str(options.truth),
            budgets=tuple(budgets), items=_planned_items(items, used), curve=_curve(items, rates), command=command,
            fit_per_bit=fit_per_bit, validation_store=second.store if second else "",
            validation_seed=second.seed if second else None, validation_trials=second.trials.n if second else 0,
        )  # fmt: skip


def _fit_per_bit(options: PlanOptions, store: PvfStore, described: float | None) -> float | None:
    """The fault rate of a bit, from the accelerator, the options or the stored command; None if unknown."""
    fit, spec = options.fit_per_bit, store.spec
    if described is not None:
        rate: float | None = described
    else:
        rate = stored_options(store, PvfReportOptions).fit_per_bit if fit is None else check_rate(fit)
    bits = Counter[int]()
    for tensor in store.baseline.tensors:
        bits[tensor.width] += tensor.elements * tensor.width
    one_width = max(bits.values()) >= ONE_WIDTH * sum(bits.values())
    if spec.fault == "bitflip" and spec.law == "per-element" and one_width:
        return rate
    if fit is not None:
        raise UsageError(
            f"--fit-per-bit cannot be used with {store.path}: {FIT_REQUIREMENT}, and elements of one width; omit --fit-per-bit"
        )
    return None


def _memories(
    options: PlanOptions, items: ParameterItems, rates: Floats
) -> tuple[dict[str, Memory], float | None, CurrentPlace | None]:
    """The memory of each budget by name, the fault rate of a bit, and the current place of the items.

    The last two are None unless the options name an accelerator. Raises ``UsageError`` if no item fits into a budget.
    """
    total = int(items.sizes.sum())
    if options.accelerator is not None:
        clash = {"--budget": options.budget != DEFAULT_BUDGETS, "--fit-per-bit": options.fit_per_bit is not None}
        for name in (name for name, is_given in clash.items() if is_given):
            raise UsageError(f"{name} and --accelerator both describe the memory; leave out {name}")
        memory, most, now = accelerator_memory(options.accelerator, items.items)
        return pareto_memories(memory, rates, items.sizes), most, now
    result = {}
    smallest = min(items.items, key=lambda item: item.size)
    for text in options.budget:
        bits = parse_capacity(text, total, "--budget")
        if bits < smallest.size:
            noun = {"tensor": "tensor", "rows": "block of rows"}.get(options.granularity, "class of bits of a tensor")
            finer = "" if options.granularity == "tensor-bits" else " or use --granularity tensor-bits"
            raise UsageError(
                f"--budget {text} is {human_bytes(bits // 8)} of {human_bytes(total // 8)}, but the smallest {noun} "
                f"({smallest.name}) takes {human_bytes(-(-smallest.size // 8))}; give a larger --budget{finer}"
            )
        result[text] = protected_memory(bits)
    return result, None, None


def _true_rates(options: PlanOptions, items: ParameterItems) -> Floats:
    """The failure rate of each item in the store that is taken as the truth, float64[items]."""
    assert options.truth is not None
    with PvfStore(options.truth) as store:
        truth = read_items(store, options.granularity, options.unit)
    rates = {(i.name, i.size): rate for i, rate in zip(truth.items, truth.pooled_rates().tolist(), strict=True)}
    missing = [item.name for item in items.items if (item.name, item.size) not in rates]
    if missing:
        raise UsageError(
            f"--truth {options.truth} has no {missing[0]!r} of this size; give a store of the same workload, with the same --at"
        )
    return np.array([rates[item.name, item.size] for item in items.items])


@dataclass(frozen=True)
class Planning:
    """Predicts and judges the plans of all budgets.

    Attributes:
        true_rates: Failure rate of each item according to the trials that are taken as the truth, float64[items].
        unplanned: Share of the faults in each item that remain without a plan, float64[items].
        second: Trials of the second campaign; None without one.
        joint: Confidence of each interval with which the limits of all budgets hold together (Bonferroni).
    """

    options: PlanOptions
    items: ParameterItems
    true_rates: Floats
    unplanned: Floats
    second: ItemTrials | None
    joint: float

    def planned_budget(self, name: str, memory: Memory, assignment: Assignment) -> PlannedBudget:
        """The plan of one budget, without its comparison with the second campaign."""
        sizes, remaining = self.items.sizes, memory.residuals(assignment.choice)
        orders = {name: weights for name, weights in _baselines(memory, sizes).items() if weights is not None}
        oracle = memory.residuals(optimal_assignment(self.true_rates, sizes, memory).choice)
        used = np.bincount(assignment.choice, sizes, len(memory.blocks)) / 8
        is_budget, confidence = self.options.accelerator is None, self.joint
        plan_by_truth = float(self.true_rates @ remaining)
        prediction = self.items.prediction
        trials = self.second or prediction
        return PlannedBudget(
            name=name,
            capacity=(memory.blocks[0].capacity or 0) / 8 if is_budget else None,
            used={block.name: float(n) for block, n in zip(memory.blocks, used, strict=True)},
            optimal=assignment.optimal,
            predicted=prediction.rate(remaining, confidence),
            baselines={name: prediction.rate(weights, confidence) for name, weights in orders.items()},
            change=trials.rate(remaining - self.unplanned, confidence),
            gains={name: trials.rate(remaining - HALF * weights, confidence) for name, weights in orders.items()},
            oracle=min(float(self.true_rates @ oracle), plan_by_truth),
            plan_by_truth=plan_by_truth,
            trials_factor=prediction.trials_factor(remaining, confidence, ASKED_PRECISION),
            latency=None if is_budget else memory.latency(assignment.choice, sizes),
            energy=None if is_budget else memory.energy(assignment.choice, sizes),
            second_campaign=None if self.second is None else self.second.rate(remaining, confidence),
        )

    def with_differences(
        self, budgets: Sequence[PlannedBudget], remaining: Sequence[Floats], second: ItemTrials
    ) -> list[PlannedBudget]:
        """Add the difference between prediction and second campaign to each budget."""

        def gap(weights: Floats, confidence: float) -> Interval:
            return difference(self.items.prediction.rate(weights, confidence), second.rate(weights, confidence))

        gaps = [gap(weights, self.joint) for weights in remaining]
        tested, differing = dict(enumerate(gaps)), set[int]()
        while fresh := {n for n, g in tested.items() if g.low > 0 or g.high < 0}:  # Holm's steps
            differing |= fresh
            alone = 1 - (1 - self.options.confidence) / max(1, len(gaps) - len(differing))
            tested = {n: gap(remaining[n], alone) for n in tested if n not in differing}
        return [
            replace(budget, difference=budget_gap, differs=n in differing)
            for n, (budget, budget_gap) in enumerate(zip(budgets, gaps, strict=True))
        ]


def _baselines(memory: Memory, sizes: Ints) -> dict[str, Floats | None]:
    """The share of the faults in each item that remains under each of `BASELINES`.

    None for an order in which the items do not fit.
    """
    rng = np.random.default_rng(0)
    drawn = [assign_in_order(rng.permutation(sizes.size).tolist(), sizes, memory) for _ in range(RANDOM_ORDERS)]
    fitting = [memory.residuals(choice) for choice in drawn if choice is not None]
    ascending = np.argsort(sizes, kind="stable")
    ordered = [assign_in_order(order.tolist(), sizes, memory) for order in (ascending, ascending[::-1])]
    by_size = [None if choice is None else memory.residuals(choice) for choice in ordered]
    return dict(zip(BASELINES, [np.mean(fitting, axis=0) if fitting else None, *by_size], strict=True))


def _planned_items(items: ParameterItems, used: Mapping[str, Sequence[str]]) -> tuple[PlannedItem, ...]:
    rates = items.pooled_rates().tolist()
    result = [
        PlannedItem(item.name, item.size / 8, item.share, rates[i], {name: blocks[i] for name, blocks in used.items()})
        for i, item in enumerate(items.items)
    ]
    return tuple(sorted(result, key=lambda item: -item.rate))


def _curve(items: ParameterItems, selection_rates: Floats) -> tuple[tuple[float, float], ...]:
    """Protected bytes and remaining failure rate, as items are protected one after the other."""
    order = np.argsort(-selection_rates / items.sizes, kind="stable")
    rates = items.prediction.item_rates(order.size)[order]
    protected = np.concatenate([[0.0], np.cumsum(items.sizes[order])]) / 8
    left = np.concatenate([np.cumsum(rates[::-1])[::-1], [0.0]])
    return tuple(zip(protected.tolist(), left.tolist(), strict=True))


def protected_list(result: PlanResult) -> dict[str, Any]:
    """The plan as plain values for a file: the items in each block, by budget."""
    return {
        "workload": result.workload,
        "granularity": result.granularity,
        "budget": [
            {
                "name": budget.name,
                "bytes": dict(budget.used),
                "blocks": {
                    block: [item.name for item in result.items if item.blocks[budget.name] == block]
                    for block in budget.used
                    if block != "unprotected"
                },
            }
            for budget in result.budgets
        ],
    }
