"""Draws the faults of training trials, each from the number of its trial alone.

Layers and phases are drawn as in the artifact of He et al. (ISCA 2023): all pairs of an operation and a phase are equally likely,
whatever their size. Only products (convolutions, matrix products) are corrupted, forward and backward, because the accelerators
that the fault models describe compute these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.campaigns.spec import TrialId, trial_seed
from unsilent.faults import Fault, Region
from unsilent.faults.fault_texts import from_text, split_from
from unsilent.faults.hardware.accelerator import WeightedPreset
from unsilent.faults.hardware.description_file import load_accelerator
from unsilent.faults.hardware.presets import CORRUPTED_PHASES, PRESETS, Preset
from unsilent.faults.mixtures import lasting_fault_model
from unsilent.faults.models import FaultModel
from unsilent.faults.naming import SiteName, parse_site
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.guard.watched_tensors import MOMENTS_OF_OPTIMIZERS, MOVING, PARAMETER, STATISTICS
from unsilent.sites.operands import PRODUCTS
from unsilent.sites.targets import component_of
from unsilent.studies.training.spec import (
    MOMENTS,
    PER,
    RANDOM,
    InjectionPoint,
    OperationPhase,
    TrainingSpec,
    TrainingTarget,
)

STATE, GRADIENT = "optim", "gradient"
KIND = "kind"
"""Value of ``per`` for one target per kind of memory: parameters, first and second moments, moving statistics, gradients."""


class SampledFault(NamedTuple):
    """The faults drawn for a trial, with their injection point."""

    injection: InjectionPoint
    faults: tuple[Fault | UnresolvedFault, ...]
    lasts: int | None = 1
    """Number of steps in which the faults act, from the injection on; ``None`` for all steps until the end."""


@dataclass(frozen=True)
class WeightedFaultModel:
    """A fault model with its weight."""

    name: str
    weight: float
    source: Preset | WeightedPreset | FaultModel
    value: str | None = None
    begins: tuple[int, int] | None = None
    """First and last step in which its faults may begin; ``None`` for any step."""

    @property
    def operand(self) -> str:
        """The operand of the operation that the fault corrupts."""
        if isinstance(self.source, FaultModel):
            return "out"
        return (self.source.preset if isinstance(self.source, WeightedPreset) else self.source).operand

    @property
    def lasts(self) -> int | None:
        """The number of steps in which a fault acts; None if it acts until the end."""
        return self.source.lasts if isinstance(self.source, FaultModel) else 1

    def fault_at_operation(self, place: OperationPhase, seed: int) -> UnresolvedFault:
        """A fault of this model in a given operation and phase."""
        if isinstance(self.source, FaultModel):
            return UnresolvedFault(f"op:{place.operation}/{place.phase}/out", self.source, seed)
        return self.source.fault_at_operation(f"op:{place.operation}", place.phase, seed, self.value)


class FaultSampler:
    """Draws the faults of trials.

    Args:
        regions: Regions of one step, including memory (parameters, optimizer state); see `StepSurvey`.
        parameters: Names of the parameters.
        components: Modules of each component by name.
        steps: Number of steps of a run.

    Raises:
        UsageError: a layer, phase or fault model does not exist, or no place fits the faults.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        regions: Sequence[Region],
        parameters: Sequence[str],
        components: Mapping[str, Sequence[str]],
        steps: int,
    ) -> None:
        self.spec, self.steps = spec, steps
        self.regions = list(regions)
        self._regions = {region.site: region for region in regions}
        self.everywhere = self._products()
        self.notes: list[str] = []
        self.kinds: list[WeightedFaultModel] = []
        self.places: list[OperationPhase] = []
        self._memory: dict[str, list[Region]] = {}
        if spec.per is None:
            self.kinds = weighted_fault_models(spec)
            self.places = self._places()
            self._fitting = [(kind, self._fits(kind)) for kind in self.kinds]
            self._check()
        else:
            self._memory = self._parts(set(parameters), components)
        self._check_steps()

    @property
    def targets(self) -> tuple[TrainingTarget, ...]:
        """The targets that trials are drawn for."""
        if self.spec.per is None:
            return (TrainingTarget(RANDOM),)
        result = []
        for name, regions in self._memory.items():
            what, _, part = name.partition(":")
            result.append(TrainingTarget(name, what, part, sum(r.eligible_count for r in regions)))
        return tuple(result)

    def draw(self, campaign: str, trial: TrialId) -> SampledFault:
        """Draw the faults of a trial; raises ``UsageError`` for an unknown target."""
        rng = np.random.Generator(np.random.PCG64(trial_seed(campaign, self.spec.seed, trial)))
        if trial.target == RANDOM and self.spec.per is None:
            return self._operation(rng)
        if trial.target not in self._memory:
            raise unknown_name_error("target", trial.target, [t.name for t in self.targets])
        return self._draw_held_fault(trial.target, rng)

    def _operation(self, rng: np.random.Generator) -> SampledFault:
        step = int(rng.integers(self.steps))
        weights = np.array([kind.weight if places else 0.0 for kind, places in self._fitting])
        kind, places = self._fitting[int(rng.choice(len(weights), p=weights / weights.sum()))]
        if kind.begins is not None:
            step = int(rng.integers(kind.begins[0], kind.begins[1] + 1))
        place = places[int(rng.integers(len(places)))]
        fault = kind.fault_at_operation(place, int(rng.integers(2**62)))
        return SampledFault(InjectionPoint(step, fault.site, place.phase, place.layer, kind.name), (fault,), kind.lasts)

    def _draw_held_fault(self, target: str, rng: np.random.Generator) -> SampledFault:
        regions = self._memory[target]
        first = 1 if target.startswith(STATE) and self.steps > 1 else 0  # optimizers make their state in the first step
        begin, last = self._model.begins or (0, self.steps - 1)
        step = int(rng.integers(max(first, begin), last + 1))
        ends = np.cumsum([r.eligible_count for r in regions])
        region = regions[int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))]
        model = self._model
        fault = UnresolvedFault(region.site, model, int(rng.integers(2**62)))
        layer = SiteName("param", parse_site(region.site).name).layer
        return SampledFault(
            InjectionPoint(step, region.site, target.partition(":")[0], layer, model.text), (fault,), model.lasts
        )

    # -- places ----------------------------------------------------------------------------------------------------

    def _places(self) -> list[OperationPhase]:
        for phase in self.spec.phases:
            if phase not in CORRUPTED_PHASES:
                raise unknown_name_error("phase", phase, CORRUPTED_PHASES)
        self._check_layers("convolutions or matrix products", {place.layer for place in self.everywhere})
        result = [
            place
            for place in self.everywhere
            if place.phase in self.spec.phases and any(fnmatchcase(place.layer, glob) for glob in self.spec.layers)
        ]
        if not result:
            raise UsageError(
                f"no convolution or matrix product of {', '.join(self.spec.layers)} has phase {' or '.join(self.spec.phases)} in "
                f"a step of {self.spec.workload}; widen --layer or --phase"
            )
        return result

    def _check_layers(self, what: str, layers: Set[str]) -> None:
        """Raise ``UsageError`` if a layer glob matches none of the layers."""
        for glob in self.spec.layers:
            if not any(fnmatchcase(layer, glob) for layer in layers):
                raise unknown_name_error(f"layer with {what}", glob, layers)

    def _products(self) -> list[OperationPhase]:
        """All convolutions and matrix products, in all phases."""
        there = [site for site in map(parse_site, self._regions) if site.kind == "op" and site.operand == "out"]
        return [
            OperationPhase(site.name, site.phase, site.layer)
            for site in there
            if site.name.partition("#")[2].rpartition(".")[0] in PRODUCTS and site.phase in CORRUPTED_PHASES
        ]

    def _fits(self, kind: WeightedFaultModel) -> list[OperationPhase]:
        """The operations and phases to which a fault model can be applied."""
        return [place for place in self.places if self._has_room(kind, place)]

    def _has_room(self, kind: WeightedFaultModel, place: OperationPhase) -> bool:
        region = self._regions.get(f"op:{place.operation}/{place.phase}/{kind.operand}")
        if region is None:
            return False
        fault = kind.fault_at_operation(place, 0)
        try:
            return bool(fault.resolve_for_tensor(region.dtype, region.shape))
        except UsageError:
            return False

    def _check(self) -> None:
        if not any(places for _, places in self._fitting):
            raise UsageError(
                f"none of the fault models ({', '.join(k.name for k in self.kinds[:6])}) can be applied to an operation that "
                "--layer and --phase select; choose others with --fault"
            )
        for kind, places in self._fitting:
            if not places:
                self.notes.append(f"{kind.name} cannot be applied to any of the operations and is not drawn.")
            elif len(places) < len(self.places):
                self.notes.append(
                    f"{kind.name} can be applied in {len(places)} of {len(self.places)} pairs of operation and phase."
                )

    def _check_steps(self) -> None:
        """Raise ``UsageError`` if a fault would begin after the last step, or before optimizer state exists."""
        moments = [kind.begins for kind in self.kinds] if self.spec.per is None else [self._model.begins]
        for begins in filter(None, moments):
            if begins[1] >= self.steps:
                raise UsageError(
                    f"{from_text(begins)} of --fault goes beyond the last step: a run has {self.steps:,} steps, counted from 0"
                )
            if begins[1] == 0 < self.steps - 1 and any(name.startswith(STATE) for name in self._memory):
                raise UsageError("from=0 of --fault is before the optimizer has state; begin at step 1 or later")

    # -- memory ----------------------------------------------------------------------------------------------------

    def _parts(self, parameters: set[str], components: Mapping[str, Sequence[str]]) -> dict[str, list[Region]]:
        """The regions of parameters and optimizer state by part of the model, or of all memory by kind."""
        if self.spec.per not in PER:
            raise unknown_name_error("--per", str(self.spec.per), PER)
        if self.spec.moment not in MOMENTS:
            raise unknown_name_error("--moment", self.spec.moment, MOMENTS)
        if len(self.spec.faults) > 1:
            raise UsageError("--per corrupts memory with one fault model; give one --fault")
        if self.spec.accelerator is not None or self.spec.value is not None:
            raise UsageError("--per corrupts memory, but --accelerator and --value apply to operations; leave them out")
        self._check_layers("parameters", {SiteName("param", name).layer for name in parameters})
        model, result = self._model, dict[str, list[Region]]()
        by_kind = self.spec.per == KIND
        for what in ("param", STATE, *([GRADIENT] if by_kind and self.spec.moment == "update" else [])):
            for site, region in self._regions.items():
                kind, name, _, entry = parse_site(site)
                if kind != what or not region.eligible_count or not model.value.ways(region):
                    continue
                owner, remembered = SiteName("param", name), memory_kind(kind, name, entry, name in parameters)
                if (remembered is None if by_kind else name not in parameters) or not any(
                    fnmatchcase(owner.layer, glob) for glob in self.spec.layers
                ):
                    continue
                parts = {"component": component_of(owner, components), "layer": owner.layer, "tensor": name}
                parts[KIND] = str(remembered).replace(" ", "-")
                result.setdefault(f"{what}:{parts[self.spec.per]}", []).append(region)
        if not result:
            raise UsageError(
                f"{model.text} cannot be applied to any parameter of {', '.join(self.spec.layers)}; "
                "widen --layer or choose another --fault"
            )
        return result

    @cached_property
    def _model(self) -> FaultModel:
        """The fault model for faults in memory."""
        return lasting_fault_model(self.spec.faults[0][0] if self.spec.faults else "bitflip")


