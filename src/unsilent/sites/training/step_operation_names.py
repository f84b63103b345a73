"""Names of the operations of a training step, and their backward nodes.

Autograd numbers its nodes, and assigns the number of an operation's node just before the operation is dispatched. So when an
operation that needs a gradient runs, the last assigned number belongs to its node. Profilers match them in the same way.

Counts in names restart with every micro-step: a forward pass of the model that begins after a backward pass. Operations that
activation checkpointing recomputes keep their names, with occurrence 1. A recomputed call of a module is matched with the earlier
call in the same checkpointed region or, if torch does not give the region, with the call whose nodes are nearest to the node that
requested it. Calls of one module in one region are recomputed in their original order.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from unsilent.basics.nested import tensors_in
from unsilent.sites.calls import OperationNamer
from unsilent.sites.operands import operation_name
from unsilent.sites.threads import StepThread

RECOMPUTED = "(recomputed)"
"""Module name of operations that are recomputed outside any module call."""


def current_node() -> Any:
    """The autograd node that is being evaluated; None in a forward pass."""
    return torch._C._current_autograd_node()


def next_number() -> int:
    """The number that the next autograd node will get."""
    return int(torch._C._autograd._get_sequence_nr())


class ModuleCall(NamedTuple):
    """A forward call of a module: its range of autograd nodes, its operation counts, its checkpoint region."""

    begin: int
    counts: Counter[str]
    end: int
    region: int | None

    def distance(self, node: int) -> int:
        """Distance of a node from the range of this call's nodes; 0 inside."""
        return max(self.begin - node, node - self.end, 0)


class OperationOccurrence(NamedTuple):
    """A run of an operation: its name, the micro-step, and 0 for the first run or 1 for a recomputation."""

    name: str
    micro_step: int
    occurrence: int


class StepOperationNamer(OperationNamer):
    """Names the operations of one training step; ``moved`` is called when a module call begins (True) or ends.

    Attributes:
        called_modules: Names of the modules that were called.
    """

    def __init__(self, model: nn.Module, moved: Callable[[bool], None] = lambda begins: None) -> None:
        super().__init__(model_inside_wrapper(model))
        self._moved = moved
        self._backward_begins: Callable[[], None] | None = None
        self.called_modules: dict[str, None] = {}
        self._reset()
        self._micro_step = 0
        self._backward = False

    def _reset(self) -> None:
        self._tallies: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._again: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._calls: defaultdict[int, list[ModuleCall]] = defaultdict(list)
        self._open: list[tuple[int, int, Counter[str], int | None] | None] = []
        self._reruns: Counter[tuple[Any, int]] = Counter()
        self.ambiguous_modules: set[str] = set()

    def __enter__(self) -> StepOperationNamer:
        super().__enter__()
        self._reset()
        self._micro_step, self._backward = 0, False
        self.called_modules = {}
        return self

    @property
    def module_names(self) -> Collection[str]:
        """Names of all modules of the model."""
        return self._names.values()

    @property
    def has_run_backward(self) -> bool:
        """Whether a backward pass has run."""
        return self._backward or self._micro_step > 0

    @property
    def current_micro_step(self) -> int:
        """Number of backward passes that ended before this forward pass began."""
        return self._micro_step

    def mark_backward(self) -> None:
        """Record that a backward node runs."""
        self._backward = True

    def next_occurrence(self, func: Any, again: bool) -> OperationOccurrence:
        """The next forward operation's name and occurrence; must be called exactly once for each, in order."""
        module, operation = self.module, operation_name(func)
        if again and len(self._stack) == 1:
            module = RECOMPUTED
        tally = (self._again if again else self._tallies)[module]
        k = tally[operation]
        tally[operation] = k + 1
        return OperationOccurrence(f"{module}#{operation}.{k}", self._micro_step, int(again))

    def _begin(self, module: nn.Module, args: Any) -> None:
        node = current_node()
        if node is None and self._backward and len(self._stack) == 1:  # a backward pass may also run inside a module
            self._micro_step += 1
            self._backward = False
            self._reset()
        super()._begin(module, args)
        name = self.module
        self.called_modules[name] = None
        if node is None:
            counted = self._tallies.get(name)
            counts = counted.copy() if counted else Counter[str]()
            self._open.append((id(module), next_number() - 1, counts, checkpoint_region()))
        else:
            self._open.append(None)
            if id(module) in self._calls:
                self._again[name] = self._earlier(id(module), name, node._sequence_nr()).counts.copy()
        self._moved(True)

    def _earlier(self, module: int, name: str, node: int) -> ModuleCall:
        """The original module call that is being recomputed."""
        where, calls = checkpoint_region(), self._calls[module]
        candidates = [call for call in calls if call.region == where and where is not None]
        if not candidates:  # region unknown: the calls nearest to the requesting node
            least = min(call.distance(node) for call in calls)
            candidates = [call for call in calls if call.distance(node) == least]
            if self._reruns[node, module] >= len(candidates) or len({call.region for call in calls} - {None}):
                self.ambiguous_modules.add(name)
        key = (where if where is not None else node, module)
        number = self._reruns[key]
        self._reruns[key] = number + 1
        return candidates[number % len(candidates)]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._end(module, args, output)
        if opened := self._open.pop():
            key, begin, counts, where = opened
            self._calls[key].append(ModuleCall(begin, counts, next_number() - 1, where))
        if self._backward_begins is not None and len(self._stack) == 1:
            for node in {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None}:
                node.register_prehook(self._node_begins)
        self._moved(False)

    def follow_backward(self, begins: Callable[[], None] | None) -> None:
        """Follow backward passes in any thread; ``begins`` is called when one reaches the model's output.

        Needed if no operations are observed, which would reveal a backward pass that torch's own functions did not start.
        """
        self._backward_begins = begins

    def _node_begins(self, gradients: Any) -> None:
        if self._backward_begins is not None and not torch.is_grad_enabled():
            self._backward_begins()

    def _is_followed(self, module: nn.Module) -> bool:
        in_backward = self._backward_begins is not None and current_node() is not None
        return self._thread.includes(in_backward and id(module) in self._names)


