"""An accelerator described by numbers, and the weighted fault models that follow from them.

Every group of flip-flops has a share of all flip-flops and an activeness (how often what it holds is used); together they say how
often a fault that is used begins there. With the probability that such a fault is not masked they give the failure rate

    FIT = raw * sum over groups of share * activeness * unmasked

(FIdelity, MICRO 2020; ``raw``: the FIT of all flip-flops together, one FIT being a failure in 1e9 hours). Which
outputs a group reaches follows from the array (`presets.family`). Every fact has a grade: `GRADES`.

Invariants: shares and ``other`` add up to 1; weights of the entries add up to 1; an unmasked probability is never made up, so
where one is missing there is no FIT.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unsilent.faults.drawn import FASTEST, Draw
from unsilent.faults.hardware.description import AcceleratorDescription, Group
from unsilent.faults.hardware.presets import Preset, Sizes, family

_STAGES = {"first": "input", "second": "weight", "third": "accumulator", "out": "output"}


@dataclass(frozen=True)
class Entry:
    """One weighted fault model: ``preset`` of the group of flip-flops ``group``, in a register of dtype ``held``.

    ``fastest``: what runs of outputs follow, see `Draw`. ``weight``: its share of all faults that are used, 0 to 1.
    """

    group: str
    preset: Preset
    held: str
    fastest: str
    weight: float

    def draw(self, operation: str, phase: str = "fwd", seed: int = 0, value: str | None = None, **moment: Any) -> Draw:
        """It in an operation; see `Preset.draw`. The same in all phases: dX and dW are products, too."""
        return self.preset.draw(operation, phase, seed, value, **{"held": self.held, "fastest": self.fastest, **moment})


@dataclass(frozen=True)
class Row:
    """An entry with the facts of its group, for a table. ``fit``: of the whole group, None where it is not known.

    ``split``: why the group's weight is divided among its entries as it is; empty where there is one entry.
    """

    group: str
    name: str
    operand: str
    pattern: str
    reach: str
    values: str
    held: str
    share: float
    activeness: float
    unmasked: float | None
    weight: float
    split: str
    fit: float | None
    evidence: str


@dataclass(frozen=True)
class Accelerator:
    """A description, and what follows from it."""

    description: AcceleratorDescription

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All weighted fault models, in the order of the description."""
        whole = sum(g.share * g.activeness for g in self.description.groups.values())
        result = []
        for name, group in self.description.groups.items():
            presets, parts = self._presets(name, group)
            weight = group.share * group.activeness / whole
            for preset, part in zip(presets, parts, strict=True):
                fastest = self.description.array.fastest if preset.operand == "out" else FASTEST[0]
                result.append(Entry(name, preset, self._held(group, preset), fastest, weight * part))
        return tuple(result)

    def sample(self, rng: np.random.Generator) -> Entry:
        """One entry, by weight."""
        weights = np.array([e.weight for e in self.entries])
        return self.entries[int(rng.choice(weights.size, p=weights / weights.sum()))]

    def fit_of(self, group: str) -> float | None:
        """The FIT of one group of flip-flops; None where raw rate or unmasked probability are not known."""
        result, raw = self.description.groups[group], self.description.raw_fit
        return (
            None if raw is None or result.unmasked is None else raw * result.share * result.activeness * result.unmasked
        )

    @property
    def fit(self) -> float | None:
        """The FIT of all groups together; None where `no_fit` says why."""
        return None if self.no_fit else sum(self.fit_of(name) or 0.0 for name in self.description.groups)

    @property
    def no_fit(self) -> str:
        """Why there is no FIT; empty where there is."""
        if self.description.raw_fit is None:
            return "raw_fit is not known"
        missing = [name for name, group in self.description.groups.items() if group.unmasked is None]
        return f"the unmasked probability of {', '.join(missing)} is not known" if missing else ""

    def table(self) -> tuple[Row, ...]:
        """One row per entry."""
        return tuple(self._row(entry) for entry in self.entries)

    def _row(self, entry: Entry) -> Row:
        group, preset = self.description.groups[entry.group], entry.preset
        value = preset.model.text.removesuffix(preset.model.pattern.text).rstrip(",:")
        pattern = (preset.model.pattern.text or "one") + (" along positions" if entry.fastest != FASTEST[0] else "")
        return Row(
            entry.group, preset.name, preset.operand, pattern, preset.reach, value, entry.held,
            group.share, group.activeness, group.unmasked, entry.weight, self._split(entry.group, group),
            self.fit_of(entry.group), group.graded,
        )  # fmt: skip

    def _split(self, name: str, group: Group) -> str:
        several = sum(e.group == name for e in self.entries)
        if several == 1:
            return ""
        given = group.faults is not None and group.faults[0].part is not None
        return "as described" if given else f"not known, 1/{several} each"

    def _presets(self, name: str, group: Group) -> tuple[tuple[Preset, ...], list[float]]:
        """The fault models of a group, and how its weight is divided among them."""
        if group.faults is None:
            presets = tuple(p for p in self._family if p.kind == group.kind)
            return presets, [1 / len(presets)] * len(presets)
        presets = tuple(
            Preset(f.name or f"{name}.{i}", name, f.operand, f.model, f.window, f.intent)
            for i, f in enumerate(group.faults)
        )
        parts = [1.0 if f.part is None else f.part for f in group.faults]
        return presets, [part / sum(parts) for part in parts]

    @cached_property
    def _family(self) -> tuple[Preset, ...]:
        array = self.description.array
        return family(
            Sizes(
                array.outputs, array.reduction, array.cycles("weight_hold"), array.cycles("input_hold"),
                bool(array.tail), bool(array.onward), array.tile_sizes,
            )
        )  # fmt: skip

    def _held(self, group: Group, preset: Preset) -> str:
        stage = group.stage or _STAGES[preset.operand]
        return str(getattr(self.description.dtypes, stage))
