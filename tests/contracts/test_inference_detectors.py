"""What every detector of corrupted answers must do: the contract that is shipped. A new one joins by its row in `DETECTORS`."""

import pytest
import torch

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.protection.detector import DETECTORS, make_detector
from unsilent.protection.recorded_pass import record_pass
from unsilent.testing import DetectorContract
from unsilent.testing.detectors import clean_batches, small_model

TEXTS = [*DETECTORS, "duplication:layers=*mlp*", "duplication:share=0.5", "dr-dna+weight-integrity+abft"]
SEES_WEIGHTS = [text for text in TEXTS if text not in ("nonfinite", "duplication:share=0.5")]
SEES_OPERATIONS = [
    text for text in TEXTS if text not in ("weight-integrity", "golden-test", "nonfinite", "duplication:share=0.5")
]


class TestDetectors(DetectorContract):
    @pytest.fixture(autouse=True, params=TEXTS)
    def _text(self, request):
        self.text = request.param
        self.sees_weights, self.sees_operations = self.text in SEES_WEIGHTS, self.text in SEES_OPERATIONS

    def make_detector(self):
        return make_detector(self.text)

    def test_its_name_makes_it_again_and_it_says_what_it_takes(self):
        _, detector = self.calibrated()
        assert make_detector(detector.name).name == detector.name
        assert detector.nbytes or detector.name in ("nonfinite", "abft")


def test_an_operation_that_is_corrupted_by_injection_is_recorded():
    model = small_model()
    batch = clean_batches(1, 9)[0]
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
    recorded = record_pass(small_model(), batch=clean_batches(1)[0])
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
    duplication.calibrate(small_model())
    copied = set(duplication._copies)
    assert "head" in copied
    assert "block.mlp.0" in copied
    assert "block.attention.qkv" not in copied
