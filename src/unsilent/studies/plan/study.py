"""Which parameters of a stored PVF campaign to protect, or to duplicate, with a given amount of memory.

Protected memory corrects faults; a plan chooses what to put there so that the remaining failure rate, ``sum share x PVF`` over
all that is not protected, is smallest. One half of the trials of each stratum selects, the other half predicts, so the prediction
is not too low because the best was selected. `unsilent.studies.plan.validation` checks it with a second campaign.

This study reads stores of ``unsilent pvf`` and runs its validation as such a campaign. No other study imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsilent.campaigns.observer import Observer
from unsilent.errors import UsageError
from unsilent.interval import Interval
from unsilent.options import OptionValues
from unsilent.sizes import human_bytes
from unsilent.statistics.comparing import difference
from unsilent.studies.plan.assignment import (
    Floats,
    Ints,
    Memory,
    assign_in_order,
    optimal_assignment,
    protected_memory,
)
from unsilent.studies.plan.blocks_file import parse_capacity, read_memory
from unsilent.studies.plan.items import ParameterItems, read_items
from unsilent.studies.plan.records import BASELINES, HALF, PlannedBudget, PlannedItem, PlanResult, Validation
from unsilent.studies.plan.spec import DEFAULT_BUDGETS, PlanOptions
from unsilent.studies.plan.validation import ValidationTrials, run_validation
from unsilent.studies.pvf.kind import PvfStore

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload

RANDOM_ORDERS = 100
"""Random assignments whose mean is the baseline; they are the same for the same items."""
ASKED_PRECISION = 0.2
"""Relative half-width that `PlannedBudget.trials_factor` is about."""


def plan(
    store: str | Path,
    *,
    budget: str | Sequence[str] = DEFAULT_BUDGETS,
    blocks: str | Path | None = None,
    granularity: str = "tensor",
    unit: str = "sample",
    confidence: float = 0.95,
    truth: str | Path | None = None,
    validate: bool = False,
    validation_trials: int | None = None,
    validation_store: str | Path | None = None,
    validation_seed: int | None = None,
    workload: str | InferenceWorkload | None = None,
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    weights: str | Path | None = None,
    jobs: int = 1,
    observer: Observer | None = None,
) -> PlanResult:
    """Which parameters to protect with each budget, and the failure rate that remains.

    Arguments are the options of ``unsilent plan``, by the same names and with the same defaults.

    Args:
        store: Store of a campaign of ``unsilent pvf --per tensor``.
        budget: Protected memory, as shares of the parameters (``"5%"``) or sizes (``"64kB"``).
        blocks: A TOML file of memory blocks, instead of budgets.
        granularity: What is protected as a whole: ``tensor``, or ``tensor-bits``, one class of bits of a tensor.
        unit: What one incorrect output is counted on, ``sample`` or ``batch``.
        truth: A store of the same campaign that is taken for the truth, for the oracle.
        validate: Run a second, independent campaign with the protection in place.
        validation_trials, validation_store, validation_seed: Of that campaign: trials per component, file, seed.
        workload: What that campaign runs, where it is not built in: a name, or a live workload.
        options, data, weights: Of the workload, where it is not built in.

    Raises:
        UsageError: input that does not fit, or a budget into which no item fits.
        StoreError: a store cannot be used.
    """
    arguments = dict(locals())
    live = None if workload is None or isinstance(workload, str) else workload
    asked_workload = getattr(workload, "name", None) if live is not None else workload
    asked = OptionValues.from_call((PlanOptions,), {**arguments, "workload": asked_workload})
    return make_plan(asked.make_dataclass(PlanOptions), asked.command_line("plan", PlanOptions), observer, live)


def make_plan(
    options: PlanOptions, command: str = "", observer: Observer | None = None, live: InferenceWorkload | None = None
) -> PlanResult:
    """`plan` with its options in one record; ``command`` is the command line that asks for the same again."""
    with ExitStack() as stack:
        store = stack.enter_context(PvfStore(options.store))
        store.check_has_trials()
        items = read_items(store, options.granularity, options.unit)
        memories = _memories(options, items)
        truth = items if options.truth is None else _read_truth(options, items)
        trials = None
        if options.validate:
            path = options.validation_store or options.store.with_suffix(".validation.sqlite")
            named = {"workload": options.workload, "data": options.data, "weights": options.weights}
            trials = run_validation(
                store, path, items, trials=options.validation_trials, seed=options.validation_seed, unit=options.unit,
                confirmed=named, options=options.options, workload=live, jobs=options.jobs, observer=observer,
            )  # fmt: skip
        rates, sizes = items.selection_rates(), items.sizes
        choices = {name: optimal_assignment(rates, sizes, memory) for name, memory in memories.items()}
        alone = 1 - (1 - options.confidence) / len(memories)
        budgets = [
            _planned(name, memory, choices[name].choice, choices[name].optimal, items, truth, trials, alone)
            for name, memory in memories.items()
        ]
        if trials is not None:
            remaining = {name: memory.residuals(choices[name].choice) for name, memory in memories.items()}
            budgets = _validated(budgets, remaining, items, trials, alone)
        spec = store.spec
        used = {name: [m.blocks[b].name for b in choices[name].choice.tolist()] for name, m in memories.items()}
        return PlanResult(
            workload=spec.workload, store=str(options.store), fault=spec.fault, law=spec.law,
            granularity=options.granularity, unit=options.unit, confidence=options.confidence,
            bytes=float(sizes.sum()) / 8, trials=sum(1 for _ in store.rows()),
            unprotected=items.rate(np.ones(sizes.size), options.confidence),
            truth="all trials of the campaign" if options.truth is None else str(options.truth),
            budgets=tuple(budgets), items=_planned_items(items, used), curve=_curve(items, rates), command=command,
            validation_store=trials.store if trials else "", validation_seed=trials.seed if trials else None,
            validation_trials=trials.n if trials else 0,
        )  # fmt: skip


def _memories(options: PlanOptions, items: ParameterItems) -> dict[str, Memory]:
    """The memory of each budget, by the name of the budget; raises ``UsageError`` where no item fits into one."""
    total = int(items.sizes.sum())
    if options.blocks is not None:
        if options.budget != DEFAULT_BUDGETS:
            raise UsageError("--budget and --blocks both say how much memory is protected; give only one")
        return {options.blocks.name: read_memory(options.blocks, total)}
    result = {}
    smallest = min(items.items, key=lambda item: item.size)
    for text in options.budget:
        bits = parse_capacity(text, total, "--budget")
        if bits < smallest.size:
            noun = "tensor" if options.granularity == "tensor" else "class of bits of a tensor"
            finer = " or use --granularity tensor-bits" if options.granularity == "tensor" else ""
            raise UsageError(
                f"--budget {text} is {human_bytes(bits // 8)} of {human_bytes(total // 8)}, but the smallest {noun} "
                f"({smallest.name}) takes {human_bytes(-(-smallest.size // 8))}; give a larger --budget{finer}"
            )
        result[text] = protected_memory(bits)
    return result


def _read_truth(options: PlanOptions, items: ParameterItems) -> ParameterItems:
    assert options.truth is not None
    with PvfStore(options.truth) as store:
        truth = read_items(store, options.granularity, options.unit)
    names = {item.name: item for item in truth.items}
    missing = [item.name for item in items.items if item.name not in names or names[item.name].size != item.size]
    if missing:
        raise UsageError(
            f"--truth {options.truth} has no {missing[0]!r} of this size; give a store of the same workload, with the same --at"
        )
    return replace(truth, items=tuple(names[item.name] for item in items.items))


def _planned(
    name: str,
    memory: Memory,
    choice: Ints,
    optimal: bool,
    items: ParameterItems,
    truth: ParameterItems,
    trials: ValidationTrials | None,
    confidence: float,
) -> PlannedBudget:
    """The plan of one budget, as far as it is known without comparing it with the second campaign."""
    sizes, remaining, true_rates = items.sizes, memory.residuals(choice), truth.pooled_rates()
    orders = {name: found for name, found in _baselines(memory, sizes).items() if found is not None}
    oracle = memory.residuals(optimal_assignment(true_rates, sizes, memory).choice)
    source: ParameterItems | ValidationTrials = items if trials is None else trials
    used = np.bincount(choice, sizes, len(memory.blocks)) / 8
    is_budget = len(memory.blocks) == 2 and memory.blocks[1].name == "unprotected" and memory.blocks[1].capacity is None
    capacity = memory.blocks[0].capacity if is_budget else None
    plan_by_truth = float(true_rates @ remaining)
    return PlannedBudget(
        name=name,
        capacity=None if capacity is None else capacity / 8,
        used={block.name: float(n) for block, n in zip(memory.blocks, used, strict=True)},
        optimal=optimal,
        predicted=items.rate(remaining, confidence),
        baselines={name: items.rate(weights, confidence) for name, weights in orders.items()},
        gains={name: source.rate(remaining - HALF * weights, confidence) for name, weights in orders.items()},
        oracle=min(float(true_rates @ oracle), plan_by_truth),
        plan_by_truth=plan_by_truth,
        trials_factor=items.trials_factor(remaining, confidence, ASKED_PRECISION),
        latency=None if is_budget else memory.latency(choice, sizes),
        energy=None if is_budget else memory.energy(choice, sizes),
    )


def _baselines(memory: Memory, sizes: Ints) -> dict[str, Floats | None]:
    """Share of the faults in each item that remains under each of `BASELINES`; None where an order does not fit."""
    rng = np.random.default_rng(0)
    drawn = [assign_in_order(rng.permutation(sizes.size).tolist(), sizes, memory) for _ in range(RANDOM_ORDERS)]
    fitting = [memory.residuals(choice) for choice in drawn if choice is not None]
    ascending = np.argsort(sizes, kind="stable")
    ordered = [assign_in_order(order.tolist(), sizes, memory) for order in (ascending, ascending[::-1])]
    by_size = [None if choice is None else memory.residuals(choice) for choice in ordered]
    return dict(zip(BASELINES, [np.mean(fitting, axis=0) if fitting else None, *by_size], strict=True))


def _validated(
    budgets: Sequence[PlannedBudget],
    remaining: Mapping[str, Floats],
    items: ParameterItems,
    trials: ValidationTrials,
    confidence: float,
) -> list[PlannedBudget]:
    """The budgets with what the second campaign says of them."""

    def gap(name: str, level: float) -> Interval:
        return difference(items.rate(remaining[name], level), trials.rate(remaining[name], level))

    names, level = {budget.name for budget in budgets}, 1 - confidence
    result = {name: gap(name, confidence) for name in names}
    differing: set[str] = set()
    while fresh := {n for n in names - differing if _excludes_zero(gap(n, 1 - level) if differing else result[n])}:
        differing |= fresh
        level = (1 - confidence) * len(names) / max(1, len(names) - len(differing))  # Holm's next step
    return [
        replace(
            budget,
            validation=Validation(
                trials.rate(remaining[budget.name], confidence), result[budget.name], budget.name in differing
            ),
        )
        for budget in budgets
    ]


def _excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def _planned_items(items: ParameterItems, used: Mapping[str, Sequence[str]]) -> tuple[PlannedItem, ...]:
    rates = items.pooled_rates().tolist()
    result = [
        PlannedItem(item.name, item.size / 8, item.share, rates[i], {name: blocks[i] for name, blocks in used.items()})
        for i, item in enumerate(items.items)
    ]
    return tuple(sorted(result, key=lambda item: -item.rate))


def _curve(items: ParameterItems, selection_rates: Floats) -> tuple[tuple[float, float], ...]:
    """See `PlanResult.curve`."""
    order = np.argsort(-selection_rates / items.sizes, kind="stable")
    rates = np.array([sum(s.weight * s.mean for s in item.prediction if s.n) for item in items.items])[order]
    protected = np.concatenate([[0.0], np.cumsum(items.sizes[order])]) / 8
    left = np.concatenate([np.cumsum(rates[::-1])[::-1], [0.0]])
    return tuple(zip(protected.tolist(), left.tolist(), strict=True))


def protected_list(result: PlanResult) -> dict[str, Any]:
    """The plan as plain values, for a file: what each budget puts into which block."""
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
