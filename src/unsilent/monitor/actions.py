"""What is done on an alarm: leave an optimizer step out, save the state, stop the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.errors import UnsilentError

UNCONFIRMED, CONFIRMED = 16, 17
"""Exit codes, as in Megatron-LM's rerun machine: resume to find out more; a fault is confirmed."""


class MonitorStop(UnsilentError):
    """The monitor stops the job, in all ranks alike.

    Attributes:
        exit_code: 17 where bits changed between two steps, which proves a fault; otherwise 16.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SkippedStep:
    """An optimizer step that changes nothing: while it runs, parameters have no gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def end(self) -> None:
        """Put the gradients back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def save_state(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], step: int, rank: int) -> Path:
    """Write the state of a training to ``step-S-rank-R.pt`` in a folder, in one step; the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}-rank-{rank}.pt"
    unfinished = path.with_suffix(".part")
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]},
        unfinished,
    )
    unfinished.replace(path)
    return path
