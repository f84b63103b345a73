"""Contract tests for judges of outputs."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unsilent.basics.nested import map_tensors, tensors_in
from unsilent.outcomes.base import Judge, JudgeVerdict
from unsilent.outcomes.judges import to_verdict
from unsilent.workloads.batch_samples import holds_samples


def mixed(golden: Any, faulty: Any, from_faulty: Tensor) -> Any:
    """The golden output with some samples of the faulty one, bool[n]; parts without one entry per sample stay golden."""
    if type(golden) is not type(faulty):
        return golden
    if isinstance(golden, Tensor):
        if golden.shape != faulty.shape or golden.shape[:1] != from_faulty.shape:
            return golden
        return torch.where(from_faulty.to(golden.device).view(-1, *(1,) * (golden.ndim - 1)), faulty, golden)
    if holds_samples(golden) and len(golden) == len(faulty) == len(from_faulty):
        return [two if chosen else one for one, two, chosen in zip(golden, faulty, from_faulty.tolist(), strict=True)]
    if isinstance(golden, Mapping):
        return {key: mixed(part, faulty.get(key), from_faulty) for key, part in golden.items()}
    if isinstance(golden, (list, tuple)) and len(golden) == len(faulty):
        parts = [mixed(*pair, from_faulty) for pair in zip(golden, faulty, strict=True)]
        return type(golden)(*parts) if hasattr(golden, "_fields") else type(golden)(parts)
    return golden


class JudgeContract(ABC):
    """Tests of a judge.

    A subclass defines `make_judge` and `make_outputs`.
    """

    @abstractmethod
    def make_judge(self) -> Judge:
        """The judge to test."""

    @abstractmethod
    def make_outputs(self) -> tuple[Any, Any, Any]:
        """A golden output, a faulty output in which at least one sample is incorrect, and their batch."""

    def verdict(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        """The verdict of the judge, as arrays."""
        judge = self.make_judge()
        return to_verdict(judge, judge(golden, faulty, batch))

    def test_the_golden_output_is_correct(self) -> None:
        golden, _, batch = self.make_outputs()
        verdict = self.verdict(golden, golden, batch)
        assert not verdict.incorrect.any()
        assert (verdict.severity == 0).all()

    def test_an_incorrect_output_is_found_with_a_severity(self) -> None:
        golden, faulty, batch = self.make_outputs()
        verdict = self.verdict(golden, faulty, batch)
        assert verdict.incorrect.any()
        assert verdict.incorrect.shape == verdict.severity.shape == self.verdict(golden, golden, batch).incorrect.shape
        assert (verdict.severity[verdict.incorrect] > 0).all()

    def test_the_verdict_on_a_sample_does_not_depend_on_other_samples(self) -> None:
        """Skipped if there is one sample, or the outputs cannot be put together from samples, as they have no tensors."""
        golden, faulty, batch = self.make_outputs()
        whole = self.verdict(golden, faulty, batch)
        number = torch.arange(len(whole.incorrect))
        everything = self.verdict(golden, mixed(golden, faulty, number >= 0), batch)
        if len(number) < 2 or not np.array_equal(everything, whole):
            pytest.skip("make_outputs gives no tensors with two or more samples")
        for chosen in (number % 2 == 0, number % 2 == 1):
            verdict = self.verdict(golden, mixed(golden, faulty, chosen), batch)
            np.testing.assert_array_equal(verdict.incorrect, whole.incorrect & chosen.numpy())
            np.testing.assert_allclose(verdict.severity, np.where(chosen, whole.severity, 0), 1e-5)

    def test_outputs_are_not_changed_and_the_answer_is_the_same_again(self) -> None:
        (golden, faulty, batch), untouched = self.make_outputs(), self.make_outputs()
        first, second = (self.verdict(golden, faulty, batch) for _ in range(2))
        np.testing.assert_equal(tuple(first), tuple(second))
        for now, then in zip(tensors_in((golden, faulty)), tensors_in(untouched[:2]), strict=True):
            assert torch.equal(now, then)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_values_that_are_not_finite_are_judged(self, value: float) -> None:
        golden, _, batch = self.make_outputs()

        def spoilt(path: tuple[str, ...], tensor: Tensor) -> Tensor:
            return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor

        verdict = self.verdict(golden, map_tensors(golden, spoilt), batch)
        assert verdict.incorrect.shape == verdict.severity.shape == self.verdict(golden, golden, batch).incorrect.shape
        assert not np.isnan(verdict.severity).any()

    def test_its_repr_makes_it_again(self) -> None:
        """Check that evaluating the ``repr`` of a judge gives an equal judge.

        The text is part of a campaign's identity.
        """
        judge = self.make_judge()
        again = eval(repr(judge), dict(vars(sys.modules[type(judge).__module__])))  # noqa: S307 - the text of a test's own class
        assert again == judge
        assert repr(again) == repr(judge)
