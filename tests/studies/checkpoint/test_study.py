"""``unsilent checkpoint study``: the class of a resume, shares and differences, and a small campaign of real processes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Request
from unsilent.campaigns.spec import TrialId, campaign_hash
from unsilent.checkpoints import Checkpoint
from unsilent.cli.main import run as cli
from unsilent.outcomes.training import TrainingOutcome
from unsilent.render.cells import header_text, texts
from unsilent.render.report_json import report_json
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences, store_noise_floors
from unsilent.report.model import Report
from unsilent.studies.checkpoint.analysis import (
    CheckpointResult,
    Differences,
    EqualPairs,
    JudgedResume,
    ResumeJudge,
    analyse,
    smallest_detectable,
    smallest_detectable_in_pairs,
)
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY, CheckpointStore
from unsilent.studies.checkpoint.report import LOADED_BY_TEXTS, comparison_report, report
from unsilent.studies.checkpoint.runner import BELONGS, regions_of
from unsilent.studies.checkpoint.spec import (
    COLLECTIVES,
    LOADED_BY,
    SECTIONS,
    CheckpointAnalysisOptions,
    CheckpointBaseline,
    CheckpointRow,
    CheckpointTarget,
    CleanResume,
    make_checkpoint_spec,
)
from unsilent.studies.checkpoint.study import checkpoint_study

STEPS = 40
NOISE = np.linspace(-0.01, 0.01, 20)


def floor(scale=1.0):
    values = tuple((scale * NOISE).tolist())
    return ReplicaDifferences("within", values, values, (0.0,) * 20, (False,) * 20, 10, (0.1,))


FLOORS = NoiseFloors(floor(), floor(3.0))


def clean(strategy="single", ranks=1):
    flat = (0.9,) * STEPS
    return CleanResume(
        strategy,
        ranks,
        (0.3,) * STEPS,
        flat,
        (40, 80),
        (0.8, 0.9),
        (0.5, 0.3),
        "a",
        ("b",) * ranks,
        ((4, 8),) * ranks,
        1.0,
    )


def baseline(strategies=("single", "ddp")):
    resumes = tuple(clean(name, 1 if name == "single" else 2) for name in strategies)
    targets = tuple(
        CheckpointTarget(f"{name}/{part}", name, part, "all", 10)
        for name in strategies
        for part in ("weights", "first_moment")
    )
    known = {"campaign": "c", "fingerprint": {}, "golden_seconds": 1.0}
    return CheckpointBaseline("t", targets, 40, 40 + STEPS, ("a", "b"), resumes, **known)


def row(
    target="single/weights", k=0, accuracy=0.9, loss=0.3, metric=0.9, end="finished", same=False, flips=1, steps=STEPS
):
    ranks = 1 if target.startswith("single") else 2
    curve = np.full(steps, metric) if np.isscalar(metric) else np.asarray(metric, np.float64)
    losses = np.full(steps, loss)
    if end == "not-finite":
        losses[-1] = math.nan
    return CheckpointRow(
        TrialId(target, flips, k), "[]", end, steps, 2, same, "b" if same else "", "", losses, curve, np.array([0.8, accuracy]),
        np.array([0.5, loss]), np.zeros((2, 2), np.int64), np.zeros((2, 2), np.int64), np.full((ranks, 2, 2), [1, 2]),
    )  # fmt: skip


def judged(given, **options):
    return ResumeJudge(baseline(), FLOORS, CheckpointAnalysisOptions(**options)).judge(given)


@pytest.mark.parametrize(
    ("given", "outcome", "different", "harmful"),
    [
        (row(same=True), TrainingOutcome.MASKED_BITWISE, False, False),
        (row(), TrainingOutcome.MASKED_BENIGN, False, False),
        (row(accuracy=0.88), TrainingOutcome.MASKED_BENIGN, True, False),  # beyond the sums, not beyond other seeds
        (row(accuracy=0.5, loss=2.0), TrainingOutcome.LOW_TEST, True, True),
        (row(accuracy=0.5, loss=2.0, metric=0.2), TrainingOutcome.SHARP_DEGRADE, True, True),
        (row(end="not-finite", steps=1), TrainingOutcome.IMMEDIATE_NAN, True, True),
        (row(end="not-finite", steps=5), TrainingOutcome.SHORT_TERM_NAN, True, True),
        (row(accuracy=0.99, loss=0.1), TrainingOutcome.IMPROVED, True, False),
    ],
)
def test_the_class_of_a_resume(given, outcome, different, harmful):
    found = judged(given)
    assert (found.outcome, found.different, found.harmful) == (outcome, different, harmful)


def test_what_was_lost_is_harmful_whatever_else():
    lost = replace(row(), end="crash", steps_run=0, evaluations=0, losses=np.empty(0), metric=np.empty(0))
    assert (judged(lost).outcome, judged(lost).harmful) == (TrainingOutcome.CRASHED, True)


def test_steps_to_recover():
    assert judged(row()).steps_to_recover == 0
    dip = np.full(STEPS, 0.9)
    dip[:15] = 0.2
    # Windows of ten steps: that of steps 14 to 23 has one low step, 0.07 below; the next has none.
    assert judged(row(metric=dip)).steps_to_recover == 15
    assert judged(row(metric=0.2)).steps_to_recover is None


def test_smallest_detectable_difference_is_found_four_times_in_five():
    n, p = 400, 0.1
    gap = smallest_detectable((40, n), (40, n), 0.95)
    rng = np.random.default_rng(1)
    a, b = rng.binomial(n, p - gap / 2, 4000) / n, rng.binomial(n, p + gap / 2, 4000) / n
    pooled = (a + b) / 2
    z = np.abs(a - b) / np.sqrt(pooled * (1 - pooled) * 2 / n)
    assert 0.75 < (z > 1.96).mean() < 0.87
    assert smallest_detectable((0, 5), (0, 5), 0.95) < 1


def test_smallest_detectable_difference_of_pairs_is_found_four_times_in_five():
    n, unequal = 400, 0.2
    gap = smallest_detectable_in_pairs(round(unequal * n), n, 0.95)
    rng = np.random.default_rng(1)
    # Of pairs that differ, so many more in one direction than in the other.
    more = rng.multinomial(n, [(unequal + gap) / 2, (unequal - gap) / 2, 1 - unequal], 4000)
    z = np.abs(more[:, 0] - more[:, 1]) / np.sqrt(more[:, 0] + more[:, 1])
    assert 0.75 < (z > 1.96).mean() < 0.87


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategies": "single,nope"}, "nope"),
        ({"strategies": "ddp,ddp"}, "each name once"),
        ({"sections": "weight"}, "did you mean 'weights'"),
        ({"fault": "bitflip:count=3"}, "--flips"),
        ({"loaded_by": "one"}, "one-after"),
        ({"ranks": "1"}, "--strategy single"),
        ({"flips": "0,1"}, "1 or more"),
        ({"flips": "1,1"}, "different numbers"),
        ({"strategies": "single", "loaded_by": "one-after"}, "choose a --strategy with several"),
        ({"strategies": "single", "sections": "collectives"}, "choose a --strategy with several"),
        ({"law": "fair"}, "sampling law"),
    ],
)
def test_what_cannot_be_asked(options, match):
    with pytest.raises(UsageError, match=match):
        make_checkpoint_spec(Request(CHECKPOINT_STUDY.option_classes, {"workload": "train-resnet", **options}))


def test_every_section_and_way_to_load_is_described():
    assert {*BELONGS, COLLECTIVES} == set(SECTIONS)
    assert set(LOADED_BY_TEXTS) == set(LOADED_BY)


def test_numbers_of_flips_are_mixed_alike():
    """Of an interrupted campaign: as many trials of each number of flips on both sides, or one section would look worse."""
    weights, moment = (CheckpointTarget(f"ddp/{part}", "ddp", part, "all", 10) for part in ("weights", "first_moment"))

    def trials(target, flips, count, harmful):
        outcome = TrainingOutcome.LOW_TEST if harmful else TrainingOutcome.MASKED_BENIGN
        return [
            JudgedResume(target, flips, k, outcome, harmful, False, "", None, *[np.zeros(0)] * 4) for k in range(count)
        ]

    strata = {
        (weights.name, 1): trials(weights, 1, 4, False), (weights.name, 100): trials(weights, 100, 4, True),
        (moment.name, 1): trials(moment, 1, 4, False), (moment.name, 100): trials(moment, 100, 1, True),
    }  # fmt: skip
    together, *by_flips = Differences([weights, moment], (1, 100), strata, 0.95).between_sections()
    assert (together.name, together.first.n, together.first.estimate) == (
        "ddp, weights against first_moment, all numbers of flips", 5, 0.2,
    )  # fmt: skip
    assert together.difference.estimate == 0
    assert [one.first.n for one in by_flips] == [4, 1]


def write_study(path):
    """A stored campaign that never ran; its result."""
    spec = make_checkpoint_spec(
        Request(
            CHECKPOINT_STUDY.option_classes,
            {"workload": "train-resnet", "sections": "weights,first_moment", "flips": "1"},
        )
    )
    rows = [
        row(f"{strategy}/{section}", k, *((0.5, 2.0) if section == "weights" and k % 2 else ()))
        for strategy in ("ddp", "single")
        for section in ("first_moment", "weights")
        for k in range(10)
    ]
    with CheckpointStore(path, write=True) as store:
        known = baseline()
        store.bind_campaign(spec, replace(known, campaign=campaign_hash(spec, known.fingerprint)))
        store.record_budget(10, "unsilent checkpoint study train-resnet")
        store.add_rows(rows)
        store_noise_floors(store, FLOORS)
        return analyse(store, CheckpointAnalysisOptions())


def test_a_stored_campaign_is_read_and_reported(tmp_path):
    result = write_study(tmp_path / "s.sqlite")
    assert isinstance(result, CheckpointResult)
    harmful = {(g.target.strategy, g.target.section): g.harmful.estimate for g in result.groups}
    assert harmful == {
        (s, p): 0.5 if p == "weights" else 0.0 for s in ("single", "ddp") for p in ("weights", "first_moment")
    }
    *sections, strategies = result.differences
    names = [d.name for d in sections]
    assert names == [f"{strategy}, weights against first_moment, 1 flip" for strategy in ("single", "ddp")]
    assert all(d.difference.estimate == 0.5 and d.first.n == 10 for d in sections)
    assert (strategies.is_paired, strategies.difference.estimate) == (True, 0)
    assert result.pairs == EqualPairs(20, 0, 20)
    page = report(result)
    assert isinstance(page, Report)
    assert "10 of 40 trainings" in page.headline
    gap = replace(strategies.difference, low=-0.1, high=0.1)
    result = replace(result, differences=(replace(strategies, difference=gap, detectable=0.141),))
    assert any("would find a difference of 15 points or more" in one for one in report(result).findings)
    assert any("largest share of harmful ends" in one for one in report(result).findings)
    harmless = tuple(group for group in result.groups if not group.harmful_trials)
    assert harmless
    assert not any("largest share" in one for one in report(replace(result, groups=harmless)).findings)
    differences = comparison_report(result, replace(result, groups=result.groups[::-1]))
    (shown,) = differences.sections[0].parts
    lines = [texts(shown.columns, one) for one in shown.rows]
    assert lines[0][-3:-1] == ["50 [18, 82]"] * 2
    assert {line[-1] for line in lines} == {"0 [-60, +60]", "0 [-40, +40]"}  # a difference has signs, and is in points
    assert header_text(shown.columns[-1]).endswith(", points")
    measures = [row["measure"] for row in report_json(differences)["results"][:3]]
    assert measures == ["harmful, A", "harmful, B", "harmful, A minus B"]


WITH = ("--with", "steps=24", "--with", "batch=16", "--with", "width=4")


@pytest.mark.slow
def test_a_campaign_of_real_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    request = (
        "checkpoint",
        "study",
        "train-resnet",
        *WITH,
        "--flips",
        "1,50",
        "--section",
        "weights,second_moment",
        "--quiet",
    )
    assert cli([*request, "--trials", "1", "--json", "--store", "s.sqlite"]) == 0
    capsys.readouterr()
    assert cli([*request, "--trials", "2", "--json", "--store", "s.sqlite"]) == 0  # the same campaign, extended
    found = json.loads(capsys.readouterr().out)
    assert (found["trials"], found["schema"]) == (16, "unsilent/checkpoint-study/2")
    assert {entry["strategy"] for entry in found["clean"]} == {"single", "ddp"}
    with CheckpointStore(tmp_path / "s.sqlite") as store:
        rows = {row.trial: row for row in store.rows()}
    single = rows[TrialId("single/weights", 50, 1)]
    faults = json.loads(single.faults)
    assert sum(len(fault["elements"]) for fault in faults) <= 50
    assert {fault["site"].partition("/")[0] for fault in faults} == {"file:model"}
    assert single.changed[0, 0].sum() > 0  # what was corrupted is other right after the restart
    assert cli(["replay", "s.sqlite", "ddp/weights/x50/1"]) == 0
    assert "ended as stored" in capsys.readouterr().out
    assert cli(["status", "s.sqlite"]) == 0
    assert "16 of 16 trials, complete" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_loaded_by_one_rank_and_payloads(tmp_path):
    found = checkpoint_study(
        "train-resnet", options={"steps": 24, "batch": 16, "width": 4}, trials=1, flips=(100,), strategy="ddp,fsdp2",
        section="weights,first_moment,collectives", loaded_by="all,one-before,one-after-broadcast",
        store=tmp_path / "s.sqlite", floor=tmp_path / "floor.sqlite",
    )  # fmt: skip
    resumes = {trial.target.name: trial for trial in found.trials}
    assert len(resumes) == 2 * (2 * 3 + 1)
    # Wrapping for DDP sends rank 0's parameters to all; sending its optimizer state does the same for moments.
    healed = [
        "ddp/weights/one-before",
        "ddp/first_moment/one-after-broadcast",
        "fsdp2/first_moment/one-after-broadcast",
    ]
    for name, trial in resumes.items():
        assert trial.bit_identical == (name in healed), name
        assert (trial.changed_of_all[:, 0].max() > 0) == ("weights" in name and name not in healed), name
    assert found.pairs.same_bits == found.pairs.count == 2
    assert (resumes["ddp/collectives"].changed_of_all[:, -1] > 0).all()
    # By layer and rank: the first evaluation has what was corrupted, on the rank that loaded it.
    one = resumes["fsdp2/weights/one-before"]
    assert np.nanmax(one.changed[0, 0]) == 0 < np.nanmax(one.changed[1, 0])
    spreads = [spread for spread in found.layers if spread.target.name == "ddp/weights"]
    assert [spread.layer for spread in spreads] == list(found.baseline.layers)
    assert all(math.isnan(spread.changed[0]) or 0 <= spread.changed[0] <= 1 for spread in spreads)
    ways = [d.name for d in found.differences if "loaded by" in d.name]
    assert len(ways) == 6
    assert all(d.is_paired for d in found.differences if "loaded by" in d.name)


@pytest.mark.slow
def test_sections_of_a_real_checkpoint(tmp_path):
    from unsilent.workloads.distributed import Gang

    with Gang("train-resnet", {"steps": "24", "batch": "16", "width": "4"}, strategy="single", world_size=1) as gang:
        path = gang.train_to(3, tmp_path / "c.pt")
    with Checkpoint(path) as checkpoint:
        sites = {section: {region.site for region in regions_of(checkpoint, section)} for section in BELONGS}
    assert all(sites.values())
    parts = [*sites.values()]
    assert len(set.union(*parts)) == sum(map(len, parts))  # none belongs to two
    assert not any("running" in site for site in sites["weights"])
