"""Notes when a backward pass begins and ends, in any training loop: `torch.autograd.backward` is replaced while somebody listens.

``loss.backward()``, loss scalers and the training frameworks all call this function. Backward passes inside another one
(activation checkpointing) are not reported. Loss scalers are noted as well, by their methods ``scale`` and ``update``: the factor
of a loss is found in its graph, so that several losses may be scaled before the first is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler

from unsilent.nested import tensors_in


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


_SCALE = "unsilent-loss-scale"
_MOST_NODES = 8
"""Operations between a scaled loss and what is differentiated, such as a division by the number of micro-batches."""
_listeners: list[BackwardListener] = []
_replaced: list[tuple[Any, str, Any, Any]] = []
"""The object, the name, the original and what is there instead."""
_depth = 0
_is_scaling = False


def add_listener(listener: BackwardListener) -> None:
    """Call this listener from now on."""
    if not _replaced:
        _replace(torch.autograd, "backward", _noted_backward)
        for scaler in _with_subclasses(GradScaler):  # that of FSDP has a method of its own
            for name, make in (("scale", _noted_scale), ("update", _noted_update)):
                if name in vars(scaler):
                    _replace(scaler, name, make)
    _listeners.append(listener)


def remove_listener(listener: BackwardListener) -> None:
    """Call it no more; the last one leaves torch as it was."""
    global _is_scaling
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        for owner, name, plain, ours in _replaced:
            if vars(owner)[name] is ours:  # somebody else may have replaced it since
                setattr(owner, name, plain)
        _replaced.clear()
        _is_scaling = False


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    plain = vars(owner)[name]
    ours = functools.wraps(plain)(make(plain))
    setattr(owner, name, ours)
    _replaced.append((owner, name, plain, ours))


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)


def _noted_backward(plain: Any) -> Any:
    def backward(tensors: Any, *args: Any, **named: Any) -> Any:
        global _depth
        if _depth:
            return plain(tensors, *args, **named)
        roots = [tensors] if isinstance(tensors, Tensor) else [one for one in tensors if isinstance(one, Tensor)]
        scale = _scale_of(roots) if _is_scaling else None
        for listener in _listeners:  # one may add another, which is called as well
            listener.before_backward(roots, scale)
        listeners = list(_listeners)
        _depth += 1
        try:
            result = plain(tensors, *args, **named)
        finally:
            _depth -= 1
        for listener in listeners:
            listener.after_backward()
        return result

    return backward


def _noted_scale(plain: Any) -> Any:
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        global _is_scaling
        result = plain(scaler, outputs)
        if scaler.is_enabled():
            _is_scaling = True
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    metadata: Any = tensor.grad_fn.metadata
                    metadata[_SCALE] = scaler._scale
        return result

    return scale


def _noted_update(plain: Any) -> Any:
    def update(scaler: GradScaler, *args: Any, **named: Any) -> None:
        plain(scaler, *args, **named)
        if scaler.is_enabled():
            for listener in tuple(_listeners):
                listener.after_scaler_update()

    return update


def _scale_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The factor that a loss scaler multiplied these tensors by, or what they were computed from."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    for _ in range(_MOST_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            continue
        if (scale := node.metadata.get(_SCALE)) is not None:
            return scale if isinstance(scale, Tensor) else None
        waiting += [following for following, _ in node.next_functions]
    return None
