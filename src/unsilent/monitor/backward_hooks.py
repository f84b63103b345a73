"""Notifies listeners of backward passes, by replacing `torch.autograd.backward` while there are listeners.

``loss.backward()``, loss scalers and the training frameworks all call this function. Backward passes inside another one
(activation checkpointing) are not reported. A listener may be bound to one thread; it is then notified only of the passes of that
thread, so that trainings in several threads do not mix. Listeners are not kept alive, and a child of a fork has none.

Loss scalers are followed as well, through their methods ``scale`` and ``update``: the factor of a loss is found in its graph, so
that several losses may be scaled before the first is differentiated.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import clip_grad

from unsilent.basics.nested import tensors_in


class HiddenFromScript:
    """Base class of hooks that are removed from a module while `torch.jit.script` compiles it."""


def script_without_hooks(plain: Any) -> Any:
    """A replacement of `torch.jit.script` that removes hidden hooks from a module while it is compiled."""

    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **named: Any) -> Any:
        if not isinstance(obj, nn.Module):
            # Names are looked up in the frame of the caller.
            return plain(obj, optimize, _frames_up + 1, *args, **named)
        with _without_hooks(obj):
            return plain(obj, optimize, _frames_up + 1, *args, **named)

    return script


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which a model has no hooks of `HiddenFromScript`; they are restored in order."""
    tables = [table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
    before = [(table, dict(table)) for table in tables if any(map(_is_hidden, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_hidden(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def _is_hidden(hook: object) -> bool:
    return isinstance(hook, HiddenFromScript)


class BackwardListener:
    """A listener that is called around each backward pass; by default it does nothing."""

    def before_backward(self, tensors: Sequence[Tensor], scale: Tensor | None) -> None:
        """Called when a backward pass of these tensors begins.

        ``scale``: factor that a loss scaler has multiplied them by.
        """

    def after_backward(self) -> None:
        """Called when a backward pass has ended without an error."""

    def after_clipping(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Called when the program has clipped gradients.

        ``norm``: total norm of the gradients of these parameters before clipping.
        """

    def after_scaler_update(self) -> None:
        """Called when a loss scaler has updated its factor, which ends the step.

        The optimizer may have skipped its step.
        """

    def hook_failed(self, error: Exception) -> None:
        """Called when a hook of this module, or a method of a listener, has raised an error."""


class _Registration:
    """A listener, and the number of the thread that it is bound to; None for all threads."""

    def __init__(self, listener: BackwardListener, thread: int | None) -> None:
        self.listener, self.thread = weakref.ref(listener, lambda _: _remove(self)), thread


CLIP = "_clip_grads_with_norm_"
"""Function that `clip_grad_norm_` calls, however the program imported it; `torch.nn.utils` has it without the underscore."""
_SCALE = "unsilent-loss-scale"
_MOST_NODES = 8
"""Most operations between a scaled loss and the differentiated tensor, for example a division by the number of micro-batches."""
_listeners: list[_Registration] = []
_replaced: list[tuple[Any, str, Any, Any]] = []
"""The object, the attribute name, the original and its replacement."""
_passes = threading.local()
"""``depth``: number of nested backward passes that this thread is in."""
_is_scaling = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listeners.clear)


def add_listener(listener: BackwardListener, thread: int | None = None) -> None:
    """Call this listener from now on.

    ``thread``: identifier of a thread if only its backward passes count.
    """
    if not _replaced:
        _replace(torch.autograd, "backward", _noted_backward)
        _replace(torch.jit, "script", script_without_hooks)
        if hasattr(clip_grad, CLIP):
            _replace(clip_grad, CLIP, _noted_clipping)
            _replace(torch.nn.utils, CLIP.removeprefix("_"), _noted_clipping)
        for scaler in _with_subclasses(GradScaler):  # FSDP's loss scaler has a method of its own
            for name, make in (("scale", _noted_scale), ("update", _noted_update)):
                if name in vars(scaler):
                    _replace(scaler, name, make)
    _listeners.append(_Registration(listener, thread))


def bind_to_this_thread(listener: BackwardListener) -> None:
    """Call the listener only for backward passes of the calling thread from now on."""
    for registration in _listeners:
        if registration.listener() is listener:
            registration.thread = threading.get_ident()


def remove_listener(listener: BackwardListener) -> None:
    """Stop calling this listener.

    When the last one is removed, the functions of torch are restored.
    """
    for registered in [registration for registration in _listeners if registration.listener() is listener]:
        _remove(registered)


def _remove(registration: _Registration) -> None:
    global _is_scaling
    if registration in _listeners:
        _listeners.remove(registration)
    if not _listeners:
        for owner, name, plain, replacement in _replaced:
            if vars(owner)[name] is replacement:  # other code may have replaced it since
                setattr(owner, name, plain)
        _replaced.clear()
        _is_scaling = False


def _heard() -> Iterator[BackwardListener]:
    """The listeners for backward passes of the current thread.

    Listeners that are added meanwhile are included.
    """
    for registration in _listeners:
        if registration.thread in (None, threading.get_ident()) and (listener := registration.listener()) is not None:
            yield listener


def _report_failure(error: Exception) -> None:
    for listener in tuple(_heard()):
        listener.hook_failed(error)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    plain = vars(owner)[name]
    replacement = functools.wraps(plain)(make(plain))
    setattr(owner, name, replacement)
    _replaced.append((owner, name, plain, replacement))


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


def _noted_backward(plain: Any) -> Any:
    def backward(tensors: Any, *args: Any, **named: Any) -> Any:
        if getattr(_passes, "depth", 0):
            return plain(tensors, *args, **named)
        if not isinstance(tensors, (Tensor, GradientEdge)):
            tensors = tuple(tensors)  # as torch does: it may be an iterator
        roots = [tensors] if isinstance(tensors, Tensor) else [root for root in tensors if isinstance(root, Tensor)]
        scale = _scale_or_failure(roots) if _is_scaling else None
        listeners, thread = [], threading.get_ident()
        for registration in _listeners:  # like `_heard`, without a Python call; it may grow meanwhile
            if registration.thread in (None, thread) and (listener := registration.listener()) is not None:
                listeners.append(listener)
                listener.before_backward(roots, scale)
        _passes.depth = 1
        try:
            result = plain(tensors, *args, **named)
        finally:
            _passes.depth = 0
        for listener in listeners:
            listener.after_backward()
        return result

    return backward


def _noted_clipping(plain: Any) -> Any:
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **named: Any) -> None:
        # Like torch, because it may be an iterator.
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        plain(parameters, max_norm, total_norm, *args, **named)
        if is_dynamo_compiling():
            return
        thread = threading.get_ident()
        for registration in _listeners:  # like `_heard`, without a Python call
            if registration.thread in (None, thread) and (listener := registration.listener()) is not None:
                try:
                    listener.after_clipping(parameters, total_norm)
                except Exception as error:
                    listener.hook_failed(error)

    return clip


def _noted_scale(plain: Any) -> Any:
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        result = plain(scaler, outputs)
        if scaler.is_enabled():
            _note_scale(scaler, result)
        return result

    return scale


def _noted_update(plain: Any) -> Any:
    def update(scaler: GradScaler, *args: Any, **named: Any) -> None:
        plain(scaler, *args, **named)
        if scaler.is_enabled():
            for listener in tuple(_heard()):
                try:
                    listener.after_scaler_update()
                except Exception as error:
                    listener.hook_failed(error)

    return update


def _note_scale(scaler: GradScaler, scaled: Any) -> None:
    """Store the scaler's factor in the graph of each scaled tensor."""
    global _is_scaling
    _is_scaling = True
    try:
        for tensor in tensors_in(scaled):
            if tensor.grad_fn is not None:
                metadata: Any = tensor.grad_fn.metadata
                metadata[_SCALE] = scaler._scale
    except Exception as error:
        _report_failure(error)


def _scale_or_failure(tensors: Sequence[Tensor]) -> Tensor | None:
    """The result of `_scale_of`, or None after an error, which is passed to the listeners."""
    try:
        return _scale_of(tensors)
    except Exception as error:
        _report_failure(error)
        return None


def _scale_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The factor of the loss scaler in the graphs of these tensors, or None if they were not scaled."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    for _ in range(_MOST_NODES):
        node = waiting.pop(0) if waiting else None
        if node is None:
            continue
        if (scale := node.metadata.get(_SCALE)) is not None:
            return scale if isinstance(scale, Tensor) else None
        waiting += [following for following, _ in node.next_functions]
    return None
