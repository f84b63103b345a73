"""Sources of training batches, whose order depends only on the seeds, the epoch and the position in it.

Invariant: a source holds no state of a run. All state of a run is in its `TrainingState`, and can be made again from
the counters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.workloads.trainings.base import TrainingState
from unsilent.workloads.trainings.randomness import DATA, FETCHED, seed_globals, stream_seed


class BatchSource(Protocol):
    """A source that gives the batch at the state's epoch and cursor.

    After the last batch of an epoch it gives the first batch of the next epoch.
    """

    def batch(self, state: TrainingState) -> Any:
        """The batch at the state's position.

        Increases ``epoch`` at the end of an epoch; the caller moves the cursor once the step is done.
        """
        ...


@dataclass(frozen=True)
class RowBatches:
    """Batches of ``size`` out of ``count`` rows, in a new random order in each epoch.

    The last incomplete batch is left out. ``take``: maps int64 row numbers [size] to a batch.
    """

    count: int
    size: int
    take: Callable[[Tensor], Any]

    def batch(self, state: TrainingState) -> Any:
        """The batch of rows at the state's position."""
        order = _permutation_of_epoch(state, self.count, self.count // self.size)
        return self.take(order[state.cursor * self.size : (state.cursor + 1) * self.size])


@dataclass(frozen=True)
class ListedBatches:
    """A list of batches, in a new random order in each epoch."""

    batches: Sequence[Any]

    def batch(self, state: TrainingState) -> Any:
        """The batch at the state's position."""
        return self.batches[int(_permutation_of_epoch(state, len(self.batches), len(self.batches))[state.cursor])]


@dataclass(frozen=True)
class StepBatches:
    """Batches from a function of the step.

    Random numbers that it draws are seeded from the stream of the order.
    """

    give: Callable[[int], Any]

    def batch(self, state: TrainingState) -> Any:
        """The batch of the state's step; the whole run is one epoch."""
        seed_globals(stream_seed(state.seeds, "order", state.step))
        return self.give(state.step)


@dataclass(frozen=True)
class IteratedBatches:
    """Batches from an iterable such as a data loader, which is iterated again in each epoch.

    To continue inside an epoch, it is iterated from the start up to the cursor. A sampler with a ``generator`` gets a
    generator of the order's stream, and all other random numbers for a batch belong to augmentation. Without such a
    sampler, the two cannot be distinguished in the first batch of an epoch, which is drawn from the order's stream.
    """

    make: Callable[[], Iterable[Any]]
    """Function that is called once for each state, or in each epoch if its result can be iterated only once."""

    def batch(self, state: TrainingState) -> Any:
        """The next batch of the iterator that the state holds."""
        held = state.cached_values
        if held.get("at") != (state.epoch, state.cursor):
            self._begin(state)
        seed_globals(stream_seed(state.seeds, "augment", state.step, FETCHED))
        batch = next(held["iterator"], _END)
        if batch is _END:
            if state.cursor == 0:
                raise UsageError("the batches are empty; give at least one")
            state.epoch, state.cursor = state.epoch + 1, 0
            return self.batch(state)
        held["at"] = (state.epoch, state.cursor + 1)
        return batch

    def _begin(self, state: TrainingState) -> None:
        iterable = state.cached_values.get("iterable")
        if iterable is None or isinstance(iterable, Iterator):
            seed_globals(stream_seed(state.seeds, DATA))
            iterable = state.cached_values["iterable"] = self.make()
        first = state.step - state.cursor
        iterator = _iteration(iterable, state, first)
        for step in range(first, state.step):
            seed_globals(stream_seed(state.seeds, "augment", step, FETCHED))
            next(iterator, None)
        state.cached_values["iterator"] = iterator


def _iteration(loader: Any, state: TrainingState, step: int) -> Iterator[Any]:
    """A new iterator over a loader, with its first batch already fetched.

    ``step``: the step that uses the first batch.
    """
    order, augment = stream_seed(state.seeds, "order", state.epoch), stream_seed(state.seeds, "augment", step, FETCHED)
    sampler = getattr(loader, "sampler", None)
    for part in (loader, sampler):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(state.epoch)
    # The loader's own generator seeds its worker processes, which do the augmentation.
    pairs: tuple[tuple[Any, int], ...] = ((sampler, order), (loader, augment))
    lent = [(part, part.generator, seed) for part, seed in pairs if _draws(part)]
    seed_globals(augment if _draws(sampler) else order)
    try:
        for part, _, seed in lent:
            part.generator = torch.Generator().manual_seed(seed)
        iterator = iter(loader)
        # Samplers read their generator when the first batch is requested.
        first = list(islice(iterator, 1))
    finally:
        for part, before, _ in lent:
            part.generator = before
    return chain(first, iterator)


def _draws(part: Any) -> bool:
    """Whether a loader or sampler has an attribute for a generator."""
    return hasattr(part, "generator") and isinstance(part.generator, (torch.Generator, type(None)))


_END = object()


def source_of(batches: Any) -> BatchSource:
    """The batch source for a user's argument ``batches``.

    Raises ``UsageError`` for a value that cannot give batches.
    """
    if isinstance(batches, (Tensor, Mapping, str)):
        raise UsageError(
            f"batches is a {type(batches).__name__}; expected several batches: put a single batch into a list, [batch]"
        )
    if isinstance(batches, (RowBatches, ListedBatches, StepBatches, IteratedBatches)):
        return batches
    if isinstance(batches, (list, tuple)):
        if not batches:
            raise UsageError("a training needs at least one batch, found an empty list")
        return ListedBatches(batches)
    if isinstance(batches, Iterator):
        raise UsageError(
            f"batches is a {type(batches).__name__}, which can be read only once; give a list, a data loader or a function"
        )
    if isinstance(batches, Iterable):
        return IteratedBatches(lambda: batches)
    if callable(batches):
        return StepBatches(batches) if _wants_step(batches) else IteratedBatches(batches)
    raise UsageError(
        f"batches is {type(batches).__name__}; expected a list of batches, a data loader, a function that returns one of these, "
        "or a function that takes the step and returns its batch"
    )


def _wants_step(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _permutation_of_epoch(state: TrainingState, count: int, batches: int) -> Tensor:
    """A random permutation of ``count`` items for the current epoch.

    Begins the next epoch once ``batches`` batches were taken.
    """
    if state.cursor >= batches:
        state.epoch, state.cursor = state.epoch + 1, 0
    if state.cached_values.get("order_of") != state.epoch:
        generator = state.generators["order"].manual_seed(stream_seed(state.seeds, "order", state.epoch))
        state.cached_values |= {"order_of": state.epoch, "order": torch.randperm(count, generator=generator)}
    order: Tensor = state.cached_values["order"]
    return order
