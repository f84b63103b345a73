"""`unsilent.compare_models`: models of all kinds that should agree."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)).eval()


def inputs(batches: int = 3, n: int = 16) -> list[torch.Tensor]:
    return [torch.randn(n, 12, generator=torch.Generator().manual_seed(i)) for i in range(batches)]


def swapped(model: nn.Module) -> nn.Module:
    result = copy.deepcopy(model)
    with torch.no_grad():
        result[2].weight.copy_(model[2].weight.roll(1, 0))
        result[2].bias.copy_(model[2].bias.roll(1, 0))
    return result


def changed_by_hand(original, deployed) -> int:
    with torch.no_grad():
        return sum(int((original(x).argmax(1) != deployed(x).argmax(1)).sum()) for x in inputs())


def test_a_model_agrees_with_itself():
    found = unsilent.compare_models(network(), network(), inputs())
    assert (found.n, found.changed.estimate, found.measures["identical"].estimate) == (48, 0, 1)
    assert (
        found.report().headline
        == "The answer changed for none of 48 inputs; with 95 % confidence, it changes for at most 7.4 % of such inputs"
    )
    assert found.worst_inputs == ()


def test_swapped_class_outputs_are_seen():
    found = unsilent.compare_models(network(), swapped(network()), inputs())
    assert found.records.changed.sum() == changed_by_hand(network(), swapped(network())) == 48


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model():
    """Real int8 kernels, whose operations are others than the original's."""
    quantised = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, torch.qint8)
    found = unsilent.compare_models(network(), quantised, inputs())
    assert found.records.changed.sum() == changed_by_hand(network(), quantised)
    assert found.measures["identical"].estimate == 0
    assert 0 < found.records.kl.max() < 0.1


def test_a_compiled_model():
    compiled = torch.compile(network(), backend="eager")
    assert unsilent.compare_models(network(), compiled, inputs()).changed.estimate == 0
    found = unsilent.compare_models(network(), torch.compile(swapped(network()), backend="eager"), inputs())
    assert found.records.changed.sum() == changed_by_hand(network(), swapped(network()))


@pytest.mark.gpu
def test_a_model_on_another_device():
    found = unsilent.compare_models(network(), network().cuda(), inputs())
    assert found.changed.estimate == 0
    assert unsilent.compare_models(network(), swapped(network()).cuda(), inputs()).changed.estimate == 1


class Session:
    """Has the methods of an ONNX Runtime session."""

    class Input:
        name = "x"

    def __init__(self, model):
        self.model = model

    def get_inputs(self):
        return [self.Input()]

    def run(self, names, given):
        assert names is None
        return [self.model(torch.from_numpy(given["x"])).numpy()]


def test_functions_and_sessions_have_outputs_only():
    own = network()
    for deployed in (Session(own), own.forward, lambda x: own(x).numpy()):
        found = unsilent.compare_models(own, deployed, inputs())
        assert found.layers is None
        assert found.changed.estimate == 0
    of_two = unsilent.compare_models(Session(own), Session(swapped(own)), [{"x": x} for x in inputs()])
    assert of_two.records.changed.sum() == changed_by_hand(own, swapped(own))


def test_a_real_session():
    pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    import io

    file = io.BytesIO()
    torch.onnx.export(network(), (inputs()[0],), file)
    found = unsilent.compare_models(network(), ort.InferenceSession(file.getvalue()), inputs())
    assert found.records.changed.sum() == 0


def test_labels_split_changes_into_lost_and_gained_ones():
    labels = [network()(x).argmax(1) for x in inputs()]
    found = unsilent.compare_models(network(), swapped(network()), inputs(), labels=labels)
    assert found.lost == found.changed
    assert found.gained.estimate == 0
    assert found.report().headline == (
        "Of 48 inputs, the deployed model answers 48 wrongly that the original answers rightly (100 % [92, 100]), "
        "and 0 rightly that the original answers wrongly"
    )
    reverse = unsilent.compare_models(swapped(network()), network(), inputs(), labels=labels)
    assert reverse.gained == found.lost


