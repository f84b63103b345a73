"""The memories that a plan assigns parameters to: budgets, or the memories of an accelerator."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.sizes import parse_bytes
from unsilent.faults import Region, fault_model
from unsilent.faults.hardware.description import Memory as DescribedMemory
from unsilent.faults.hardware.description_file import load_accelerator
from unsilent.faults.hardware.event_shares import outcome_shares
from unsilent.faults.hardware.memories import ALTERED
from unsilent.faults.naming import kind_of, parse_site
from unsilent.sites.addresses import Address
from unsilent.studies.plan.assignment import Block, Floats, Ints, Memory, optimal_assignment
from unsilent.studies.plan.items import Item

_PERCENT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")
LIMITS = 4
"""Number of limits of latency, and of energy, for which plans are made, from the least value up to that without limits."""
LARGE = Region("param:any", "float32", (2**16,))


def parse_capacity(text: str, total: int, name: str) -> int:
    """Parse a capacity in bits: a share of ``total`` like ``5%``, or a size like ``64kB``.

    ``name`` is the name of the option in error messages. Raises ``UsageError``.
    """
    match = _PERCENT.fullmatch(text)
    if match:
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(f"{name} is {text!r}; expected a share above 0% and up to 100%, like 5%")
        return math.floor(share * total + 1e-6)
    try:
        size = parse_bytes(text)
    except UsageError:
        size = 0
    if size < 1:
        raise UsageError(f"{name} is {text!r}; expected a share of the parameters like 5%, or a size like 64kB")
    return min(8 * size, total)


@dataclass(frozen=True, slots=True)
class CurrentPlace:
    """The memory in which each item is before a plan moves any.

    Attributes:
        words: Description for reports.
        blocks: Block of each item, int64[items].
    """

    words: str
    blocks: Ints


def accelerator_memory(accelerator: str, items: Sequence[Item]) -> tuple[Memory, float, CurrentPlace]:
    """The memories of an accelerator for parameters, their highest fault rate, and the current place of items.

    Memories for parameters name parameters in ``holds``, or have an empty ``holds``. The fault rate is in events per bit in 1e9
    hours; the share of faults that remain in a block is relative to it. Raises ``UsageError`` if no such memory is described.
    """
    described = load_accelerator(accelerator).description.memories
    if not described:
        raise UsageError(f"--accelerator {accelerator} describes no memories; add a table [memories.NAME] for each")
    for_parameters = {
        name: memory for name, memory in described.items() if not memory.holds or _parameter_addresses(name, memory)
    }
    if not for_parameters:
        raise UsageError(
            f"--accelerator {accelerator} has no memory for parameters: none has param: in holds, or an empty holds"
        )
    most = max(memory.fit_per_bit for memory in for_parameters.values())
    if most == 0:
        raise UsageError(
            f"--accelerator {accelerator} has no memory for parameters with fit_per_mbit above 0, so nothing can fail"
        )
    total = sum(item.size for item in items)
    blocks = tuple(
        Block(
            name,
            min(8 * memory.size_bytes, total),
            _rate_of_silent_events(memory) / most,
            memory.latency or 0.0,
            memory.energy or 0.0,
        )
        for name, memory in for_parameters.items()
    )
    return Memory(blocks), most, _place_now(for_parameters, blocks, items)


def _parameter_addresses(name: str, memory: DescribedMemory) -> list[Address]:
    """The addresses of the parameters that a memory holds.

    Raises ``UsageError`` if an address names single elements.
    """
    addresses = [Address.parse(text) for text in memory.holds if kind_of(text) == "param"]
    if any(address.index is not None for address in addresses):
        raise UsageError(
            f"holds of memory {name} has elements of a tensor ({' '.join(memory.holds)}); a plan needs whole tensors"
        )
    return addresses


def _place_now(memories: Mapping[str, DescribedMemory], blocks: Sequence[Block], items: Sequence[Item]) -> CurrentPlace:
    """Place each item in the first memory that holds it, or else in the least reliable one."""
    worst = max(range(len(blocks)), key=lambda n: (blocks[n].residual, blocks[n].capacity or 0))
    globs = [[address.glob for address in _parameter_addresses(*entry)] for entry in memories.items()]
    names = [parse_site(item.tensor[0]).name for item in items]
    held = [next((n for n, row in enumerate(globs) if any(fnmatchcase(name, g) for g in row)), None) for name in names]
    used = " and ".join(blocks[n].name for n in sorted({n for n in held if n is not None}))
    if not used:
        words = f"with all of them in {blocks[worst].name}"
    elif None in held:
        words = f"where they are now ({used}; parts that no memory holds taken to be in {blocks[worst].name})"
    else:
        words = f"where they are now ({used})"
    return CurrentPlace(words, np.array([worst if n is None else n for n in held], np.int64))


def _rate_of_silent_events(memory: DescribedMemory) -> float:
    """The rate of events in a bit that the protection neither corrects nor reports, in 1e9 hours."""
    shares = [
        pattern.share * outcome_shares(fault_model(pattern.model), [LARGE], memory.code).shares.get(outcome, 0.0)
        for pattern in memory.patterns.values()
        for outcome in ALTERED
    ]
    return memory.fit_per_bit * math.fsum(shares)


def pareto_memories(memory: Memory, rates: Floats, sizes: Ints) -> dict[str, Memory]:
    """The memory with each of the limits whose plans are Pareto-optimal, by the name of the limit.

    The plan with the fewest failures comes first. A plan is left out if another one is no worse in failures, latency and energy,
    and differs in one of them. Raises ``UsageError`` if the parameters do not fit.
    """
    free = optimal_assignment(rates, sizes, memory).choice
    plans = {"no limit": (memory, free)}
    for name, limited in _variants_with_limits(memory, free, sizes):
        try:
            plans[name] = limited, optimal_assignment(rates, sizes, limited).choice
        except UsageError:  # the parameters do not fit within this limit
            continue
    costs = {
        name: (float(rates @ memory.residuals(choice)), memory.latency(choice, sizes), memory.energy(choice, sizes))
        for name, (_, choice) in plans.items()
    }
    unbeaten = {
        cost: name for name, cost in reversed(costs.items())
        if not any(rival != cost and all(np.less_equal(rival, cost)) for rival in costs.values())
    }  # fmt: skip
    return {name: plans[name][0] for _, name in sorted(unbeaten.items())}


def _variants_with_limits(memory: Memory, free: Ints, sizes: Ints) -> Iterator[tuple[str, Memory]]:
    """Variants of a memory with different limits on its latency, then with different limits on its energy."""
    least = min(block.latency for block in memory.blocks)
    for limit in np.linspace(least, memory.latency(free, sizes), LIMITS + 1)[:-1].tolist():
        yield f"latency <= {limit:.4g}", replace(memory, max_latency=limit)
    least = min(block.energy for block in memory.blocks) * float(sizes.sum()) / 8
    for limit in np.linspace(least, memory.energy(free, sizes), LIMITS + 1)[:-1].tolist():
        yield f"energy <= {limit:.4g}", replace(memory, max_energy=limit)
