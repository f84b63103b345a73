"""Makes a script's DataLoader loops repeatable, so that steps are executed again after an alarm.

Only ``for`` statements directly over a DataLoader of torch, in the user's own functions and scripts, are made repeatable.
Anything else that takes batches (``enumerate``, ``zip``, ``next``, a generator, a training framework that fetches ahead) would
continue with new batches when steps are repeated. Loops without gradients or with a model in evaluation mode are not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from unsilent.guard.loop_code import is_plain_loop
from unsilent.guard.loop_state import is_of_library
from unsilent.monitor.monitor import Monitor


class RerunLoops:
    """Replaces ``DataLoader.__iter__`` between `start` and `stop`.

    Args:
        monitor: Returns the current monitor, if there is one.
    """

    def __init__(self, monitor: Callable[[], Monitor | None]) -> None:
        self._monitor, self._is_in_loop = monitor, False
        self._plain: Any = None

    def start(self) -> None:
        """Replace ``DataLoader.__iter__``."""
        plain = self._plain = DataLoader.__iter__

        def begin(loader: DataLoader[Any]) -> Iterator[Any]:
            frame = sys._getframe(1)
            is_of_user = type(loader) is DataLoader and not is_of_library(frame.f_code.co_filename)
            batches = plain(loader)
            return self._loop(batches) if is_of_user and is_plain_loop(frame.f_code, frame.f_lasti) else batches

        DataLoader.__iter__ = begin  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Restore ``DataLoader.__iter__``."""
        if self._plain is not None:
            DataLoader.__iter__ = self._plain  # type: ignore[method-assign]

    def _loop(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            monitor = self._monitor()
            if monitor is None or self._is_in_loop or not (torch.is_grad_enabled() and monitor.model.training):
                yield batch
                continue
            self._is_in_loop = True
            try:
                yield from monitor.iterate(chain([batch], batches))
            finally:
                self._is_in_loop = False
