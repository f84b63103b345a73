"""A forward hook of a collector, which returns early in most calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unsilent.monitor.backward_hooks import HiddenFromScript

if TYPE_CHECKING:
    from unsilent.monitor.signals.collector import SignalCollector


class ForwardHook(HiddenFromScript):
    """A forward hook that passes its errors to a collector.

    It does nothing in copies of a module, and while torch traces or transforms the module.

    Args:
        collector: Collector that adds up the hook's time and takes its errors.
        function: Hook to call.
        is_expected: Function that returns whether the hook may have work in this step. Between the large operations of a model
            each line of Python takes ten times as long as in a loop, so most calls should end here.
    """

    def __init__(
        self,
        collector: SignalCollector,
        function: Callable[..., None],
        is_expected: Callable[[], bool] | None = None,
    ) -> None:
        self._collector, self._function, self._is_expected = collector, function, is_expected

    def __call__(self, *args: Any) -> None:
        if is_transformed() or (self._is_expected is not None and not self._is_expected()) or self._collector.is_off:
            return
        with self._collector.timed("values"):
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace the hook with a function that does nothing in a copied or pickled model.

        The function is from the standard library.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_transformed() -> bool:
    """Whether `torch.compile` is tracing or a transform of `torch.func` is running.

    Tensors then have no values of their own.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
