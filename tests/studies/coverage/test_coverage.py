"""``unsilent coverage``: scores of recordings against obvious loops, trials of a tiny training, and a small campaign."""

from __future__ import annotations

import contextlib
import json
import math
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from campaigns.faulty_loop import Here, write_loop
from conftest import campaign_run
from hostile_stores import mutants
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.options import Request
from unsilent.campaigns.codec import row_codec
from unsilent.campaigns.spec import TrialId
from unsilent.cli.main import run as cli
from unsilent.detectors.rule import ALARM, NORMAL, WARNING, judge_recording, make_judgement
from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NUMBER, UPDATE, Recording, Series
from unsilent.monitor.sampling import SampleIntervals
from unsilent.outcomes.base import Outcome
from unsilent.report.model import Report
from unsilent.studies.coverage.analysis import LARGE_FINITE, MATCHED, analyse, analyse_together
from unsilent.studies.coverage.kind import COVERAGE, CoverageStore
from unsilent.studies.coverage.paired_tests import mcnemar_p_value
from unsilent.studies.coverage.planted_changes import workload_and_change
from unsilent.studies.coverage.recording import StepRecorder, relative_difference
from unsilent.studies.coverage.report import report
from unsilent.studies.coverage.runner import CoverageRunner
from unsilent.studies.coverage.scoring import (
    BINS,
    SCORE_EDGES,
    Application,
    Detector,
    FalseAlarmCounter,
    FaultRecording,
    Sampling,
    applications,
    current_digest,
    named_rules,
    score_bins,
    score_faults,
    threshold_at_rate,
)
from unsilent.studies.coverage.spec import (
    CLEAN,
    FOLLOWED,
    GOLDEN,
    NOT_FOUND,
    TARGETS,
    CleanTarget,
    CoverageAnalysisOptions,
    CoverageRow,
    CoverageSpec,
    make_coverage_spec,
    parse_clean_target,
    severity_class,
)
from unsilent.studies.coverage.study import run_coverage
from unsilent.workloads import load_training

SERIES = (
    Series(GRADIENT, "a", L2, 4, 2), Series(GRADIENT, "a", LARGEST, 4, 2), Series(GRADIENT, "b", L2, 4, 2),
    Series(GRADIENT, "b", LARGEST, 4, 2), Series(UPDATE, "a", L2, 4, 2), Series(LOSS, "", NUMBER),
)  # fmt: skip


@dataclass(frozen=True)
class TimesTheLargest:
    """An alarm from ten times the largest value so far on, a warning from five times; learns every value."""

    name: ClassVar[str] = "times-the-largest"

    def reads(self, series):
        return series.statistic == L2

    def initial_state(self, series):
        return np.zeros(len(series))

    def judge(self, state, values, seen, seconds):
        with np.errstate(all="ignore"):
            scores = np.where(np.isnan(values), np.inf, values / (10 * state))
        judgement = make_judgement(seen & (state > 0), scores >= 1, scores >= 0.5, scores, state)
        return np.where(seen, np.fmax(state, values), state), judgement


RULES = {"times-the-largest": TimesTheLargest()}


def recording(values):
    values = np.asarray(values, np.float64)
    return Recording(SERIES, values, np.ones(values.shape, np.bool_), np.arange(float(len(values))))


def random_recording(steps, seed=0):
    return recording(np.random.default_rng(seed).lognormal(0, 0.02, (steps, len(SERIES))))


# -- scores of recordings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severity", "name"),
    [(0, "0..1e-4"), (9e-5, "0..1e-4"), (1e-4, "1e-4..1e-2"), (0.5, "1e-2..1"), (1, "1..100"), (99, "1..100"), (1e30, "100..inf"),
     (math.inf, "nonfinite"), (math.nan, "")],
)  # fmt: skip
def test_classes_of_severity(severity, name):
    assert severity_class(severity) == name


def test_a_relative_difference_is_that_of_all_elements_together():
    rng = np.random.default_rng(0)
    one, other, size = ([rng.normal(size=shape) for shape in ((3, 2), (5,))] for _ in range(3))
    flat = [np.concatenate([part.ravel() for part in parts]) for parts in (one, other, size)]
    expected = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[2])
    tensors = [[torch.from_numpy(part) for part in parts] for parts in (one, other, size)]
    assert relative_difference(*tensors) == pytest.approx(expected)
    tensors[0][1][2] = math.nan
    assert relative_difference(*tensors) == math.inf


