"""Names for the operations of a model as they run: ``layer1.0.conv1#convolution.0``.

An operation belongs to the innermost module in whose call it runs; ``k`` counts the operations of the same name in the module,
over one evaluation of one batch. Every dispatched operation counts, including views, so that a name does not depend on which
operations are observed. Hooks are global to the process while an `OperationNamer` is entered and are removed afterwards, even if
the model raised an error; calls in other threads of the program are ignored.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from unsilent.faults.naming import ROOT
from unsilent.sites.modules import named_modules
from unsilent.sites.operands import operation_name
from unsilent.sites.threads import StepThread

OUTSIDE = "(run)"
"""Module name of operations that the workload's ``run`` executes outside the model."""


class OperationNamer:
    """Names each operation by the module that is being called; a context manager around one evaluation of a batch.

    Args:
        model: Module whose submodules give the names. Operations of a module that is not part of it have the name of the
            calling module.

    Attributes:
        mode: Dispatch mode that is active together with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name or ROOT for name, module in named_modules(model)}
        self._stack: list[str] = [OUTSIDE]
        self._counts: Counter[tuple[str, str]] = Counter()
        self._handles: list[Any] = []
        self.mode: Any = None
        self._thread = StepThread()

    @property
    def module(self) -> str:
        """Name of the innermost module that is being called."""
        return self._stack[-1]

    def next_name(self, func: Any) -> str:
        """The name of the next operation; must be called exactly once for each operation, in order."""
        key = (self._stack[-1], operation_name(func))
        k = self._counts[key]
        self._counts[key] = k + 1
        return f"{key[0]}#{key[1]}.{k}"

    def __enter__(self) -> OperationNamer:
        self._stack, self._counts = [OUTSIDE], Counter()
        self._thread = StepThread(self.mode)
        self._handles = [
            register_module_forward_pre_hook(self._began),
            register_module_forward_hook(self._ended, always_call=True),
        ]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _is_followed(self, module: nn.Module) -> bool:
        """Whether the current thread works for the observed step."""
        return self._thread.includes()

    def _began(self, module: nn.Module, args: Any) -> None:
        if self._is_followed(module):
            self._begin(module, args)

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_followed(module):
            self._end(module, args, output)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
