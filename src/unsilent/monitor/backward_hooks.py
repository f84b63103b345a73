"""Notes when a backward pass begins and ends, in any training loop: `torch.autograd.backward` is replaced while somebody listens.

``loss.backward()``, loss scalers and the training frameworks all call this function. Backward passes inside another one
(activation checkpointing) are not reported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """Is called around each backward pass."""

    def before_backward(self, tensors: Sequence[Tensor]) -> None:
        """A backward pass of these tensors begins."""
        ...

    def after_backward(self) -> None:
        """It has ended; it raised no error."""
        ...


_listeners: list[BackwardListener] = []
_plain: Any = None
_depth = 0


def add_listener(listener: BackwardListener) -> None:
    """Call this listener from now on."""
    global _plain
    if _plain is None:
        _plain = torch.autograd.backward
        torch.autograd.backward = functools.wraps(_plain)(_backward)
    _listeners.append(listener)


def remove_listener(listener: BackwardListener) -> None:
    """Call it no more; the last one leaves torch as it was."""
    global _plain
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _plain is not None:
        torch.autograd.backward, _plain = _plain, None


def _backward(tensors: Any, *args: Any, **named: Any) -> Any:
    global _depth
    plain = _plain
    for listener in _listeners if not _depth else ():  # one may add another, which is called as well
        listener.before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
    listeners = list(_listeners) if not _depth else []
    _depth += 1
    try:
        result = plain(tensors, *args, **named)
    finally:
        _depth -= 1
    for listener in listeners:
        listener.after_backward()
    return result