def test_a_workload_gives_labels_judge_and_inputs(tiny):
    workload = unsilent.Workload(
        network(), [(x, network()(x).argmax(1)) for x in inputs()], labelled=True, judge="topk:k=2", name="own"
    )
    found = unsilent.compare_models(workload, swapped(network()))
    assert found.judge == "topk:k=2"
    assert found.measures["right, original"].estimate == 1
    assert found.lost.estimate > 0.3
    assert unsilent.compare_models(workload, workload).changed.estimate == 0


def test_the_page_shows_the_worst_inputs_as_pictures_and_as_text(tmp_path):
    images = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).eval()
    broken = copy.deepcopy(images)
    broken[1].weight.data.neg_()
    found = unsilent.compare_models(images, broken, [torch.randn(9, 3, 4, 4)])
    page = found.write_html(tmp_path / "p.html").read_text()
    assert len(found.worst_inputs) == 8
    assert page.count('"type":"image"') + page.count('"type": "image"') == 8
    text = unsilent.compare_models(network(), swapped(network()), inputs()).write_html(tmp_path / "t.html").read_text()
    shown = [f"Input {number}" in text for number in range(48)]
    assert sum(shown) >= 8
    workload = unsilent.Workload(network(), inputs(), show=lambda x: f"begins with {float(x[0, 0]):.2f}")
    found = unsilent.compare_models(workload, swapped(network()))
    number, text = found.worst_inputs[0]
    assert text == f"begins with {float(torch.cat(inputs())[number, 0]):.2f}"
    assert text in found.write_html(tmp_path / "s.html").read_text()


