"""Contract tests for detectors of corrupted inference results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.protection.detector import InferenceDetector, StoredDetector, largest_margins, make_detector
from unsilent.protection.hashed_file import restored, stored
from unsilent.protection.protect import protect
from unsilent.protection.recorded_pass import record_pass
from unsilent.sites.injecting import inject
from unsilent.workloads.layers import TransformerBlock


class SmallModel(nn.Module):
    """A small transformer with a layer that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TransformerBlock(16, 2)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head(self.act(self.block(x)).mean(1))}


def small_model() -> SmallModel:
    """A new `SmallModel` with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SmallModel().eval()


def clean_batches(count: int, seed: int = 0) -> list[Tensor]:
    """Batches of 20 clean samples each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(20, 6, 16, generator=generator) for _ in range(count)]


def _equal_tensors(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


class DetectorContract(ABC):
    """Tests of a detector.

    A subclass defines `make_detector`.

    Attributes:
        sees_weights: Whether the detector notices that the highest exponent bit of a weight flips.
        sees_operations: Whether the detector notices a large value in the output of a layer.
    """

    sees_weights: ClassVar[bool] = True
    sees_operations: ClassVar[bool] = True

    @abstractmethod
    def make_detector(self) -> InferenceDetector:
        """A new detector that is not calibrated."""

    def calibrated(self) -> tuple[SmallModel, InferenceDetector]:
        """A model and a detector that was calibrated with it."""
        model, detector = small_model(), make_detector(self.make_detector())
        detector.calibrate(model, clean_batches(10))
        return model, detector

    def test_margins_of_clean_samples(self) -> None:
        model, detector = self.calibrated()
        recorded = record_pass(model, batch=clean_batches(1, 5)[0])
        margins = detector.margins(recorded)
        assert margins.dtype == np.float64
        assert margins.ndim == 2
        assert margins.shape[1] == recorded.samples == 20
        assert np.isfinite(margins).all()
        np.testing.assert_array_equal(detector.margins(recorded), margins)
        assert detector.nbytes >= 0
        assert detector.name

    def test_calibrating_leaves_the_model_as_it_was(self) -> None:
        model, expected = small_model(), small_model()
        make_detector(self.make_detector()).calibrate(model, clean_batches(10))
        changed = [name for name, module in model.named_modules() if module.training]
        assert not changed, f"calibrate leaves these modules in training mode: {changed}"
        before, after = expected.state_dict(), model.state_dict()
        changed = [name for name in before | after if not _equal_tensors(before.get(name), after.get(name))]
        assert not changed, f"calibrate changes these tensors of the model: {changed}"
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_the_margins_of_a_sample_do_not_depend_on_other_samples(self) -> None:
        model, detector = self.calibrated()
        batch = clean_batches(1, 11)[0]
        others = batch.clone()
        others[1::2] *= 100
        whole, again = (detector.margins(record_pass(model, batch=one))[:, ::2] for one in (batch, others))
        np.testing.assert_allclose(again, whole, 1e-5, 1e-5 * np.abs(whole).max())

    def test_recording_and_judging_change_no_bit_of_an_answer(self) -> None:
        model, detector = self.calibrated()
        batch, before = clean_batches(1, 6)[0], {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            clean = model(batch)["scores"]
        recorded = record_pass(model, batch=batch, keep_layers=detector.needs_layers)
        detector.margins(recorded)
        assert torch.equal(recorded.output["scores"], clean)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_a_corrupted_weight_is_seen_while_it_is_in_place(self) -> None:
        model, detector = self.calibrated()
        batch = clean_batches(1, 7)[0]
        clean = largest_margins(detector, record_pass(model, batch=batch)).max()
        with inject(model, "param:block.mlp.0.weight[3,4]", bit=30):
            faulty = largest_margins(detector, record_pass(model, batch=batch))
        assert not self.sees_weights or faulty.max() > clean

    def test_a_corrupted_operation_is_seen_in_the_record_after_it(self) -> None:
        model, detector = self.calibrated()
        batch = clean_batches(1, 8)[0]
        clean = largest_margins(detector, record_pass(model, batch=batch))

        def corrupt(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[4, 2, 7] = 1e6
            return output

        hook = model.get_submodule("block.mlp.2").register_forward_hook(corrupt, prepend=True)
        recorded = record_pass(model, batch=batch)
        hook.remove()
        faulty = largest_margins(detector, recorded)
        assert not np.isnan(faulty).any()
        if self.sees_operations:
            assert faulty[4] > clean.max()
            assert faulty.argmax() == 4

    def test_a_protected_model_answers_as_the_model(self) -> None:
        """Call the protected model without ``torch.no_grad()``, so that gradients are recorded."""
        model, batch = small_model(), clean_batches(1, 10)[0]
        expected = model(batch)["scores"]
        with protect(model, clean_batches(15), detector=self.make_detector(), rate=0.05) as guarded:
            assert torch.allclose(guarded(batch)["scores"], expected, rtol=1e-5)
            assert guarded.verdict is not None
            assert guarded.verdict.margins.shape == (20,)

    def test_what_a_profile_stores_gives_the_same_margins(self) -> None:
        """Only for detectors that have the methods of `StoredDetector`."""
        model, detector = self.calibrated()
        if isinstance(detector, StoredDetector):
            arrays: dict[str, Tensor] = {}
            text = stored(detector.learnt(), "0/", arrays)
            again = self.make_detector()
            assert isinstance(again, StoredDetector)
            again.know(restored(text, arrays), model)
            recorded = record_pass(model, batch=clean_batches(1, 9)[0])
            np.testing.assert_array_equal(again.margins(recorded), detector.margins(recorded))
