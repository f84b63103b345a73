"""Plans of protected memory: optimal against brute force, unbiased against known truths, through the product, and bad input."""

from __future__ import annotations

import inspect
import itertools
import json
import tomllib
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import unsilent
from conftest import in_process
from studies.pvf.test_truth import truth, workload  # noqa: F401 - fixtures
from unsilent.basics.errors import UsageError
from unsilent.basics.options import options_of
from unsilent.statistics import clopper_pearson
from unsilent.studies.plan.assignment import Block, Memory, assign_in_order, optimal_assignment, protected_memory
from unsilent.studies.plan.items import Item, ItemTrials, ParameterItems, StratumTrials
from unsilent.studies.plan.memories import parse_capacity
from unsilent.studies.plan.report import report
from unsilent.studies.plan.spec import PlanOptions
from unsilent.studies.plan.stored_items import read_items
from unsilent.studies.plan.study import plan
from unsilent.studies.pvf.analysis import PvfEstimator, analyse
from unsilent.studies.pvf.kind import PvfStore

# -- the optimum ---------------------------------------------------------------------------------------------------------

rates = st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=6)


def brute_force(values, sizes, memory):
    """The fewest remaining failures over all assignments that fit, tried one by one; None where none fits."""
    best = None
    for choice in itertools.product(range(len(memory.blocks)), repeat=len(values)):
        used = [sum(s for s, b in zip(sizes, choice, strict=True) if b == n) for n in range(len(memory.blocks))]
        if any(b.capacity is not None and u > b.capacity for b, u in zip(memory.blocks, used, strict=True)):
            continue
        energy = sum(s / 8 * memory.blocks[b].energy for s, b in zip(sizes, choice, strict=True))
        if memory.max_energy is not None and energy > memory.max_energy:
            continue
        latency = sum(s * memory.blocks[b].latency for s, b in zip(sizes, choice, strict=True)) / sum(sizes)
        if memory.max_latency is not None and latency > memory.max_latency:
            continue
        left = sum(v * memory.blocks[b].residual for v, b in zip(values, choice, strict=True))
        best = left if best is None else min(best, left)
    return best


def check_optimal(values, sizes, memory):
    best = brute_force(values, sizes, memory)
    array, bits = np.array(values), np.array(sizes, np.int64)
    if best is None:
        with pytest.raises(UsageError, match="cannot hold all"):
            optimal_assignment(array, bits, memory)
        return
    found = optimal_assignment(array, bits, memory)
    assert memory.fits(found.choice, bits)
    assert array @ memory.residuals(found.choice) == pytest.approx(best, abs=1e-5 * sum(values) + 1e-12)


@given(rates, st.data())
def test_one_protected_block_is_filled_as_well_as_can_be(values, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(values), max_size=len(values)))
    check_optimal(values, sizes, protected_memory(data.draw(st.integers(0, sum(sizes)))))


@given(rates, st.data())
def test_several_blocks_with_limits_are_filled_as_well_as_can_be(values, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(values), max_size=len(values)))
    total = sum(sizes)
    capacity = st.one_of(st.none(), st.integers(0, total))
    memory = Memory(
        (
            Block("best", data.draw(st.integers(0, total)), 0.0, 4.0, 3.0),
            Block("good", data.draw(capacity), 0.25, 2.0, 2.0),
            Block("plain", data.draw(capacity), 1.0, 1.0, 1.0),
        ),
        data.draw(st.one_of(st.none(), st.floats(1, 4).map(lambda x: round(x, 2) + 1e-3))),
        data.draw(st.one_of(st.none(), st.integers(0, 3 * total).map(lambda x: x / 8 + 1e-3))),
    )
    check_optimal(values, sizes, memory)


def test_greedy_is_not_the_optimum():
    sizes, memory = np.array([6, 5, 5], np.int64), protected_memory(10)
    values = np.array([7.0, 5.0, 5.0])
    greedy = assign_in_order([0, 1, 2], sizes, memory)
    assert values @ memory.residuals(greedy) == 10
    assert optimal_assignment(values, sizes, memory).choice.tolist() == [1, 0, 0]