@pytest.mark.parametrize("name", named_rules())
def test_features_are_scored_as_if_the_rule_read_them_alone(name):
    if name == "asd-combined":
        pytest.skip("reads every third series, whichever these are")
    rule, given_recording = named_rules()[name], random_recording(150)
    given_recording.values[120:, :2] *= 1e7
    by_step = {}
    for application in applications({name: rule}, SERIES):
        for step, values in enumerate(given_recording.values):
            for detector, pair in zip(
                application.detectors, application.judge(values, given_recording.seen[step], step), strict=True
            ):
                by_step.setdefault(detector, []).append(pair)
    for detector, pairs in by_step.items():
        own = given_recording
        if detector.on:
            feature, _, statistic = detector.on.partition(" ")
            own = own.columns(lambda one: (one.feature, one.statistic) == (feature, statistic or NUMBER))  # noqa: B023
            object.__setattr__(rule, "reads", lambda one: True)
        _, judgement = judge_recording(rule, own)
        rule.__dict__.pop("reads", None)
        for (level, score), levels, scores in zip(pairs, judgement.levels, judgement.scores, strict=True):
            judged = [one for one in scores if not math.isnan(one)]
            assert level == max(levels, default=NORMAL)
            assert score == pytest.approx(max(judged)) if judged else math.isnan(score)


def test_a_fault_is_judged_from_the_state_before_its_step_and_against_the_golden_run():
    golden = random_recording(40)
    golden.values[30, 0] *= 40  # an alarm of its own
    golden.values[31:, 0] *= 40
    faults = []
    for step, after, factor in ((10, 0, 100), (20, 2, 7), (28, 2, 100), (35, 0, 100)):
        values = golden.values[step : step + 4].copy()
        values[after, 0] *= factor
        faults.append(FaultRecording(step, values, np.ones(values.shape, np.bool_)))
    application = Application(RULES["times-the-largest"], SERIES, {Detector("r", ""): lambda one: True})
    scored, seconds = score_faults(application, golden, faults, 4)
    found = scored[Detector("r", "")]
    assert seconds > 0
    for number, fault in enumerate(faults):
        joined = recording(np.concatenate([golden.values[: fault.step], fault.values]))
        _, judgement = judge_recording(RULES["times-the-largest"], joined)
        assert found.levels[number].tolist() == judgement.levels[fault.step :].max(1).tolist()
        assert found.scores[number].tolist() == np.nanmax(judgement.scores[fault.step :], axis=1).tolist()
    assert found.levels.max(1).tolist() == [ALARM, WARNING, ALARM, ALARM]
    assert found.detected_after(ALARM).tolist() == [0, -1, -1, 0]  # the third one in a step with a false alarm
    assert found.detected_after(WARNING).tolist() == [0, 2, -1, 0]
    assert found.detected_at(1.0).tolist() == [True, False, False, True]
    assert found.detected_at(0.5).tolist() == [True, True, False, True]


def test_consecutive_steps_are_one_event():
    application = Application(RULES["times-the-largest"], SERIES[:1], {Detector("r", ""): lambda one: True})
    counter = FalseAlarmCounter(application)
    for step, value in enumerate([1, 1, 20, 500, 1, 3000, 9000, 1, 90001]):
        counter.count_step(np.array([float(value)]), np.ones(1, np.bool_), step)
    assert counter.events.tolist() == [[2, 3]]  # 9000 is a warning only
    assert counter.scores.sum() == 9
    assert counter.scores[0, 0] == 1  # the first step has nothing to be compared with


@given(
    st.lists(st.one_of(st.floats(1e-13, 1e7), st.sampled_from([0.0, math.inf, math.nan])), min_size=1, max_size=60),
    st.floats(0.001, 0.9),
)
def test_a_threshold_is_the_lowest_edge_with_the_rate(scores, rate):
    counts = np.bincount(score_bins(np.array(scores)), minlength=BINS)
    threshold = threshold_at_rate(counts, rate)
    shares = [sum(score >= edge for score in scores) / len(scores) for edge in SCORE_EDGES]
    fitting = [edge for edge, share in zip(SCORE_EDGES, shares, strict=True) if share <= rate]
    assert threshold == (fitting[0] if fitting else math.inf)


