"""The base class of this package's dispatch modes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unsilent.basics.errors import InjectionError
from unsilent.sites.calls import OperationNamer


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is hidden from torch's compiler, once the compiler has been loaded.

    Torch hides every mode when its class is created, which imports the whole compiler: this would cost a second of CPU time and
    70 MiB in each worker, although models are rarely compiled.

    Args:
        calls: Namer of the operations while the mode is active.
    """

    def __init__(self, calls: OperationNamer | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation_names = calls
        self._hooks = ExitStack()
        self._entered = self._is_active = False

    def _around(self, stack: ExitStack) -> None:
        """Enter the contexts that must be active together with the mode."""
        if self._operation_names is not None:
            self._operation_names.mode = self
            stack.enter_context(self._operation_names)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        cls = type(self)
        if "torch._dynamo" in sys.modules and "_hidden" not in vars(cls):
            cls._hidden = True  # type: ignore[attr-defined]
            hide = torch._disable_dynamo  # type: ignore[attr-defined]
            cls.__torch_dispatch__ = hide(cls.__torch_dispatch__, recursive=True)  # type: ignore[method-assign]
        if self._entered:
            raise InjectionError(f"this {cls.__name__} is already active; make a new {cls.__name__} for each step")
        with ExitStack() as stack:
            stack.callback(setattr, self, "_entered", False)
            self._entered = True
            self._around(stack)
            self._set_active(self._starts_active)
            self._hooks = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._set_active(False)
        finally:
            self._hooks.close()

    @property
    def _starts_active(self) -> bool:
        """Whether the mode sees operations from the beginning, and not only once it is set active."""
        return True

    def _set_active(self, active: bool) -> None:
        """Start or stop seeing operations."""
        if active and not self._is_active:
            super().__enter__()  # type: ignore[no-untyped-call]
        elif self._is_active and not active:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_active = active
