"""Writes the log lines of a faulty training in the layout of the artifact (``replay_….txt``).

This module does without torch.

The lines of a fault accept any receipt, so other trials can be shown next to the published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unsilent.papers.isca23.injections import EPOCHS, STEPS

if TYPE_CHECKING:
    from unsilent.faults.receipts import Receipt

VALID_SCALE = 125 / 1024
"""The published validation loss is each worker's sum over its 125 images, divided by the training's batch."""
NOT_FINITE = "Encounter NaN! Terminate training!"


@dataclass(frozen=True)
class PublishedStepRecord:
    """Loss and accuracy of one training step over the whole batch, in training mode."""

    epoch: int
    step: int
    loss: float
    accuracy: float
    receipt: Receipt | None = None

    @property
    def finite(self) -> bool:
        """Whether the loss is finite, so that the training continues."""
        return math.isfinite(self.loss)

    @property
    def line(self) -> str:
        """The log line of this step."""
        at = f"Epoch: {self.epoch}/{EPOCHS}, step: {self.step}/{STEPS}"
        return f"{at}, loss: {self.loss:.5f}, accuracy: {self.accuracy:.5f}"


def header(epoch: int, step: int, weights: str) -> list[str]:
    """First lines of the log: epoch and step of the fault, and the initial weights."""
    return [f"Inject to epoch: {epoch}", f"Inject to step: {step}", f"Load weights from {weights}"]


def epoch_line(epoch: int, train: tuple[float, float], valid: tuple[float, float]) -> str:
    """The log line at the end of an epoch, with loss and accuracy in training and on held-out images."""
    scaled = valid[0] * VALID_SCALE
    return (
        f"End of epoch: {epoch}/{EPOCHS}, train loss: {train[0]:.5f}, train accuracy: {train[1]:.5f}, "
        f"valid loss: {scaled:.5f}, valid accuracy: {valid[1]:.5f}"
    )