def test_nothing_of_the_solver_is_printed(capfd):
    rng = np.random.default_rng(1)
    sizes = (2 ** rng.integers(3, 14, 200)).astype(np.int64)
    for share in (0.02, 0.05):
        optimal_assignment(rng.random(200) ** 6 * sizes, sizes, protected_memory(int(share * sizes.sum())))
    assert capfd.readouterr().out == ""


# -- predictions ---------------------------------------------------------------------------------------------------------


def synthetic(rng, pvf, shares, sizes, trials, groups):
    """Items of a population with these vulnerabilities, with trials drawn for each group of items."""
    items = tuple(
        Item(f"t{i}", (f"t{i}", "float32"), None, None, int(size), float(share))
        for i, (share, size) in enumerate(zip(shares, sizes, strict=True))
    )
    halves = []
    for _ in range(2):
        strata = []
        for group in groups:
            hit = rng.choice(group, trials * len(group), p=shares[group] / shares[group].sum())
            wrong = (rng.random(hit.size) < pvf[hit]).astype(float)
            strata.append(StratumTrials(float(shares[group].sum()), group, hit, wrong))
        halves.append(ItemTrials(tuple(strata)))
    return ParameterItems(items, *halves)


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 6])
def test_predictions_are_unbiased_and_their_intervals_cover(together):
    """Over 300 campaigns with so many items in a stratum; the same trials that selected would predict less than remains."""
    rng = np.random.default_rng(7)
    pvf, sizes = rng.beta(0.3, 3, 24), rng.integers(10, 1000, 24)
    shares = sizes / sizes.sum()
    groups = np.arange(24).reshape(-1, together)
    memory = protected_memory(int(0.2 * sizes.sum()))
    errors, optimistic, covered = [], [], 0
    for _ in range(300):
        items = synthetic(rng, pvf, shares, sizes, 40, groups)
        left = memory.residuals(optimal_assignment(items.selection_rates(), items.sizes, memory).choice)
        true = float(left @ (shares * pvf))
        predicted = items.prediction.rate(left, 0.9)
        errors.append(predicted.estimate - true)
        optimistic.append(items.selection.rate(left, 0.9).estimate - true)
        covered += predicted.low <= true <= predicted.high
    standard_error = np.std(errors) / len(errors) ** 0.5
    assert abs(np.mean(errors)) < 4 * standard_error
    assert np.mean(optimistic) < -4 * standard_error
    assert covered >= 255  # P = 0.003 at exactly 90 %


outcomes = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=2, max_size=5)
factors = st.lists(st.floats(-1, 1), min_size=3, max_size=3).map(np.array)


@given(st.lists(st.tuples(st.floats(0.1, 1), outcomes), min_size=1, max_size=4), factors)
def test_signed_sums_have_the_right_estimate_and_possible_limits(parts, weights):
    total = sum(share for share, _ in parts)
    strata = [
        StratumTrials(share / total, np.arange(3), np.array([i for i, _ in x]), np.array([y for _, y in x]))
        for share, x in parts
    ]
    found = ItemTrials(tuple(strata)).rate(weights, 0.9)
    expected = sum(share / total * np.mean([weights[i] * y for i, y in x]) for share, x in parts)
    assert found.estimate == pytest.approx(expected, abs=1e-9)
    assert found.low <= found.estimate <= found.high
    assert found.low >= min(0, weights.min()) - 1e-9
    assert found.high <= max(0, weights.max()) + 1e-9


def test_protected_strata_do_not_widen_the_limits():
    """Weights 0 and 1 of a stratum each: the interval of the unprotected one alone."""
    wrong = np.array([0.0, 1, 0, 0])
    strata = [StratumTrials(0.5, np.array([n]), np.full(4, n), wrong) for n in (0, 1)]
    found = ItemTrials(tuple(strata)).rate(np.array([0.0, 1.0]), 0.9)
    alone = clopper_pearson(1, 4, 0.9)
    assert (found.low, found.estimate, found.high) == pytest.approx((alone.low / 2, 0.125, alone.high / 2), abs=1e-6)


