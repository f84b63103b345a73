"""``unsilent inference-coverage``: a campaign of a tiny model against obvious loops, wrong input, and a small campaign."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

from conftest import campaign_run, in_process
from hostile_stores import mutants
from studies.clean_inference import write_clean
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.interval import Interval
from unsilent.campaigns.codec import row_codec
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.inline import InlineExecutor
from unsilent.campaigns.merging import merge_stores
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import TrialId, WorkerSettings
from unsilent.cli.main import run as cli
from unsilent.faults import Fault
from unsilent.report.model import Report
from unsilent.report.text import share_with_limits_text
from unsilent.sites import inject
from unsilent.studies.coverage.inference.analysis import ALL, LADDER, LAYER, analyse, analyse_together
from unsilent.studies.coverage.inference.detector_rows import AFTER_CALL, layers_run
from unsilent.studies.coverage.inference.fault_search import FaultSearch
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE, InferenceCoverageStore
from unsilent.studies.coverage.inference.report import report
from unsilent.studies.coverage.inference.runner import InferenceCoverageRunner, fixed_rows
from unsilent.studies.coverage.inference.scoring import ScoredStore, check_clean_samples, clean_samples_needed
from unsilent.studies.coverage.inference.spec import (
    ERROR_MODELS,
    FOUND,
    IN_WEIGHTS,
    RUNGS,
    WEIGHT_RATE,
    DetectorInfo,
    InferenceCoverageOptions,
    InferenceCoverageSpec,
)
from unsilent.studies.coverage.inference.study import inference_coverage, run_inference_coverage
from unsilent.studies.coverage.inference.timing import flops_by_layer, resized
from unsilent.workloads import load
from unsilent.workloads.base import call_model

DETECTORS = ("ranger", "abft", "weight-integrity", "dr-dna+weight-integrity")
OPTIONS = InferenceCoverageOptions(rate=0.05)
ASKED = [word for name in DETECTORS for word in ("--detector", name)]


def make_spec(folder, **more):
    values = {
        "workload": f"{folder}/clean.py:make",
        "detectors": DETECTORS,
        "flip_rate": 1e-3,
        "tries": 200,
        "profile_samples": 100,
        "clean_samples": 400,
    } | more
    return InferenceCoverageSpec(**values)


def run(spec, path, trials, engine="auto", shard=(1, 1)):
    with (
        InlineExecutor(WorkerJob(INFERENCE_COVERAGE.runner, spec, None, WorkerSettings(engine))) as executor,
        InferenceCoverageStore(path, write=True) as store,
    ):
        return run_inference_coverage(
            campaign_run(INFERENCE_COVERAGE, spec, store, executor, trials=trials, shard=shard, rate=OPTIONS.rate)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference")
    write_clean(folder)
    return folder


@pytest.fixture(scope="module")
def campaign(folder):
    run(make_spec(folder), folder / "a.sqlite", 2)
    result = run(make_spec(folder), folder / "a.sqlite", 5)  # the same campaign, extended
    with InferenceCoverageStore(folder / "a.sqlite") as store:
        yield store, result


@pytest.fixture(scope="module")
def analysed(campaign):
    """The analysis of that campaign at a rate of false alarms, made once."""
    return functools.cache(lambda rate: analyse(campaign[0], InferenceCoverageOptions(rate=rate)))


@pytest.fixture(scope="module")
def rows(campaign):
    """All rows as an export has them."""
    return [row_codec(type(row)).row_as_json(row) for row in campaign[0].rows()]


def faults_of(rows, target=None):
    return [row for row in rows if row["end"] == FOUND and target in (None, row["target"])]


def faulty_batches(workload):
    """That faults act in: 8 of the 20 batches of test samples, equally far apart."""
    batches = workload.clean_batches("test", 400)
    return [batches[n] for n in (0, 2, 5, 7, 10, 12, 15, 17)]


def layers_before(store, detector):
    """Rows of margins before those of a detector, and its own."""
    before = 0
    for one in store.baseline.detectors:
        if one.name == detector:
            return before, len(one.layers)
        before += len(one.layers)
    raise AssertionError(detector)


def clean_margins(store, rows, part, detector):
    number = [one.name for one in store.baseline.detectors].index(detector)
    chunks = sorted((row for row in rows if row["target"] == part), key=lambda row: row["k"])
    return [value for row in chunks for value in row["margins"][number]]


def threshold_of(values, rate):
    return sorted(values)[math.ceil((len(values) + 1) * (1 - rate) - 1e-9) - 1]


PRODUCTS = [6 * 16, 16 * 16, 16 * 4]
IN_LAYERS = [((n + 1) / 3, sum(PRODUCTS[: n + 1]) / sum(PRODUCTS)) for n in range(3)]
KNOWN_AT = {
    "ranger": IN_LAYERS,
    "abft": IN_LAYERS,
    "weight-integrity": [(1, 1)],
    "dr-dna+weight-integrity": [*IN_LAYERS, (1, 1)],
}
"""Share of layers and of FLOPs that have run when each row of margins is known."""


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("rate", [0.05, 0.1])
def test_shares_follow_from_exported_rows(campaign, analysed, rows, detector, rate):
    store = campaign[0]
    result = analysed(rate)
    limit = threshold_of(clean_margins(store, rows, "calibration", detector), rate)
    before, layers = layers_before(store, detector)
    known = KNOWN_AT[detector]
    assert len(known) == layers
    for errors in (*ERROR_MODELS, ALL):
        shares, depths, detected, changed = [], ([], []), 0, 0
        for row in faults_of(rows, None if errors == ALL else errors):
            own = row["margins"][before : before + layers]
            crossed = [[n for n in range(layers) if own[n][sample] > limit] for sample in range(row["changed"])]
            shares.append(sum(map(bool, crossed)) / row["changed"])
            detected, changed = detected + sum(map(bool, crossed)), changed + row["changed"]
            for depth, run in enumerate(depths):
                firsts = [min(known[n] for n in some)[depth] for some in crossed if some]
                run += [sum(firsts) / len(firsts)] if firsts else []
        one = next(d for d in result.detections if (d.detector, d.errors, d.rate) == (detector, errors, rate))
        assert one.share.n == len(shares)
        assert one.share.estimate == pytest.approx(np.mean(shares))
        assert one.share.low <= one.share.estimate <= one.share.high
        assert one.answers.n == len(shares)
        assert one.answers.estimate == pytest.approx(detected / changed)
        assert one.answers.low <= one.answers.estimate <= one.answers.high
        for interval, run in zip((one.layers, one.flops), depths, strict=True):
            assert interval.n == len(run)
            assert interval.estimate == (pytest.approx(np.mean(run)) if run else None)
    alarms = next(a for a in result.false_alarms if (a.detector, a.rate) == (detector, rate))
    assert alarms.share.n == 200  # originals: two samples each
    assert alarms.share.estimate == pytest.approx(alarms.count / 400)
    assert alarms.count == sum(value > limit for value in clean_margins(store, rows, "test", detector))
    shifted = clean_margins(store, rows, "shifted", detector)
    assert alarms.shifted.estimate == pytest.approx(sum(value > limit for value in shifted) / len(shifted))


def test_faults_change_the_answers_that_are_flagged(campaign, rows, folder):
    workload = load(f"{folder}/clean.py:make")
    model, found = workload.model(), faults_of(rows)
    assert {row["target"] for row in found} == set(ERROR_MODELS)
    for row in found:
        batch = faulty_batches(workload)[row["batch"]]
        faults = [Fault.from_json({**one, "step": None}) for one in row["faults"]]
        with torch.no_grad():
            golden = model(batch).argmax(1)
            with inject(model, faults):
                output = model(batch)
        changed = (output.argmax(1) != golden) & output.isfinite().all(1)
        assert row["flags"] == changed.int().tolist()
        assert row["changed"] == sum(row["flags"]) > 0
        assert row["masked"] + row["benign"] + row["due"] == row["tried"] - 1
        assert (row["layer"] in ("first", "second", "last")) or row["target"] in IN_WEIGHTS or row["layer"] == ""


def test_trials_end_as_all_of_their_faults_do(campaign, folder):
    """Every fault that was tried, each alone on the plain engine."""
    runner = InferenceCoverageRunner(make_spec(folder), worker_settings=WorkerSettings("plain"))
    seed = 12345
    found = runner._search.find("output-flip", seed)
    search = FaultSearch(runner.engine, runner.spec)
    batch = search.draw_batch(seed)
    for number in range(found.tries.total()):
        faults = search.draw("output-flip", batch, np.random.default_rng([seed, number]))
        assert {fault.step for fault in faults} == {batch}
        changed = (runner.engine.trial(faults).codes == 2).any()
        assert changed == (number == found.tries.total() - 1)
    assert (batch, faults[0].to_json()) == (found.batch, found.faults[0].to_json())


def test_trials_draw_every_sample_alike(campaign, folder, rows):
    runner = InferenceCoverageRunner(make_spec(folder), worker_settings=WorkerSettings("plain"))
    drawn = np.bincount([runner._search.draw_batch(seed) for seed in range(3200)], minlength=8)
    assert scipy.stats.chisquare(drawn).pvalue > 1e-4
    assert len({row["batch"] for row in faults_of(rows)}) > 4
    for tries in campaign[1].tries:
        own = faults_of(rows, tries.errors)
        different = {(row["batch"], n) for row in own for n, flag in enumerate(row["flags"]) if flag}
        assert tries.different_answers == len(different) <= tries.answers


def test_faults_act_on_samples_with_the_rate_of_false_alarms(folder):
    """The workload's own evaluation batches are ten times as large as clean samples: every one of them has an alarm."""
    spec = make_spec(folder, workload=f"{folder}/clean.py:other_evaluation", detectors=("ranger",), clean_samples=1000)
    runner = InferenceCoverageRunner(spec, worker_settings=WorkerSettings("plain"))
    clean = [
        runner.run(TrialId("calibration", None, k))
        for k in range(runner.establish_baseline().clean_trials["calibration"])
    ]
    limit = threshold_of([value for row in clean for value in row.margins[0]], 0.05)

    def alarms(batches):
        return [bool(value > limit) for batch in batches for value in runner._largest_margins(batch)[0]]

    assert all(alarms(runner.workload.batches()))
    counted = alarms(runner.engine.batches)
    assert len(counted) == 160
    # Threshold of 1,000 samples, alarms of 160 others: the beta-binomial law.
    law = scipy.stats.betabinom(160, 1001 - math.ceil(1001 * 0.95), math.ceil(1001 * 0.95))
    assert law.ppf(1e-3) <= sum(counted) <= law.ppf(1 - 1e-3)


