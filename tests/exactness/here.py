"""Tables of traps that are compared in this process: `harness` without a second process, for a trap is made by its test.

A new trap is a class (or a function that gives a module) under ``@TABLE.trap(...)``. The engine under test and a fresh
`PlainEngine` each get a model of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exactness.faults import Trial, draw, enough
from exactness.harness import Comparison, Reference, Summary, one_thread, plain_json, summarise
from exactness.oracle import answers
from unsilent.engine import PlainEngine
from unsilent.engine.cached import CachedEngine
from unsilent.faults import Fault
from unsilent.workloads.base import Workload

SEED = 5
OPS = {"op": 40, "input": 20}
ALL = {"param": 30, **OPS}

Directed = Callable[[PlainEngine], Sequence[Trial]]
"""Trials that corrupt where a trap is sprung."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, always the same ones."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).to(dtype)


def seeded(model: nn.Module, scale: float = 0.4) -> nn.Module:
    """With normal weights that do not depend on what ran before."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


class Base(nn.Module):
    """Two linear layers; what happens between them is the point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x)))

    def between(self, y: Tensor) -> Tensor:
        return y


def none(engine: PlainEngine) -> Sequence[Trial]:
    """No directed trials."""
    return ()


def at(*faults: Fault) -> Trial:
    """A trial of given faults."""
    return Trial("directed", faults)


@dataclass(frozen=True)
class Made(Reference):
    """A workload that a function makes."""

    make: Callable[[], Workload] | None = None

    def load(self) -> Workload:
        assert self.make is not None
        return self.make()


@dataclass(frozen=True)
class Trap:
    """One row of a table. ``trials``: how many of each kind; ``directed``: more of them."""

    name: str
    make: Callable[[], Workload]
    trials: Mapping[str, int]
    directed: Directed

    def spring(self) -> tuple[Summary, CachedEngine]:
        """Run the trials by both engines, alone and together; what was found, and the engine under test."""
        comparison = Comparison(Made(self.name, make=self.make))
        assert isinstance(comparison.engine, CachedEngine)
        trials = list(self.directed(comparison.engine))
        for kind, least in self.trials.items():
            if regions := comparison.regions(kind):
                trials += draw(regions, enough(regions, least), SEED)
        found = comparison.answers(trials, SEED)
        with one_thread():
            plain = PlainEngine(self.make())
            expected = plain_json(answers(plain, [t.faults for t in trials]))
        return summarise(comparison, trials, expected, found), comparison.engine


class Table(dict[str, Trap]):
    """Traps by name."""

    def trap(
        self,
        *shapes: tuple[int, ...],
        trials: Mapping[str, int] = ALL,
        directed: Directed = none,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        """Put what makes a module into the table, with one batch for each of the shapes.

        Weights are seeded first; then ``prepare()`` is called, where the module has it.
        """

        def put(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            def make() -> Workload:
                model = seeded(kind()).to(dtype) if isinstance(kind, type) else kind()
                if callable(prepare := getattr(model, "prepare", None)):
                    with torch.no_grad():
                        prepare()
                batches = [numbers(*shape, dtype=dtype) for shape in shapes]
                return Workload(model, batches, **{"judge": "tolerance", "name": name, **options})

            name = kind.__name__.lower()
            self[name] = Trap(name, make, trials, directed)
            return kind

        return put