# -- through the product -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A stored campaign of the tiny workload, by tensors and classes of bits."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.py").write_text(TINY)
    words = ("--per", "tensor", "--strata", "bits", "--trials", 12, "--store", "t.sqlite", "--quiet")
    done = in_process("pvf", "tiny.py:make", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_plan_with_validation_from_the_command_line(campaign):
    words = ("plan", "t.sqlite", "--granularity", "tensor-bits", "--budget", "3%", "--budget", "40B", "--validate")
    more = ("--workload", "tiny.py:make", "--validation-trials", 60, "--json", "-o", "list.toml")
    done = in_process(*words, *more, cwd=campaign)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert [b["name"] for b in values["budgets"]] == ["3%", "40B"]
    assert values["budgets"][1]["used"]["protected"] <= 40
    listed = tomllib.loads((campaign / "list.toml").read_text())["budget"][0]["blocks"]["protected"]
    assert listed == [item["name"] for item in values["items"] if item["blocks"]["3%"] == "protected"]
    results = {(row["budget"], row["assignment"]): row for row in values["results"]}
    # The second campaign again, from its exported trials alone.
    with PvfStore(campaign / "t.validation.sqlite") as store:
        shares = {t.name: t.share for t in store.baseline.targets}
        outcomes = {name: [] for name in shares}
        for row in store.rows():
            (fault,) = json.loads(row.faults)
            bit = int(fault["operands"][0], 16).bit_length() - 1
            kinds = {31: "sign", 30: "exponent-top", **dict.fromkeys(range(26, 30), "exponent-high")}
            kinds |= {**dict.fromkeys(range(23, 26), "exponent-low"), **dict.fromkeys(range(20, 23), "mantissa-high")}
            name = f"{fault['site'].removeprefix('param:')}/{kinds.get(bit, 'mantissa-low')}"
            wrong = sum(code >= 2 for code in row.outcome_codes) / len(row.outcome_codes)
            outcomes[row.trial.target].append(0.0 if name in listed else wrong)
    expected = sum(shares[name] * np.mean(values) for name, values in outcomes.items())
    assert results["3%", "validation"]["estimate"] == pytest.approx(expected)
    gap = results["3%", "plan minus validation"]
    assert gap["estimate"] == pytest.approx(results["3%", "plan"]["estimate"] - expected)
    assert gap["low"] < gap["estimate"] < gap["high"]
    assert "<html" in (campaign / "t.plan.html").read_text()[:200]
    again = in_process(*words, "--workload", "tiny.py:make", "--validation-trials", 60, "--plain", cwd=campaign)
    assert again.returncode == 0
    assert "validation" in again.stdout


def test_the_rate_without_protection_is_that_of_the_campaign(campaign):
    with PvfStore(campaign / "t.sqlite") as store:
        model = next(row for row in analyse(store, PvfEstimator()).rows if row.level == "model")
    found = plan(campaign / "t.sqlite", budget="5%").unprotected
    assert (found.estimate, found.low, found.high) == pytest.approx((model.estimate, model.low, model.high))


def test_the_oracle_is_compared_with_the_plan_by_the_same_trials(campaign):
    result = plan(campaign / "t.sqlite", budget=("5%", "20%"), granularity="tensor-bits")
    table = report(result).sections[0].parts[0]
    names = [column.name for column in table.columns]
    for row, budget in zip(table.rows[1:], result.budgets, strict=True):
        cells = dict(zip(names, row.cells, strict=True))
        assert (cells["plan, trials of oracle"], cells["oracle"]) == (budget.plan_by_truth, budget.oracle)
        assert cells["oracle"] <= cells["plan, trials of oracle"]


@pytest.mark.parametrize(("granularity", "hint"), [("tensor", True), ("tensor-bits", False)])
@pytest.mark.parametrize(
    ("share", "said"),
    [(0.98, "the plan leaves more than half the failure rate of {}, by prediction, at every budget: 98 % at 20%"),
     (1.02, "the plan leaves no less than the failure rate of {}, by prediction, at every budget: 102 % at 20%")],
)  # fmt: skip
def test_a_plan_that_is_no_better_than_random_says_so(campaign, granularity, hint, share, said):
    result = plan(campaign / "t.sqlite", budget="20%")
    (budget,) = result.budgets
    rate, gain = (replace(budget.predicted, estimate=value, low=0.0, high=1.0) for value in (0.02, 0.02 - 0.01 / share))
    worse = replace(budget, predicted=rate, gains={"random": gain})
    findings = list(report(replace(result, granularity=granularity, budgets=(worse,))).findings)
    assert said.format("assigning parts in random order") in findings
    assert any("try --granularity tensor-bits" in one for one in findings) is hint


def test_all_granularities_cover_all_parameters(campaign):
    for granularity, count in (("tensor", 8), ("tensor-bits", 48), ("rows", 17)):
        with PvfStore(campaign / "t.sqlite") as store:
            items = read_items(store, granularity, "sample")
        assert len(items.items) == count
        assert items.sizes.sum() == 32 * (6 * 8 + 8 + 4 * 8 + 8 * 3 + 3)
        assert sum(item.share for item in items.items) == pytest.approx(1)


def test_a_campaign_by_components_is_planned_with(campaign):
    """The trials say which row of which tensor was hit."""
    words = ("pvf", "tiny.py:make", "--trials", 90, "--fit-per-bit", 0.001, "--store", "c.sqlite", "--quiet")
    assert in_process(*words, cwd=campaign).returncode == 0
    result = unsilent.plan(campaign / "c.sqlite", budget="10%", granularity="rows")
    assert {item.name for item in result.items} > {"first.weight[7:8]", "last.weight[2:3]", "last.bias"}
    with PvfStore(campaign / "c.sqlite") as store:
        shares = {t.name: t.share for t in store.baseline.targets}
        wrong = {name: [] for name in shares}
        for row in store.rows():
            (fault,) = json.loads(row.faults)
            name, (element,) = fault["site"].removeprefix("param:"), fault["elements"]
            spared = item_of(name, element) in protected(result, "10%")
            if row.trial.k % 2:  # the half that predicts
                wrong[row.trial.target].append(0 if spared else np.mean([c >= 2 for c in row.outcome_codes]))
    expected = sum(shares[name] * np.mean(values) for name, values in wrong.items())
    assert result.budgets[0].predicted.estimate == pytest.approx(expected)
    # FIT: the campaign's command has the rate of a bit.
    assert result.raw_fit == pytest.approx(0.001 * 8 * 460)
    done = in_process("plan", "c.sqlite", "--budget", "10%", "--fit-per-bit", 0.01, "--json", cwd=campaign)
    values = json.loads(done.stdout)
    rates = {(row["budget"], row["assignment"]): row for row in values["results"]}
    for end in ("estimate", "low", "high"):
        assert rates["10%", "plan FIT"][end] == pytest.approx(0.01 * 8 * 460 * rates["10%", "plan"][end])


MEMORIES = """
name = "mine"
description = "three memories"
sources = []
[memories.ecc]
size = "180B"
fit_per_mbit = 100.0
protection = "sec-ded"
code_word = 32
latency = 2.0
energy = 3.0
bandwidth = "1GB"
holds = []
evidence = "assumed"
patterns.single = { model = "bitflip", share = 0.9, evidence = "assumed" }
patterns.row = { model = "bitflip:run=2", share = 0.05, evidence = "assumed" }
patterns.triple = { model = "multibit:flips=3", share = 0.05, evidence = "assumed" }
[memories.parity]
size = "200B"
fit_per_mbit = 100.0
protection = "parity"
code_word = 32
latency = 1.5
energy = 2.0
bandwidth = "1GB"
holds = []
evidence = "assumed"
patterns.single = { model = "bitflip", share = 0.5, evidence = "assumed" }
patterns.double = { model = "burst:length=2", share = 0.5, evidence = "assumed" }
[memories.main]
size = "1GB"
fit_per_mbit = 50.0
latency = 1.0
energy = 1.0
bandwidth = "1GB"
holds = []
evidence = "assumed"
patterns.single = { model = "bitflip", share = 1.0, evidence = "assumed" }
"""


@pytest.mark.slow
def test_the_plans_for_the_memories_of_an_accelerator_are_a_pareto_set(campaign):
    (campaign / "mine.toml").write_text(MEMORIES)
    result = unsilent.plan(campaign / "t.sqlite", accelerator=campaign / "mine.toml", granularity="rows")
    assert result.fit_per_bit == 100 / 2**20  # the highest rate of a bit
    first, *others = result.budgets
    assert first.predicted.estimate == min(budget.predicted.estimate for budget in result.budgets)
    assert len(others) >= 3
    for budget in result.budgets:
        assert sum(budget.used.values()) == pytest.approx(result.bytes)
        assert budget.used["ecc"] <= 180
        assert budget.used["parity"] <= 200
        limit = np.inf if budget.name == "no limit" else float(budget.name.rpartition(" ")[2])
        cost = budget.energy if budget.name.startswith("energy") else budget.latency
        assert cost <= limit * 1.001
    # Corrected or reported in SEC-DED: all but a part of the triple flips. Both other memories let half of 100 FIT through.
    with PvfStore(campaign / "t.sqlite") as store:
        items = read_items(store, "rows", "sample")
    rates = {
        item.name: rate for item, rate in zip(items.items, items.prediction.item_rates(len(items.items)), strict=True)
    }
    left = {"ecc": 0.0, "parity": 0.5, "main": 0.5}
    least = sum(rates[item.name] * left[item.blocks[first.name]] for item in result.items)
    most = sum(rates[item.name] * {**left, "ecc": 0.05}[item.blocks[first.name]] for item in result.items)
    assert least < first.predicted.estimate < most
    done = in_process("plan", "t.sqlite", "--accelerator", "mine.toml", cwd=campaign)
    assert done.returncode == 0
    assert "bytes in parity" in done.stdout
    for other in others:  # none is beaten by the one without limits
        assert other.latency < first.latency or other.energy < first.energy


def test_a_plan_with_an_accelerator_says_what_does_not_fit(campaign):
    (campaign / "small.toml").write_text(MEMORIES.replace('"1GB"\nfit', '"10B"\nfit'))
    with pytest.raises(UsageError, match="cannot hold all 460 B of the parameters"):
        unsilent.plan(campaign / "t.sqlite", accelerator=campaign / "small.toml")
    with pytest.raises(UsageError, match="describes no memories"):
        unsilent.plan(campaign / "t.sqlite", accelerator="nvdla")
    with pytest.raises(UsageError, match="leave out fit_per_bit="):
        unsilent.plan(campaign / "t.sqlite", accelerator=campaign / "small.toml", fit_per_bit=0.1)


def memory_text(name, holds, fit, protection=""):
    """A memory of an accelerator's file, with room for all parameters and single flips only."""
    return f"""
[memories.{name}]
size = "1GB"
fit_per_mbit = {fit}
{protection}
bandwidth = "1GB"
holds = {json.dumps(holds)}
evidence = "assumed"
patterns.single = {{ model = "bitflip", share = 1.0, evidence = "assumed" }}
"""


ECC = 'protection = "sec-ded"\ncode_word = 32'


def plan_for(campaign, *memories):
    head = 'name = "mine"\ndescription = "memories"\nsources = []\n'
    (campaign / "held.toml").write_text(head + "".join(itertools.starmap(memory_text, memories)))
    return unsilent.plan(campaign / "t.sqlite", accelerator=campaign / "held.toml")


def rate_outside(campaign, corrected):
    """The failure rate per fault if those in tensors that begin like this are corrected, from the rows of the store."""
    with PvfStore(campaign / "t.sqlite") as store:
        shares = {t.name: t.share for t in store.baseline.targets}
        outcomes = {name: [] for name in shares}
        for row in store.rows():
            (fault,) = json.loads(row.faults)
            spared = fault["site"].startswith(f"param:{corrected}")
            outcomes[row.trial.target].append(0 if spared else np.mean([c >= 2 for c in row.outcome_codes]))
    return sum(shares[name] * np.mean(values) for name, values in outcomes.items())


def test_memories_that_hold_other_things_are_no_place_for_parameters(campaign):
    """A memory of inputs with a high rate does not make the memory that parameters are in look protected."""
    result = plan_for(campaign, ("hbm", ["param:*"], 10), ("sram", ["op:*"], 50, ECC), ("fifo", ["input:*"], 1000))
    assert {block for item in result.items for block in item.blocks.values()} == {"hbm"}
    assert result.fit_per_bit == 10 / 2**20
    assert result.unprotected.estimate == pytest.approx(rate_outside(campaign, "nothing"))
    shown = report(result)
    assert "leaves the failure rate per fault as it is where they are now (hbm): " in shown.headline
    assert shown.findings[0] == "hbm is the only memory that may hold parameters, so there is nothing to choose"
    assert any(note.startswith("rates and FIT are not those of unsilent pvf --accelerator") for note in shown.notes)


def test_a_plan_is_compared_with_where_parameters_are_now(campaign):
    """In the first memory that holds them, in the worst one where none does."""
    first, main, spare = ("ecc", ["first.*"], 50, ECC), ("main", ["param:*"], 50), ("spare", [], 50, ECC)
    result = plan_for(campaign, first, main, spare)
    assert result.compared_with == "where they are now (ecc and main)"
    assert result.unprotected.estimate == pytest.approx(rate_outside(campaign, "first."))
    assert result.budgets[0].predicted.high == 0  # all of it can be moved
    result = plan_for(campaign, first, ("main", [], 50), spare)
    assert result.compared_with == "where they are now (ecc; parts that no memory holds taken to be in main)"
    assert result.unprotected.estimate == pytest.approx(rate_outside(campaign, "first."))
    result = plan_for(campaign, ("ecc", [], 50, ECC), ("main", [], 25), ("other", [], 50))
    assert result.compared_with == "with all of them in other"
    assert result.unprotected.estimate == pytest.approx(rate_outside(campaign, "nothing"))
    result = plan_for(campaign, ("slow", ["param:*"], 25), ("other", [], 50))
    assert result.unprotected.estimate == pytest.approx(rate_outside(campaign, "nothing") / 2)  # per fault of the other


@pytest.mark.parametrize(
    ("memories", "message"),
    [
        ((("sram", ["op:*"], 50),), "has no memory for parameters"),
        ((("sram", ["op:*"], 50), ("main", ["param:*"], 0)), "no memory for parameters with fit_per_mbit above 0"),
        ((("main", ["param:first.weight[0]"], 5),), "memory main has elements of a tensor (param:first.weight[0])"),
    ],
)
def test_memories_that_no_plan_can_be_made_for_are_refused(campaign, memories, message):
    with pytest.raises(UsageError) as error:
        plan_for(campaign, *memories)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rate", "change", "said"),
    [
        ((0.014, 0.01, 0.02), (-0.003, -0.01, -0.001), " of 1.4 % [1.0, 2.0]; without protection it is 1.7 % [1.2, 2.2]."),
        ((0.0, 0.0, 0.068), (-0.01, -0.02, -0.001), " of < 6.8 %; without protection it is 1.7 % [1.2, 2.2]."),
        ((0.018, 0.01, 0.03), (-0.01, -0.02, -0.001), "1.7 % [1.2, 2.2]; compared on the same trials, the plan leaves less."),
        ((0.018, 0.01, 0.03), (0.001, -0.01, 0.02), "1.7 % [1.2, 2.2]; compared on the same trials, the plan leaves more."),
        ((0.014, 0.01, 0.02), (-0.001, -0.01, 0.02), "1.7 % [1.2, 2.2]; it is not shown that the plan leaves less."),
    ],
)  # fmt: skip
def test_the_headline_says_whether_less_remains(campaign, rate, change, said):
    result = plan(campaign / "t.sqlite", budget=("20%", "5%"))
    large, small = result.budgets

    def interval(values):
        return replace(result.unprotected, **dict(zip(("estimate", "low", "high"), values, strict=True)))

    large = replace(large, predicted=interval(rate), change=interval(change))
    shown = report(replace(result, unprotected=interval((0.017, 0.012, 0.022)), budgets=(large, small))).headline
    assert shown.startswith("Protecting 20% of the parameters")  # the budget that leaves least, in any order
    assert shown.endswith(said)