@pytest.mark.parametrize(
    ("originals", "said"),
    [
        ("[[0] * 19] * (samples // 20)", "does not name one original for each sample"),
        ("[[0] * 20] * (samples // 20)", "an original has clean samples of part 'calibration' in two batches"),
    ],
)
def test_originals_that_do_not_fit_are_refused(tmp_path, originals, said):
    write_clean(tmp_path)
    with (tmp_path / "clean.py").open("a") as file:
        file.write(
            "\n\nclass Wrong(Clean):\n    def clean_originals(self, part, samples):\n"
            f"        return {originals}\n\ndef wrong():\n"
            "    return Wrong(Net(), [inputs(0, 20)], name='wrong')\n"
        )
    with pytest.raises(UsageError, match=said):
        InferenceCoverageRunner(make_spec(tmp_path, workload=f"{tmp_path}/clean.py:wrong"))


def test_samples_without_originals_are_their_own(folder):
    spec = make_spec(folder, workload=f"{folder}/clean.py:independent")
    runner = InferenceCoverageRunner(spec, worker_settings=WorkerSettings("plain"))
    row = runner.run(TrialId("test", None, 0))
    assert len(set(row.originals.tolist())) == row.samples == 400


def test_the_plain_engine_makes_the_same_store(campaign, folder, tmp_path):
    run(make_spec(folder), tmp_path / "b.sqlite", 5, "plain")
    with InferenceCoverageStore(tmp_path / "b.sqlite") as store:
        assert list(canonical_lines(store)) == list(canonical_lines(campaign[0]))


