"""What a fault costs of a workload's own score: against each stored fault injected again, scored with loops in numpy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from conftest import in_process
from unsilent.basics.errors import StoreError, UnsilentError
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.faults import Fault
from unsilent.outcomes.base import LOG_LIKELIHOOD
from unsilent.sites import Parameters
from unsilent.studies.pvf.kind import PvfStore, check_pvf_baseline, check_row
from unsilent.studies.pvf.records import LostScore
from unsilent.studies.pvf.spec import GoldenScores
from unsilent.workloads.base import score_of

CLASSES = 3


def mean_iou(output, batch):
    """Mean intersection over union of each image [n, classes, h, w], over the classes that are in its mask or answer."""
    answer, mask = output.argmax(1), batch[1]
    each = torch.stack([(answer == c) & (mask == c) for c in range(CLASSES)]).sum((2, 3)).double()
    either = torch.stack([(answer == c) | (mask == c) for c in range(CLASSES)]).sum((2, 3)).double()
    return (each / either.clamp(min=1)).sum(0) / (either > 0).sum(0)


def oracle(answers, masks):
    """The same in loops over images, classes and pixels."""
    result = []
    for answer, mask in zip(answers.tolist(), masks.tolist(), strict=True):
        pairs = [pair for rows in zip(answer, mask, strict=True) for pair in zip(*rows, strict=True)]
        ratios = []
        for c in range(CLASSES):
            either = sum(c in pair for pair in pairs)
            if either:
                ratios.append(sum(pair == (c, c) for pair in pairs) / either)
        result.append(sum(ratios) / len(ratios))
    return np.array(result)


def segmentation(score=mean_iou, **more):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 1)).eval()
    images = torch.rand(7, 1, 6, 6)
    with torch.no_grad():
        masks = model(images).argmax(1)
    masks[:, :2] = (masks[:, :2] + 1) % CLASSES  # fault-free answers are not all right
    batches = [(images[:4], masks[:4]), (images[4:], masks[4:])]
    more = {"score_name": "mIoU", **more}
    return unsilent.Workload(model, batches, labelled=True, judge="segmentation", name="seg", score=score, **more)


def stored(path):
    with PvfStore(path) as store:
        return store.baseline, list(store.rows())


@pytest.mark.slow
def test_mean_iou_that_is_lost(tmp_path):
    workload = segmentation()
    result = unsilent.pvf(workload, trials=40, fault="random:count=3", per="tensor", store=tmp_path / "s.sqlite")
    baseline, rows = stored(tmp_path / "s.sqlite")
    model, masks = workload.model(), torch.cat(workload.labels())

    def scores():
        with torch.no_grad():
            output = torch.cat([model(batch) for batch in workload.batches()])
        finite = output.isfinite().flatten(1).all(1).numpy()
        return np.where(finite, oracle(output.argmax(1), masks), 0.0)

    golden = scores()
    assert 0.1 < golden.mean() < 0.9
    assert baseline.scores.mean == pytest.approx(golden.mean())
    lost = {}
    for row in rows:
        with Parameters(model).inject([Fault.from_json(one) for one in json.loads(row.faults)]):
            expected = (golden - scores()).mean()
        assert row.score_lost == pytest.approx(expected, abs=1e-12)
        lost.setdefault(row.trial.target, []).append(expected)
    assert len(lost) == 4
    assert any(value > 0 for each in lost.values() for value in each)
    for row in result.rows:
        if row.level == "tensor":
            assert row.score_lost.estimate == pytest.approx(np.mean(lost[row.target]))
            assert row.score_lost.low < row.score_lost.estimate < row.score_lost.high <= golden.max()
    assert result.score_name == "mIoU"
    assert result.golden_score == pytest.approx(golden.mean())
    assert "mIoU lost per fault" in [name for name, _, _ in result.report().numbers]
    result.write_html(tmp_path / "page.html")
    assert "mIoU lost" in (tmp_path / "page.html").read_text()


def test_every_fault_of_a_kind_leaves_nothing_to_estimate(tmp_path):
    result = unsilent.pvf(
        segmentation(), trials="all", fault="bitflip:bits=31", at="2.bias", store=tmp_path / "s.sqlite"
    )
    lost = [row.score_lost for row in stored(tmp_path / "s.sqlite")[1]]
    assert len(lost) == CLASSES
    for row in result.rows:
        assert row.score_lost.estimate == row.score_lost.low == row.score_lost.high
        assert row.score_lost.estimate == pytest.approx(np.mean(lost))


@pytest.mark.parametrize(
    "asked",
    [
        {"fault": "random:count=2", "per": "layer"},
        {"fault": "random:count=2", "samples": 2},
        {"fault": "random", "at": "op:*"},
        {"fault": "random:count=2", "at": "input:*"},
        pytest.param({"rel": "60%", "trials": 150}, marks=pytest.mark.slow),
    ],
)
def test_shortcuts_do_not_change_rows(asked, tmp_path):
    lines = []
    for engine in ("auto", "plain"):
        path = tmp_path / f"{engine}.sqlite"
        unsilent.pvf(segmentation(), **{"trials": 30, **asked}, engine=engine, store=path)
        with PvfStore(path) as store:
            assert any(row.score_lost != 0 for row in store.rows())
            lines.append(list(canonical_lines(store)))
    assert lines[0] == lines[1]


def raises_when_wrong(output, batch):
    result = mean_iou(output, batch)
    if output.abs().max() > 100:
        raise ValueError("too large")
    return result


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_scores_that_cannot_be_computed_are_the_lowest(engine, tmp_path):
    result = unsilent.pvf(
        segmentation(raises_when_wrong), trials=12, at="2.weight", fault="bitflip:bits=30", engine=engine,
        store=tmp_path / "s.sqlite",
    )  # fmt: skip
    baseline, rows = stored(tmp_path / "s.sqlite")
    assert all(row.score_lost == pytest.approx(baseline.scores.mean) for row in rows)
    assert {row.sdc for row in result.rows} != {0}  # how outputs are judged stays as it is


def test_without_a_score_nothing_is_stored(tmp_path):
    result = unsilent.pvf(segmentation(None), trials=5, store=tmp_path / "s.sqlite")
    baseline, rows = stored(tmp_path / "s.sqlite")
    assert baseline.scores is None
    assert "score" not in baseline.fingerprint
    assert all(math.isnan(row.score_lost) for row in rows)
    assert result.score_name == ""
    assert all(row.score_lost is None for row in result.rows)


def halved(output, batch):
    return mean_iou(output, batch) / 2


@pytest.mark.parametrize("other", [{"score": halved}, {"score_name": "IoU"}, {"score_range": (-1, 1)}, {"score": None}])
def test_another_score_is_another_campaign(other, tmp_path):
    unsilent.pvf(segmentation(), trials=2, store=tmp_path / "s.sqlite")
    unsilent.pvf(segmentation(), trials=3, store=tmp_path / "s.sqlite")
    with pytest.raises(StoreError):
        unsilent.pvf(segmentation(**other), trials=3, store=tmp_path / "s.sqlite")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"score": lambda output, batch: output.mean()}, "expected a number for each of the 4 samples"),
        ({"score_range": (0.9, 1)}, r"expected 0.9 to 1: give score_range=\(lowest, highest\)"),
        ({"score_range": 3}, "score_range is 3; expected two numbers"),
    ],
)
def test_scores_that_do_not_fit_are_refused(more, why, tmp_path):
    with pytest.raises(UnsilentError, match=why):
        unsilent.pvf(segmentation(**more), trials=2)


OWN = """