def test_the_headline_for_memories_is_the_plan_that_leaves_least(campaign):
    (campaign / "mine.toml").write_text(MEMORIES)
    result = unsilent.plan(campaign / "t.sqlite", accelerator=campaign / "mine.toml", granularity="rows")
    least = min(result.budgets, key=lambda budget: budget.predicted.estimate)
    assert least.name == result.budgets[0].name
    assert f"to the memories with {least.name} is predicted to leave" in report(result).headline


def item_of(name, element):
    """The block of rows of the tiny workload that an element is in: a matrix has at most 8 rows, and each is a block."""
    columns = {"first.weight": 6, "last.weight": 8}.get(name)
    return f"{name}[{element // columns}:{element // columns + 1}]" if columns else name


def protected(result, budget):
    return {item.name for item in result.items if item.blocks[budget] == "protected"}


@pytest.mark.slow
def test_plans_of_rows_keep_the_promised_rate(workload, truth, tmp_path):  # noqa: F811
    """From all faults and from drawn campaigns, against a loop over all flips."""
    unsilent.pvf(workload, trials="all", per="tensor", store=tmp_path / "all.sqlite")
    result = unsilent.plan(tmp_path / "all.sqlite", budget="10%", granularity="rows")

    def left(plan):
        return np.mean([0.0 if item_of(n, e) in protected(plan, "10%") else v for (n, e, _), v in truth.items()])

    assert result.budgets[0].predicted.estimate == pytest.approx(left(result))
    errors = []
    for seed in range(12):
        per = ("component", "tensor")[seed % 2]
        unsilent.pvf(workload, trials=150, per=per, seed=seed, store=tmp_path / f"{seed}.sqlite")
        drawn = unsilent.plan(tmp_path / f"{seed}.sqlite", budget="10%", granularity="rows", confidence=0.999)
        (budget,) = drawn.budgets
        assert budget.predicted.low <= left(drawn) <= budget.predicted.high
        errors.append(budget.predicted.estimate - left(drawn))
    assert abs(np.mean(errors)) < 4 * np.std(errors, ddof=1) / len(errors) ** 0.5