@contextlib.contextmanager
def limited_outputs(layer, low, high):
    handle = layer.register_forward_hook(lambda module, inputs, output: output.nan_to_num(nan=0.0).clamp(low, high))
    yield
    handle.remove()


def test_rungs_bring_answers_back(campaign, rows, folder):
    """Limits of layers by a loop over their outputs; faults in weights alone, which stay."""
    workload = load(f"{folder}/clean.py:make")
    model = workload.model()
    names = ("first", "second", "last")
    values = {name: [] for name in names}
    hooks = [getattr(model, n).register_forward_hook(lambda m, i, o, n=n: values[n].append(o)) for n in names]
    with torch.no_grad():
        for batch in workload.clean_batches("calibration", 600)[:5]:  # 100 samples
            model(batch)
    for hook in hooks:
        hook.remove()
    ranges = {name: (float(torch.cat(v).min()), float(torch.cat(v).max())) for name, v in values.items()}

    def answers(batch, zero):
        x = batch
        for name in names:
            low, high = ranges[name]
            x = getattr(model, name)(x)
            inside = (x >= low) & (x <= high)
            x = torch.where(inside, x, torch.zeros_like(x) if zero else x.nan_to_num(nan=0.0).clamp(low, high))
            x = x.relu() if name != "last" else x
        return x.argmax(1)

    def back(batch, golden, zero, where):
        return (answers(batch, zero) == golden)[where].int().tolist()

    for row in faults_of(rows):
        batch = faulty_batches(workload)[row["batch"]]
        faults = [Fault.from_json({**one, "step": None}) for one in row["faults"]]
        where = torch.tensor(row["flags"], dtype=torch.bool)
        by_rung = dict(zip(RUNGS, row["restored"], strict=True))
        transient = row["target"] not in IN_WEIGHTS
        with torch.no_grad():
            golden = model(batch).argmax(1)
            with contextlib.nullcontext() if transient else inject(model, faults):
                for rung, zero in (("clamp", False), ("zero", True)):
                    assert by_rung[rung] == back(batch, golden, zero, where)
                assert by_rung["rerun"] == (model(batch).argmax(1) == golden)[where].int().tolist()
            if not transient:
                assert (by_rung["clamp-in-run"], by_rung["zero-in-run"]) == (by_rung["clamp"], by_rung["zero"])
            elif row["layer"]:
                with inject(model, faults), contextlib.ExitStack() as stack:
                    for name in names:
                        stack.enter_context(limited_outputs(getattr(model, name), *ranges[name]))
                    assert by_rung["clamp-in-run"] == (model(batch).argmax(1) == golden)[where].int().tolist()
        assert all(by_rung["rerun"]) is transient
        assert all(by_rung["golden"])
        if row["target"] != WEIGHT_RATE:
            assert all(by_rung["repair"])  # one bad block at most


