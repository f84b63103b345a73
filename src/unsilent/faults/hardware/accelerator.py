"""An accelerator described by numbers, and its weighted fault models.

Every group of flip-flops has a share of all flip-flops and an activeness (the probability that its content is used). Their
product is proportional to the rate of faults in the group that are used. Together with the probability that such a fault is not
masked, it gives the failure rate

    FIT = raw * sum over groups of share * activeness * unmasked

(FIdelity, MICRO 2020; ``raw``: the FIT of all flip-flops together, one FIT being a failure in 1e9 hours). Which
outputs a group affects follows from the array (`presets.presets_for_array`). Every fact has a grade: `GRADES`. Memories of
the description are handled in `unsilent.faults.hardware.memories`.

Invariants: shares and ``other`` add up to 1; weights of the entries add up to 1; an unmasked probability is never invented, so
the FIT is unknown if one is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults.hardware.description import AcceleratorDescription, FlipFlopGroup
from unsilent.faults.hardware.presets import ArraySizes, Preset, presets_for_array
from unsilent.faults.unresolved_fault import FASTEST, UnresolvedFault

_STAGES = {"first": "input", "second": "weight", "third": "accumulator", "out": "output"}


@dataclass(frozen=True)
class WeightedPreset:
    """A fault model with a weight: ``preset``, for registers of dtype ``held`` in the flip-flop group ``group``.

    ``fastest``: axis that varies fastest along a run of outputs, see `UnresolvedFault`. ``weight``: share of this fault
    model among all faults that are used, 0 to 1.
    """

    group: str
    preset: Preset
    held: str
    fastest: str
    weight: float

    def fault_at_operation(
        self, operation: str, phase: str = "fwd", seed: int = 0, value: str | None = None, **moment: Any
    ) -> UnresolvedFault:
        """The fault of this preset in an operation, the same in all phases; see `Preset.fault_at_operation`."""
        return self.preset.fault_at_operation(
            operation, phase, seed, value, **{"held": self.held, "fastest": self.fastest, **moment}
        )


@dataclass(frozen=True)
class AcceleratorRow:
    """A row of an accelerator's table: one fault model and the facts of its flip-flop group.

    ``weight_split_reason``: reason for the split of the group's weight among its entries; empty if there is only one entry.
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
    unmasked_probability: float | None
    weight: float
    weight_split_reason: str
    fit: float | None
    evidence: str


@dataclass(frozen=True)
class Accelerator:
    """An accelerator's description, with the fault models and FIT rates that are computed from it."""

    description: AcceleratorDescription

    @cached_property
    def weighted_presets(self) -> tuple[WeightedPreset, ...]:
        """All weighted fault models, in the order of the description.

        Raises ``UsageError`` if the description has no flip-flops.
        """
        if self.description.array is None:
            raise UsageError(
                f"the accelerator {self.description.name!r} describes no flip-flops, which faults are drawn from; choose another "
                "accelerator, or describe them in FILE.toml with array, dtypes, groups and other"
            )
        whole = sum(g.share * g.activeness for g in self.description.groups.values())
        result = []
        for name, group in self.description.groups.items():
            presets, parts = self._presets(name, group)
            weight = group.share * group.activeness / whole
            for preset, part in zip(presets, parts, strict=True):
                fastest = self.description.array.fastest if preset.operand == "out" else FASTEST[0]
                result.append(WeightedPreset(name, preset, self._held(group, preset), fastest, weight * part))
        return tuple(result)

    def draw_weighted_preset(self, rng: np.random.Generator) -> WeightedPreset:
        """Draw a fault model of the accelerator by weight."""
        weights = np.array([e.weight for e in self.weighted_presets])
        return self.weighted_presets[int(rng.choice(weights.size, p=weights / weights.sum()))]

    @property
    def raw_fit_by_group(self) -> dict[str, float]:
        """The FIT of each flip-flop group in use, before masking; empty if the raw rate is unknown."""
        raw, groups = self.description.raw_fit, self.description.groups
        return {} if raw is None else {name: raw * group.share * group.activeness for name, group in groups.items()}

    def fit_rate_of(self, group: str) -> float | None:
        """The FIT of one flip-flop group; None if the raw rate or the unmasked probability is unknown."""
        unmasked, raw = self.description.groups[group].unmasked, self.raw_fit_by_group.get(group)
        return None if raw is None or unmasked is None else raw * unmasked

    @property
    def fit_rate(self) -> float | None:
        """The FIT of all flip-flop groups together; None if it is unknown (see `why_no_fit_rate`)."""
        return None if self.why_no_fit_rate else sum(self.fit_rate_of(name) or 0.0 for name in self.description.groups)

    @property
    def why_no_fit_rate(self) -> str:
        """Why the FIT of the flip-flops is unknown; empty if it is known."""
        if not self.description.groups:
            return "no flip-flops are described"
        if self.description.raw_fit is None:
            return "raw_fit is not known"
        missing = [name for name, group in self.description.groups.items() if group.unmasked is None]
        return f"the probability that a fault in {', '.join(missing)} is not masked is unknown" if missing else ""

    def table(self) -> tuple[AcceleratorRow, ...]:
        """One row per weighted preset; empty if no flip-flops are described."""
        return tuple(self._row(entry) for entry in self.weighted_presets) if self.description.groups else ()

    def _row(self, entry: WeightedPreset) -> AcceleratorRow:
        group, preset = self.description.groups[entry.group], entry.preset
        value = preset.model.text.removesuffix(preset.model.pattern.text).rstrip(",:")
        pattern = (preset.model.pattern.text or "one") + (" along positions" if entry.fastest != FASTEST[0] else "")
        return AcceleratorRow(
            entry.group, preset.name, preset.operand, pattern, preset.affected_outputs_text, value, entry.held,
            group.share, group.activeness, group.unmasked, entry.weight, self._split_dimension(entry.group, group),
            self.fit_rate_of(entry.group), group.evidence_summary,
        )  # fmt: skip

    def _split_dimension(self, name: str, group: FlipFlopGroup) -> str:
        several = sum(e.group == name for e in self.weighted_presets)
        if several == 1:
            return ""
        has_parts = group.faults is not None and group.faults[0].part is not None
        return "as described" if has_parts else f"not known, 1/{several} each"

    def _presets(self, name: str, group: FlipFlopGroup) -> tuple[tuple[Preset, ...], list[float]]:
        """The fault models of a group, and their parts of the group's weight."""
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
        assert array is not None
        return presets_for_array(
            ArraySizes(
                array.outputs, array.reduction, array.hold_cycles("weight_hold"), array.hold_cycles("input_hold"),
                bool(array.tail), bool(array.onward), array.tile_sizes,
            )
        )  # fmt: skip

    def _held(self, group: FlipFlopGroup, preset: Preset) -> str:
        stage = group.stage or _STAGES[preset.operand]
        return str(getattr(self.description.dtypes, stage))
