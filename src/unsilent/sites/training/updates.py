"""The operations of an optimizer's update, named by the parameter they update: ``op:fc.weight#addcdiv.0/optim/out``.

The parameter of an operation follows from the memory that it uses: the memory of the parameter, its gradient or its state, or of
results computed from them. An operation on lists (``_foreach_addcdiv_``) belongs to the parameters of all entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unsilent.basics.nested import tensors_in
from unsilent.sites.corrupting import has_plain_memory
from unsilent.sites.modules import named_parameters, parameters_of
from unsilent.sites.operands import first_tensor_list, operation_name
from unsilent.sites.threads import StepThread


class UpdateOperation(NamedTuple):
    """An update operation for one parameter: its name, and its entry in the operation's lists (None: no lists)."""

    name: str
    entry: int | None


def local(tensor: Tensor) -> Tensor:
    """The local shard of a distributed tensor; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


class UpdateTracker:
    """Context manager that follows the updates of optimizers in one step.

    Args:
        before: Function that is called before each update.
        moved: Function that is called when an update begins (with True) or has ended (with False).

    Attributes:
        active: Whether an optimizer's ``step`` is running.
        names_are_wanted: Whether operations must be named; this requires a search of all tensors of an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[], None] = lambda: None,
        moved: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        self._model = model
        self.active, self._before, self._moved = False, before, moved
        self.names_are_wanted = True
        self._owners: dict[int, tuple[StorageWeakRef, str]] = {}  # a reference prevents reuse of the number
        self._counts: Counter[tuple[str, str]] = Counter()
        self._handles: list[Any] = []
        self._thread = StepThread()

    def __enter__(self) -> UpdateTracker:
        self._thread = StepThread()
        self._counts, self._owners = Counter(), {}
        self._handles = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]
        return self

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()
        self.active, self._owners = False, {}

    def name_operations(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[UpdateOperation]:
        """Names of the next operation, one per updated parameter; must be called exactly once for each, in order."""
        entries = first_tensor_list(args)
        operation, result = operation_name(func), []
        if entries is None:
            owner = next((o for t in tensors_in((*args, *kwargs.values())) if (o := self._owner(t))), None)
            owners: list[tuple[str | None, int | None]] = [(owner, None)]
        else:
            owners = [(self._owner(t), i) for i, t in enumerate(entries)]
        for owner, entry in owners:
            if owner is not None:
                k = self._counts[owner, operation]
                self._counts[owner, operation] = k + 1
                result.append(UpdateOperation(f"{owner}#{operation}.{k}", entry))
        return result

    def assign_results(self, work: Sequence[UpdateOperation], result: Any) -> None:
        """Assign the memory of an operation's result to the parameters that it was computed for."""
        results = list(tensors_in(result))
        for operation in work:
            tensors = results if operation.entry is None else results[operation.entry : operation.entry + 1]
            for tensor in tensors:
                self._assign_owner(tensor, operation.name.rpartition("#")[0])

    def _owner(self, tensor: Any) -> str | None:
        here = local(tensor) if isinstance(tensor, Tensor) else None
        result = (
            self._owners.get(here.untyped_storage()._cdata) if here is not None and has_plain_memory(here) else None
        )
        return None if result is None or result[0].expired() else result[1]

    def _assign_owner(self, tensor: Any, name: str) -> None:
        if isinstance(tensor, Tensor) and has_plain_memory(here := local(tensor)):
            memory = here.untyped_storage()
            self._owners[memory._cdata] = StorageWeakRef(memory), name

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_followed(optimizer):
            return
        self._before()
        self.active = True
        names = {id(p): name for name, p in named_parameters(self._model)} if self.names_are_wanted else {}
        for group in optimizer.param_groups if self.names_are_wanted else ():
            for number, p in enumerate(group["params"]):
                name = names.get(id(p), f"(parameter {number})")
                for tensor in (p, p.grad, *optimizer.state.get(p, {}).values()):
                    self._assign_owner(tensor, name)
        self._moved(True)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_followed(optimizer):
            self.active = False
            self._moved(False)

    def _is_followed(self, optimizer: Optimizer) -> bool:
        """Whether an update belongs to the observed step, whichever thread executes it."""
        if self._thread.is_current:
            return True
        parameter_ids = {id(p) for p in self._model.parameters()}
        return self._thread.includes(any(id(p) in parameter_ids for p in parameters_of([optimizer])))


def state_of(optimizers: Sequence[Optimizer], model: nn.Module, name: str, entry: str) -> Tensor | None:
    """A tensor of an optimizer's state; None if it does not exist (yet)."""
    parameter = dict(named_parameters(model)).get(name)
    for optimizer in optimizers:
        value = optimizer.state.get(parameter, {}).get(entry) if parameter is not None else None
        if isinstance(value, Tensor):
            return local(value)
    return None


def optimizer_state_names(optimizers: Sequence[Optimizer], model: nn.Module) -> list[str]:
    """The optimizer state tensors that can be corrupted, named like ``fc.weight/exp_avg``."""
    return [
        f"{name}/{entry}"
        for name, p in named_parameters(model)
        for optimizer in optimizers
        for entry, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    ]


def current_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The current gradients of the parameters, by parameter name."""
    return {name: local(p.grad) for name, p in named_parameters(model) if p.grad is not None}
