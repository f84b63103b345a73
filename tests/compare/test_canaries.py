"""Canaries: stored inputs show a model that changed, and files of others are refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.compare.canaries import check_canaries, load_canaries, make_canaries, parse_comparison
from unsilent.compare.canary_choice import BOUNDARY, CHOICES, CONSTRUCTED, RANDOM, margins
from unsilent.workloads.base import Workload


class Net(nn.Module):
    def __init__(self, width=8, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.first(x).relu())


def batches(seed=1, sizes=(30, 20)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


def workload(model=None, **more):
    return Workload(model or Net().eval(), batches(), name="net", **more)


def check(canaries, model, comparison="bits"):
    return check_canaries(canaries, model, comparison, model=model)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("canaries") / "c"
    make_canaries(workload(), 6).save(path)
    return path


# -- the choice of inputs ------------------------------------------------------------------------------------------------


def test_boundary_inputs_are_those_with_the_smallest_margins():
    made = make_canaries(workload(), 6, BOUNDARY)
    model = Net().eval()
    every = margins(workload().judge, model(torch.cat(batches()))).sort().values
    chosen = torch.cat([margins(workload().judge, model(part.batch)) for part in made.parts]).sort().values
    torch.testing.assert_close(chosen, every[:6])
    assert made.count == 6


def test_random_inputs_follow_the_seed_and_are_distinct_samples():
    one, same, other = (make_canaries(workload(), 50, RANDOM, seed=seed) for seed in (3, 3, 4))
    rows = [torch.cat([part.batch for part in made.parts]) for made in (one, same, other)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert len(rows[0].unique(dim=0)) == 50


def test_constructed_inputs_are_nearer_to_another_answer_within_the_range_of_the_data():
    near, built = (make_canaries(workload(), 8, choice) for choice in (BOUNDARY, CONSTRUCTED))
    model, rule = Net().eval().requires_grad_(False), workload().judge
    gaps = [float(torch.cat([margins(rule, model(p.batch)) for p in c.parts]).median()) for c in (near, built)]
    assert gaps[1] < gaps[0] / 3
    inputs = torch.cat([part.batch for part in built.parts])
    data = torch.cat(batches())
    assert data.min() <= inputs.min()
    assert inputs.max() <= data.max()


def test_a_threshold_has_a_margin_and_a_sequence_has_none():
    assert margins(unsilent.outcomes.judge("threshold:at=0.25"), torch.tensor([0.5, 0.25])).tolist() == [0.25, 0.0]
    with pytest.raises(UsageError, match=r"exact-sequence does not say how far .* give --choice random"):
        make_canaries(workload(judge="exact-sequence"), 2)
    assert make_canaries(workload(judge="exact-sequence"), 2, RANDOM).count == 2


# -- what a check says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("comparison", ["bits", "labels", 0.0])
def test_the_same_model_answers_as_stored(choice, comparison, tmp_path):
    make_canaries(workload(), 5, choice).save(tmp_path / "c")
    result = check(load_canaries(tmp_path / "c"), Net().eval(), comparison)
    assert (result.exit_code, result.changed, len(result.rows)) == (0, 0, 5)
    assert result.weights_are_the_same is True
    assert "is not ruled out" in result.report().headline


def test_a_corrupted_model_is_noticed_with_each_canary_and_by_how_much(file):
    model = Net().eval()
    with torch.no_grad():
        model.last.bias[0] += 0.5
    result = check(load_canaries(file), model)
    assert (result.exit_code, result.changed, result.weights_are_the_same) == (1, 6, False)
    assert all(row.largest == pytest.approx(0.5) for row in result.rows)
    row = result.report().estimates.rows[0].cells
    assert row[:2] == (1, "changed")


def test_a_change_below_the_tolerance_or_without_another_label_is_counted_by_bits_alone(file):
    model = Net().eval()
    with torch.no_grad():
        model.last.bias += torch.tensor([1e-3, 1e-3, 1e-3])
    canaries = load_canaries(file)
    results = {comparison: check(canaries, model, comparison) for comparison in ("bits", "labels", 0.5, 1e-6)}
    assert {name: one.changed for name, one in results.items()} == {"bits": 6, "labels": 0, 0.5: 0, 1e-6: 6}
    findings = results["labels"].report().findings
    assert findings[0].endswith("that the canaries were made with, but no answer counts as changed, compared by label.")
    assert findings[1].startswith("6 of 6 answers have other bits, by at most")
    assert findings[1].endswith("of the largest magnitude in the same tensor")


def test_weights_that_differ_are_said_to_change_no_bit_only_where_they_do_not(file):
    model = Net().eval()
    same = check_canaries(
        replace(load_canaries(file), weights="of a weight that no answer depends on"), model, model=model
    )
    assert same.report().findings == (
        "The weights differ from those that the canaries were made with, but every answer has the stored bits.",
    )


def test_no_bound_is_stated_for_an_answer_of_zeros_that_changed():
    zeros = workload(judge="threshold", run=lambda model, batch: 0 * model(batch)[:, :1])
    canaries = make_canaries(zeros, 4, RANDOM)
    result = check_canaries(canaries, lambda batch: torch.full((len(batch), 1), 0.25), "labels")
    assert result.report().findings == ("4 of 4 answers have other bits",)


class TwoOutputs(nn.Module):
    """Class scores, and boxes of a thousand times their magnitude."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.boxes = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        return self.scores(x), 1000 * self.boxes(x)


