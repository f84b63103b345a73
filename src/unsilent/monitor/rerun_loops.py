"""Loops of a script over a DataLoader, as loops of `Monitor.iterate`: steps are executed again after an alarm without a change.

Only loops in the user's own code count, with a DataLoader of torch itself: training frameworks fetch batches ahead, so that a
batch that comes again would be taken for another one. Loops without gradients or of a model in evaluation mode are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from unsilent.monitor.loop_state import is_of_library
from unsilent.monitor.monitor import Monitor


class RerunLoops:
    """Replaces ``DataLoader.__iter__`` from `start` to `stop`.

    Args:
        monitor: Returns the monitor that there is now, if any.
    """

    def __init__(self, monitor: Callable[[], Monitor | None]) -> None:
        self._monitor, self._is_in_loop = monitor, False
        self._plain: Any = None

    def start(self) -> None:
        """From now on."""
        plain = self._plain = DataLoader.__iter__

        def begin(loader: DataLoader[Any]) -> Iterator[Any]:
            is_of_user = not is_of_library(sys._getframe(1).f_code.co_filename)
            batches = plain(loader)
            return _Batches(self._loop(batches), batches) if type(loader) is DataLoader and is_of_user else batches

        DataLoader.__iter__ = begin  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """Leave torch as it was."""
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


class _Batches:
    """The batches of a loop; all else is as of the iterator of the DataLoader, such as its length."""

    def __init__(self, loop: Iterator[Any], plain: Iterator[Any]) -> None:
        self._loop, self._plain = loop, plain

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._loop)

    def __len__(self) -> int:
        return len(self._plain)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_plain"), name)