class _BackwardCallbacks:
    """Callbacks before every backward pass; patches torch's backward function while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[tuple[Callable[[bool], None], StepThread]] = []
        self._engine: Any = None

    def add(self, callback: Callable[[bool], None]) -> None:
        autograd: Any = torch.autograd
        with self._lock:
            if not self._callbacks:
                self._engine, autograd._engine_run_backward = autograd._engine_run_backward, self._run
            self._callbacks.append((callback, StepThread()))

    def remove(self, callback: Callable[[bool], None]) -> None:
        autograd: Any = torch.autograd
        with self._lock:
            self._callbacks = [entry for entry in self._callbacks if entry[0] != callback]
            if not self._callbacks:
                autograd._engine_run_backward = self._engine

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        builds_graph = bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))
        for callback, thread in tuple(self._callbacks):
            if thread.includes(is_of_step=True):  # also torch's threads: a pass inside a backward node
                callback(builds_graph)
        return engine(*args, **kwargs)


_CALLBACKS = _BackwardCallbacks()


@contextmanager
def before_backward(callback: Callable[[bool], None]) -> Iterator[None]:
    """Context in which ``callback`` is called before every backward pass.

    The argument of the callback is whether the pass builds a graph itself (``create_graph``).
    """
    _CALLBACKS.add(callback)
    try:
        yield
    finally:
        _CALLBACKS.remove(callback)


def checkpoint_region() -> int | None:
    """The checkpointed region (non-reentrant) that is running or being recomputed; None outside such regions."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = hooks[0] if hooks else None
    for cell in getattr(getattr(pack, "_torchdynamo_orig_callable", pack), "__closure__", None) or ():
        result = cell.cell_contents
        result = result() if isinstance(result, weakref.ref) else result
        if type(result).__name__ == "_CheckpointFrame":
            return id(result)
    return None


_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def model_inside_wrapper(model: nn.Module) -> nn.Module:
    """The model inside a wrapper or a compiled module."""
    while True:
        if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        elif type(model).__name__ in _WRAPPERS and isinstance(wrapped := model.module, nn.Module):
            model = wrapped
        else:
            return model