def test_what_is_restored_of_detected_answers(campaign, rows):
    store, result = campaign
    limit = threshold_of(clean_margins(store, rows, "calibration", "ranger"), OPTIONS.rate)
    layers, ladders, restored, detected = [], [], 0, 0
    for row in faults_of(rows):
        by_rung = dict(zip(RUNGS, row["restored"], strict=True))
        by_layer, by_ladder = [], []
        for sample in range(row["changed"]):
            crossed = [n for n in range(3) if row["margins"][n][sample] > limit]
            if crossed:
                own = row["layer"] == ("first", "second", "last")[crossed[0]]
                by_layer.append(own)
                by_ladder.append(own or any(by_rung[rung][sample] for rung in ("rerun", "repair", "clamp")))
        if by_layer:
            layers.append(np.mean(by_layer))
            ladders.append(np.mean(by_ladder))
        restored, detected = restored + sum(by_ladder), detected + len(by_ladder)
    known = {(one.rung, one.errors): one for one in result.restored}
    assert known[LAYER, ALL].detected_share.estimate == pytest.approx(np.mean(layers))
    assert known[LADDER, ALL].detected_share.estimate == pytest.approx(np.mean(ladders))
    assert known[LADDER, ALL].detected_answers.estimate == pytest.approx(restored / detected)
    assert known["golden", ALL].share.estimate == known["golden", ALL].answers.estimate == 1
    for number, rung in enumerate(RUNGS):
        back = [row["restored"][number] for row in faults_of(rows)]
        assert known[rung, ALL].share.estimate == pytest.approx(np.mean([np.mean(one) for one in back]))
        assert known[rung, ALL].answers.estimate == pytest.approx(np.mean([one for each in back for one in each]))


def test_weights_are_checked_while_the_fault_is_there(rows, campaign):
    before, _ = layers_before(campaign[0], "weight-integrity")
    for row in faults_of(rows):
        bad = max(row["margins"][before])
        assert (bad > 0) == (row["target"] in IN_WEIGHTS)


