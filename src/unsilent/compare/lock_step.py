"""Two forward passes in lock step, so that only one output of each is in memory at a time.

The second pass runs in a separate thread, which waits at each layer until the first pass has reached the same layer. Only one of
the two threads runs at a time. If the passes call their layers in different orders, outputs that come too early are kept.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unsilent.basics.nested import tensors_in

Layers = Sequence[tuple[str, nn.Module]]
"""Modules to listen to, each with its name; calls of modules with the same name are counted together."""


class LayerCall(NamedTuple):
    """One call of a layer, with its inputs and outputs.

    Attributes:
        name: Name of the layer, followed by ``#2`` for its second call.
        inputs, named_inputs: Positional and keyword arguments of the call.
        outputs: Returned floating-point tensors, at least one; quantised tensors are dequantised.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    named_inputs: dict[str, Any]
    outputs: tuple[Tensor, ...]


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors in the output of a layer; quantised ones are dequantised."""
    plain = (tensor.dequantize() if tensor.is_quantized else tensor for tensor in tensors_in(output))
    return tuple(tensor for tensor in plain if tensor.is_floating_point() and tensor.ndim and tensor.numel())


def thread_settings() -> list[AbstractContextManager[Any]]:
    """Contexts that give another thread this thread's inference mode and autocast."""
    settings: list[AbstractContextManager[Any]] = [torch.inference_mode(torch.is_inference_mode_enabled())]
    accelerator = torch.accelerator.current_accelerator()
    for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
        if torch.is_autocast_enabled(kind):
            cached = torch.is_autocast_cache_enabled()
            settings.append(torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=cached))
    return settings


class _Stopped(BaseException):
    """Raised in a forward pass to end it early."""


class LayerCalls:
    """Hooks that report each call of a layer to a listener; a context manager that removes them.

    Only calls by one thread are reported.
    """

    def __init__(self, layers: Layers, listener: Callable[[LayerCall], None]) -> None:
        self._layers, self._listener = layers, listener
        self._counts: Counter[str] = Counter()
        self._thread, self._is_listening = threading.get_ident(), False
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerCalls:
        self._hooks = [
            module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in self._layers
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def ran(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            # A listener may call layers itself.
            if self._is_listening or threading.get_ident() != self._thread or not (values := output_tensors(output)):
                return
            self._counts[name] += 1
            run = name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"
            self._is_listening = True
            try:
                self._listener(LayerCall(run, module, inputs, named, values))
            finally:
                self._is_listening = False

        return ran


class WaitingPass:
    """A forward pass in its own thread that waits at each layer; a context manager that ends it.

    Args:
        layers: Layers with their names in the other pass.
        call: Function that runs the model once.
        threads: Number of threads that operations of this pass use; ``None`` to keep the setting.
    """

    def __init__(self, layers: Layers, call: Callable[[], Any], threads: int | None = None) -> None:
        self._layers, self._call, self._threads = layers, call, threads
        self._settings = thread_settings()
        self._resume, self._reached = threading.Semaphore(0), threading.Semaphore(0)
        self._current: LayerCall | None = None
        self._early: dict[str, LayerCall] = {}
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_ended = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def reach(self, name: str) -> LayerCall | None:
        """Continue the pass to this call of a layer and return it, or None if the call does not occur."""
        while name not in self._early:
            if self._current is not None:  # not requested yet
                late = self._current
                self._early[late.name] = late._replace(outputs=tuple(output.clone() for output in late.outputs))
                self._current = None
            if self._has_ended:
                return None
            self._go_on()
            if self._current is not None and self._current.name == name:
                call, self._current = self._current, None
                return call
        return self._early.pop(name)

    def finish(self) -> tuple[Any, list[str]]:
        """Continue the pass to its end.

        Returns the model's output, and the names of calls that were not requested with `reach`.
        """
        further = list(self._early)
        self._early.clear()
        while True:
            if self._current is not None:
                further.append(self._current.name)
                self._current = None
            if self._has_ended:
                break
            self._go_on()
        if self._error is not None:  # raised before, and caught by the other model
            raise self._error
        return self._result, further

    def __enter__(self) -> WaitingPass:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_stopped = True
        self._resume.release()
        self._thread.join()

    def _go_on(self) -> None:
        self._resume.release()
        self._reached.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._resume.acquire()
        try:
            if self._is_stopped:
                return
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with ExitStack() as stack:
                for setting in (*self._settings, torch.no_grad(), LayerCalls(self._layers, self._wait)):
                    stack.enter_context(setting)
                self._result = self._call()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            self._reached.release()

    def _wait(self, call: LayerCall) -> None:
        # The model caught the exception that should end it: its pass runs to its end without waiting at layers.
        if self._is_stopped:
            return
        self._current = call
        del call  # objects used for waiting hold no output
        self._reached.release()
        self._resume.acquire()
        if self._is_stopped:
            raise _Stopped