def test_mcnemar_is_the_binomial_test():
    from scipy.stats import binomtest

    for one, other in ((0, 0), (5, 0), (3, 9), (7, 7), (0, 40)):
        expected = binomtest(one, one + other).pvalue if one + other else 1.0
        assert mcnemar_p_value(one, other) == pytest.approx(expected)


def test_names_of_fault_free_runs():
    target = CleanTarget("batch-size", 1200, 3, 5, 4, "0123abcd")
    assert parse_clean_target(target.name) == target
    assert parse_clean_target("operation:1..100") is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"follow": "0"}, "--follow"),
        ({"tries": "0"}, "--tries"),
        ({"steps": "5"}, "--steps"),
        ({"only": ["operations:*"]}, "unknown class of faults"),
        ({"phases": ["forward"]}, "unknown phase"),
        ({"faults": ["bitflop"]}, "did you mean 'bitflip'"),
    ],
)
def test_what_cannot_be_asked(options, match):
    with pytest.raises(UsageError, match=match):
        make_coverage_spec(Request(COVERAGE.option_classes, {"workload": "train-resnet", **options}))


# -- trials ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    loop = write_loop(tmp_path_factory.mktemp("coverage"))
    with closing(CoverageRunner(CoverageSpec(loop, follow=3, tries=200))) as found:
        yield found


def test_signals_are_those_of_a_loop_by_hand(runner):
    row = runner.run(GOLDEN)
    assert (row.end, row.signals.shape) == ("recorded", (24, len(runner.establish_baseline().series)))
    workload = runner.workload
    state, names = workload.start(0), [Series(*one) for one in runner.establish_baseline().series]
    for step in range(3):
        before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        loss = workload.step(state).loss
        for place, one in enumerate(names):
            if one.feature == LOSS:
                expected = loss
            elif one.feature in (GRADIENT, UPDATE):
                p = dict(state.model.named_parameters())[one.tensor]
                tensor = (p.grad if one.feature == GRADIENT else p.detach() - before[one.tensor]).double()
                expected = float(tensor.norm() if one.statistic == L2 else tensor.abs().max())
            else:
                continue
            assert row.signals[step, place] == pytest.approx(expected, rel=1e-4, abs=1e-9), one


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[2], TARGETS[4], TARGETS[8]], ids=lambda target: target.name)
def test_a_trial_has_a_fault_of_its_class(runner, target):
    golden, trial = runner.run(GOLDEN), TrialId(target.name, None, 0)
    row, again = runner.run(trial), runner.run(trial)
    assert row.reproducible_values() == again.reproducible_values()
    assert (row.end, row.steps, severity_class(row.severity)) == (FOLLOWED, 3, target.severity)
    assert json.loads(row.faults)
    step = row.injection.step
    assert 1 <= step <= 24 - 3
    gradients = [n for n, one in enumerate(runner.establish_baseline().series) if one[0] == GRADIENT and one[2] == L2]
    change = np.abs(row.signals[0, gradients] - golden.signals[step, gradients])
    if target.place == "operation":  # the norm of the change is at least the change of the norm
        whole = np.sqrt((golden.signals[step, gradients] ** 2).sum())
        with np.errstate(over="ignore"):
            assert math.isinf(row.signals[0].max()) or np.sqrt((change**2).sum()) <= row.severity * whole * 1.001 + 1e-9
    runner.verify_restored_state()


def test_a_class_that_no_fault_is_of(tmp_path):
    with closing(
        CoverageRunner(CoverageSpec(write_loop(tmp_path), faults=(("zero", 1.0),), tries=3, only=("operation:*",)))
    ) as one:
        one.spec = replace(one.spec, large_fault="zero")
        row = one.run(TrialId("operation:1e-4..1e-2", None, 1))
    assert row.tried <= 3
    assert row.end in (NOT_FOUND, FOLLOWED)


def test_errors_of_the_training_are_the_outcome_of_a_trial(tmp_path):
    with pytest.raises(UsageError, match="--follow records 30"):
        CoverageRunner(CoverageSpec(write_loop(tmp_path), follow=30))