def test_a_report_has_all_parts(campaign):
    store, result = campaign
    shown = report(result)
    assert isinstance(shown, Report)
    assert {one.title for one in shown.sections} >= {
        "Detection",
        "Trade-offs",
        "How early",
        "False alarms",
        "Comparisons",
    }
    assert {one.detector for one in result.comparisons} == set(DETECTORS[1:])
    for points in result.roc.values():
        assert [y for _, y in points] == sorted(y for _, y in points)
        assert points[-1] == (1.0, pytest.approx(1.0))
    assert result.unreported == {0.001: 10_000, 0.01: 1000}
    assert any("needs a campaign with --clean-samples 10000" in one for one in shown.findings)
    assert all(np.isfinite(one.ratios).all() for one in result.costs)
    twice = analyse_together([store, store], OPTIONS)
    own, both = ({(d.detector, d.errors, d.rate): d.share for d in one.detections} for one in (result, twice))
    assert {key: 2 * one.n for key, one in own.items()} == {key: one.n for key, one in both.items()}
    assert all(both[key].estimate == pytest.approx(one.estimate) for key, one in own.items())


def test_a_report_says_where_most_faults_change_the_same_answer(campaign, rows):
    result = campaign[1]
    for tries in result.tries:
        alone = [(row["batch"], row["flags"].index(1)) for row in faults_of(rows, tries.errors) if row["changed"] == 1]
        assert tries.same_answer == max((alone.count(one) for one in alone), default=0)
    for same, said in ((2, True), (1, False)):
        tries = replace(result.tries[0], found=10, same_answer=same)
        findings = report(replace(result, tries=(tries,))).findings
        assert (
            any(f"{same} of 10 faults changed one and the same answer and no other" in one for one in findings) is said
        )


def test_too_few_clean_samples_are_refused(campaign):
    assert clean_samples_needed(0.01) == 1000
    with pytest.raises(
        UsageError,
        match="--clean-samples is 400; a rate .* of 0.01 needs 1,000 or more: choose a higher --rate",
    ):
        analyse(campaign[0], InferenceCoverageOptions())


def test_the_error_names_the_clean_samples_that_were_asked_for():
    with pytest.raises(UsageError, match=r"^--clean-samples is 300, but the workload has 150 clean .* 0.05 needs 200"):
        check_clean_samples(300, 0.05, 150)
    check_clean_samples(190, 0.05, 200)  # whole batches are more than those asked for


def test_the_headline_says_what_is_detected(campaign):
    result = campaign[1]
    own = {d.detector: d.answers for d in result.detections if d.errors == ALL and d.rate == OPTIONS.rate}
    answers, faults = sum(one.answers for one in result.tries), sum(one.found for one in result.tries)
    headline = report(result).headline
    assert headline.startswith(
        f"ranger detects {share_with_limits_text(own['ranger'])} of {answers:,} answers of clean "
    )
    assert f"that {faults} faults changed, at a threshold for 5 % false alarms (" in headline
    most = max(own, key=lambda name: own[name].estimate)
    assert f"{most} detects the most, {share_with_limits_text(own[most])}." in headline
    same = tuple(replace(d, answers=own["ranger"]) for d in result.detections)
    assert report(replace(result, detections=same)).headline.endswith("no detector detects more.")
    none = tuple(replace(one, found=0, answers=0) for one in result.tries)
    assert (
        report(replace(result, tries=none)).headline
        == "No fault that changes an answer of clean was found in 20 trials."
    )


def test_alarms_on_all_shifted_samples_are_a_finding(campaign):
    result = campaign[1]
    for high, low, said in ((1.0, 0.98, True), (0.06, 0.02, False)):
        alarms = tuple(replace(a, shifted=Interval(high, low, high, 0.95, 300, "")) for a in result.false_alarms)
        found = [one for one in report(replace(result, false_alarms=alarms)).findings if "shifted samples" in one]
        assert bool(found) is said
    assert "shifted samples" not in " ".join(found)


@pytest.mark.parametrize(("originals", "promised"), [(255, "5.4 %"), (98, "6.0 %"), (10**6, "5.1 %")])
def test_a_promise_of_false_alarms_is_rounded_up(campaign, originals, promised):
    result = replace(
        campaign[1],
        originals={**campaign[1].originals, "calibration": originals},
        clean={**campaign[1].clean, "calibration": 10 * originals},
    )
    findings = " ".join(report(result).findings)
    assert f"a new original is only promised at most {promised} false alarms" in findings


