"""The report of ``unsilent plan``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from unsilent.basics.interval import Interval
from unsilent.basics.sizes import human_bytes
from unsilent.basics.strictjson import fields_by_name
from unsilent.report.curves import line_series
from unsilent.report.dots import Dots, axis_bottom, dot_traces, hover_text
from unsilent.report.estimates import Estimate, machine_table
from unsilent.report.model import Column, Getter, Plot, Report, Section, Table, TextCell
from unsilent.report.text import (
    count_text,
    estimate_text,
    number_text,
    percent_text,
    share_with_limits_text,
    upper_bound_text,
)
from unsilent.report.theme import GREY, INK, Figure, figure, marker_series, percent_ticks, series_colour, series_marker
from unsilent.studies.plan.records import BASELINES, HALF, PlannedBudget, PlanResult

_LEAST_AXIS = 1e-7
_ASIDE = 1.035
"""Factor between the positions of the marks of one budget, so that they do not overlap."""
MOST_ITEMS = 20
"""Most parts of the parameters that a terminal lists."""
MEMORIES_LEAD = (
    "Plans that no other one beats: none leaves fewer failures, by the half of the trials that selects, at no more latency and "
    "no more energy. What remains is relative to the memory for parameters whose bits fail most often, and what a memory "
    "corrects or reports does not remain. Every event is taken to be as harmful as a fault of the campaign."
)
MEMORY_RATES = (
    "rates and FIT are not those of unsilent pvf --accelerator: a plan takes the outcomes of the campaign's own faults (bitflip: "
    "one flipped bit) times the events that come through a memory, so a burst or a miscorrected word counts like one such fault, "
    "and counts incorrect samples, or batches with --unit batch; pvf injects the events themselves and counts incorrect calls"
)
METHOD = (
    "The remaining failure rate is the probability that one fault, drawn over all parameters by the law of the campaign, "
    "makes an output incorrect although the faults in protected memory are corrected. Trials with even numbers select what is "
    "protected, those with odd numbers predict the rate, so a prediction does not know which trials made the selection. The "
    "selection is the optimum of the knapsack problem (HiGHS). Limits of all budgets hold together (Bonferroni); whether "
    "prediction and second campaign differ is decided with Holm's correction."
)


def report(result: PlanResult) -> Report:
    """The report on a plan."""
    return Report(
        "unsilent/plan/2", "plan", f"Protected memory for {result.workload}", _headline(result),
        machine_table(estimates(result), ("budget", "assignment", "")),
        findings=tuple(_findings(result)),
        sections=tuple(_sections(result)),
        facts=tuple(_facts(result)),
        notes=tuple(_notes(result)),
        repeat_command=result.command,
        method=METHOD,
        further_json={**fields_by_name(result), "raw_fit": result.raw_fit},
    )  # fmt: skip


def _headline(result: PlanResult) -> str:
    """A sentence on the failure rate that the best plan leaves, and on the rate without a plan."""
    first = result.budgets[0]
    best = first if first.capacity is None else max(result.budgets, key=lambda budget: budget.capacity or 0.0)
    start, without = _budget_text(best, result), _rate_text(result.unprotected)
    if best.change.low == best.change.high == 0:
        return f"{start} leaves the failure rate per fault as it is {result.compared_with}: {without}."
    said = (
        f"{start} is predicted to leave a failure rate per fault of {_rate_text(best.predicted)}; "
        f"{result.compared_with} it is {without}"
    )
    seems_worse = (best.predicted.estimate or 0.0) >= (result.unprotected.estimate or 0.0)
    if (best.change.estimate or 0.0) > 0:
        return f"{said}; compared on the same trials, the plan leaves more."
    if best.change.high >= 0:
        return f"{said}; it is not shown that the plan leaves less."
    return f"{said}; compared on the same trials, the plan leaves less." if seems_worse else f"{said}."


def _rate_text(rate: Interval) -> str:
    """A failure rate with its limits; only the upper limit if no trial failed, like ``< 6.8 %``."""
    if rate.estimate == 0 and rate.high > 0:
        return f"{estimate_text(rate).estimate} %"
    return share_with_limits_text(rate)


def _budget_text(budget: PlannedBudget, result: PlanResult) -> str:
    if budget.capacity is None:
        return f"Assigning the parameters of {result.workload} to the memories with {budget.name}"
    return f"Protecting {_with_share(budget, result)} of the parameters of {result.workload}"


def _with_share(budget: PlannedBudget, result: PlanResult) -> str:
    """The name of a budget; for a size, with its share of the parameters."""
    if budget.capacity is None or budget.name.endswith("%"):
        return budget.name
    return f"{budget.name} ({100 * budget.capacity / result.bytes:.3g} %)"


def estimates(result: PlanResult) -> list[Estimate]:
    """The remaining failure rates of each budget, their differences, and failures per 1e9 hours."""
    rows = [_estimate("", "unprotected", result.unprotected)]
    for budget in result.budgets:
        rows += [_estimate(budget.name, name, rate) for name, rate in _rates(budget).items()]
        rows.append(_estimate(budget.name, "plan minus unprotected", budget.change))
        rows += [_estimate(budget.name, f"plan minus half of {name}", gain) for name, gain in budget.gains.items()]
        if budget.second_campaign and budget.difference:
            rows.append(_estimate(budget.name, "validation", budget.second_campaign))
            rows.append(_estimate(budget.name, "plan minus validation", budget.difference))
    if result.raw_fit is not None:
        rows.append(_estimate("", "unprotected FIT", result.unprotected.scaled(result.raw_fit)))
        rows += [_estimate(b.name, "plan FIT", b.predicted.scaled(result.raw_fit)) for b in result.budgets]
    return rows


def _estimate(budget: str, assignment: str, rate: Interval) -> Estimate:
    return Estimate({"budget": budget, "assignment": assignment}, rate)


def _rates(budget: PlannedBudget) -> dict[str, Interval]:
    """The predicted remaining rates of the plan and of its baselines, by name."""
    return {"plan": budget.predicted, **budget.baselines}


def _findings(result: PlanResult) -> Iterator[str]:
    source = "in the second campaign" if result.validation_store else "by prediction"
    memories = tuple(result.budgets[0].used)
    if len(memories) == 1:
        yield f"{memories[0]} is the only memory that may hold parameters, so there is nothing to choose"
    for name in BASELINES if len(memories) > 1 else ():
        gains = {b.name: b.gains[name] for b in result.budgets if name in b.gains}
        shown = [budget for budget, gain in gains.items() if gain.high < 0]
        estimated = [budget for budget, gain in gains.items() if gain.estimate is not None and gain.estimate <= 0]
        noun = f"assigning {name.replace(' first', ' parts first').replace('random', 'parts in random order')}"
        if estimated:
            certain = f"shown with joint limits at {', '.join(shown)}" if shown else "not shown with joint limits"
            yield f"the plan leaves at most half the failure rate of {noun}, {source}, at {', '.join(estimated)}; {certain}"
        else:
            shares = {b.name: _share_of_baseline(b, name) for b in result.budgets if name in b.gains}
            each = ", ".join(f"{percent_text(share)} at {budget}" for budget, share in shares.items())
            best = min((share for share in shares.values() if share is not None), default=0.0)
            start = "more than half" if best < 1 else "no less than"
            yield f"the plan leaves {start} the failure rate of {noun}, {source}, at every budget: {each}"
            if name == BASELINES[0] and result.granularity != "tensor-bits":
                yield "classes of bits need less memory than whole tensors or rows: try --granularity tensor-bits"
    wrong = [b.name for b in result.budgets if b.differs]
    if wrong:
        yield f"prediction and second campaign differ at {', '.join(wrong)} (after Holm's correction)"
    elif result.validation_store:
        count = count_text(len(result.budgets), "budget")
        yield f"no difference between prediction and second campaign was shown at any of {count} (after Holm's correction)"
    vague = [b for b in result.budgets if b.trials_factor is not None and b.trials_factor > 1]
    if vague:
        factors = ", ".join(f"{upper_bound_text(b.trials_factor or 0)} times as many at {b.name}" for b in vague)
        yield f"to predict the rate to within 20 %, the campaign needs more --trials: {factors}"


def _share_of_baseline(budget: PlannedBudget, name: str) -> float | None:
    """The remaining rate relative to that of a baseline; None if unknown or 0."""
    rate, gain = (budget.second_campaign or budget.predicted).estimate, budget.gains[name].estimate
    if rate is None or gain is None or rate <= gain:
        return None
    return HALF * rate / (rate - gain)


def _sections(result: PlanResult) -> Iterator[Section]:
    has_blocks = any(budget.capacity is None for budget in result.budgets)
    plots = []
    if not has_blocks:
        plots.append(Plot("pareto", "Remaining failure rate against protected bytes", pareto_figure(result)))
    yield Section(
        "Remaining failure rate",
        "Failure rate per fault that remains with each budget, by the half of the trials that did not select, compared with "
        "assignments that do not use the trials and with the best that any plan could reach (oracle).",
        (_budget_table(result), *plots),
    )
    if result.validation_store:
        yield Section(
            "Validation",
            f"A second campaign of {count_text(result.validation_trials, 'trial')} with seed {result.validation_seed}, in which "
            "faults in protected memory are corrected.",
            (_validation_table(result),),
        )
    if has_blocks:
        yield Section("Memories", MEMORIES_LEAD, (_memories_table(result),))
    yield Section(
        "What is protected",
        f"Parts of the parameters ({result.granularity}), those that contribute most to the failure rate if nothing is corrected "
        "first, and where each budget puts them.",
        (_items_table(result),),
    )


def _budget_table(result: PlanResult) -> Table:
    fit = [] if result.raw_fit is None else [Column("remains, FIT", "estimate", scale=result.raw_fit)]
    columns = (
        Column("budget"), Column.share("remains"), *fit, *(Column.percent(name, priority=1) for name in BASELINES),
        Column.percent("plan, trials of oracle", priority=1), Column.percent("oracle"),
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"budget": "none", "remains": result.unprotected}]
    for budget in result.budgets:
        names = {"budget": _with_share(budget, result), "remains": budget.predicted}
        baselines = {name: rate.estimate for name, rate in budget.baselines.items()}
        rows.append({**names, **baselines, "plan, trials of oracle": budget.plan_by_truth, "oracle": budget.oracle})
    return Table.of([{**row, "remains, FIT": row["remains"]} for row in rows], columns)


def _validation_table(result: PlanResult) -> Table:
    columns = (
        Column("budget", of="name"), Column.share("predicted"), Column.share("second campaign"),
        Column.points("difference"), Column("differs (Holm)", of=lambda b: "yes" if b.differs else "not shown"),
    )  # fmt: skip
    return Table.of([b for b in result.budgets if b.difference], columns)


def _memories_table(result: PlanResult) -> Table:
    """The table of the Pareto-optimal plans of an accelerator."""
    columns = (
        Column("budget", of="name"), Column.share("remains", "predicted"),
        *([] if result.raw_fit is None else [Column("FIT", "estimate", scale=result.raw_fit, of="predicted")]),
        Column("mean latency", of=lambda b: _number_cell(b.latency)),
        Column("energy", of=lambda b: _number_cell(b.energy)),
        *(Column(f"bytes in {name}", "number", digits=",.0f", of=_used_budget(name)) for name in result.budgets[0].used),
    )  # fmt: skip
    return Table.of(result.budgets, columns)


def _used_budget(memory: str) -> Getter:
    return lambda budget: budget.used[memory]


def _number_cell(value: float | None) -> TextCell:
    return TextCell(number_text(value or 0.0), value)


def _items_table(result: PlanResult) -> Table:
    columns = (
        Column.text("part", "name"),
        Column("size", "number", digits=lambda size: human_bytes(math.ceil(size)), of="bytes"),
        Column.percent("faults that hit it", "share"), Column.percent("contribution", "rate"),
        *(Column(b.name, priority=1 + (b is not result.budgets[0]), of=_block_of(b.name)) for b in result.budgets),
    )  # fmt: skip
    return Table.of(result.items, columns, terminal_rows=MOST_ITEMS, sortable=True)


def _block_of(budget: str) -> Getter:
    """A function that returns the block of an item under a budget; None if it is unprotected."""
    return lambda item: None if item.blocks[budget] == "unprotected" else item.blocks[budget]


def _facts(result: PlanResult) -> Iterator[tuple[str, str]]:
    yield "store", result.store
    yield "trials", f"{result.trials:,}, half of them for the selection and half for the prediction"
    parts = count_text(len(result.items), "part")
    yield "parameters", f"{human_bytes(int(result.bytes))} in {parts} ({result.granularity})"
    yield "fault", f"{result.fault}, one in each trial, drawn {result.law}"
    yield "counted unit, confidence", f"{result.unit}, {100 * result.confidence:g} %"
    yield "oracle", result.truth
    if result.raw_fit is not None:
        faults = f"{number_text(result.raw_fit)} faults in all parameters per 1e9 hours"
        yield "FIT", f"{result.fit_per_bit:g} per bit, {faults}"
    if result.validation_store:
        campaign = f"{result.validation_store}, seed {result.validation_seed}"
        yield "second campaign", f"{campaign}, {result.validation_trials:,} trials"


def _notes(result: PlanResult) -> Iterator[str]:
    if result.budgets[0].capacity is None:
        yield f"row none: the parameters {result.compared_with}, by all trials"
        yield MEMORY_RATES
    else:
        yield "row none: without protection, by all trials, as in the report of the campaign"
    yield "remains: predicted from the half of the trials that did not select the parts; limits hold for all budgets together"
    yield "smallest first, largest first: the same, with parts in order of their size; random: mean of 100 random orders"
    yield "plan, trials of oracle: what the plan leaves in the trials that the oracle uses; compare the oracle with this column"
    if result.truth.startswith("all trials"):
        yield "oracle: the best plan for all trials of the campaign, evaluated on the same trials; on average, no plan is better"
    else:
        yield f"oracle: the best plan for the trials of {result.truth}, evaluated on the same trials"
    if any(not budget.optimal for budget in result.budgets):
        names = ", ".join(budget.name for budget in result.budgets if not budget.optimal)
        yield f"the solver reached its time limit, so a slightly better selection may exist: {names}"


# -- figure ------------------------------------------------------------------------------------------------------------


def pareto_figure(result: PlanResult) -> Figure:
    """The remaining failure rate against the share of protected bytes, on two logarithmic axes."""
    budgets = result.budgets
    rates = [rate for b in budgets for rate in (b.predicted, *b.baselines.values())]
    bottom = max(axis_bottom([r for r in rates if r.estimate]), _LEAST_AXIS)
    places = [b.used["protected"] / result.bytes for b in budgets]
    left = min([p for p in places if p > 0], default=0.01) / 2
    points = [(x / result.bytes, y) for x, y in result.curve if x / result.bytes >= left and y >= bottom]
    traces = [line_series("parts one by one", points, {"color": GREY, "width": 2})]
    series: list[tuple[str, Sequence[Interval | None]]] = [("plan", [b.predicted for b in budgets])]
    series += [(name, [b.baselines.get(name) for b in budgets]) for name in BASELINES]
    if result.validation_store:
        series.append(("second campaign", [b.second_campaign for b in budgets]))
    for number, (name, shown) in enumerate(series):
        aside = _ASIDE ** (number - (len(series) - 1) / 2)
        points_of_series = zip(places, shown, budgets, strict=True)
        rows = [
            (aside * x, rate, hover_text(rate, name, b.name)) for x, rate, b in points_of_series if rate is not None
        ]
        traces += dot_traces(Dots(name, series_colour(number), series_marker(number), rows), bottom, along="y")
    oracle = [(x, b.oracle) for x, b in zip(places, budgets, strict=True) if b.oracle >= bottom]
    hover = [f"oracle: {100 * y:.2g} %" for _, y in oracle]
    marker = {"color": INK, "symbol": "line-ew-open", "size": 44}
    traces.append(marker_series("oracle", [x for x, _ in oracle], [y for _, y in oracle], hover, marker))
    ticks = percent_ticks(10.0 ** math.floor(math.log10(left)))
    return figure(
        traces,
        420,
        xaxis={"type": "log", "range": [math.log10(left), 0.02], "title": {"text": "protected bytes"}, **ticks},
        yaxis={"type": "log", "range": [math.log10(bottom), 0.08], "title": {"text": "remaining failure rate per fault"},
               **percent_ticks(bottom)},
    )  # fmt: skip
