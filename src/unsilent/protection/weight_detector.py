"""Detects corrupted weights by checksums of blocks of memory; the margin is the number of bad blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.detectors.activations.rule import Floats
from unsilent.protection.recorded_pass import RecordedPass
from unsilent.protection.weight_integrity import Block, WeightIntegrity
from unsilent.sites.modules import named_tensors
from unsilent.workloads.base import call_model


class WeightDetector:
    """Checks the weights after each call; detects faults in parameters and buffers only.

    Args:
        slices: Number of slices of the memory; each call checks the next slice. A run that judges a recovery checks all of them.

    Attributes:
        bad_blocks: Bad blocks that the last check found.
    """

    kind: ClassVar[str] = "weight-integrity"
    needs_layers = False

    def __init__(self, slices: int = 1) -> None:
        if slices < 1:
            raise UsageError(f"weight-integrity: slices is {slices}; expected 1 or more")
        self.name = self.kind if slices == 1 else f"{self.kind}:slices={slices}"
        self._slices = slices
        self.integrity: WeightIntegrity | None = None
        self.bad_blocks: Sequence[Block] = ()
        self._taken: dict[str, tuple[Any, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the checksums and parity."""
        return 0 if self.integrity is None else self.integrity.nbytes

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any] = (), run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Compute the checksums and parity of the weights."""
        self.integrity = WeightIntegrity(model)
        self._taken = _identities(model)

    def check_tensors(self, model: nn.Module) -> None:
        """Raise ``UsageError`` if tensors of the model were replaced since the checksums were computed."""
        if replaced := self._names_of_replaced_tensors(model):
            raise UsageError(
                f"{replaced[0]} was replaced, added, removed or converted after {self.name} took its checksums, so that its "
                "corruption would not be noticed; protect the model again"
            )

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise ``UsageError`` if clean calls have changed tensors.

        Corruption of these tensors could not be distinguished from such changes.
        """
        assert self.integrity is not None, "calibrate comes first"
        if changed := self._names_of_replaced_tensors(model) or list(
            dict.fromkeys(block.tensor for block in self.integrity.check())
        ):
            raise UsageError(
                f"{', '.join(changed[:5])}{', …' if len(changed) > 5 else ''} changed while the model answered clean batches; "
                f"{self.name} expects parameters and buffers that stay as they are: keep what changes in an attribute that is no "
                f"buffer, or leave {self.kind} out"
            )

    def _names_of_replaced_tensors(self, model: nn.Module) -> list[str]:
        """Names of the tensors that were added, removed or replaced since the checksums were computed."""
        now = _identities(model)
        return [name for name in self._taken | now if now.get(name) != self._taken.get(name)]

    def margins(self, recorded: RecordedPass) -> Floats:
        """The number of bad blocks in the present weights, float64[1, samples]."""
        assert self.integrity is not None, "calibrate comes first"
        checks_all = self._slices == 1 or recorded.judges_recovery
        self.bad_blocks = self.integrity.check() if checks_all else self.integrity.check_slice(self._slices)
        return np.full((1, recorded.samples), float(len(self.bad_blocks)))


def _identities(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The identity, dtype, device and shape of each parameter and buffer, by name."""
    return {name: (id(t), t.dtype, t.device, t.shape) for name, t in named_tensors(model).items()}