@pytest.mark.parametrize("target", ["golden", "operation:1..100", CleanTarget(CLEAN, 30, 1, 1, 1, "0" * 8).name])
def test_rows_of_lost_workers_can_be_stored(runner, target):
    row = runner.lost_trial_row(TrialId(target, None, 0), Outcome.CRASH, 2.0, "signal 9")
    assert (row.end, row.error, row.seconds, row.steps) == ("crash", "signal 9", 2.0, 0)
    row_codec(CoverageRow).encode(row, partial(COVERAGE.shapes, runner.baseline))
    COVERAGE.check_row(row, runner.baseline)


def test_a_fault_free_run_counts_every_step_once(runner):
    digest = current_digest(named_rules())
    row = runner.run(TrialId(CleanTarget(CLEAN, 30, 1, 1, 1, digest).name, None, 0))
    assert row.end == "judged"
    assert set(row.scores.sum(1).tolist()) == {30}
    names = json.loads(row.rules)
    assert (row.events.shape, row.scores.shape) == ((len(names), 4), (len(names), BINS))
    assert {"robust-z", "robust-z on loss", "nonfinite on gradient l2"} <= set(names)
    assert row.events[names.index("nonfinite")].tolist() == [0, 0, 0, 0]
    with pytest.raises(UsageError, match="other rules"):
        runner.run(TrialId(CleanTarget(CLEAN, 30, 1, 1, 1, "0" * 8).name, None, 0))


def test_planted_changes():
    spec = CoverageSpec("train-resnet", (("width", "4"), ("steps", "20")))
    workload = load_training(spec.workload, dict(spec.options))
    sizes = []

    def looked_at(model, inputs):
        sizes.append((len(inputs[0]), float(inputs[0].abs().max())))

    for kind in ("batch-size", "learning-rate", "data"):
        plain, change = workload_and_change(spec, workload, kind, 40)
        assert plain.steps == 40  # its schedule is stretched
        state = plain.start(0)
        plain.step(state)
        rate = state.optimizers[0].param_groups[0]["lr"]
        further = change(state)
        state.model.register_forward_pre_hook(looked_at)
        further.step(state)
        after = state.optimizers[0].param_groups[0]["lr"]
        assert (after < rate) == (kind == "learning-rate")
    assert [size for size, _ in sizes] == [64, 32, 32]
    assert sizes[2][1] == pytest.approx(sizes[1][1] / 2, rel=0.2)


# -- campaigns --------------------------------------------------------------------------------------------------------------

BUDGET = {"trials": 2, "clean_runs": 2, "changed_runs": 1}


@pytest.mark.slow
def test_a_campaign_is_read_and_reported(runner, tmp_path):
    executor = Here(runner)
    with CoverageStore(tmp_path / "s.sqlite", write=True) as store:
        options = CoverageAnalysisOptions(rate=0.05)
        store.bind_campaign(runner.spec, runner.establish_baseline())
        with pytest.raises(UsageError, match="no recording of the fault-free run"):
            analyse(store, options)
        request = campaign_run(COVERAGE, runner.spec, store, executor, "unsilent coverage x", rate=0.05, **BUDGET)
        first = run_coverage(request)
        ran = len(executor.ran)
        again = run_coverage(request)
        assert len(executor.ran) == ran == 1 + 2 * len(TARGETS) + 2 + 2
        own = analyse(store, options, RULES)
        twice = analyse_together([store, store], options)
    assert first.detections == again.detections
    assert (first.clean_runs, first.clean_steps) == (2, 48)
    assert first.faults == sum(len(values) for values in first.severities.values()) > 15
    for name, values in first.severities.items():
        assert {severity_class(value) for value in values} <= {name.partition(":")[2]}
    by_rule = {(d.rule, d.level, d.target): d for d in first.detections if not d.on}
    nonfinite = by_rule["nonfinite", "alarm", "operation:nonfinite"]
    assert nonfinite.detected == nonfinite.share.n == len(first.severities["operation:nonfinite"])
    assert {d.level for d in first.detections} >= {"alarm", MATCHED}
    assert {one.target for one in first.tests} >= {"finite"}
    assert {one.after_changes.keys() == {"learning-rate", "data"} for one in first.false_alarms} == {True}
    shown = report(first)
    assert isinstance(shown, Report)
    large = [
        d for d in first.detections if (d.rule, d.on, d.level) == ("robust-z", "", "alarm") and d.target in LARGE_FINITE
    ]
    faults = sum(len(first.severities[d.target]) for d in large)
    assert shown.headline.startswith(f"robust-z detects {sum(d.detected for d in large)} of {faults} finite faults in ")
    assert "48 fault-free steps of 2 runs" in shown.headline
    most = max(sum(d.detected for d in first.detections if (d.rule, d.on, d.level) == (rule, "", "alarm") and
                   d.target in LARGE_FINITE) for rule in {d.rule for d in first.detections})  # fmt: skip
    of_reference = sum(d.detected for d in large)
    said_most = "; no rule detects more;" if most == of_reference else f"; the most by any rule are {most:,} ("
    assert said_most in shown.headline
    cost = next(one for one in shown.sections if one.title == "Cost")
    assert f" {len(first.baseline.series)} series of numbers in each step" in cost.introduction
    assert "No finite fault" in report(replace(first, detections=())).headline
    limit = next(
        one.per_step.high for one in first.false_alarms if (one.rule, one.on, one.level) == ("robust-z", "", "alarm")
    )
    said = next(one for one in shown.findings if one.startswith("false alarms of robust-z"))
    assert float(said.split("limits: ")[1].split(" ")[0]) >= limit
    assert (twice.faults, twice.clean_steps) == (2 * first.faults, 2 * first.clean_steps)
    assert [2 * d.detected for d in first.detections] == [d.detected for d in twice.detections]
    assert [2 * one.events for one in first.false_alarms] == [one.events for one in twice.false_alarms]
    # Other rules: the same faults, but no fault-free run that they judged.
    assert {d.rule for d in own.detections} == {"times-the-largest"}
    assert (own.clean_steps, own.false_alarms, own.tests) == (0, (), ())


