"""The tensors that a guard watches: moments, moving statistics and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.guard.magnitudes import largest_magnitudes
from unsilent.sites.modules import named_modules, named_parameters, parameters_of

FIRST, SECOND, MOVING, PARAMETER = "first moment", "second moment", "moving statistic", "parameter"
HISTORY = (FIRST, SECOND, MOVING)
"""Kinds of tensors that accumulate gradients or activations."""
KINDS = (*HISTORY, PARAMETER)
MOMENTS_OF_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg", "exp_inf"), FIRST),
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq"), SECOND),
}
"""Entries of the state of torch's optimizers that accumulate gradients."""
STATISTICS = ("running_mean", "running_var")


class WatchedTensor(NamedTuple):
    """A watched tensor: its name (``fc.weight/exp_avg``), its kind, and its parameter or buffer.

    ``table[key]`` is its location; for a moment the table is ``states[parameter]``.
    """

    name: str
    kind: str
    owner: str
    tensor: Tensor
    table: Mapping[str, Any]
    key: str
    states: Mapping[Any, Any] | None = None
    parameter: Tensor | None = None


def find_history_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[WatchedTensor]:
    """Moments of optimizers, which exist after their first step, and moving statistics of the model."""
    return [*_moments(model, optimizers), *_statistics(model)]


def find_watched_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[WatchedTensor]:
    """All tensors that a guard watches: moments, moving statistics, and the parameters of the model."""
    return [*find_history_tensors(model, optimizers), *_parameters(model)]


def possible_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Names of tensors that are watched now or may be after the first step."""
    owners = [owner for number, optimizer in enumerate(optimizers) for owner, _ in _owners(model, optimizer, number)]
    moments = [f"{owner}/{key}" for owner in owners for key in MOMENTS_OF_OPTIMIZERS]
    return [*(part.name for part in (*_parameters(model), *_statistics(model))), *moments]


def same_watched_tensors(parts: Sequence[WatchedTensor], optimizers: Sequence[Optimizer]) -> bool:
    """Whether a quick check shows that the watched tensors are unchanged; new modules are not detected."""
    states = [o.state for o in optimizers]
    if sum(len(state) for state in states) != len({id(p.parameter) for p in parts if p.parameter is not None}):
        return False
    return all(
        p.table.get(p.key) is p.tensor
        and (p.states is None or (any(p.states is s for s in states) and p.states.get(p.parameter) is p.table))
        for p in parts
    )


def has_history(optimizer: Optimizer) -> bool:
    """Whether an optimizer that has made a step has moments."""
    entries = [entry for state in optimizer.state.values() for entry in state.items()]
    return any(key in MOMENTS_OF_OPTIMIZERS and isinstance(value, Tensor) for key, value in entries)


def _moments(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[WatchedTensor]:
    for number, optimizer in enumerate(optimizers):
        for owner, parameter in _owners(model, optimizer, number):
            table = optimizer.state.get(parameter, {})
            for key, value in table.items():
                if isinstance(value, Tensor) and value.is_floating_point() and (kind := MOMENTS_OF_OPTIMIZERS.get(key)):
                    yield WatchedTensor(f"{owner}/{key}", kind, owner, value, table, key, optimizer.state, parameter)


def _owners(model: nn.Module, optimizer: Optimizer, number: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of an optimizer with their names in the model."""
    names = {id(p): name for name, p in named_parameters(model)}
    for i, parameter in enumerate(parameters_of([optimizer])):
        yield names.get(id(parameter), f"optimizer {number}, parameter {i}"), parameter


def _statistics(model: nn.Module) -> Iterator[WatchedTensor]:
    for name, module in named_modules(model):
        for key in STATISTICS:
            value = module._buffers.get(key)
            if isinstance(value, Tensor) and value.is_floating_point():
                owner = f"{name}.{key}" if name else key
                yield WatchedTensor(owner, MOVING, owner, value, module._buffers, key)


def _parameters(model: nn.Module) -> Iterator[WatchedTensor]:
    seen = set()
    for name, module in named_modules(model):
        for key, value in module._parameters.items():
            if value is not None and value.is_floating_point() and id(value) not in seen:
                seen.add(id(value))
                owner = f"{name}.{key}" if name else key
                yield WatchedTensor(owner, PARAMETER, owner, value, module._parameters, key)


def magnitudes_of(parts: Sequence[WatchedTensor]) -> Tensor:
    """The largest magnitude of each tensor, float64[n]; see `largest_magnitudes`.

    On the CPU a negative second moment is returned as it is.
    """
    return largest_magnitudes([part.tensor for part in parts], [part.kind == SECOND for part in parts])


def no_gradient_history_message(optimizer: Optimizer) -> str:
    """Why a training with this optimizer cannot be guarded."""
    return (
        f"{type(optimizer).__name__} keeps no momentum or moments, so there is nothing to watch; "
        "use momentum, or an optimizer with moments (Adam, AdamW, RMSprop)"
    )