def test_a_difference_is_measured_against_the_magnitude_of_its_own_tensor():
    canaries, model = make_canaries(workload(TwoOutputs().eval()), 6), TwoOutputs().eval()
    with torch.no_grad():
        model.scores.weight.neg_()
        model.scores.bias.neg_()
    result = check(canaries, model, 0.01)
    assert result.changed == 6
    assert [row.relative for row in result.rows] == pytest.approx(6 * [2.0])


def test_values_that_are_not_finite_are_a_change_by_any_comparison(file):
    model = Net().eval()
    with torch.no_grad():
        model.last.bias[:] = torch.nan
    assert [check(load_canaries(file), model, how).changed for how in ("bits", "labels", 1e9)] == [6, 6, 6]


def test_a_device_that_computes_otherwise_is_told_from_changed_weights(file):
    model = Net().eval()
    result = check_canaries(load_canaries(file), lambda batch: model(batch) * 1.01, model=model)
    assert result.exit_code == 1
    assert "The weights have the stored bits" in result.report().findings[0]


def test_outputs_alone_can_be_checked(file):
    result = check_canaries(load_canaries(file), Net().eval())
    assert (result.exit_code, result.weights_are_the_same) == (0, None)


def test_the_number_of_threads_is_as_before(file):
    torch.set_num_threads(2)
    try:
        check(load_canaries(file), Net().eval())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# -- bad input -----------------------------------------------------------------------------------------------------------


def test_more_canaries_than_samples_are_refused():
    with pytest.raises(UsageError, match=r"^-k \(--count\) is 51, but mine has 50 samples; give at most that many"):
        make_canaries(workload(), 51, name="mine")
    with pytest.raises(UsageError, match=r"^--seed is -1; expected 0 or more$"):
        make_canaries(workload(), 2, RANDOM, seed=-1)
    with pytest.raises(UsageError, match=r"^-k \(--count\) is 0; expected 1 or more$"):
        make_canaries(workload(), 0)
    with pytest.raises(UsageError, match=r"unknown --choice 'boundry'; did you mean 'boundary'\?"):
        make_canaries(workload(), 1, "boundry")


def test_a_model_that_is_not_deterministic_is_refused():
    def run(model, batch):
        return model(batch + 0.1 * torch.randn(batch.shape))

    with pytest.raises(UsageError, match="needs a deterministic model"):
        make_canaries(workload(run=run), 4)


def test_an_answer_that_is_not_finite_is_refused():
    with pytest.raises(UsageError, match="answers a canary with NaN or infinity"):
        make_canaries(workload(run=lambda model, batch: model(batch) / 0), 4, RANDOM)