@pytest.mark.slow
def test_a_campaign_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    request = ["coverage", "train-resnet", "--with", "steps=30", "--with", "width=4", "--only", "operation:*", "--follow", "3",
             "--clean-runs", "1", "--changed-runs", "1", "--quiet", "--json", "--store", "s.sqlite"]  # fmt: skip
    assert cli([*request, "--trials", "1"]) == 0
    capsys.readouterr()
    assert cli([*request, "--trials", "2", "--jobs", "2"]) == 0  # the same campaign, extended
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["clean_steps"]) == ("unsilent/coverage/2", 30)
    assert found["faults"] > 8
    assert cli(["replay", "s.sqlite", "operation:1e-4..1e-2/x/0"]) == 0
    assert "as stored" in capsys.readouterr().out
    assert cli(["status", "s.sqlite"]) == 0
    assert "12 of 12 trials, complete" in capsys.readouterr().out
    for _, path in mutants(tmp_path / "s.sqlite", tmp_path, 3, 40):
        with contextlib.suppress(UnsilentError), CoverageStore(path) as store:
            report(store.analyse())


def test_recorded_steps_leave_no_hook(runner):
    state = runner.workload.start(0)
    plain = torch.autograd.backward
    with StepRecorder(state) as recorder:
        recorder.record(runner.workload.step)
        assert torch.autograd.backward is not plain
    assert torch.autograd.backward is plain
    assert not any(m._forward_pre_hooks for m in state.model.modules())
    assert not state.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("sampling", "intervals"), [(3, (3, 3, 3)), ("4", (4, 4, 4)), ("1,5,8", (1, 5, 8)), ((2, 1, 1), (2, 1, 1))]
)
def test_one_option_says_in_how_many_steps_a_monitor_reads_each_sort_of_value(sampling, intervals):
    request = Request.from_call([CoverageAnalysisOptions], {"sampling": sampling})
    assert request[CoverageAnalysisOptions].intervals == intervals


@pytest.mark.parametrize("sampling", ["1,5", "0", "1,5,0", "1,5,8,9"])
def test_a_sampling_that_is_none_is_refused(sampling):
    request = Request([CoverageAnalysisOptions], {"sampling": sampling})
    with pytest.raises(UsageError, match="--sampling"):
        request[CoverageAnalysisOptions]


def test_sampling_is_that_of_a_monitor(runner):
    state = runner.workload.start(0)
    with StepRecorder(state) as recorder:
        recorder._collector.intervals = SampleIntervals(3, 4, 2)
        recorded = [recorder.record(runner.workload.step)[1] for _ in range(6)]
        expected = Sampling(3, 4, 2).is_read(recorder.series, np.arange(6))
    assert np.array_equal(recorded, expected)