class Scored:
    name, components, info, score_name = "own", {}, {}, "closeness"
    judge = unsilent.judge("top1")

    def __init__(self):
        self.made = Tiny().eval()

    def model(self):
        return self.made

    def batches(self):
        return batches()

    def run(self, model, batch):
        return model(batch)

    def score(self, output, batch):
        return output.softmax(1).amax(1)


def scored():
    torch.manual_seed(3)
    return Scored()
"""


def test_a_workload_class_of_your_own(tiny, tmp_path):
    Path("tiny.py").write_text(Path("tiny.py").read_text() + OWN)
    done = in_process("pvf", "tiny.py:scored", "--trials", 10, "--store", "s.sqlite", "--json", "-o", "page.html")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["score_name"] == "closeness"
    assert all(set(row["score_lost"]) == {"estimate", "low", "high"} for row in shown["results"])
    assert "closeness lost" in Path("page.html").read_text()
    exported = in_process("export", "s.sqlite", "-o", "rows.csv")
    assert exported.returncode == 0, exported.stderr
    assert "score_lost" in Path("rows.csv").read_text().splitlines()[0]


def test_a_subclass_may_define_its_score():
    class Fixed(unsilent.Workload):
        score_name = "fixed"

        def score(self, output, batch):
            return output.new_ones(len(output))

    score = score_of(Fixed(nn.Linear(2, 2).eval(), [torch.zeros(3, 2)]))
    assert score.name == "fixed"
    assert score.of_golden(torch.zeros(3, 2), None, 3).tolist() == [1.0] * 3


def test_perplexity_ratio():
    golden, faulty = np.array([-1.5, -2.0, -1.0]), np.array([-1.5, -3.0, -1.25])
    lost = float((golden - faulty).mean())
    perplexities = np.exp(-faulty) / np.exp(-golden)
    assert LostScore(lost, 0.0, 1.0).perplexity_ratio.estimate == pytest.approx(perplexities.prod() ** (1 / 3))


def text_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).eval()
    return unsilent.Workload(
        model, [torch.randint(9, (5, 6))], judge="next-token", name="text", score_name=LOG_LIKELIHOOD,
        score=log_likelihood, score_range=(-10.0, 0.0),
    )  # fmt: skip


def log_likelihood(output, tokens):
    each = [[torch.log_softmax(s[i], -1)[t[i + 1]] for i in range(5)] for s, t in zip(output, tokens, strict=True)]
    return torch.tensor(each).mean(1)


def test_reports_of_log_likelihoods_show_perplexity(tmp_path):
    result = unsilent.pvf(text_model(), trials=20, fault="bitflip:bits=30", store=tmp_path / "s.sqlite")
    report = result.report()
    numbers = {name: value for name, value, _ in report.numbers}
    assert "log-likelihood per token lost per fault" in numbers
    assert "perplexity ratio per fault" in numbers
    result.write_html(tmp_path / "page.html")
    assert "perplexity ratio" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_the_language_model_scores_characters():
    from torch.nn.functional import cross_entropy

    workload = unsilent.load("chargpt")
    windows = workload.batches()[0]
    with torch.no_grad():
        output = workload.model()(windows)
    score = score_of(workload)
    assert (score.name, score.lowest) == (LOG_LIKELIHOOD, pytest.approx(-math.log(97)))
    found = score.of_golden(output, windows, len(windows))
    for row, own in zip(range(len(windows)), found, strict=True):
        assert own == pytest.approx(-float(cross_entropy(output[row, :-1], windows[row, 1:])), rel=1e-5)


GOLDEN = GoldenScores("mIoU", 0.0, 1.0, mean=0.72, least=0.7, most=0.75)  # a sample loses from -0.3 to 0.75


def test_impossible_losses_are_damaged_rows(tmp_path):
    unsilent.pvf(segmentation(), trials=2, store=tmp_path / "s.sqlite")
    baseline, rows = stored(tmp_path / "s.sqlite")
    changed = replace(baseline, scores=GOLDEN)
    for lost in (-0.3, 0.0, 0.75):
        check_row(replace(rows[0], score_lost=lost), changed)
    for lost in (-0.31, 0.76, math.nan, math.inf):
        with pytest.raises(DamagedRecordError):
            check_row(replace(rows[0], score_lost=lost), changed)
    with pytest.raises(DamagedRecordError):
        check_row(replace(rows[0], score_lost=0.1), replace(baseline, scores=None))


@pytest.mark.parametrize(
    "wrong",
    [{"lowest": 1.0}, {"highest": math.inf}, {"mean": math.nan}, {"least": -0.1}, {"most": 1.1}, {"least": 0.8}],
)
def test_impossible_scores_are_a_damaged_description(wrong, tmp_path):
    unsilent.pvf(segmentation(), trials=2, store=tmp_path / "s.sqlite")
    baseline, _ = stored(tmp_path / "s.sqlite")
    check_pvf_baseline(replace(baseline, scores=GOLDEN))
    with pytest.raises(DamagedRecordError):
        check_pvf_baseline(replace(baseline, scores=replace(GOLDEN, **wrong)))


@pytest.mark.slow
def test_a_replayed_trial_loses_the_same(tiny, tmp_path):
    Path("tiny.py").write_text(Path("tiny.py").read_text() + OWN)
    done = in_process("pvf", "tiny.py:scored", "--trials", 4, "--store", "s.sqlite", "--quiet")
    assert done.returncode == 0, done.stderr
    _, rows = stored("s.sqlite")
    assert any(row.score_lost for row in rows)
    for trial in (row.trial for row in rows if row.score_lost):
        again = in_process(
            "replay", "s.sqlite", f"{trial.target}/x{trial.flips}/{trial.k}", "--json", "--workload", "tiny.py:scored"
        )
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["same"]
