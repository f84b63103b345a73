"""What every detector of corrupted answers keeps to; a new one joins by its row in `DETECTORS`."""

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.protection.detector import DETECTORS, largest_margins, make_detector
from unsilent.protection.recorded_pass import record_pass
from unsilent.workloads.layers import TransformerBlock

TEXTS = [*DETECTORS, "duplication:layers=*mlp*", "duplication:share=0.5", "dr-dna+weight-integrity+abft"]
SEES_WEIGHTS = [text for text in TEXTS if text not in ("nonfinite", "duplication:share=0.5")]
SEES_OPERATIONS = [
    text for text in TEXTS if text not in ("weight-integrity", "golden-test", "nonfinite", "duplication:share=0.5")
]


class Small(nn.Module):
    """A transformer with a layer that writes into its input."""

    def __init__(self):
        super().__init__()
        self.block = TransformerBlock(16, 2)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return {"scores": self.head(self.act(self.block(x)).mean(1))}


def small():
    torch.manual_seed(0)
    return Small().eval()


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(20, 6, 16, generator=generator) for _ in range(count)]


@pytest.fixture(scope="module", params=TEXTS)
def calibrated(request):
    """A model and a detector that knows it."""
    model, detector = small(), make_detector(request.param)
    detector.calibrate(model, batches(10))
    return model, detector


def test_margins_of_clean_samples(calibrated):
    model, detector = calibrated
    assert make_detector(detector.name).name == detector.name
    recorded = record_pass(model, batch=batches(1, 5)[0])
    margins = detector.margins(recorded)
    assert margins.dtype == np.float64
    assert margins.ndim == 2
    assert margins.shape[1] == recorded.samples == 20
    assert np.isfinite(margins).all()
    np.testing.assert_array_equal(detector.margins(recorded), margins)
    assert detector.nbytes >= 0
    assert detector.nbytes or detector.name in ("nonfinite", "abft")


def test_recording_and_judging_change_no_bit_of_an_answer(calibrated):
    model, detector = calibrated
    batch, before = batches(1, 6)[0], {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        clean = model(batch)["scores"]
    recorded = record_pass(model, batch=batch, keep_layers=detector.needs_layers)
    detector.margins(recorded)
    assert torch.equal(recorded.output["scores"], clean)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_corrupted_weight_is_seen_while_it_is_in_place(calibrated):
    model, detector = calibrated
    batch = batches(1, 7)[0]
    clean = largest_margins(detector, record_pass(model, batch=batch)).max()
    with unsilent.inject(model, "param:block.mlp.0.weight[3,4]", bit=30):
        faulty = largest_margins(detector, record_pass(model, batch=batch))
    if detector.name in SEES_WEIGHTS:
        assert faulty.max() > clean


def test_a_corrupted_operation_is_seen_in_the_record_after_it(calibrated):
    model, detector = calibrated
    batch = batches(1, 8)[0]
    clean = largest_margins(detector, record_pass(model, batch=batch))

    def corrupt(module, inputs, output):
        output = output.clone()
        output[4, 2, 7] = 1e6
        return output

    hook = model.block.mlp[2].register_forward_hook(corrupt, prepend=True)
    recorded = record_pass(model, batch=batch)
    hook.remove()
    faulty = largest_margins(detector, recorded)
    if detector.name in SEES_OPERATIONS:
        assert faulty[4] > clean.max()
        assert faulty.argmax() == 4


def test_an_operation_that_is_corrupted_by_injection_is_recorded():
    model = small()
    batch = batches(1, 9)[0]
    with unsilent.inject(model, "op:block.mlp.0[7]", bit=30) as receipt:
        recorded = record_pass(model, batch=batch)
    assert receipt is not None
    clean = record_pass(model, batch=batch)
    names = [layer.name for layer in recorded.layers]
    assert names == [layer.name for layer in clean.layers]
    assert "scaled_dot_product_attention" in names
    first = next(
        a.name for a, b in zip(recorded.layers, clean.layers, strict=True) if not torch.equal(a.output, b.output)
    )
    assert first == "block.mlp.0"


def test_a_record_is_safe_from_changes_in_place():
    recorded = record_pass(small(), batch=batches(1)[0])
    block = next(layer for layer in recorded.layers if layer.name == "block.mlp.2")
    act = next(layer for layer in recorded.layers if layer.name == "act")
    assert (act.output >= 0).all()
    assert block.output.min() < 0
    assert torch.equal(block.run_again(), block.output)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dr-dnaa", "unknown detector 'dr-dnaa'; did you mean 'dr-dna'"),
        ("dr-dna+nothing", "unknown detector 'nothing'"),
        ("dr-dna:legs=3", "unknown parameter of rule 'dr-dna': 'legs'"),
        ("duplication:share=2", "share is 2; expected"),
        ("weight-integrity:slices=0", "slices is 0; expected 1 or more"),
    ],
)
def test_what_no_detector_is_called(text, message):
    with pytest.raises(UsageError, match=message.replace("+", r"\+")):
        make_detector(text)


def test_layers_are_duplicated_in_the_order_of_their_scores():
    from unsilent.protection.duplication import Duplication

    duplication = Duplication(share=0.4, scores={"head": 0.9, "block.mlp.*": 0.5})
    duplication.calibrate(small())
    copied = set(duplication._copies)
    assert "head" in copied
    assert "block.mlp.0" in copied
    assert "block.attention.qkv" not in copied
