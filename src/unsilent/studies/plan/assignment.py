"""Assigns items to blocks of memory so that the fewest failures remain.

With one protected block and unlimited unprotected memory this is the 0/1 knapsack problem; with more blocks, the generalised
assignment problem. Both are solved exactly by SciPy's mixed-integer solver (HiGHS). If that reaches its time limit, the better of
its best assignment and of the greedy one (largest failure rate per bit first) is returned.

Invariants: every item is in exactly one block; no block holds more bits than its capacity.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.sizes import human_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TIME_LIMIT, GAP = 3.0, 1e-6
"""Maximum seconds of the solver for one assignment, and the relative gap at which the assignment counts as optimal."""
_OBJECTIVE = 1e4
"""Sum of the scaled objective, large because HiGHS stops at an absolute gap of 1e-6."""
_SHRINKAGES = (0.0, 1e-5)
"""Shares of the capacities that are left free in each attempt: HiGHS allows constraints to be violated by 1e-6."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of memory.

    Attributes:
        capacity: Capacity in bits; None if it is unlimited.
        residual: Share of the faults in the block that remain; 0 if all are corrected, 1 for unprotected memory.
        latency: Latency of an access, in any unit.
        energy: Energy per byte, in any unit.
    """

    name: str
    capacity: int | None = None
    residual: float = 1.0
    latency: float = 0.0
    energy: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The blocks that items are assigned to, with optional limits on mean latency and total energy."""

    blocks: tuple[Block, ...]
    max_latency: float | None = None
    max_energy: float | None = None

    def latency(self, choice: Ints, sizes: Ints) -> float:
        """The mean latency over all bits of an assignment."""
        return float(np.array([b.latency for b in self.blocks])[choice] @ sizes / sizes.sum())

    def energy(self, choice: Ints, sizes: Ints) -> float:
        """The energy of an assignment, over all bytes."""
        return float(np.array([b.energy for b in self.blocks])[choice] @ sizes / 8)

    def residuals(self, choice: Ints) -> Floats:
        """The share of the faults in each item that remain, float64[items]."""
        return np.array([b.residual for b in self.blocks], dtype=np.float64)[choice]

    def fits(self, choice: Ints, sizes: Ints) -> bool:
        """Whether an assignment exceeds neither a capacity nor a limit."""
        used = np.bincount(choice, sizes, len(self.blocks))
        full = any(b.capacity is not None and n > b.capacity for b, n in zip(self.blocks, used, strict=True))
        slow = self.max_latency is not None and self.latency(choice, sizes) > self.max_latency * (1 + 1e-9)
        hungry = self.max_energy is not None and self.energy(choice, sizes) > self.max_energy * (1 + 1e-9)
        return not (full or slow or hungry)


def protected_memory(bits: int) -> Memory:
    """A memory with a protected block of a given size and an unlimited unprotected block."""
    return Memory((Block("protected", bits, 0.0), Block("unprotected")))


@dataclass(frozen=True, slots=True)
class Assignment:
    """The block number of each item, int64[items], and whether it is proven to be optimal."""

    choice: Ints
    optimal: bool


def assign_in_order(order: Iterable[int], sizes: Ints, memory: Memory) -> Ints | None:
    """Greedily assign items, in the given order, to the most reliable block that has room.

    None if no block has room for some item.
    """
    best = sorted(range(len(memory.blocks)), key=lambda b: memory.blocks[b].residual)
    left = [math.inf if b.capacity is None else b.capacity for b in memory.blocks]
    choice = np.zeros(sizes.size, np.int64)
    for item in order:
        block = next((b for b in best if left[b] >= sizes[item]), None)
        if block is None:
            return None
        choice[item] = block
        left[block] -= int(sizes[item])
    return choice


def optimal_assignment(rates: Floats, sizes: Ints, memory: Memory) -> Assignment:
    """The assignment with the fewest remaining failures; among equal ones, one with the least energy.

    Args:
        rates: Failure rate of each item in unprotected memory, not negative, float64[items].
        sizes: Bits of each item, int64[items].

    Raises:
        UsageError: the blocks cannot hold all items within the limits.
    """
    greedy = assign_in_order(np.argsort(-rates / sizes, kind="stable").tolist(), sizes, memory)
    candidates = [greedy] if greedy is not None and memory.fits(greedy, sizes) else []
    solved, optimal = _solve(rates, sizes, memory)
    candidates += [] if solved is None else [solved]
    if not candidates:
        raise UsageError(
            f"the blocks cannot hold all {human_bytes(int(sizes.sum()) // 8)} of the parameters within their capacities and "
            "limits; give a block without a capacity, or raise capacities and limits"
        )
    return Assignment(min(candidates, key=lambda c: float(rates @ memory.residuals(c))), optimal)


def _solve(rates: Floats, sizes: Ints, memory: Memory) -> tuple[Ints | None, bool]:
    """The assignment of the solver, or None, and whether it is proven to be optimal."""
    from scipy import sparse  # slow to import, like the next line
    from scipy.optimize import Bounds, LinearConstraint, milp

    items, blocks = sizes.size, len(memory.blocks)
    residuals = np.array([b.residual for b in memory.blocks])
    energies = np.array([b.energy for b in memory.blocks])
    cost = np.outer(rates, residuals)
    cost *= _OBJECTIVE / max(float(cost.sum()), 1e-300)
    cost += (
        np.outer(sizes / sizes.sum(), energies / max(float(energies.max()), 1e-300)) * 1e-4
    )  # decides between assignments with equal failure rates
    each = sparse.kron(sparse.eye(items), np.ones((1, blocks)), format="csr")
    rows, limits = _rows(sizes, memory)
    for shrinkage in _SHRINKAGES:
        constraints = [LinearConstraint(each, 1, 1)]
        if rows:
            constraints.append(LinearConstraint(np.array(rows), -np.inf, np.array(limits) * (1 - shrinkage)))
        with _without_native_output():
            solution = milp(
                cost.reshape(-1), integrality=np.ones(items * blocks), bounds=Bounds(0, 1), constraints=constraints,
                options={"time_limit": TIME_LIMIT, "mip_rel_gap": GAP},
            )  # fmt: skip
        if solution.x is None:
            return None, False
        choice = np.asarray(solution.x.reshape(items, blocks).argmax(1), dtype=np.int64)
        if memory.fits(choice, sizes):
            return choice, solution.status == 0 and not shrinkage
    return None, False


@contextmanager
def _without_native_output() -> Iterator[None]:
    """Suppress the output that HiGHS writes to stdout, which may have to stay valid JSON."""
    sys.stdout.flush()
    with open(os.devnull, "wb") as nowhere:
        stdout = os.dup(1)
        try:
            os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def _rows(sizes: Ints, memory: Memory) -> tuple[list[Floats], list[float]]:
    """The capacities and limits as rows of linear constraints over (item, block)."""
    rows, limits = [], []

    def add(per_bit: Sequence[float], limit: float) -> None:
        rows.append(np.outer(sizes, per_bit).reshape(-1))
        limits.append(limit)

    for number, block in enumerate(memory.blocks):
        if block.capacity is not None:
            add([float(number == column) for column in range(len(memory.blocks))], block.capacity)
    if memory.max_latency is not None:
        add([b.latency for b in memory.blocks], memory.max_latency * float(sizes.sum()))
    if memory.max_energy is not None:
        add([b.energy / 8 for b in memory.blocks], memory.max_energy)
    return rows, limits
