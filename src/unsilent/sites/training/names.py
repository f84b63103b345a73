"""Names of the operations of a training step, and which backward node belongs to which of them.

Autograd numbers its nodes, and takes the number of an operation's node just before the operation is dispatched; so the number
that was given out last, when an operation that needs a gradient runs, is that of its node. A profiler pairs them so, too.

Names count anew with every micro-step: a forward pass of the model that begins after a backward pass. What activation
checkpointing runs again goes by the name it had, with occurrence 1: a call of a module is taken for the earlier call whose nodes
lie nearest to the node that asked for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from unsilent.sites.calls import Calls
from unsilent.sites.operands import operation_name

RECOMPUTED = "(recomputed)"
"""What is run again outside of any module's call."""


def current_node() -> Any:
    """The autograd node that is being evaluated, None in a forward pass."""
    return torch._C._current_autograd_node()


def next_number() -> int:
    """The number that the next node will get."""
    return int(torch._C._autograd._get_sequence_nr())


class Call(NamedTuple):
    """One call of a module in the forward pass: last node made before it and in it, operations counted before it."""

    begin: int
    counts: Counter[str]
    end: int


class Met(NamedTuple):
    """How an operation is called: its name, the micro-step, and whether it runs for the first time (0) or again (1)."""

    name: str
    micro_step: int
    occurrence: int


class StepCalls(Calls):
    """Follows the module calls of one training step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(inner(model))
        self._reset()
        self._micro_step = 0
        self._backward = False

    def _reset(self) -> None:
        self._tallies: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._again: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._calls: defaultdict[int, list[Call]] = defaultdict(list)
        self._open: list[tuple[int, int, Counter[str]] | None] = []

    def __enter__(self) -> StepCalls:
        super().__enter__()
        self._reset()
        self._micro_step, self._backward = 0, False
        return self

    @property
    def micro_step(self) -> int:
        """How many backward passes were over when this forward pass began."""
        return self._micro_step

    def backward(self) -> None:
        """Told that a backward node runs."""
        self._backward = True

    def meet(self, func: Any, again: bool) -> Met:
        """The name of a forward operation that is about to run; to be asked exactly once for each, in order."""
        module, operation = self.module, operation_name(func)
        if again and len(self._stack) == 1:
            module = RECOMPUTED
        tally = (self._again if again else self._tallies)[module]
        k = tally[operation]
        tally[operation] = k + 1
        return Met(f"{module}#{operation}.{k}", self._micro_step, int(again))

    def _begin(self, module: nn.Module, args: Any) -> None:
        node = current_node()
        if node is None and self._backward:
            self._micro_step += 1
            self._backward = False
            self._reset()
        super()._begin(module, args)
        name = self.module
        if node is None:
            self._open.append((id(module), next_number() - 1, self._tallies[name].copy()))
            return
        self._open.append(None)
        if id(module) in self._calls:
            number = node._sequence_nr()
            nearest = min(self._calls[id(module)], key=lambda c: max(c.begin - number, number - c.end, 0))
            self._again[name] = nearest.counts.copy()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._end(module, args, output)
        if opened := self._open.pop():
            key, begin, counts = opened
            self._calls[key].append(Call(begin, counts, next_number() - 1))


@contextmanager
def before_backward(told: Callable[[], None]) -> Iterator[None]:
    """Calls back whenever a backward pass is about to begin: nodes that are made by then can still be given hooks."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        told()
        return engine(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def inner(model: nn.Module) -> nn.Module:
    """The model inside a wrapper or a compiled module, whose own name would stand before all others."""
    while True:
        if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        elif type(model).__name__ in _WRAPPERS and isinstance(wrapped := model.module, nn.Module):
            model = wrapped
        else:
            return model