class Dropping(nn.Module):
    """Is not deterministic in eval mode either."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, True)


def nan_for_one(x):
    y = network()(x).detach().clone()
    y[3, 1] = torch.nan
    return y


@pytest.mark.parametrize(
    ("deployed", "more", "message"),
    [
        (nn.Linear(12, 4), {}, r"a tensor \[16, 5\] and the deployed model with \[16, 4\]"),
        (nn.Linear(11, 5), {}, "the deployed model cannot run on batch 0: mat1 and mat2 shapes"),
        (nan_for_one, {}, "the deployed model answers batch 0 with NaN or infinity"),
        (Dropping(), {}, "the deployed model answers batch 0 differently when it is run again"),
        (nn.Sequential(nn.Linear(12, 5), nn.Dropout()).train(), {}, r"is in training mode; call model.eval\(\) first"),
        (3, {}, "the deployed model is 3; expected a torch.nn.Module, an ONNX Runtime session or a function"),
        (network(), {"data": []}, "there are no inputs"),
        (network(), {"data": None}, "no inputs were given; expected data="),
        (network(), {"labels": [torch.zeros(16)]}, "labels of 1 batches; expected those of each of the 3"),
        (network(), {"judge": "top2"}, "unknown judge 'top2'"),
        (network(), {"confidence": 2}, "confidence= is 2"),
        (network(), {"confidence": "x"}, "confidence= is 'x'; expected a value from 0.5 to below 1"),
        (network(), {"data": inputs()[0]}, r"data= is a Tensor; expected .*: put a single batch into a list"),
        (network(), {"data": {"x": inputs()[0]}}, "data= is a dict; expected an iterable of batches"),
        (network(), {"data": inputs()[0].numpy()}, "data= is a ndarray; expected an iterable of batches"),
        (network(), {"data": 3}, "data= is a int; expected an iterable of batches"),
        (network(), {"labels": 3}, "labels= is a int; expected an iterable of the labels of each batch"),
        (network(), {"labels": "abc"}, "labels= is a str; expected an iterable of the labels"),
        (lambda x: {"a": x, "c": x}, {"original": lambda x: {"a": x, "b": x}},
         "answers with 'a', 'b' and the deployed model with 'a', 'c'"),
    ],
)  # fmt: skip
def test_bad_input_is_said_in_one_line(deployed, more, message):
    with pytest.raises(UsageError, match=message) as raised:
        unsilent.compare_models(**{"original": network(), "deployed": deployed, "data": inputs(), **more})
    assert "\n" not in str(raised.value)


def test_a_limit_is_of_the_upper_limit(tmp_path):
    from unsilent.compare.comparing import compare_on_batches
    from unsilent.compare.models import compared_model

    models = [compared_model(network(), name) for name in ("a", "b")]
    few = compare_on_batches(*models, inputs(1), most_changed=0.1)
    many = compare_on_batches(*models, inputs(4), most_changed=0.1)
    assert (few.changed.estimate, few.exit_code, many.exit_code) == (0, 1, 0)
    assert "21 %: more than is allowed, 10 %" in " ".join(few.report().findings)


def test_results_of_all_measures_have_limits_that_hold_them():
    found = unsilent.compare_models(network(), network(1), inputs(), labels=[torch.zeros(16)] * 3)
    for interval in found.measures.values():
        assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
        assert interval.n == 48
    rows = [row.cells for row in found.report().estimates.rows]
    assert len(rows) > 10
    assert np.isfinite(found.records.kl).all()


def test_scores_are_read_alike_in_all_batches():
    """The first batch alone would be taken for probabilities."""
    alone = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    batches = [alone, torch.tensor([[1.0, -2.0], [3.0, 0.5]])]
    found = unsilent.compare_models(lambda x: x, lambda x: 0.75 * x + 0.25 * x.flip(1), [alone])
    assert found.records.kl[0] > 0
    both = unsilent.compare_models(lambda x: x, lambda x: 0.75 * x + 0.25 * x.flip(1), batches)
    p, q = (torch.log_softmax(y.double(), 1) for y in (alone, 0.75 * alone + 0.25 * alone.flip(1)))
    np.testing.assert_allclose(both.records.kl[:2], (p.exp() * (p - q)).sum(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "judged"),
    [
        (lambda y: {"loss": y.sum(1), "logits": y}, "logits, output 2 of 2"),
        (lambda y: {"scores": y, "features": 3 * y}, "scores, the first of 2 outputs"),
        (lambda y: (y, 3 * y, y), "the first of 3 outputs"),
        (lambda y: (y.argmax(1), y), "output 2 of 2"),
        (lambda y: {"all": (y, y)}, "all.0, the first of 2 outputs"),
        (lambda y: [y], ""),
        (lambda y: y, ""),
    ],
)
def test_the_report_says_which_output_is_judged(outputs, judged):
    own = network()
    found = unsilent.compare_models(lambda x: outputs(own(x)), lambda x: outputs(own(x)), inputs(), judge="top1")
    assert dict(found.report().facts).get("judged output", "") == judged
    of_function = unsilent.compare_models(
        lambda x: outputs(own(x)), lambda x: outputs(own(x)), inputs(), judge=lambda g, f, batch: [False] * 16
    )
    assert "judged output" not in dict(of_function.report().facts)


def test_outputs_of_dicts_are_compared_by_their_names():
    own = network()
    found = unsilent.compare_models(
        lambda x: {"a": own(x), "b": -own(x)}, lambda x: {"b": -own(x), "a": own(x)}, inputs(), judge="top1"
    )
    assert (found.changed.estimate, found.measures["identical"].estimate) == (0, 1)


def test_the_notes_say_where_repeatability_was_tried():
    notes = unsilent.compare_models(network(), network(), inputs()).report().notes
    assert any("batch 0 only" in line for line in notes)


def test_workloads_without_a_name_are_named_by_their_part():
    found = unsilent.compare_models(unsilent.Workload(network(), inputs()), unsilent.Workload(network(), inputs()))
    assert (found.original, found.deployed) == ("the original", "the deployed model")
    named = unsilent.compare_models(unsilent.Workload(network(), inputs(), name="mine"), network())
    assert named.original == "mine"