def memory_kind(kind: str, name: str, entry: str, parameter: bool) -> str | None:
    """The kind of memory of a site; None for state like counters and masks."""
    if kind == STATE:
        return MOMENTS_OF_OPTIMIZERS.get(entry)
    if kind == "param" and not parameter:
        return MOVING if name.rpartition(".")[2] in STATISTICS else None
    return GRADIENT if kind == GRADIENT else PARAMETER


def weighted_fault_models(spec: TrainingSpec) -> list[WeightedFaultModel]:
    """The fault models of the settings, with weights that sum to 1."""
    if spec.accelerator is not None and spec.faults:
        raise UsageError("--accelerator and --fault both choose the fault models; give only one of them")
    if spec.accelerator is not None:
        entries = load_accelerator(spec.accelerator).weighted_presets
        return [WeightedFaultModel(f"{e.group}/{e.preset.name}", e.weight, e, spec.value) for e in entries]
    weighted_names = spec.faults or tuple((name, 1.0) for name in PRESETS)
    whole = sum(weight for _, weight in weighted_names)
    return [
        WeightedFaultModel(name, weight / whole, _source(name, spec.value), spec.value, split_from(name)[1])
        for name, weight in weighted_names
    ]


def _source(name: str, value: str | None) -> Preset | FaultModel:
    preset, _ = split_from(name)
    if preset in PRESETS:
        return PRESETS[preset]
    if value is not None:
        raise UsageError(f"--value and --fault {name} both set what elements become; give only one of them")
    return lasting_fault_model(name)