def test_damaged_stores_are_refused_or_read(campaign, folder, tmp_path):
    for _, path in mutants(folder / "a.sqlite", tmp_path, 5, 8):
        with contextlib.suppress(UnsilentError), InferenceCoverageStore(path) as store:
            report(store.analyse(rate=0.05))


def test_a_fault_that_raises_counts_as_due(folder):
    runner = InferenceCoverageRunner(make_spec(folder, flip_rate=0.05, tries=20))
    row = runner.run(TrialId(WEIGHT_RATE, None, 0))
    assert row.due + row.benign + row.masked + (row.end == FOUND) == row.tried
    runner.verify_restored_state()


def test_rows_have_the_names_of_their_layers(folder):
    detectors = ("weight-integrity+ranger+duplication:layers=second|last", "duplication:share=0.4", "duplication")
    runner = InferenceCoverageRunner(make_spec(folder, detectors=detectors), worker_settings=WorkerSettings("plain"))
    combination, part, whole = runner.establish_baseline().detectors
    assert combination.layers == (AFTER_CALL, "first", "second", "last", "second", "last")
    flops = [one for _, one in IN_LAYERS]
    assert combination.flops == pytest.approx([1, *flops, *flops[1:]])
    assert layers_run(combination).tolist() == pytest.approx([1, 1 / 3, 2 / 3, 1, 2 / 3, 1])
    assert (part.layers, part.flops) == (("first", "last"), (pytest.approx(flops[0]), 1))
    assert (whole.layers, whole.flops) == ((AFTER_CALL,), (1,))
    found = runner._search.find("output-flip", 3)
    _, margins = runner._faulty_pass(found.batch, found.faults)
    assert [len(one) for one in margins] == [6, 2, 1]


class Operation:
    """A row of a fault in the operation of one layer that changed two answers."""

    layer, changed = "second", 2
    restored = np.zeros((len(RUNGS), 2))


def test_a_combination_is_early_where_any_part_is(campaign, monkeypatch):
    """The part that is stacked last reads the layer that runs first."""
    info = DetectorInfo("a+b+weight-integrity", ("last", AFTER_CALL, "first", "second"), (1.0, 1.0, 0.2, 0.5), 1)
    store = SimpleNamespace(baseline=SimpleNamespace(detectors=[info]))
    scored = ScoredStore(store, [], [Operation()], {}, {}, np.zeros(0))
    monkeypatch.setattr(ScoredStore, "threshold", lambda *_: 0.5)
    monkeypatch.setattr(ScoredStore, "margins", lambda *_: [np.array([[1.0, 0], [1, 0], [0, 0], [1, 0]])])
    found = scored.detected(info.name, 0.01)
    assert (found.share[0], found.layers[0], found.flops[0]) == (0.5, 2 / 3, 0.5)
    assert found.by_layer[0] == 0.5  # the layer that is corrupted is the first with an alarm


@pytest.mark.parametrize("rows_", [1, 2, 3, 5])
def test_margins_of_a_pass_that_took_another_way(rows_):
    margins = np.arange(8.0).reshape(2, 4)[::-1]
    fixed = fixed_rows(margins, rows_)
    assert fixed.shape == (rows_, 4)
    assert np.array_equal(fixed.max(0), margins.max(0))


def test_flops_are_those_of_products(folder):
    workload = load(f"{folder}/clean.py:make")
    sizes = {"first": 6 * 16, "second": 16 * 16, "last": 16 * 4}
    total, done = sum(sizes.values()), 0
    found = flops_by_layer(workload.model(), call_model, workload.batches()[0])
    for name, size in sizes.items():
        done += size
        assert found[name] == pytest.approx(done / total)


