"""Fault models: a value model (new value of a corrupted element), a pattern (choice of the slots) and a name.

A fault model is written ``name:key=value,…`` and re-created from that text: ``bitflip``, ``bitflip:count=8``,
``bitflip:bits=exponent,rate=1e-6``, ``burst:length=3``, ``zero:run=16``,
``random:block=16,cycles=any``, ``scale:factor=2,count=4,stride=32``. Besides its own parameters, every model takes those of the
pattern: ``count``, ``rate``, ``run``, ``stride``, ``block``, ``cycles``, ``tile``, ``whole`` and ``heads``. A user may also give
a function or a mixture: see `mixtures.asked_fault_model`.

Invariant: a draw depends only on the model, the regions, the law and the generator's state.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from unsilent.basics import name_and_parameters
from unsilent.basics.errors import UsageError
from unsilent.faults.bitwise import Corrupted, ValueModel
from unsilent.faults.blocks import Block
from unsilent.faults.blocks import parse_tile as _tile
from unsilent.faults.fault_texts import from_text
from unsilent.faults.patterns import Count, One, Pattern, Rate, Run, Strided
from unsilent.faults.population import LocatedSlots, Population, Region, as_population, check_law
from unsilent.faults.record import Fault
from unsilent.faults.slices import Head, Whole
from unsilent.faults.values import VALUES

_TOGETHER = ({"count", "stride"}, {"block", "cycles"})  # the only combinations of pattern parameters


def pattern_from_parameters(
    count: int | None = None,
    rate: float | None = None,
    run: int | None = None,
    stride: int | None = None,
    block: int | None = None,
    cycles: int | str | None = None,
    tile: str | None = None,
    whole: str | None = None,
    heads: int | None = None,
) -> Pattern:
    """The pattern for these parameters; raises ``UsageError`` if they contradict each other."""
    parameters = {k: v for k, v in locals().items() if v is not None}
    if set(parameters) == {"stride"}:
        raise UsageError(
            f"stride={stride} also needs count, the number of elements to corrupt at this distance; add count="
        )
    if set(parameters) == {"cycles"}:
        raise UsageError(f"cycles={cycles} needs block, the number of elements of one cycle; add block=")
    if len(parameters) > 1 and set(parameters) not in _TOGETHER:
        choices = "count, rate, run, block, tile, whole, heads, stride with count, or cycles with block"
        raise UsageError(f"{' and '.join(parameters)} exclude each other; give one of {choices}")
    if count is not None:
        return Count(count) if stride is None else Strided(count, stride)
    if rate is not None:
        return Rate(rate)
    if block is not None:
        return Block(block, _cycles(cycles))
    if tile is not None:
        return _tile(tile)
    if whole is not None:
        return Whole(whole)
    if heads is not None:
        return Head(heads=heads)
    return One() if run is None else Run(run)


def _cycles(value: int | str | None) -> int | None:
    if value is None or isinstance(value, int):
        return 1 if value is None else value
    if value != "any":
        raise UsageError(f"cycles={value[:40]!r}; expected a number of blocks, or the word any")
    return None


Regions = Sequence[Region] | Population
_NO_CHANCE = np.random.default_rng(0)


@dataclass(frozen=True)
class FaultModel:
    """A kind of corruption without a place; ``fault_model(model.text)`` re-creates it."""

    name: str
    value: ValueModel
    pattern: Pattern = field(default_factory=One)
    lasts: int | None = 1
    """Number of batches (for values of a run) or steps (for a training) in which the same elements are corrupted; None: until the
    end."""
    begins: tuple[int, int] | None = None
    """First and last batch or step, counted from 0, in which a fault may begin; None: any."""

    @property
    def text(self) -> str:
        """The shortest text that re-creates this model (``stuck`` always includes its value)."""
        parameters = [
            f"{f.name}={getattr(self.value, f.name)}"
            for f in fields(self.value)  # type: ignore[arg-type]
            if f.repr and (getattr(self.value, f.name) != f.default or f.name in self.value.always_in_text)
        ]
        lasts = "" if self.lasts == 1 else f"lasts={self.lasts or 'end'}"
        parts = (*parameters, self.pattern.text, from_text(self.begins), lasts)
        return ":".join(filter(None, (self.name, ",".join(filter(None, parts)))))

    @property
    def count(self) -> int | None:
        """Number of corruptions: flips for ``bitflip``, else elements; ``None`` if a rate determines it."""
        return self.pattern.count

    @property
    def has_explicit_count(self) -> bool:
        """Whether the user gave the number of corruptions (count, rate, run, block, …)."""
        return not isinstance(self.pattern, One)

    def with_count(self, k: int) -> FaultModel:
        """This model with ``k`` corruptions; raises ``UsageError`` for ``k < 1`` and for a rate."""
        return replace(self, pattern=self.pattern.with_count(k))

    def choose(self, rng: np.random.Generator) -> FaultModel:
        """The model of one fault: the model itself, or a drawn part of a mixture."""
        return self

    @property
    def parts(self) -> tuple[FaultModel, ...]:
        """The parts of a mixture, or only the model itself."""
        return (self,)

    def can_corrupt(self, region: Region) -> bool:
        """Whether a region has a dtype that this model can corrupt."""
        return self.value.ways(region) > 0

    def capacity(self, regions: Regions) -> int:
        """Number of distinct slots that ``regions`` have for this model, whatever its pattern.

        Slots are (element, bit) pairs for ``bitflip`` and elements for the other models; 0 if nothing can be corrupted.
        """
        return as_population(regions).slots(self.value.ways, self.value).total

    def draw(self, regions: Regions, rng: np.random.Generator, law: str = "per-element") -> tuple[Fault, ...]:
        """Draw faults from this model: one fault per corrupted tensor, in the order of ``regions``.

        ``law`` is a key of `SAMPLING_LAWS`. A rate may corrupt nothing; the result is then ``()``. Slots are not counted
        again if a `Population` or the same `Region` objects are passed again. Raises ``UsageError`` if nothing can be
        corrupted, or fewer slots than requested.
        """
        check_law(law)
        population = as_population(regions)
        slots = population.slots(
            self.value.ways, self.value, self.pattern.count_placements, self.pattern.placement_cache_key
        )
        if slots.total < self.pattern.slots_needed:
            raise self._too_few(population)
        picks = self.pattern.draw_slots(slots, population.regions, rng, law)
        if picks.region.size == 1 or self.pattern.single_event:
            return (self._fault(population.regions[picks.region[0]], picks, rng),)
        edges = np.flatnonzero(picks.region[1:] != picks.region[:-1]) + 1
        bounds = [0, *edges.tolist(), picks.region.size] if picks.region.size else [0]
        return tuple(
            self._fault(population.regions[picks.region[a]], LocatedSlots(*(p[a:b] for p in picks)), rng)
            for a, b in itertools.pairwise(bounds)
        )

    def nth_fault(self, regions: Regions, number: int) -> tuple[Fault, ...]:
        """The fault in slot ``number``, ``0 <= number < capacity(regions)``; the value model must draw no values."""
        population = as_population(regions)
        slots = population.slots(self.value.ways, self.value)
        picks = slots.locate(np.array([number]))
        return (self._fault(population.regions[picks.region[0]], picks, _NO_CHANCE),)

    def _fault(self, region: Region, picks: LocatedSlots, rng: np.random.Generator) -> Fault:
        """The fault in one region, with all its corrupted slots ``picks``."""
        elements = region.to_flat_indices(picks.place)
        corrupted = Corrupted(region, elements, picks.way, self.pattern.single_event)
        operation, operands = self.value.operation_and_operands(corrupted, rng)
        if elements.size > 1:
            fresh = elements[1:] != elements[:-1]
            if not fresh.all():  # several flips of one element: one mask
                starts = np.concatenate([[0], np.flatnonzero(fresh) + 1])
                elements, operands = elements[starts], np.bitwise_xor.reduceat(operands, starts)
            if region.elements is not None or region.axes is not None:
                order = np.argsort(elements)
                elements, operands = elements[order], operands[order]
        where = (region.site, region.dtype, region.shape)
        return Fault(
            *where, elements, operation, operands,
            step=region.step, occurrence=region.occurrence, function=self.value.function,
        )  # fmt: skip

    def _too_few(self, population: Population) -> UsageError:
        """The error for a population with too few slots."""
        usable = [r for r in population.regions if r.eligible_count and self.value.ways(r)]
        if not usable:
            sample = ", ".join(f"{r.site!r} ({r.dtype}, {r.eligible_count} elements)" for r in population.regions[:3])
            more = ", …" if len(population.regions) > 3 else ""
            return UsageError(
                f"{self.text} needs {self.value.region_requirement}; found {sample + more if sample else 'no tensor'}"
            )
        if self.pattern.region_requirement:
            shapes = ", ".join(f"{r.site!r} of shape {list(r.shape)}" for r in usable[:3])
            return UsageError(f"{self.pattern.text} needs {self.pattern.region_requirement}; found {shapes}")
        largest = max(usable, key=lambda r: r.eligible_count)
        if self.pattern.single_event:
            requirement = f"{self.pattern.text} spans {self.pattern.span} elements of one tensor"
            return UsageError(
                f"{requirement}, but the largest tensor, {largest.site!r}, has {largest.eligible_count}; ask for fewer"
            )
        where = f"{largest.site!r} has" if len(usable) == 1 else f"the {len(usable)} tensors have"
        requirement = f"asked for {self.pattern.count} distinct {self.value.counted_noun}"
        return UsageError(f"{requirement}, but {where} {self.capacity(population)} for {self.name}; ask for fewer")


class Factory:
    """Factory of the fault models of one name; takes the parameters of the value model and of the pattern."""

    def __init__(self, name: str, value: type[ValueModel]) -> None:
        self.name = name
        self.value = value
        self.__doc__ = value.__doc__
        # `name_and_parameters.build` reads signature and annotations to convert the parameters of a text.
        value_signature, pattern_signature = inspect.signature(value), inspect.signature(pattern_from_parameters)
        self.__signature__ = value_signature.replace(
            parameters=[
                p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for p in (*value_signature.parameters.values(), *pattern_signature.parameters.values())
            ],
            return_annotation=FaultModel,
        )
        hints = {**typing.get_type_hints(value.__init__), **typing.get_type_hints(pattern_from_parameters)}
        self.__annotations__ = {**hints, "return": FaultModel}

    def __call__(self, **parameters: Any) -> FaultModel:
        shared = {
            k: parameters.pop(k) for k in inspect.signature(pattern_from_parameters).parameters if k in parameters
        }
        return FaultModel(self.name, self.value(**parameters), pattern_from_parameters(**shared))

    def __repr__(self) -> str:
        return f"<fault model {self.name}{self.__signature__}>"


FAULT_MODELS: Mapping[str, Factory] = MappingProxyType({name: Factory(name, value) for name, value in VALUES.items()})


def fault_model(text: str) -> FaultModel:
    """Parse a fault model such as ``"bitflip:bits=exponent,count=8"``; raises ``UsageError``."""
    return name_and_parameters.build_named("fault model", text, FAULT_MODELS)