@pytest.mark.slow
def test_a_plan_from_all_faults_is_the_oracle_and_exact(workload, truth, tmp_path):  # noqa: F811
    unsilent.pvf(workload, trials="all", per="tensor", store=tmp_path / "all.sqlite")
    result = unsilent.plan(tmp_path / "all.sqlite", budget=("3%", "10%"), granularity="tensor-bits")
    total = sum(truth.values()) / len(truth)
    assert result.unprotected.estimate == result.unprotected.high == pytest.approx(total)
    for budget in result.budgets:
        assert budget.predicted.low == budget.predicted.high == pytest.approx(budget.oracle)
    # What remains, from the oracle's loop over all flips.
    classes = {31: "sign", 30: "exponent-top", **dict.fromkeys(range(26, 30), "exponent-high")}
    classes |= {**dict.fromkeys(range(23, 26), "exponent-low"), **dict.fromkeys(range(20, 23), "mantissa-high")}
    blocks = {item.name: item.blocks["3%"] for item in result.items}
    left = [
        0.0 if blocks[f"{name}/{classes.get(bit, 'mantissa-low')}"] == "protected" else value
        for (name, _, bit), value in truth.items()
    ]
    assert result.budgets[0].predicted.estimate == pytest.approx(np.mean(left))
    # A drawn campaign without strata, planned and validated, with the exhaustive one as the truth.
    unsilent.pvf(workload, trials=600, per="tensor", store=tmp_path / "drawn.sqlite")
    drawn = unsilent.plan(
        tmp_path / "drawn.sqlite", budget=("3%", "10%"), granularity="tensor-bits", truth=tmp_path / "all.sqlite",
        validate=True, workload=workload, validation_trials=1000, confidence=0.999,
    )  # fmt: skip
    for budget, best in zip(drawn.budgets, result.budgets, strict=True):
        assert budget.oracle == pytest.approx(best.oracle)
        assert budget.oracle <= budget.plan_by_truth
        assert budget.predicted.low <= budget.plan_by_truth <= budget.predicted.high
        assert budget.second_campaign.low <= budget.plan_by_truth <= budget.second_campaign.high
        assert not budget.differs
        assert budget.predicted.estimate < budget.baselines["random"].estimate