def test_batches_of_another_size():
    batch = {"x": torch.arange(6).reshape(3, 2), "scale": torch.tensor(2.0)}
    assert resized(batch, 1)["x"].tolist() == [[0, 1]]
    assert resized(batch, 4)["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert resized(batch, 4)["scale"] == 2


# -- the verb --------------------------------------------------------------------------------------------------------------

FEW = ("--profile-samples", 100, "--clean-samples", 400, "--rate", 0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("digits-cnn", "--detector", "dr-dma"), "did you mean 'dr-dna'"),
        (("digits-cnn", "--only", "weight-flop"), "unknown error model 'weight-flop'"),
        (("digits-cnn", "--clean-samples", 500), "--clean-samples is 500; a rate of false alarms of 0.01 needs 1,000 or more"),
        (("digits-cnn", "--flip-rate", 0), "--flip-rate is 0.0; expected a share of bits above 0"),
        (("digits-cnn", "--detector", "golden-test:every=2"), "so that trials would depend on each other; leave out slices"),
        (("digits-cnn", "--burst", "rundom"), "unknown fault model 'rundom'"),
        (("digits-cnn", "--clean-runs", 2), "No such option: --clean-runs"),
        (("train-resnet", "--detector", "abft"), "is a training; expected a workload for inference"),
        (("digits-cn",), "did you mean 'digits-cnn'"),
        (("clean.py:without", *FEW, "--detector", "abft"), "workload 'without' has no clean inputs 'calibration'; give"),
        ((), "no workload was named; give one like digits-cnn"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(folder, words, said):
    done = in_process("inference-coverage", *words, "--quiet", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_a_campaign_of_the_command_line(folder):
    asked = (
        "inference-coverage",
        "clean.py:make",
        *FEW,
        *ASKED,
        "--tries",
        100,
        "--trials",
        2,
        "--only",
        "output-burst",
    )
    done = in_process(*asked, "--store", "c.sqlite", "--json", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["reference"]) == ("unsilent/inference-coverage/2", "ranger")
    assert {row["unit"] for row in found["results"]} == {"fault", "changed answer", "clean sample"}
    assert all({"estimate", "low", "high", "confidence", "n"} <= row.keys() for row in found["results"])
    shown = in_process("replay", "c.sqlite", "output-burst/x/1", "--workload", "clean.py:make", cwd=folder)
    assert "as stored" in shown.stdout, shown.stderr
    assert "2 of 2 trials, complete" in in_process("status", "c.sqlite", cwd=folder).stdout
    assert in_process("report", "c.sqlite", "--rate", "0.1", cwd=folder).returncode == 0


@pytest.mark.slow
def test_shards_are_merged_into_the_whole(campaign, folder, tmp_path):
    store, _ = campaign
    parts = [run(make_spec(folder), tmp_path / f"{part}.sqlite", 5, shard=(part, 2)) and tmp_path / f"{part}.sqlite"
             for part in (1, 2)]  # fmt: skip
    merge_stores(tmp_path / "out.sqlite", parts, store.kind)
    with InferenceCoverageStore(tmp_path / "out.sqlite") as merged:
        assert list(canonical_lines(merged)) == list(canonical_lines(store))


@pytest.mark.slow
def test_a_campaign_of_a_built_in_workload(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [
        "inference-coverage",
        "digits-cnn",
        "--quiet",
        "--json",
        "--store",
        "s.sqlite",
        "--clean-samples",
        "1000",
        "--jobs",
        "2",
    ]
    assert cli([*asked, "--trials", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    shares = {
        (row["detector"], row["errors"]): row["estimate"]
        for row in found["results"]
        if row["measure"] == "detected, of faults" and row["rate"] == "0.01"
    }
    assert shares["duplication", "all"] == 1
    assert shares["weight-integrity", "weight-flip"] == 1
    assert shares["weight-integrity", "output-flip"] == 0
    assert "Detected answers against false alarms" in (tmp_path / "s.html").read_text()


def test_a_promise_needs_originals_with_equally_many_samples():
    from unsilent.studies.coverage.inference.analysis import _has_equal_groups

    assert _has_equal_groups(np.repeat(np.arange(5), 4))
    assert _has_equal_groups(np.repeat(np.arange(5), [4, 4, 4, 4, 2]))
    assert not _has_equal_groups(np.repeat(np.arange(5), [4, 4, 4, 2, 2]))
    assert not _has_equal_groups(np.repeat(np.arange(3), [1, 4, 9]))


@pytest.mark.parametrize("name", ["drdna", "dr-dna:bins=0", "dr-dna+nothing"])
def test_unknown_detectors_are_refused_before_the_workload_is_made(name, monkeypatch):
    from unsilent.studies.coverage.inference import runner

    monkeypatch.setattr(runner, "InferenceCoverageRunner", None)
    with pytest.raises(UsageError):
        inference_coverage("digits-cnn", detector=name)
