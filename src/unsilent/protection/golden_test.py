"""Golden test vector: the model answers a stored clean input again, and the bits of the answers are compared.

It detects permanent faults in weights or in a device, but no transient ones. A test costs a call of the model with few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.nested import map_tensors, tensors_in
from unsilent.detectors.activations.rule import Floats
from unsilent.outcomes.tensors import leaves, samples_that_differ
from unsilent.protection.recorded_pass import RecordedPass
from unsilent.workloads.base import call_model
from unsilent.workloads.batch_samples import count_samples, take_samples


class GoldenTest:
    """Compares the bits of the answer to a stored input with those of the right answer.

    Args:
        samples: Number of samples of the first clean batch that are stored.
        every: Number of calls from one test to the next. A run that judges a recovery is always tested.
    """

    kind: ClassVar[str] = "golden-test"
    needs_layers = False

    def __init__(self, samples: int = 1, every: int = 1) -> None:
        if samples < 1 or every < 1:
            raise UsageError(f"golden-test: samples is {samples} and every {every}; expected 1 or more")
        parameters = [f"{key}={value}" for key, value in (("samples", samples), ("every", every)) if value != 1]
        self.name = self.kind + (f":{','.join(parameters)}" if parameters else "")
        self._samples, self._every, self._calls = samples, every, 0
        self._run: Callable[[nn.Module, Any], Any] = call_model
        self.batch: Any = None
        self.answer: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the stored input and answer."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors_in(self.batch), *self.answer))

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Store some samples of the first batch, and the model's answer to them."""
        batch = next(iter(batches), None)
        first = take_samples(batch, torch.arange(min(self._samples, count_samples(batch))))
        self._run, self.batch = run, map_tensors(first, _canonical)
        self.answer = self.answer_of(model)
        if any(samples_that_differ(a, b, 1).any() for a, b in zip(self.answer, self.answer_of(model), strict=True)):
            raise UsageError(
                "two runs of the model on the same input gave different bits; golden-test stores an answer, so it needs a "
                "deterministic model"
            )

    def know(self, batch: Any, answer: list[Tensor], model: nn.Module, run: Callable[[nn.Module, Any], Any]) -> None:
        """Restore a stored input and the right answer to it, for example from a file.

        Args:
            run: Function that calls the model once, which must give the stored answer.

        Raises:
            UsageError: ``run`` raises an error, or gives another answer.
        """
        self._run, self.batch, self.answer = run, batch, answer
        try:
            reason = "" if self._passes(model) else "the model gives another answer to the stored input"
        except Exception as error:  # the error of a model that is called in another way than it expects
            reason = f"the model raised {kind_and_line(error)} for the stored input"
        if reason:
            raise UsageError(
                f"{self.name}: {reason}; give load_profile the run= that the profile was made with, on the same kind of device"
            )

    def margins(self, recorded: RecordedPass) -> Floats:
        """Margins that are 1 if the answer to the stored input has changed and otherwise 0, float64[1, samples].

        They are also 0 in a call without a test.
        """
        is_due = recorded.judges_recovery or self._calls % self._every == 0
        self._calls += not recorded.judges_recovery
        return np.full((1, recorded.samples), float(is_due and not self._passes(recorded.model)))

    def _passes(self, model: nn.Module) -> bool:
        answer = self.answer_of(model)
        if len(answer) != len(self.answer):
            return False
        return not any(samples_that_differ(a, b, 1).any() for a, b in zip(self.answer, answer, strict=True))

    def answer_of(self, model: nn.Module) -> list[Tensor]:
        """The tensors of the model's present output for the stored input, copied."""
        with torch.no_grad():
            output = self._run(model, map_tensors(self.batch, lambda _, t: t.clone()))
            return [tensor.detach().clone() for tensor in leaves(output)]


def _canonical(_: Any, tensor: Tensor) -> Tensor:
    """A contiguous copy, with the strides that the tensor has when it is read from a file.

    PyTorch chooses kernels by strides.
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)