def test_the_options_are_the_arguments_of_the_function():
    own = {option.python_name for option in options_of(PlanOptions).values()}
    parameters = inspect.signature(unsilent.plan).parameters
    assert own == set(parameters) - {"observer"}
    defaults = {
        o.python_name: o.default for o in options_of(PlanOptions).values() if o.python_name not in ("store", "budget")
    }
    assert {name: parameters[name].default for name in defaults} == defaults


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "9%", "--fit-per-bit", -1), "expected a rate of 0 or more"),
        (
            ("--budget", "0.1%"),
            "the smallest tensor (last.bias) takes 12 B; give a larger --budget or use --granularity",
        ),
        (("--budget", "0%"), "--budget is '0%'; expected a share above 0% and up to 100%, like 5%"),
        (("--budget", "much"), "--budget is 'much'; expected a share of the parameters like 5%, or a size like 64kB"),
        (("--budget", "5%", "--budget", "5%"), "expected each budget once"),
        (("--granularity", "bits"), "did you mean"),
        (("--validation-trials", 5), "--validation-trials is only used with --validate"),
        (("--validate", "--budget", "9%"), "add --workload tiny.py:make"),
        (
            ("--validate", "--budget", "9%", "--workload", "tiny.py:make", "--validation-seed", 0),
            "the seed of t.sqlite",
        ),
        (("-o", "list.txt"), "expected a name that ends in .json or .toml"),
        (("-o", "t.sqlite"), "expected a name that ends in .json or .toml"),
        (("--accelerator", "none.toml"), "none.toml"),
        (("--accelerator", "nvdla", "--budget", "7%"), "leave out --budget"),
    ],
)
def test_errors_are_one_line(campaign, words, message):
    done = in_process("plan", "t.sqlite", *words, cwd=campaign)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_stores_are_refused(campaign):
    words = ("--at", "op:*", "--trials", 3, "--store", "op.sqlite", "--quiet")
    assert in_process("pvf", "tiny.py:make", *words, cwd=campaign).returncode == 0
    done = in_process("plan", "op.sqlite", cwd=campaign)
    assert done.returncode == 2
    assert "has faults at op:*; a plan needs faults in parameters: run unsilent pvf tiny.py:make --per" in done.stderr
    (campaign / "text.sqlite").write_text("no store")
    done = in_process("plan", "text.sqlite", cwd=campaign)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_campaigns_with_other_faults_are_refused_for_what_they_have(campaign):
    (campaign / "three.toml").write_text(MEMORIES.replace("holds = []", 'holds = ["param:*"]'))
    (campaign / "own.py").write_text(
        'import unsilent\n\n\n@unsilent.value_model("top")\ndef top(words):\n    return words ^ words.dtype.type(1)\n'
    )
    needs = "a plan needs trials with one drawn fault each: run unsilent pvf tiny.py:make"
    for name, words, reason in (
        ("acc", ("--accelerator", "three.toml"), "faults drawn by the memories of an accelerator; a plan needs a campaign"),
        ("mix", ("--fault", "0.7*bitflip + 0.3*burst:length=3"), f"length=3, which says itself what a trial corrupts; {needs}"),
        ("own", ("--fault", "own.py:top:count=2"), f"own.py:top:count=2, which says itself what a trial corrupts; {needs}"),
        ("many", ("--flips", "8,16"), f"has 8, 16 flips in a trial; {needs}"),
    ):  # fmt: skip
        store = ("--trials", 3, "--store", f"{name}.sqlite", "--quiet")
        done = in_process("pvf", "tiny.py:make", *words, *store, cwd=campaign)
        assert done.returncode == 0, done.stderr
        done = in_process("plan", f"{name}.sqlite", cwd=campaign)
        assert done.returncode == 2
        assert reason in done.stderr


def test_capacities():
    assert parse_capacity("5%", 1000, "--budget") == 50
    assert parse_capacity("10B", 1000, "--budget") == 80
    assert parse_capacity("1GB", 1000, "--budget") == 1000
