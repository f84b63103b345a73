"""Recognises the end of a step: backward passes, followed by steps of one or several optimizers."""

from __future__ import annotations

import logging

from unsilent.events.event_kinds import LOGGER

MOST_STEPS = 8
"""Steps of each optimizer after which they count as training steps even if no backward pass was recognised."""
UNRECOGNISED = (
    "no backward pass of this model was recognised before %d steps of its optimizers (gradients may come from "
    "torch.autograd.grad); without one, only updates, fingerprints and values of forward passes are judged"
)


class StepEnds:
    """Tracks backward passes and optimizer steps within a row of signals.

    Args:
        count: Number of the optimizers.

    Attributes:
        has_pass: Whether a backward pass of the model has ended since the last row.
        is_in_pass: Whether a backward pass is running.
    """

    def __init__(self, count: int) -> None:
        self.has_pass = self.is_in_pass = False
        self._count = count
        self._stepped: set[int] = set()
        self._unexplained = 0
        self._needs_no_pass = self._has_warned = False

    @property
    def is_over(self) -> bool:
        """Whether an optimizer has made its step.

        Later events belong to the next row, except for steps of further optimizers.
        """
        return bool(self._stepped) and (self.has_pass or self._needs_no_pass) and not self.is_in_pass

    @property
    def is_complete(self) -> bool:
        """Whether all optimizers have made their steps."""
        return self.is_over and len(self._stepped) == self._count

    def has_made_step(self, optimizer: int) -> bool:
        """Whether this optimizer has made its step in the current row of signals."""
        return self.is_over and optimizer in self._stepped

    def begin_pass(self) -> None:
        """Note that a backward pass of any model begins."""
        self.is_in_pass = True
        self._stepped.clear()

    def end_pass(self, is_own: bool) -> None:
        """Note the end of a backward pass; ``is_own``: whether it was one of this model."""
        self.is_in_pass = False
        if is_own:
            self.has_pass, self._needs_no_pass = True, False

    def end_step(self, optimizer: int) -> None:
        """Note that an optimizer has made its step."""
        self._stepped.add(optimizer)
        if self.has_pass or self.is_in_pass or self._needs_no_pass:
            return
        self._unexplained += 1
        if self._unexplained > MOST_STEPS * self._count:
            self._needs_no_pass = True
            if not self._has_warned:
                self._has_warned = True
                logging.getLogger(LOGGER).warning(UNRECOGNISED, self._unexplained)

    def begin_row(self) -> None:
        """Begin a new row of signals."""
        self.has_pass, self._unexplained = False, 0
        self._stepped.clear()
