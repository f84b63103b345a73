"""ASD of MindSpore 2.4 (CANN operator aclnnSilentCheck): `absolute_and_jump` on the gradients that enter communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from unsilent.detectors.absolute_and_jump import AbsoluteAndJump
from unsilent.detectors.series import GRADIENT, L2, Series


@dataclass(frozen=True)
class AsdV2(AbsoluteAndJump):
    """Rule on value and jump of the L2 norms of gradients; jumps are judged after 100 values.

    The original reads each tensor that enters a communication of the backward graph, divided by the loss scale; this rule reads
    the local gradient of each parameter. torch_npu shares one state among all tensors of a kind of collective; here each has its
    own.
    """

    name: ClassVar[str] = "asd-v2"
    c_min_steps: int = 100

    def reads(self, series: Series) -> bool:
        """Whether the series is the L2 norm of a parameter's gradient."""
        return (series.feature, series.statistic) == (GRADIENT, L2)
