"""What an engine that re-executes whole operations can gain at most: the share of a forward that depends on a fault.

The dependents of a fault are the operations that read what it corrupts, and all that read what those make, whatever the
values are. Their cost is timed here, in forwards of their own. An engine can do better than this bound where corruption
dies out on the way, or where it re-executes parts of operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import clock
from unsilent.engine.cached import CachedEngine
from unsilent.engine.tape import Tape
from unsilent.faults import Fault
from unsilent.faults.naming import parse_site
from unsilent.sites.calls import OperationNamer


class Stopwatch(TorchDispatchMode):
    """Seconds of every operation, by name, while it is active."""

    def __init__(self, calls: OperationNamer, device: str) -> None:
        super().__init__()
        self._calls = calls
        self._now: Callable[[], float] = time.thread_time if device == "cpu" else clock(device)
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = self._calls.next_name(func)
        start = self._now()
        result = func(*args, **(kwargs or {}))
        self.seconds[name] = self._now() - start
        return result


def operation_seconds(engine: CachedEngine, batch: int, repeats: int, device: str) -> dict[str, float]:
    """Median seconds of every operation of a batch, by name."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        with OperationNamer(engine.model) as calls, Stopwatch(calls, device) as watch, torch.no_grad():
            engine.workload.run(engine.model, engine.batches[batch])
        for name, seconds in watch.seconds.items():
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


class Bound:
    """Costs of the operations of a workload, and what depends on a fault. Batches that are not on a tape depend wholly."""

    def __init__(self, engine: CachedEngine, repeats: int = 5, device: str = "cpu") -> None:
        self.engine = engine
        self.tapes: list[Tape | None] = [r.tape if r else None for r in engine.replayers]
        self.seconds = [operation_seconds(engine, i, repeats, device) for i in range(len(self.tapes))]

    @property
    def total(self) -> float:
        """Seconds of all operations of all batches."""
        return sum(sum(seconds.values()) for seconds in self.seconds)

    def dependents(self, faults: Sequence[Fault]) -> list[tuple[int, str]]:
        """(batch, name) of the operations that depend on any of the faults."""
        found = []
        for batch, tape in enumerate(self.tapes):
            acting = [f for f in faults if f.step is None or f.step == batch]
            if tape is None and acting:
                found += [(batch, name) for name in self.seconds[batch]]
            elif tape is not None:
                found += [(batch, tape.nodes[i].name) for i in sorted(self._closure(tape, acting))]
        return found

    def cost(self, faults: Sequence[Fault]) -> float:
        """Seconds of the operations that depend on the faults."""
        return sum(self.seconds[batch].get(name, 0.0) for batch, name in self.dependents(faults))

    def share(self, faults: Sequence[Fault]) -> float:
        """Their share of the evaluations that a plain trial makes (all batches, or the one that is corrupted)."""
        steps = {f.step for f in faults}
        acting = range(len(self.tapes)) if None in steps else sorted(s for s in steps if s is not None)
        return self.cost(faults) / sum(sum(self.seconds[b].values()) for b in acting)

    def _closure(self, tape: Tape, faults: Sequence[Fault]) -> set[int]:
        stack = [reader for fault in faults for reader in self._corrupted(tape, fault)]
        found: set[int] = set()
        while stack:
            index = stack.pop()
            if index in found:
                continue
            found.add(index)
            for value in tape.nodes[index].new_values:
                stack += [r for r in tape.values[value].readers if r > index]
        return found

    def _corrupted(self, tape: Tape, fault: Fault) -> list[int]:
        """The operations that see the corruption first."""
        site = parse_site(fault.site)
        if site.kind == "param":
            value = tape.by_storage.get(self.engine.parameters.memory(fault).tensor.untyped_storage().data_ptr())
        elif site.kind == "input":
            value = tape.inputs[site.name].window.value
        else:
            index = tape.by_name[site.name]
            if site.operand != "out":
                return [index]
            return [r for v in tape.nodes[index].new_values for r in tape.values[v].readers if r > index]
        return [] if value is None else tape.values[value].readers
