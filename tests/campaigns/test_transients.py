"""Campaigns on what a run computes: the law, the batch, the store, and truth by exhaustion."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from conftest import in_process
from oracles.pvf_oracle import incorrect
from sites.subjects import generate, gpt, seeded
from unsilent.basics.errors import StoreError
from unsilent.campaigns import TrialId
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.outcomes import Outcome
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.kind import PvfStore, check_codes
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).relu())


SIZES = (5, 2)


def workload(**more):
    data = [torch.randn(n, 3, generator=seeded(n)) for n in SIZES]
    return unsilent.Workload(Net(), data, name="net", **more)


def runner(**spec):
    return TrialRunner(PvfSpec("net", at=("op:*",), **spec), workload())


def faults_of(row):
    return json.loads(row.faults)


def row(result, target, level="component"):
    (found,) = [r for r in result.rows if (r.target, r.level) == (target, level)]
    return found


def truth():
    """Every single-bit flip of every output of an operation: P(batch wrong), by operation; with nothing of the package."""
    work = workload()
    model, found = work.model(), {}
    with torch.no_grad():
        for batch in work.batches():
            golden = model(batch).numpy()
            for name in ("first", "relu", "last"):
                values = {"first": model.first(batch)}
                values["relu"] = values["first"].relu()
                values["last"] = model.last(values["relu"])
                words = values[name].numpy().reshape(-1).view(np.uint32)
                for element in range(words.size):
                    for bit in range(32):
                        words[element] ^= np.uint32(1 << bit)
                        rest = {"first": lambda v: model.last(v.relu()), "relu": model.last, "last": lambda v: v}[name]
                        wrong = incorrect(golden, rest(values[name]).numpy()).any()
                        words[element] ^= np.uint32(1 << bit)
                        found.setdefault(name, []).append(bool(wrong))
    return {name: float(np.mean(wrong)) for name, wrong in found.items()}


def test_estimates_are_near_the_truth_of_every_flip():
    exact = truth()
    result = unsilent.pvf(workload(), at="op:*", trials=2000, seed=1)
    sizes = {"first": 4, "relu": 4, "last": 3}
    assert result.unit == "batch"
    for target, name in (("first", "first"), ("last", "last"), ("other", "relu")):
        got = row(result, target)
        assert got.units == got.n == 2000
        assert abs(got.estimate - exact[name]) < 4 * (got.high - got.low) / 3.92, name
        assert got.elements == sizes[name] * sum(SIZES)
    whole = sum(exact[n] * size for n, size in sizes.items()) / sum(sizes.values())
    got = row(result, "model", "model")
    assert abs(got.estimate - whole) < 4 * (got.high - got.low) / 3.92


def test_the_law_is_uniform_over_elements_of_all_batches():
    run = runner()
    steps, elements = Counter(), Counter()
    for k in range(1400):
        (fault,) = run.draw(TrialId("first", 1, k))
        steps[fault.step] += 1
        elements[fault.step, int(fault.elements[0])] += 1
        assert fault.site == "op:first#addmm.0/fwd/out"
        assert fault.shape == (SIZES[fault.step], 4)
    # 5 of 7 samples are in batch 0; 50 is about three standard deviations.
    assert abs(steps[0] - 1000) < 50
    assert len(elements) == 28
    assert min(elements.values()) > 20


def test_the_law_per_tensor_weighs_batches_alike():
    run = runner(law="per-tensor")
    steps = Counter(run.draw(TrialId("first", 1, k))[0].step for k in range(600))
    assert abs(steps[0] - 300) < 40


def test_several_flips_fall_into_one_evaluation():
    spec = PvfSpec("net", at=("op:*", "input:*"), per="component", flips=(6,))
    run = TrialRunner(spec, workload(components={"all": "*"}))
    kinds = set()
    for k in range(15):
        faults = run.draw(TrialId("all", 6, k))
        assert len({f.step for f in faults}) == 1
        assert sum(len(f.bit_positions()) for f in faults) == 6
        row = run.run(TrialId("all", 6, k))
        codes = np.frombuffer(row.outcome_codes, np.uint8)
        assert (codes == Outcome.SPARED).sum() == SIZES[1 - faults[0].step]
        kinds |= {f.site for f in faults}
    assert kinds == {"op:first#addmm.0/fwd/out", "op:(root)#relu.0/fwd/out", "op:last#addmm.0/fwd/out"}
    assert {t.name for t in run.targets.values()} == {"all", "input"}


def test_a_rate_that_draws_nothing_masks_one_batch():
    run = runner(fault="bitflip:rate=0", flips=(None,))
    row = run.run(TrialId("first", None, 0))
    codes = np.frombuffer(row.outcome_codes, np.uint8)
    assert sorted({Outcome(c).name for c in codes}) == ["MASKED", "SPARED"]
    assert row.severity == 0
    assert row.faults == "[]"


def test_a_lost_worker_counts_for_the_batch_that_was_corrupted():
    run = runner()
    row = run.lost_trial_row(TrialId("last", 1, 3), Outcome.HANG, 1.0, "worker: hang")
    step = faults_of(row)[0]["step"]
    codes = np.frombuffer(row.outcome_codes, np.uint8)
    assert (codes == Outcome.HANG).sum() == SIZES[step]
    assert (codes == Outcome.SPARED).sum() == SIZES[1 - step]
    assert row.incorrect_batches == 1


@pytest.mark.parametrize("per", ["component", "layer", "tensor", "bit"])
def test_every_level_has_its_rows(per):
    result = unsilent.pvf(workload(), at=["op:*", "input:*"], per=per, trials=20)
    names = {r.target for r in result.rows if r.level == per}
    expected = {
        "component": {"first", "last", "other", "input"},
        "layer": {"first", "last", "(root)", "input:0"},
        "tensor": {"first#addmm.0", "last#addmm.0", "(root)#relu.0", "input:0"},
        "bit": {f"{layer}/bit{b}" for layer in ("first", "last", "(root)", "input:0") for b in range(32)},
    }
    assert names == expected[per]
    (heat,) = result.heat_maps
    assert heat.layers == ("input:0", "first", "(root)", "last")
    assert heat.total_trials == result.trials_done
    if per == "component":
        assert sum(r.n for r in result.rows if r.level == "layer") == result.trials_done


def test_units_batch_and_sample_count_the_batch_that_was_corrupted(tmp_path):
    unsilent.pvf(workload(), at="op:*", trials=300, store=tmp_path / "s.sqlite")
    with PvfStore(tmp_path / "s.sqlite") as store:
        rows = [r for r in store.rows() if r.trial.target == "last"]
        by_batch, by_sample = (analyse(store, PvfEstimator(unit=unit)) for unit in ("batch", "sample"))
        assert analyse(store, PvfEstimator()).rows == by_batch.rows
        assert "--unit" not in by_batch.command
    units = [SIZES[faults_of(r)[0]["step"]] for r in rows]
    wrong = [sum(Outcome(c).incorrect for c in r.outcome_codes) for r in rows]
    sample, batch = row(by_sample, "last"), row(by_batch, "last")
    assert (sample.units, sample.sdc + sample.due) == (sum(units), sum(wrong))
    assert sample.estimate == pytest.approx(np.mean(np.divide(wrong, units)))  # a batch is drawn by its size already
    assert (batch.units, batch.sdc + batch.due) == (300, sum(w > 0 for w in wrong))
    assert sample.masked + sample.benign + sample.sdc + sample.due == sample.units
    layer = row(by_sample, "last", "layer")
    assert (layer.units, layer.estimate) == (sample.units, sample.estimate)


def test_a_stored_campaign_goes_on_and_holds_what_a_new_one_would(tmp_path):
    first = tmp_path / "a.sqlite"
    unsilent.pvf(workload(), at="op:*", trials=10, store=first)
    unsilent.pvf(workload(), at="op:*", trials=25, store=first)
    unsilent.pvf(workload(), at="op:*", trials=25, store=tmp_path / "b.sqlite")
    with PvfStore(first) as a, PvfStore(tmp_path / "b.sqlite") as b:
        assert [r.reproducible_values() for r in a.rows()] == [r.reproducible_values() for r in b.rows()]
    with pytest.raises(StoreError, match="another campaign"):
        unsilent.pvf(workload(), at="op:first", trials=5, store=first)


def test_a_generating_model_is_corrupted_everywhere():
    ids = [torch.randint(0, 39, (2, 4), generator=seeded(n)) for n in range(2)]
    work = unsilent.Workload(gpt(), ids, run=generate, judge="exact-sequence", name="gpt")
    result = unsilent.pvf(work, at=["op:*", "kv:*", "input:*"], trials=25, fault="bitflip:bits=exponent")
    assert {r.target for r in result.rows if r.level == "component"} == {"transformer", "lm_head", "kv", "other"}
    assert any("cannot corrupt" in note and "input:0" in note for note in result.notes)
    assert not any("No fault changed" in note for note in result.notes)


def test_codes_of_a_store_are_believed_only_where_they_can_be():
    for codes in ([7, 7, 0, 2], [7, 7, 0, 7], [0, 0, 1, 2]):
        check_codes(bytes(codes), (2, 2))
    for codes in ([8, 0, 0, 0], [7, 7, 7, 7], [7, 0, 0, 0], [0, 0, 7, 1], [0, 0, 0]):
        with pytest.raises(DamagedRecordError):
            check_codes(bytes(codes), (2, 2))


def test_the_command_line_from_campaign_to_replay(tiny):
    words = ("pvf", f"{tiny}:make", "--at", "op:*", "--at", "input:*", "--trials", 30, "--flips", "1,3")
    done = in_process(*words, "--store", "s.sqlite", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["measure"], told["spec"]["unit"]) == ("P(incorrect)", "batch")
    assert "output of a batch" in told["headline"] or "no batch" in told["headline"]
    assert {r["unit"] for r in told["results"]} == {"batch"}
    again = in_process(*shlex.split(told["command"])[1:], "--store", "t.sqlite", "--quiet", "--jobs", 2)
    assert again.returncode == 0, again.stderr
    lines = [in_process("export", name, "--canonical").stdout for name in ("s.sqlite", "t.sqlite")]
    assert lines[0] == lines[1]
    assert lines[0].count('"spared":7') == 5 * 2 * 30
    replayed = in_process("replay", "s.sqlite", "last/x3/4", "--workload", f"{tiny}:make")
    assert replayed.returncode == 0, replayed.stderr
    assert "ended as stored" in replayed.stdout
    assert "spared" in replayed.stdout
    refused = in_process("report", "s.sqlite", "--fit-per-bit", "1e-4")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        "--fit-per-bit is a fault rate of parameters in memory, but the targets are values of a run" in refused.stderr
    )
    report = in_process("report", "s.sqlite", "--plain", "--unit", "sample")
    assert report.returncode == 0, report.stderr
    assert "P(incorrect)" in report.stdout
    assert "PVF" not in report.stdout
    page = Path("s.html").read_text()
    shown = page[: page.index('id="figure-data"')]
    assert "P(incorrect)" in shown
    assert "FIT" not in shown
    assert "parameter vulnerability" not in shown.lower()
    assert "of the batch that was corrupted" in shown


@pytest.mark.parametrize(
    ("at", "found"),
    [
        (("op:nowhere",), "unknown module with operations 'nowhere'"),
        (("kv:*",), "no key/value cache to corrupt"),
        (("op:*", "last.*"), "run two campaigns"),
        (("op:last/fwd/inside",), "unknown operand of an operation 'inside'"),
    ],
)
def test_what_cannot_be_corrupted_is_one_line(tiny, at, found):
    asked = [word for glob in at for word in ("--at", glob)]
    done = in_process("pvf", f"{tiny}:make", *asked, "--trials", 3, "--quiet", "--store", "s.sqlite")
    assert done.returncode == 2
    assert found in done.stderr
    assert done.stderr.count("\n") == 1
