"""Faulty training runs in terminal and JSON: what is said, of nothing too, and names only as text."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from report.conftest import HOSTILE
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.render.report_json import report_json
from unsilent.render.report_page import report_html
from unsilent.render.report_terminal import render_report
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences
from unsilent.statistics.comparing import difference, joint_differences
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.comparison import SETTINGS_THAT_MUST_MATCH, compare_training_results, comparison_report
from unsilent.studies.training.necessary_conditions import FACTORS
from unsilent.studies.training.records import (
    ClassShare,
    ConditionPoint,
    Contrast,
    ExampleCurve,
    GuardDetection,
    GuardResult,
    NecessaryCondition,
    TrainingPvfRow,
    TrainingResult,
    TrialCost,
    TrialGroup,
)
from unsilent.studies.training.report import GROUPS, report
from unsilent.studies.training.sentences import (
    OUTCOME_TEXTS,
    SOURCES,
    count_and_share_text,
    counts_text,
    findings,
    headline,
    ordered_groups,
    training_method_lines,
)

PLAIN = ["group", "target", "measure", "estimate", "low", "high", "n"]
CLASSES = [str(outcome) for outcome in TrainingOutcome]
STEPS = 200
MIXED = {"masked-bitwise": 20, "masked-benign": 60, "immediate-nan": 4, "slow-degrade": 5, "low-test": 10, "crashed": 1}


def different(name, count):
    """Trials of a class that are different: of the masked ones with other bits a tenth."""
    return 0 if name == "masked-bitwise" else count // 10 if name == "masked-benign" else count


def group(name, counts):
    n = sum(counts.values())
    apart = sum(different(outcome, c) for outcome, c in counts.items())
    harm = sum(c for outcome, c in counts.items() if TrainingOutcome(outcome).harmful)
    latent = sum(c for outcome, c in counts.items() if TrainingOutcome(outcome).latent)
    return TrialGroup(name, n, counts, *(clopper_pearson(k, n) for k in (apart, harm, latent)))


def classes(counts):
    n = sum(counts.values())
    return tuple(
        ClassShare(name, count, different(name, count), clopper_pearson(count, n))
        for name in CLASSES
        for count in [counts.get(name, 0)]
    )


def curve(outcome="low-test", step=50, ran=None, **more):
    ran = STEPS - step if ran is None else ran
    own, whole = max(ran - 9, 1), max(STEPS - step - 9, 1)
    losses = [1 / (k + 1) for k in range(ran)]
    if "nan" in outcome:
        losses[-1] = None
    fields = {
        "trial": "random/x/3",
        "trial_description": f"RD at op:conv#convolution.0/fwd/out, step {step}",
        "test_accuracy": 0.2,
    }
    fields |= {"metric": (0.5,) * own, "golden": tuple(np.linspace(0.6, 0.9, whole)), "losses": tuple(losses)}
    return ExampleCurve(outcome, step=step, **fields | more)


def condition(kind="any", factor=100.0, counts=(15, 0, 4, 80)):
    hit, missed, false, clear = counts
    shares = (clopper_pearson(hit, hit + missed), clopper_pearson(clear, clear + false))
    return NecessaryCondition(kind, factor, *counts, *shares, 0, 0, clopper_pearson(hit, hit + missed + 5))


def points(counts, ratios=(0.8, 0.9, 0.7)):
    """Latent trials have large values, those that lost their loss no number."""
    found = []
    for name, count in counts.items():
        for k in range(count):
            own = tuple(None if r is None else r * 10.0**k for r in ratios) if TrainingOutcome(name).latent else ratios
            own = (ratios[0] and math.inf, *ratios[1:]) if "nan" in name else own
            found.append(ConditionPoint(f"random/x/{k}", name, (None, None, None) if name == "crashed" else own))
    return tuple(found)


def contrast(one=(3, 60), other=(10, 40), name="harmful"):
    first, second = clopper_pearson(*one), clopper_pearson(*other)
    return Contrast(name, "backward", "forward", first, second, difference(first, second))


def caught(name, n, within, identical=None):
    return GuardDetection(name, n, within, within if identical is None else identical, clopper_pearson(within, n))


def guarded():
    sizes = (caught("up to 1", 0, 0), caught("1 to 100", 5, 1), caught("above 100", 15, 15))
    alarms = {"exp_avg_sq of stem": 14, "running_var of bn": 2}
    return GuardResult(
        1e4,
        caught("all different", 25, 17),
        caught("all harmful", 20, 16, 15),
        caught("wrote more", 15, 15),
        sizes,
        (caught("grad_wt", 12, 9), caught("fwd", 8, 7)),
        2,
        1,
        alarms,
    )


def parts():
    def one(name, what, n, failures):
        shares = (clopper_pearson(failures, n), clopper_pearson(2 * failures, n))
        return TrainingPvfRow(f"{what}:{name}", what, name, 1000, n, failures, *shares)

    return (one("stem", "param", 200, 9), one("stem", "optim", 200, 0), one("head", "param", 0, 0))


def result(counts=None, **more):
    counts = MIXED if counts is None else counts
    groups = {
        "phase": (group("grad_wt", counts), group("fwd", counts)),
        "layer": tuple(group(f"block{k}.conv", counts) for k in range(3)),
        "fault model": (group("RD", counts),),
        "part of the run": (group("steps 100 to 199", counts), group("steps 20 to 99", counts)),
        "optimizer": (group("Adam", counts),),
    }
    spread = tuple(np.linspace(-0.01, 0.02, 20))
    floor = ReplicaDifferences("within", spread, spread, (0.01,) * 20, (False,) * 20, 10, (0.1,) * 20)
    fields = {
        "workload": "train-toy", "command": "unsilent training train-toy", "spec": {"seed": 3, "horizon": None},
        "campaign": "c0ffee", "store": "s.sqlite", "steps": STEPS, "samples": 450, "parameters": 5090,
        "optimizers": ("Adam", "Adam"),
        "golden_test": 0.95, "golden_seconds": 5.0, "confidence": 0.95, "thresholds": Thresholds(),
        "floors": NoiseFloors(floor, replace(floor, switches="init+order", accuracy=tuple(np.linspace(-0.03, 0.02, 20)))),
        "level": 0.05,
        "n": sum(counts.values()), "classes": classes(counts), "all_trials": group("all", counts), "groups": groups,
        "contrasts": (contrast(),), "curves": tuple(curve(name) for name, k in counts.items() if k and name != "crashed"),
        "conditions": tuple(condition(kind, factor) for kind in ("first", "second", "moving", "any") for factor in FACTORS),
        "points": points(counts), "parts": (), "margin": 0.02,
        "cost": TrialCost(0.4, 0.5, 0.35, 1800.0, {"end": 70, "same-bits": 20, "not-finite": 10}), "guard": None, "seconds": 90.0,
        "cpu_seconds": 170.0, "versions": {"torch": "2.13.0"}, "info": {"description": "a toy"}, "notes": (),
    }  # fmt: skip
    return TrainingResult(**fields | more)


def with_floors(**changed):
    """Both floors with something else in each."""
    floors = result().floors
    return NoiseFloors(*(replace(floor, **changed) for floor in (floors.implementation, floors.seeds)))


def hostile():
    names = [*HOSTILE, "<b>x</b>"]
    counts = {"masked-benign": 3, "low-test": 1}
    return result(
        workload=names[0], command=names[1], store=names[2], optimizers=tuple(names), notes=tuple(names),
        groups={name: tuple(group(other, counts) for other in names) for name in ("layer", "phase", "fault model", names[0])},
        curves=tuple(curve(trial=name, trial_description=name) for name in names),
        points=tuple(ConditionPoint(name, "low-test", (1.0, math.inf, 5.0)) for name in names),
        parts=tuple(TrainingPvfRow(name, name, name, 1, 10, 1, *[clopper_pearson(1, 10)] * 2) for name in names),
        contrasts=(replace(contrast(), first=names[0], second=names[1], name=names[2]),),
        conditions=(condition(), condition(kind=names[0])),
        guard=replace(guarded(), sizes=tuple(caught(name, 2, 1) for name in names), alarms=dict.fromkeys(names, 1)),
        versions={name: name for name in names}, info={names[0]: names[1], "settings": {names[2]: names[3]}},
        cost=TrialCost(0.4, 0.5, 0.35, 1800.0, dict.fromkeys(names, 1)), spec={"seed": names[0], "horizon": {"steps": names[1]}},
        floors=with_floors(switches=names[0]), campaign=names[4],
    )  # fmt: skip


CORNERS = {
    "mixed": result(),
    "hostile": hostile(),
    "all masked": result({"masked-bitwise": 40}, contrasts=(), conditions=(condition(counts=(0, 0, 1, 39)),)),
    "all nan": result({"immediate-nan": 5}),
    "all crashed": result({"crashed": 5}, curves=(), conditions=(condition(counts=(0, 0, 0, 0)),)),
    "no moving": result(points=points(MIXED, (0.8, 0.9, None))),
    "moving alone": result(points=points(MIXED, (None, None, 0.7))),
    "nothing watched": result(points=points(MIXED, (None, None, None)), conditions=()),
    "zeros": result(points=points(MIXED, (0.0, 0.0, 0.0))),
    "extremes": result(
        points=(ConditionPoint("a", "low-test", (5e-324, 0.0, 1.7e308)), ConditionPoint("b", "improved", (math.inf,) * 3))
    ),
    "parts": result(parts=parts(), groups={"phase": (group("param", MIXED), group("optim", MIXED))}),
    "guard": result(guard=guarded()),
    "same floors": result(floors=with_floors(identical_to_twin=(True,) * 20)),
    "short": result(curves=(curve("slow-degrade", STEPS - 1), curve("immediate-nan", STEPS - 1, 1), curve("improved"))),
    "horizon": result(spec={"horizon": {"steps": 30}}),
    "many": result(groups={"layer": tuple(group(f"layer{k}", {"low-test": k, "masked-benign": 50}) for k in range(60))}),
}  # fmt: skip


def shown(found, width=100, plain=False):
    file = io.StringIO()
    render_report(report(found), Console(file=file, width=width, force_terminal=True, color_system=None), plain)
    return file.getvalue()


def to_json(found):
    return report_json(report(found))


def text_of(found):
    return " ".join([headline(found), *findings(found), *training_method_lines(found)])


def test_every_class_is_told():
    assert set(OUTCOME_TEXTS) == set(TrainingOutcome)
    assert set(SOURCES) == set(Thresholds.__dataclass_fields__)
    found = result(dict.fromkeys(CLASSES, 1))
    for name in CLASSES:
        assert name in shown(found), name


def test_the_headline_counts_harm_and_latent_harm():
    assert headline(result()) == (
        "20 % [12, 30] of 100 faulty training runs of train-toy were harmful, 15 % [8, 24] silently (no error raised); "
        "26 % [17, 36] ended different from the fault-free run by more than noise"
    )
    assert headline(CORNERS["all masked"]) == (
        "0 % [0, 8.9] of 40 faulty training runs of train-toy were harmful, 0 % [0, 8.9] silently (no error raised); "
        "0 % [0, 8.9] ended different from the fault-free run by more than noise"
    )


def test_nothing_seen_has_an_upper_limit():
    assert count_and_share_text(clopper_pearson(0, 100)) == "0 of 100 trials, 0 % [0, 3.7]"
    assert count_and_share_text(clopper_pearson(100, 100)) == "100 of 100 trials, 100.0 % [96.3, 100.0]"
    assert count_and_share_text(clopper_pearson(0, 0)) == "0 of 0 trials, no trial"
    assert count_and_share_text(clopper_pearson(10, 100)) == "10 of 100 trials, 10 % [4, 18]"


def test_latent_harm_is_told_apart_from_what_shows_itself():
    told = list(findings(result()))
    assert told[0] == (
        "different (beyond implementation noise): 26 of 100 trials, 26 % [17, 36]; harmful (beyond the noise of seeds as well): "
        "20 of 100 trials, 20 % [12, 30]"
    )
    assert told[1].endswith("15 of 100 trials, 15 % [8, 24]: 5×slow-degrade, 10×low-test")
    assert told[2] == "harm with an error or a loss that is not finite: 4×immediate-nan, 1×crashed"
    assert counts_text(MIXED) == "4×immediate-nan, 5×slow-degrade, 10×low-test, 1×crashed"


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (contrast((1, 100), (50, 100)), "the share is lower for backward"),
        (contrast((50, 100), (1, 100)), "the share is higher for backward"),
        (contrast((5, 100), (5, 100)), "no difference is shown"),
    ],
)
def test_a_contrast_says_what_the_interval_supports(found, word):
    assert word in text_of(result(contrasts=(found,)))


def test_several_comparisons_say_what_holds_together():
    both = (contrast(), contrast(name="latent"))
    assert (
        "(Zou & Donner) hold for all 2 together (Bonferroni); limits in a table hold for each row separately"
        in text_of(result(contrasts=both))
    )
    assert "Bonferroni" not in text_of(result(contrasts=()))


def test_two_campaigns_are_compared_with_limits_that_hold_together():
    law = dict.fromkeys(SETTINGS_THAT_MUST_MATCH, "the same")
    one, other = result(spec=law), result({"masked-bitwise": 40, "slow-degrade": 10}, spec=law)
    found = compare_training_results(one, other)
    assert [c.name for c in found] == ["different", "harmful", "latent", *(name for name in CLASSES if name in MIXED)]
    told = [((10, 50), (26, 100)), ((10, 50), (20, 100)), ((10, 50), (15, 100))]
    gaps = joint_differences([*told, *[((0, 1), (0, 1))] * (len(found) - 3)])
    for contrasted, gap in zip(found[:3], gaps, strict=False):
        assert (contrasted.difference.low, contrasted.difference.high) == (gap.low, gap.high)
        assert (contrasted.one.n, contrasted.other.n) == (100, 50)
    shown_report = comparison_report(found, one, other)
    out = io.StringIO()
    render_report(shown_report, Console(file=out, width=200, force_terminal=True, color_system=None), plain=False)
    assert f"limits of B - A hold for all {len(found)} rows together (95 %, Bonferroni)" in out.getvalue()
    assert f"joint over {len(found)}" in report_json(shown_report)["method"]


def test_two_stores_of_one_campaign_are_not_told_as_independent():
    law = dict.fromkeys(SETTINGS_THAT_MUST_MATCH, "the same")
    one, longer, foreign = result(spec=law), result({"masked-bitwise": 150}, spec=law), result(spec=law, campaign="d0")
    for other, said, headline_said in ((one, True, True), (longer, True, False), (foreign, False, False)):
        told = comparison_report(compare_training_results(one, other), one, other)
        assert any("stores of the same campaign, so their common trials are the same" in n for n in told.notes) == said
        assert ("every difference is 0" in told.headline) == headline_said


def test_conditions_are_told_with_sensitivity_or_not_at_all():
    text = text_of(result())
    assert (
        "in 15 of 15 trials that ended in silent degradation (sensitivity 100 % [78, 100]) and in 4 of 84 harmless trials"
        in text
    )
    assert "it is not known what precedes it" in text_of(CORNERS["all masked"])
    assert "of its kind in the fault-free run" not in text_of(CORNERS["nothing watched"])


def test_both_floors_are_described():
    text = text_of(result())
    assert (
        "implementation noise: 20 fault-free replicas (switches: within) whose held-out accuracy differs from that of the "
        "fault-free twin (golden) by -1 to +2 points" in text
    )
    assert (
        "noise of seeds: 20 fault-free replicas (switches: init+order) whose held-out accuracy differs from that of the "
        "fault-free twin (golden) by -3 to +2 points" in text
    )
    assert "p of at most 5 % (the smallest possible p with 20 replicas is 4.8 %)" in text
    same = text_of(CORNERS["same floors"])
    assert "ended in the final state of the fault-free twin (golden), so every difference exceeds this noise" in same
    assert "no seed changes this training, so harm is judged by implementation noise alone" in same
    assert "counted as masked after 30 steps close to the fault-free run" in text_of(CORNERS["horizon"])
    assert "horizon" not in text


def test_pvf_and_guard_are_told():
    text = text_of(CORNERS["parts"])
    assert (
        "`stem` (param) has the highest training PVF of 3 targets of train-toy: 4.5 % [2.0, 8.4] of 200 corruptions"
        in text
    )
    assert "exploratory: the order of targets is not tested" in text
    assert "held-out accuracy below 90.00 % (2 points below the worst fault-free replica of either noise floor)" in text
    assert "the same share, with the limit taken from implementation noise alone (accuracy below 92.00 %)" in text
    nothing = tuple(replace(p, failures=0, pvf=clopper_pearson(0, p.n)) for p in parts())
    assert headline(result(parts=nothing)) == (
        "None of 400 corruptions of 3 targets of train-toy ended in a convergence failure (upper limit of training PVF: at most "
        "100 % for each target)"
    )
    text = text_of(CORNERS["guard"])
    assert (
        "within two steps of the fault, the guard caught 16 of 20 harmful faults, 80 % [56, 95]; of all faults "
        "whose runs ended different, it caught 17 of 25 faults, 68 %" in text
    )
    assert "of the harmful faults caught, 15 ended with exactly the final state of the fault-free run" in text
    nobody = text_of(
        result(
            guard=replace(guarded(), all_harmful=caught("all harmful", 0, 0), large_harmful=caught("wrote more", 0, 0))
        )
    )
    assert (
        "the guard caught 0 of 0 harmful faults, no trial; of all faults whose runs ended different, it caught 17 of 25 faults"
        in nobody
    )
    assert "2 caught later than two steps after the fault, 1 stopped" in text
    assert "by what raised them: exp_avg_sq of stem 14, running_var of bn 2" in text


def test_groups_stand_in_the_order_of_reading():
    found = ordered_groups(result())
    assert [g.name for g in found["phase"]] == ["fwd", "grad_wt"]
    assert [g.name for g in found["part of the run"]] == ["steps 20 to 99", "steps 100 to 199"]
    assert list(ordered_groups(CORNERS["parts"])) == ["what was corrupted"]


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("width", [60, 100, 160])
def test_corners_are_shown(name, width):
    text = shown(CORNERS[name], width)
    assert width == 60 or " nan" not in text  # there names of classes are folded
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_tables_have_rows_for_what_was_found():
    text = shown(replace(CORNERS["guard"], parts=parts()), 120)
    for wanted in ("different, %", "all different", "26 [17, 36]", "block1.conv", "grad_wt", "steps 20 to 99", "moving statistic",
                   "10,000", "training PVF", "up to 1", "random/x/3",
                   "low on held-out", "thresholds: short_term 10"):  # fmt: skip
        assert wanted in text, wanted
    text = shown(CORNERS["many"])
    assert (
        f"the {GROUPS} most harmful (rows of fewer than 20 trials come last), and {60 - GROUPS} more in the report"
        in text
    )
    assert "layer59" in text
    assert "layer3 " not in text


@pytest.mark.parametrize("name", CORNERS)
def test_plain_lines_are_columns(name):
    lines = [line for line in shown(CORNERS[name], plain=True).splitlines() if not line.startswith("#")]
    assert lines[0].split() == PLAIN
    assert {len(line.split()) for line in lines} == {len(PLAIN)}


def test_plain_lines_have_every_estimate_and_count():
    found = replace(CORNERS["guard"], parts=parts())
    lines = [line.split() for line in shown(found, plain=True).splitlines() if not line.startswith("#")]
    values = {tuple(line[:3]): line[3:] for line in lines[1:]}
    assert len(values) == len(lines) - 1
    assert values["class", "sharp-degrade", "share"][0] == "0"
    assert values["all", "all", "different"][::3] == ["0.26", "100"]
    assert values["all", "all", "harmful"][::3] == ["0.2", "100"]
    assert values["guard", "all_different", "caught"][::3] == ["0.68", "25"]
    assert values["phase", "fwd", "low-test_trials"] == ["10", "-", "-", "100"]
    assert values["condition", "moving_above_100", "true_positives_trials"][0] == "15"
    assert values["target", "param:stem", "training_pvf"][0] == "0.045"
    assert values["target", "param:head", "training_pvf"] == ["-", "0", "1", "0"]
    assert values["guard_size", "above_100", "caught"][::3] == ["1", "15"]
    assert values["cost", "all", "steps"][0] == "0.4"


@pytest.mark.parametrize("name", CORNERS)
def test_json_is_strict(name):
    found = CORNERS[name]
    back = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert back["schema"] == "unsilent/training/3"
    assert back["classes"] == {g.name: g.n for g in found.classes}
    assert len(back["points"]) == len(found.points)
    assert len(back["curves"]) == len(found.curves)


def test_json_tells_what_is_no_number_from_what_is_missing():
    found = result(
        points=(ConditionPoint("a", "immediate-nan", (math.inf, None, 2.0)),), parts=parts(), guard=guarded()
    )
    told = to_json(found)
    assert told["points"] == [
        {
            "trial": "a",
            "class": "immediate-nan",
            "ratios": {"first": None, "second": None, "moving": 2.0},
            "not_finite": ["first"],
        }
    ]
    assert told["guard"]["late_alarms"] == 2
    assert (told["guard"]["different"]["n"], told["guard"]["different"]["detected_in_time"]) == (25, 17)
    assert told["guard"]["all_harmful"]["recovered_identical"] == 15
    assert told["different"]["masked-benign"] == 6
    assert {name: floor["switches"] for name, floor in told["floors"].items()} == {
        "implementation": "within",
        "seeds": "init+order",
    }
    row = next(r for r in told["results"] if r["target"] == "param:stem")
    assert (row["measure"], row["failures"], row["n"], row["unit"]) == ("training_pvf", 9, 200, "trial")
    assert told["least_accuracy"] == pytest.approx(0.9)
    assert told["least_accuracy_different"] == pytest.approx(0.92)
    assert next(r for r in told["results"] if r["measure"] == "training_pvf_different")["estimate"] == 0.09
    assert told["thresholds"]["gap"] == 0.02
    assert to_json(result())["guard"] is None


@pytest.mark.parametrize(
    ("asked", "counts", "said"),
    [
        (" --guard", {"masked-bitwise": 5}, True),
        ("", {"masked-bitwise": 5}, False),
        (" --guard", {"low-test": 5}, False),
    ],
)
def test_a_guard_that_had_nothing_to_do_is_said(asked, counts, said):
    told = list(findings(result(counts, command=f"unsilent training train-toy{asked}")))
    assert ("no faulty run ended different, so none was repeated under the guard" in told) == said


def test_a_comparison_of_two_stores_has_both_shares():
    spec = dict.fromkeys(SETTINGS_THAT_MUST_MATCH)
    one, other = result(spec=spec), result({"masked-benign": 90, "low-test": 10}, spec=spec)
    found = compare_training_results(one, other)
    assert [c.name for c in found[:3]] == ["different", "harmful", "latent"]
    told = comparison_report(found, one, other)
    rows = {(row["outcome"], row["of"]): row["estimate"] for row in report_json(told)["results"]}
    assert (rows["different", "A"], rows["different", "B"]) == (0.26, 0.19)
    assert (rows["harmful", "A"], rows["harmful", "B"]) == (0.2, 0.1)
    assert rows["different", "B - A"] == pytest.approx(-0.07)
    assert told.headline == "B has a larger share of masked-benign and a smaller share of masked-bitwise than A"
    for plain in (False, True):
        file = io.StringIO()
        render_report(told, Console(file=file, width=100, force_terminal=True, color_system=None), plain)
        assert "different" in file.getvalue()
        assert "harmful" in file.getvalue()
    assert "figure-shares" in report_html(told)
