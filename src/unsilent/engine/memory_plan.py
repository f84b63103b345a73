"""The choice of golden values to hold in limited memory, and the default memory budget.

A trial reads golden values as well as corrupted ones, and compares with them to end early. A value that is not held is
computed again from the nearest held values. `plan_memory` starts with all useful values and drops one after the other,
each time a value with a low cost for its bytes: P(a trial needs it) times the cost of the operations that compute it
from held values. The order does not depend on the budget, so a larger budget holds a superset and never costs more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.free_memory import available_memory_bytes
from unsilent.basics.sizes import human_bytes
from unsilent.engine.fault_propagation import (
    Bits,
    FaultPropagation,
    PropagationStart,
    costs,
    propagate_faults,
    set_weights,
)
from unsilent.engine.tape import Tape

UNKNOWN = 1 << 30
"""Available bytes that are assumed if the free memory is not known."""
SHARE = 4


def default_budget(device: torch.device | str) -> int:
    """Bytes for golden values on ``device`` by default.

    A quarter of the free memory, or 1 GiB if that is not known.
    """
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0]) // SHARE
    if device.type != "cpu":
        return UNKNOWN
    free = available_memory_bytes()
    return UNKNOWN if free is None else free // SHARE


DIES_OUT = 0.1
"""Assumed probability that a fault has no effect any more at a place where values can be compared."""
SAME_ANSWER = 0.5
"""Assumed probability that Python reads the golden bits back although they may differ."""
GROUPS = 4096
"""Number of groups of operations into which a longer tape is divided, to find the cost of computing a value again."""
FAR = 100
"""Largest number of values that are searched for those that depend on a dropped value."""


@dataclass(frozen=True)
class MemoryPlan:
    """The golden values to hold, and their number of bytes.

    ``kept_values``: golden values by tape. ``held``: bytes, including ``minimum``, the bytes that every plan holds.
    ``unlimited_bytes``: bytes with which no value would have to be computed again.
    """

    kept_values: tuple[frozenset[int], ...]
    held: int
    minimum: int
    unlimited_bytes: int


def plan_memory(
    tapes: Sequence[Tape],
    budget: int,
    *,
    operations: float = 0.0,
    worker_count: int = 1,
) -> MemoryPlan:
    """Choose the golden values to hold within ``budget`` bytes.

    ``worker_count`` workers share the budget, and each worker holds values of all tapes.

    Args:
        tapes: Tapes with the cost of each operation in ``seconds``.
        operations: Share of the faults that corrupt results of operations.

    Raises:
        UsageError: a worker's share of the budget is below the minimum.
    """
    minimum = sum(map(minimum_memory, tapes))
    if budget // worker_count < minimum:
        raise _too_small(budget, worker_count, minimum, len(tapes))
    budget //= worker_count
    sizes = [np.array([v.nbytes for v in tape.values], np.int64) for tape in tapes]
    shared: dict[object, _Order] = {}
    orders = []
    for tape in tapes:
        law = parameter_fault_weights(tape)
        key = _structure(tape, law)
        if key not in shared:
            shared[key] = _Order(tape, law, operations)
        orders.append(shared[key])
    keep = [set(order.useful) for order in orders]
    held = wanted = minimum + sum(int(sizes[t][v]) for t, values_kept in enumerate(keep) for v in values_kept)
    queue = [(order.at(0), t, 0) for t, order in enumerate(orders)] if held > budget else []
    heapq.heapify(queue)
    while held > budget:
        (_, value), t, n = heapq.heappop(queue)
        keep[t].discard(value)
        held -= int(sizes[t][value])
        heapq.heappush(queue, (orders[t].at(n + 1), t, n + 1))
    return MemoryPlan(tuple(map(frozenset, keep)), held, minimum, wanted)


def _too_small(budget: int, sharers: int, minimum: int, batches: int) -> UsageError:
    """The error for a budget that is too small, in terms of the total that ``--memory`` gives."""
    each = f" is {human_bytes(budget // sharers)} for each of {sharers} workers" if sharers > 1 else " is too small"
    need = "1 batch needs" if batches == 1 else f"{batches} batches need"
    return UsageError(
        f"--memory {human_bytes(budget)}{each}: {need} {human_bytes(minimum, math.ceil)} for outputs and constants; "
        f"give at least {human_bytes(minimum * sharers, math.ceil)}, use fewer batches, or use --engine plain"
    )


def minimum_memory(tape: Tape) -> int:
    """Number of bytes that a tape always holds: constants that the recorder copied, and the outputs."""
    memory_values = set(tape.by_storage.values())
    held = [t for v, t in tape.externals.items() if v not in memory_values] + [leaf for leaf, _ in tape.output_tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


def parameter_fault_weights(tape: Tape) -> dict[int, float]:
    """Relative frequency of faults in each parameter or buffer of a tape, by its number of bytes."""
    inputs = {entry.window.value for entry in tape.inputs.values()}
    return {v: float(tape.values[v].nbytes) for v in tape.by_storage.values() if v not in inputs}


def _sources(
    tape: Tape, law: Mapping[int, float], operations: float
) -> tuple[list[PropagationStart], NDArray[np.float64]]:
    """Possible faults as starts of propagation, and their probabilities."""
    total = sum(law.values()) or 1.0
    sources = [PropagationStart(nodes=tuple(tape.values[v].readers)) for v in law]
    odds = [w / total * (1 - operations) for w in law.values()]
    if operations:
        corrupted = [n.new_values[0] for n in tape.nodes if n.new_values]
        sources += [PropagationStart(values=(v,)) for v in corrupted]
        odds += [operations / len(corrupted)] * len(corrupted)
    return sources, np.array(odds)


def _structure(tape: Tape, law: Mapping[int, float]) -> object:
    """A key that is equal for tapes which need the same values in the same order, such as batches of one shape."""
    nodes = tuple((n.name, n.new_values, *sorted(n.values)) for n in tape.nodes)
    return nodes, tuple((v.nbytes, v.output) for v in tape.values), tuple(law.items())


class _Graph:
    """The readers and producers of each value of a tape, as plain lists."""

    def __init__(self, tape: Tape) -> None:
        internal = {v.index for v in tape.values if v.producer is not None}
        self.reads = [tuple(sorted(internal.intersection(node.values))) for node in tape.nodes]
        self.made = [node.new_values for node in tape.nodes]
        self.readers = [tuple(v.readers) for v in tape.values]
        self.producer = [v.producer for v in tape.values]

    def demand(self, needed: Sequence[Bits], held: Collection[int]) -> tuple[list[Bits], list[Bits]]:
        """The faults under which each value is needed, and under which each operation is executed again."""
        asked_for = list(needed)
        again = [0] * len(self.made)
        for n in range(len(self.made) - 1, -1, -1):
            bits = 0
            for value in self.made[n]:
                if value not in held:
                    bits |= asked_for[value]
            again[n] = bits
            for value in self.reads[n] if bits else ():
                asked_for[value] |= bits
        return asked_for, again

    def chains(self, held: Collection[int]) -> list[Bits]:
        """The operations that have to run before each operation when only ``held`` values are available.

        They are bit sets of groups of neighbouring operations.
        """
        count = len(self.made)
        items: list[Bits] = []
        for n in range(count):
            bits = 1 << (n * min(GROUPS, count) // count)
            for value in self.reads[n]:
                if value not in held:
                    producer = self.producer[value]
                    assert producer is not None  # `reads` has no externals
                    bits |= items[producer]
            items.append(bits)
        return items

    def nearest_held(self, value: int, held: Collection[int]) -> set[int]:
        """The nearest held values before and after ``value`` in the graph of a tape.

        ``value`` itself is not held.
        """
        ahead = _walk(value, held, lambda v: chain.from_iterable(self.made[r] for r in self.readers[v]))
        return ahead | _walk(value, held, lambda v: self.reads[self.producer[v] or 0])


def _walk(value: int, held: Collection[int], neighbours: Callable[[int], Iterable[int]]) -> set[int]:
    """The nearest held values in one direction of the graph.

    In a complex graph only some of them are found, since missing a few costs little.
    """
    members: set[int] = set()
    seen, stack = {value}, [value]
    while stack and len(seen) < FAR:
        for neighbour in neighbours(stack.pop()):
            if neighbour not in seen:
                seen.add(neighbour)
                if neighbour in held:
                    members.add(neighbour)
                else:
                    stack.append(neighbour)
    return members


class _Order:
    """The order in which values of a tape are dropped when memory is short, computed on demand.

    It works in rounds. Each round drops the cheaper half of the held values, in order, except those that depend on
    another value of the same round, because their cost has just changed. There are about log2(values) rounds, each
    linear in the tape.
    """

    def __init__(self, tape: Tape, law: Mapping[int, float], operations: float) -> None:
        self._graph = _Graph(tape)
        sources, self._odds = _sources(tape, law, operations)
        result = propagate_faults(tape, sources)
        self._needed = result.needed
        seconds = costs(tape)
        self._groups = np.zeros(min(GROUPS, len(seconds)))
        np.add.at(self._groups, np.arange(len(seconds)) * len(self._groups) // max(1, len(seconds)), seconds)
        self._bytes = np.array([v.nbytes for v in tape.values], np.float64)
        self._fixed = _other_uses(tape, result, self._odds, seconds)
        weights = set_weights(result.needed, self._odds) + self._fixed
        self.useful = {v.index for v in tape.values if v.producer is not None and weights[v.index] > 0}
        self._held = set(self.useful)
        self._given_up: list[tuple[float, int]] = []
        self._rounds = self._run()

    def at(self, n: int) -> tuple[float, int]:
        """The loss per byte and the number of the n-th value to drop.

        The loss never falls with ``n``. The loss is infinite when no value is left.
        """
        while len(self._given_up) <= n:
            batch = next(self._rounds, None)
            if batch is None:
                return float("inf"), -1
            for loss, value in batch:
                before = self._given_up[-1][0] if self._given_up else 0.0
                self._given_up.append((max(loss, before), value))
        return self._given_up[n]

    def _run(self) -> Iterator[list[tuple[float, int]]]:
        while candidates := sorted(v for v in self._held if self._bytes[v]):
            ranked = sorted(zip(self._losses(candidates).tolist(), candidates, strict=True))
            blocked: set[int] = set()
            batch = []
            for loss, value in ranked[: (len(ranked) + 1) // 2]:
                if value in blocked:
                    continue
                self._held.discard(value)
                batch.append((loss, value))
                blocked |= self._graph.nearest_held(value, self._held)
            yield batch

    def _losses(self, values: list[int]) -> NDArray[np.float64]:
        """The expected additional seconds of a trial for each value that is not held in memory, per byte of the value."""
        demanded = self._graph.demand(self._needed, self._held)[0]
        chains = self._graph.chains(self._held)
        often = set_weights([demanded[v] for v in values], self._odds)
        long = set_weights([chains[self._graph.producer[v] or 0] for v in values], self._groups)
        loss: NDArray[np.float64] = (often * long + self._fixed[values]) / self._bytes[values]
        return loss


def _other_uses(
    tape: Tape, result: FaultPropagation, odds: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds that a held value saves beyond its recomputation.

    With this value, a trial can end early after a comparison, or avoid a full run.
    """
    # A golden output need not be assembled and judged; this saving is counted as one operation.
    answer = seconds.sum() / max(1, len(seconds))
    onward = np.array([seconds[v.readers].sum() + answer * v.output for v in tape.values])
    saved: NDArray[np.float64] = set_weights(result.may_end_at, odds) * onward * DIES_OUT
    for node in tape.nodes:
        if node.func is None:  # Python reads it back: if it cannot be compared, the trial has to be run plainly
            value = node.reads[0].value
            saved[value] += float(set_weights([result.dirty[value]], odds)[0]) * seconds.sum() * SAME_ANSWER
    return saved