def test_inputs_that_cannot_be_moved_are_not_constructed():
    whole = Workload(
        nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)).eval(), [torch.arange(18).view(9, 2) % 9]
    )
    with pytest.raises(UsageError, match="give --choice boundary"):
        make_canaries(whole, 2, CONSTRUCTED)


def test_another_architecture_is_refused_and_other_weights_are_not(file):
    canaries = load_canaries(file)
    with pytest.raises(
        UsageError, match=r"another architecture, which has 'first.weight' as \[8, 4\], expected \[9, 4\]"
    ):
        canaries.check_architecture(Net(9))
    canaries.check_architecture(Net(seed=5))
    with pytest.raises(UsageError, match="answers with shapes"):
        check_canaries(canaries, nn.Linear(4, 5), "labels")
    with pytest.raises(UsageError, match="raised RuntimeError: .* for the inputs of the canaries"):
        check_canaries(canaries, nn.Linear(7, 3), "labels")


def test_bits_are_not_compared_where_they_may_differ_without_a_fault(file):
    model = Net().eval().double()
    with pytest.raises(UsageError, match=r"a model in float32, this is float64: bits may differ .* --compare labels"):
        check_canaries(load_canaries(file), lambda batch: model(batch.double()), model=model)
    assert (
        check_canaries(load_canaries(file), lambda batch: model(batch.double()), "labels", model=model).exit_code == 0
    )


def test_bits_of_a_compiled_model_are_not_compared_with_those_of_the_model_itself(file):
    model = Net().eval()
    model._compiled_call_impl = model.forward  # as Module.compile leaves it
    with pytest.raises(UsageError, match=r"this is .*, torch.compile: bits may differ .* --compare labels"):
        check_canaries(load_canaries(file), Net().eval(), model=model)


@pytest.mark.parametrize("text", ["bit", "-1", "nan", "inf", ""])
def test_a_comparison_is_bits_labels_or_a_tolerance(text):
    with pytest.raises(UsageError, match="expected bits, labels or a tolerance"):
        parse_comparison(text)
    assert (parse_comparison("bits"), parse_comparison("1e-3")) == ("bits", 1e-3)


def refusal(path):
    with pytest.raises(UsageError) as error:
        load_canaries(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_damaged_file_is_refused(file, tmp_path):
    content, path, refused = file.read_bytes(), tmp_path / "c", 0
    for end in (0, 8, len(content) // 2, -1):
        path.write_bytes(content[:end])
        refusal(path)
    for bit in np.random.default_rng(0).choice(8 * len(content), 300, replace=False).tolist():
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            load_canaries(path).save(tmp_path / "again")
        except UsageError:
            refused += 1
        else:
            assert (tmp_path / "again").read_bytes() == content
    assert refused > 250


def test_a_file_of_another_kind_is_refused_and_a_pickle_is_not_executed(file, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (tmp_path / "executed").touch, ()

    path = tmp_path / "c"
    path.write_bytes(pickle.dumps(Hostile()))
    assert "is not a file of canaries" in refusal(path)
    assert not (tmp_path / "executed").exists()
    save_file({"a": torch.zeros(2)}, str(path))
    assert "is not a file of canaries" in refusal(path)
    save_file({}, str(path), metadata={"canaries": json.dumps({"format": "unsilent/canaries/0"})})
    assert "make the canaries again" in refusal(path)
    assert "cannot read" in refusal(tmp_path / "none")
    assert "Is a directory" in refusal(tmp_path)


def test_labels_are_read_from_the_logits_of_an_answer_with_several_tensors(tmp_path):
    def run(model, batch):
        scores = model(batch)
        return {"hidden": scores.flip(1), "logits": scores}

    make_canaries(workload(run=run), 6).save(tmp_path / "c")
    canaries, model = load_canaries(tmp_path / "c"), Net().eval()
    assert check_canaries(canaries, lambda batch: run(model, batch), "labels").changed == 0

    def hidden_alone(batch):
        return {"hidden": model(batch), "logits": model(batch)}

    assert check_canaries(canaries, hidden_alone, "labels").changed == 0
    assert check_canaries(canaries, hidden_alone, "bits").changed == 6
