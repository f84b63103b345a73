"""Actions on an alarm: skip an optimizer step, save the state, stop the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UnsilentError
from unsilent.basics.plainfiles import move_aside
from unsilent.monitor.settings import EXECUTE_AGAIN, MonitorSettings
from unsilent.sites.modules import parameters_of

UNCONFIRMED, CONFIRMED = 16, 17
"""Exit codes, as in Megatron-LM's rerun machine: resume the job to find out more; a fault is confirmed."""
NO_LOOP = (
    "the script has no `for batch in loader` directly over a DataLoader in its own code (a loop through enumerate, zip, next or "
    "a generator has a counter, which cannot be put back), and does not use Monitor.iterate or Monitor.step"
)
NO_RERUN = "steps cannot be executed again: "
NO_SKIP = "no step can be left out, because the optimizer computes gradients during its step"
MOST_SAVED = 10
"""Maximum number of states that ``on_alarm="save"`` writes in one run; each is as large as a checkpoint."""
NO_SAVE = f"the state was not saved, because {MOST_SAVED} states of this run were saved already"


class MonitorStop(UnsilentError):
    """Raised in all ranks when the monitor stops the job.

    Attributes:
        exit_code: With ``on_alarm="replay"``, the exit code of the fault verdict. Otherwise 17 if bits changed between two steps
            without a trace in torch (a memory fault, or a write through .data or numpy), else 16.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class AlarmAction:
    """Carries out the action on an alarm that the settings name.

    Attributes:
        can_skip: Whether the verdict is known before the optimizer step that it is about.
        skips: Whether optimizer steps are left out until the next backward pass.
    """

    def __init__(self, settings: MonitorSettings, model: nn.Module, optimizers: Sequence[Optimizer], rank: int) -> None:
        self._settings, self._model, self._optimizers, self._rank = settings, model, optimizers, rank
        self.can_skip = self.skips = False
        self._skipped: dict[int, SkippedStep] = {}
        self._saved = 0

    def act(self, step: int, no_rerun: str) -> str:
        """Carry out the action, and return a description of what is done.

        Steps are executed again by other code, and the caller stops the job.

        ``no_rerun``: why steps cannot be executed again; empty if they can.
        """
        action, can_rerun = self._settings.on_alarm, not no_rerun
        if action == "skip" or (action == "rerun" and self._settings.mode == "strict" and not can_rerun):
            self.skips = self.can_skip
            return "the optimizer step is left out" if self.skips else NO_SKIP
        if action == "save":
            if self._saved >= MOST_SAVED:
                return NO_SAVE
            assert self._settings.save_to is not None
            self._saved += 1
            path = save_state(self._settings.save_to, self._model, self._optimizers, step, self._rank)
            return f"the state was saved to {path}"
        if action in EXECUTE_AGAIN and no_rerun:
            return NO_RERUN + no_rerun
        if action in EXECUTE_AGAIN:
            return "the last steps are executed again" + (" to be compared" if action == "replay" else "")
        return {"stop": "the job stops"}.get(action, "the training goes on")

    def begin_step(self, optimizer: Optimizer) -> bool:
        """Called before an optimizer step; return whether the step is skipped."""
        self.end_step(optimizer)  # the step before may have raised an error
        if self.skips:
            self._skipped[id(optimizer)] = SkippedStep(optimizer)
        return self.skips

    def begin_backward(self) -> None:
        """Called after a new backward pass; discard the gradients of steps that were skipped."""
        self.skips = False
        self._skipped.clear()

    def end_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer step; restore the gradients if the step was skipped."""
        if (skipped := self._skipped.pop(id(optimizer), None)) is not None:
            skipped.end()


class SkippedStep:
    """An optimizer step without effect: the parameters have no gradients while it runs."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        for parameter in parameters_of([optimizer]):
            self._gradients.append((parameter, parameter.grad))
            parameter.grad = None

    def end(self) -> None:
        """Put the gradients of the parameters back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def save_state(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], step: int, rank: int) -> Path:
    """Write the state of a training to ``step-S-rank-R.pt`` in a folder, and return the path.

    The file gets its name only when it is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}-rank-{rank}.pt"
    unfinished = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"step": step, "model": model.state_dict(), "optimizers": states}, unfinished)
    move_aside(path)  # of an earlier run
    unfinished.rename(path)
    return path
