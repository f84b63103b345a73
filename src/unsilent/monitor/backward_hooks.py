"""Notes when a backward pass begins and ends, in any training loop: `torch.autograd.backward` is replaced while somebody listens.

``loss.backward()``, loss scalers and the training frameworks all call this function. Backward passes inside another one
(activation checkpointing) are not reported. Loss scalers are noted as well, by their methods ``scale`` and ``update``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler


class BackwardListener(Protocol):
    """Is called around each backward pass."""

    def before_backward(self, tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        """A backward pass of these tensors begins, which a loss scaler has multiplied by ``scale``."""
        ...

    def after_backward(self) -> None:
        """It has ended; it raised no error."""
        ...

    def after_scaler_update(self) -> None:
        """A loss scaler has adapted its factor: the step is over, whether the optimizer made it or not."""
        ...


_listeners: list[BackwardListener] = []
_plain: dict[str, Any] = {}
_depth = 0
_scale: Tensor | None = None


def add_listener(listener: BackwardListener) -> None:
    """Call this listener from now on."""
    if not _plain:
        _plain.update(backward=torch.autograd.backward, scale=GradScaler.scale, update=GradScaler.update)
        torch.autograd.backward = functools.wraps(_plain["backward"])(_backward)
        GradScaler.scale = functools.wraps(_plain["scale"])(_scaled)  # type: ignore[method-assign,assignment]
        GradScaler.update = functools.wraps(_plain["update"])(_updated)  # type: ignore[method-assign,assignment]
    _listeners.append(listener)


def remove_listener(listener: BackwardListener) -> None:
    """Call it no more; the last one leaves torch as it was."""
    global _scale
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _plain:
        torch.autograd.backward = _plain["backward"]
        GradScaler.scale, GradScaler.update = _plain["scale"], _plain["update"]  # type: ignore[method-assign]
        _plain.clear()
        _scale = None


def _backward(tensors: Any, *args: Any, **named: Any) -> Any:
    global _depth, _scale
    plain, (scale, _scale) = _plain["backward"], (_scale, None)
    for listener in _listeners if not _depth else ():  # one may add another, which is called as well
        listener.before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors), scale)
    listeners = list(_listeners) if not _depth else []
    _depth += 1
    try:
        result = plain(tensors, *args, **named)
    finally:
        _depth -= 1
    for listener in listeners:
        listener.after_backward()
    return result


def _scaled(scaler: GradScaler, outputs: Any) -> Any:
    global _scale
    result = _plain["scale"](scaler, outputs)
    _scale = scaler._scale if scaler.is_enabled() else None
    return result


def _updated(scaler: GradScaler, *args: Any, **named: Any) -> None:
    _plain["update"](scaler, *args, **named)
    if scaler.is_enabled():
        for listener in tuple(_listeners):
            listener.after_scaler_update()
