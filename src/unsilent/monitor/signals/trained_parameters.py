"""The parameters that optimizers train, by name, and whether their gradients are reduced among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.guard.magnitudes import is_read
from unsilent.monitor.sampling import PARTS_OF_STATE
from unsilent.sites.modules import named_parameters, parameters_of

T = TypeVar("T")


def begins_alike(model: nn.Module) -> bool:
    """Whether all ranks begin with the same parameters, as DDP ensures.

    DDP sends the parameters of one rank to all ranks, unless some are to be ignored.
    """
    inner = getattr(model, "_orig_mod", model)
    return isinstance(inner, nn.parallel.DistributedDataParallel) and not inner.parameters_to_ignore


class TrainedParameters:
    """Parameters of several optimizers by name.

    A parameter of two optimizers belongs to the first one.

    Args:
        model: Model that gives the names.

    Attributes:
        of_optimizer: Names and parameters of each optimizer.
        count: Number of all parameters so far.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in named_parameters(model)}
        self._optimizers = optimizers
        self._known: dict[int, Tensor] = {}
        self._counted = [0] * len(optimizers)
        self.of_optimizer: list[list[tuple[str, Tensor]]] = [[] for _ in optimizers]

    def find_new(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield each new parameter with the number of its optimizer and its name.

        These are all parameters at first, and later those of added groups.
        """
        for number, optimizer in enumerate(self._optimizers):
            counted = sum(len(group["params"]) for group in optimizer.param_groups)
            if counted == self._counted[number]:
                continue
            self._counted[number] = counted
            for place, parameter in enumerate(parameters_of([optimizer])):
                if is_read(parameter) and id(parameter) not in self._known:
                    self._known[id(parameter)] = parameter
                    name = self._names.get(id(parameter), f"optimizer {number}, parameter {place}")
                    self.of_optimizer[number].append((name, parameter))
                    yield number, name, parameter


def frozen_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    """Parameters of the model that no optimizer trains."""
    trained = set(map(id, parameters_of(optimizers)))
    return [(name, parameter) for name, parameter in named_parameters(model) if id(parameter) not in trained]


def is_sharded(parameter: Any) -> bool:
    """Whether this rank holds only a part of the parameter."""
    return hasattr(parameter, "_local_tensor")


def are_reduced(parameters: Sequence[Tensor]) -> bool:
    """Whether gradients may be reduced over all ranks at the end of a backward pass."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several or any(map(is_sharded, parameters))


def in_turn(items: Sequence[T], step: int, interval: int) -> list[T]:
    """The items whose turn it is in a step.

    Item n is read in every step where n + step is divisible by the interval.
    """
    return list(items[-step % interval :: interval])


def part_in_turn(items: Sequence[T], step: int, interval: int) -> list[T]:
    """The items whose turn it is in a step, each once per interval.

    In many steps there are none, as one call for many items costs less.
    """
    pause, rest = divmod(interval, PARTS_OF_STATE)
    if rest or not pause:
        return in_turn(items, step, interval)
    return [] if step % pause else in_turn(items, step // pause, PARTS_OF_STATE)
