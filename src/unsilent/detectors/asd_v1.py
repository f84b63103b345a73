"""ASD of MindSpore 2.2 and 2.3: `absolute_and_jump` on the gradients of the inputs of normalisation layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from unsilent.detectors.absolute_and_jump import AbsoluteAndJump
from unsilent.detectors.series import L2, NORM_INPUT_GRADIENT, Series


@dataclass(frozen=True)
class AsdV1(AbsoluteAndJump):
    """Rule on value and jump of the L2 norm of the gradient at the input of normalisation layers.

    Jumps are judged after 7 values.

    torch_npu also checks the gradient of the embedding weight, which this rule does not read by default.
    """

    name: ClassVar[str] = "asd-v1"
    c_min_steps: int = 7

    def reads(self, series: Series) -> bool:
        """Whether the series is the L2 norm of the gradient of a normalisation layer's input."""
        return (series.feature, series.statistic) == (NORM_INPUT_GRADIENT, L2)
