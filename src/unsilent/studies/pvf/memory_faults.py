"""Draws faults in the memories of an accelerator, stratified by reported target, memory and error pattern.

The bit and the time of every event are uniformly distributed. A fault in reloaded memory (parameters with ``reload``) stays, so
each evaluation is affected. Any other fault affects one evaluation, if the value is still needed then. The effect of the memory's
code is computed for each fault; a trial is a fault that comes through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.sizes import human_bytes
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Fault, Region, fault_model
from unsilent.faults.hardware.accelerator import Accelerator
from unsilent.faults.hardware.description import Memory
from unsilent.faults.hardware.event_shares import EventShares, outcome_shares
from unsilent.faults.hardware.memories import ALTERED, Code, decoded, fitted
from unsilent.faults.naming import SiteName, is_transient, kind_of, parse_site
from unsilent.report.text import listed
from unsilent.sites.inputs import named_inputs
from unsilent.sites.lifetimes import LifetimeObserver, StoredValue, Window, seconds, windows
from unsilent.sites.targets import RegionsByBatch, Target, component_of
from unsilent.studies.pvf.memory_records import MemoryFacts, MemoryPart

MOST_REDRAWS = 1_000_000
RAREST = 1e-4
"""Patterns with a smaller share of events that come through are not tried: a trial would draw too many events."""
KINDS_IN_WORDS = {"param": "parameters", "op": "outputs of operations", "input": "inputs", "kv": "cache entries"}
ALL_SITES = ("param:*", "op:*", "input:*", "kv:*")


class HeldRegion(NamedTuple):
    """A region that a memory holds, with its live bits.

    Live bits are bits times the share of the time in which a fault in them has an effect.
    """

    region: Region
    site: SiteName
    live_bits: float


class MemoryFaults:
    """The targets of a campaign, and the faults of its trials.

    Attributes:
        targets: Targets whose faults can come through the protection of their memory; empty if no fault can.
        parts: Rates of all faults for each pattern in each reported part of each memory.
        facts: Facts about each memory.
        regions: All regions that faults corrupt.

    Raises:
        UsageError: no memory holds anything of the workload.
    """

    def __init__(
        self, accelerator: Accelerator, engine: PlainEngine, components: Mapping[str, Sequence[str]], per: str
    ) -> None:
        self._memories, self._engine = accelerator.description.memories, engine
        held, unmatched = dict[str, tuple[Region, ...]](), dict[str, list[str]]()
        for name, memory in self._memories.items():
            held[name], unmatched[name] = self._regions_at(memory.holds)
        self._sites_without_memory = {region.site for region in self._regions_at(ALL_SITES)[0]} - {
            region.site for regions in held.values() for region in regions
        }
        self._observe(held)
        self._pattern_of: dict[str, tuple[Memory, str]] = {}
        parts, targets = list[MemoryPart](), list[Target]()
        self.facts = tuple(self._facts(name, held[name], unmatched[name]) for name in self._memories)
        for name, memory in self._memories.items():
            for part, target in self._strata(name, memory, self._live(name, held[name]), components, per):
                parts.append(part)
                if part.altered > RAREST * part.raw:
                    targets.append(target)
        if not parts:
            raise UsageError("no memory of --accelerator holds anything of this workload; correct holds")
        tried = {target.name for target in targets}
        whole = math.fsum(part.altered for part in parts if part.target in tried)
        by_target = {part.target: part.altered / whole for part in parts if part.altered}
        self.parts = tuple(parts)
        self.targets = tuple(replace(target, share=by_target[target.name]) for target in targets)
        self.regions = tuple(dict.fromkeys(region for target in self.targets for region in target.regions))
        self._by_region = {target.name: RegionsByBatch(target, "per-element") for target in self.targets}

    def notes(self) -> Iterator[str]:
        """Notes on the failure rates: what they count, and what was assumed."""
        yield (
            "FIT counts events in 1e9 device hours that make an inference call, which evaluates one batch, incorrect (with "
            "--unit sample: one sample of the batch, on average), so it depends on the batch size. Only events in what the "
            "memories hold of this workload, while it is needed, are counted."
        )
        for facts in self.facts:
            if facts.unmatched:
                yield (
                    f"Memory {facts.name} holds nothing{' else' if facts.held else ''} of this workload: there is nothing at "
                    f"{listed(facts.unmatched)}."
                )
            if facts.held > facts.size:
                yield (
                    f"Memory {facts.name} has {human_bytes(facts.size)}, but what it is said to hold takes "
                    f"{human_bytes(facts.held)}."
                )
            yield f"Where the numbers of memory {facts.name} come from: {facts.evidence}."
        for kind, noun in KINDS_IN_WORDS.items():
            sites = sorted(site for site in self._sites_without_memory if kind_of(site) == kind)
            if sites:
                yield f"No memory holds {len(sites):,} {noun}: {listed(sites, 4)}."
        yield (
            "Assumed: calls follow each other without a pause; an operation takes as long as its memories need to move what it "
            "reads and writes, one after the other; tensors begin at a code word; check bits do not fail."
        )
        drawn = {f"{part.memory}/{part.pattern}": part.draws for part in self.parts if part.draws}
        if drawn:
            yield (
                f"Which events of {listed(drawn)} the code corrects or reports was counted in up to {max(drawn.values()):,} "
                "drawn events of each; the limits of FIT include this uncertainty. For all other patterns it is exact."
            )
        tried = {target.name for target in self.targets}
        rare = sorted(
            {f"{part.memory}/{part.pattern}" for part in self.parts if part.altered and part.target not in tried}
        )
        if rare:
            yield (
                f"Some events of {listed(rare)} come through the protection less often than once in {1 / RAREST:,.0f}: they are "
                "not injected, and only upper limits include them."
            )

    # -- what a memory holds --------------------------------------------------------------------------------------

    def _regions_at(self, addresses: Sequence[str]) -> tuple[tuple[Region, ...], list[str]]:
        """The regions that the addresses select, and the addresses that match nothing."""
        regions: dict[tuple[str, int | None, int | None], Region] = {}
        unmatched = []
        for address in addresses:
            try:
                for region in self._engine.select_regions((address,)):
                    regions.setdefault((region.site, region.step, region.occurrence), region)
            except UsageError:
                unmatched.append(address)
        return tuple(regions.values()), unmatched

    def _observe(self, held: Mapping[str, Sequence[Region]]) -> None:
        """Run each batch once and record when each value is live.

        An operation is assumed to take as long as moving its data takes.
        """
        engine = self._engine
        per_byte: dict[str, float] = {}
        for name, regions in held.items():
            for site in {region.site for region in regions}:
                per_byte[site] = per_byte.get(site, 0.0) + 1 / self._memories[name].bytes_per_second
        parameters = [(f"param:{name}", site.memory.tensor) for name, site in engine.parameters.sites.items()]
        self._observers, self._ends = list[LifetimeObserver](), list[NDArray[np.float64]]()
        for step, batch in enumerate(engine.batches):
            inputs = [(f"input:{name}", tensor) for name, tensor in named_inputs(batch)]
            observer = LifetimeObserver(engine.model, [*parameters, *inputs], step)
            observer.finish(engine.watched_output(step, observer))
            self._observers.append(observer)
            self._ends.append(observer.ends(lambda value: per_byte.get(value.site, 0.0)))
        self.call_seconds = math.fsum(float(ends[-1]) for ends in self._ends) / len(self._ends)

    def _live(self, name: str, regions: Sequence[Region]) -> Iterator[HeldRegion]:
        """The parts of the regions that a fault can affect, split by the operations that read them later."""
        memory, total = self._memories[name], self.call_seconds * len(self._ends)
        caches = any(kind_of(address) == "kv" for each in self._memories.values() for address in each.holds)
        for region in regions:
            site = parse_site(region.site)
            bits = region.eligible_bit_count
            if not is_transient(region.site):
                if memory.reload is not None:
                    yield HeldRegion(region, site, bits)
                    continue
                for step, observer in enumerate(self._observers):
                    time = self._reading_time(observer.values.get((region.site, None)), step)
                    if time:
                        yield HeldRegion(replace(region, step=step), site, bits * time / total)
                continue
            step = region.step or 0
            value = self._observers[step].values.get((region.site, region.occurrence))
            if value is None or not value.reads or (value.is_cached and site.kind == "op" and caches):
                continue  # nothing reads the value, or the cache holds it
            for window in [Window(value.written, value.reads[-1].operation)] if site.kind == "kv" else windows(value):
                share = seconds(self._ends[step], window) / total
                if share:
                    there = window.operand if window.operand is not None and region.elements is None else region
                    yield HeldRegion(there, site, there.eligible_bit_count * window.part * share)

    def _reading_time(self, value: StoredValue | None, step: int) -> float:
        """The seconds of one evaluation in which operations read a value."""
        ends = self._ends[step]
        numbers = {read.operation for read in value.reads} if value is not None else ()
        return math.fsum(float(ends[n + 1] - ends[n]) for n in numbers)

    def _facts(self, name: str, regions: Sequence[Region], unmatched: Sequence[str]) -> MemoryFacts:
        memory = self._memories[name]
        calls = 1.0 if memory.reload is None else max(1.0, memory.reload / 2 / max(self.call_seconds, 1e-300))
        facts = [f"{fact} {memory.evidence_grade(fact)}" for fact in memory.facts if getattr(memory, fact) is not None]
        facts += [f"share of {name} {pattern.evidence_grade('share')}" for name, pattern in memory.patterns.items()]
        return MemoryFacts(
            name, memory.size_bytes, self._most_bytes(regions), calls, ", ".join(facts),
            tuple(map(escape_unprintable, unmatched)),
        )  # fmt: skip

    def _most_bytes(self, regions: Sequence[Region]) -> int:
        """The largest number of bytes that are needed at the same time."""
        there = sum(region.eligible_bit_count // 8 for region in regions if not is_transient(region.site))
        most = 0
        for step, observer in enumerate(self._observers):
            changes = np.zeros(len(observer.moved) + 1, np.int64)
            for region in regions:
                value = observer.values.get((region.site, region.occurrence)) if region.step == step else None
                if value is not None and value.reads:
                    changes[max(value.written, 0)] += region.eligible_bit_count // 8
                    changes[value.reads[-1].operation + 1] -= region.eligible_bit_count // 8
            most = max(most, int(changes.cumsum().max()))
        return there + most

    # -- strata and faults ----------------------------------------------------------------------------------------

    def _strata(
        self, name: str, memory: Memory, live: Iterator[HeldRegion], components: Mapping[str, Sequence[str]], per: str
    ) -> Iterator[tuple[MemoryPart, Target]]:
        """A stratum for each reported target, dtype and error pattern of a memory, without its share."""
        by_group: dict[tuple[str, str, str, str], list[HeldRegion]] = {}
        for held_region in live:
            component = component_of(held_region.site, components)
            layer = held_region.site.layer if per != "component" else ""
            group = {"component": component, "layer": layer, "tensor": held_region.site.label}[per]
            by_group.setdefault((group, component, layer, held_region.region.dtype), []).append(held_region)
        checked = set[tuple[str, str]]()
        for (group, component, layer, dtype), held in by_group.items():
            bits = math.fsum(h.live_bits for h in held)
            for pattern, described in memory.patterns.items():
                if (pattern, dtype) not in checked:
                    _check_fits(name, pattern, described.model, held[0].region)
                    checked.add((pattern, dtype))
                raw = memory.fit_per_bit * bits * described.share
                seen = _outcome_shares(described.model, held, memory.code)
                split = {outcome: raw * share for outcome, share in seen.shares.items()}
                stratum = "/".join((name, pattern, group, *([dtype] if dtype != "float32" else [])))
                altered = math.fsum(split.get(outcome, 0.0) for outcome in ALTERED)
                yield (
                    MemoryPart(stratum, name, pattern, group, component, layer, bits, raw,
                               split.get("corrected", 0.0), split.get("detected", 0.0), altered, seen.draws),
                    Target(stratum, per, component, layer, tuple(h.region for h in held), 0.0, None, group,
                           tuple(h.live_bits for h in held)),
                )  # fmt: skip
                self._pattern_of[stratum] = memory, described.model

    def draw(self, target: str, rng: np.random.Generator) -> tuple[int | None, tuple[Fault, ...]]:
        """Draw the batch and the faults of a trial; the batch is None if all batches are affected.

        Events are drawn until one is neither corrected nor reported by the protection.
        """
        memory, text = self._pattern_of[target]
        for _ in range(MOST_REDRAWS):
            step, population = self._by_region[target].draw_batch(rng)
            faults = fitted(fault_model(text), population.regions[0]).draw(population, rng)
            if memory.code is None:
                return step, faults
            outcome, fault = decoded(faults[0], memory.code)
            if outcome in ALTERED:
                return step, (fault,)
        raise AssertionError("no fault came through a protection that lets some through")


def _outcome_shares(model: str, held: Sequence[HeldRegion], code: Code | None) -> EventShares:
    """The shares of the events in some regions by outcome of the protection."""
    return outcome_shares(fault_model(model), [h.region for h in held], code, [h.live_bits for h in held])


def _check_fits(memory: str, pattern: str, text: str, region: Region) -> None:
    """Raise ``UsageError`` if events of a pattern cannot corrupt a dtype."""
    if not fitted(fault_model(text), region).capacity((region,)):
        raise UsageError(
            f"pattern {pattern} of memory {memory} ({text}) cannot corrupt {region.site}, which has the dtype {region.dtype}; "
            "change the pattern, or what the memory holds"
        )
