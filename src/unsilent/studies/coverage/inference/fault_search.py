"""Draws faults of one error model until one of them changes an answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from unsilent.engine import PlainEngine, TrialOutcome
from unsilent.engine.running_out import unusable_if_raised
from unsilent.faults import Fault, FaultModel, Population, fault_model
from unsilent.faults.naming import is_transient
from unsilent.outcomes.base import Outcome
from unsilent.sites.targets import RegionsByBatch, Target
from unsilent.studies.coverage.inference.spec import (
    IN_WEIGHTS,
    OUTPUT_BURST,
    OUTPUT_FLIP,
    WEIGHT_FLIP,
    WEIGHT_RATE,
    InferenceCoverageSpec,
)

LAW = "per-element"
MASKED, BENIGN, DUE, SDC = "masked", "benign", "due", "sdc"


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        faults: Faults that changed an answer; empty if none were found.
        batch: Number of the batch in which the faults act.
        tries: Number of tries by outcome.
    """

    faults: tuple[Fault, ...]
    batch: int
    tries: Counter[str]


class FaultSearch:
    """Draws the faults of a campaign.

    Args:
        engine: Engine that runs the faults.
        spec: Spec that defines the faults.
    """

    def __init__(self, engine: PlainEngine, spec: InferenceCoverageSpec) -> None:
        self._engine, self._spec = engine, spec
        self._ends = np.cumsum(engine.samples)
        self._models = {
            WEIGHT_FLIP: [fault_model("bitflip")],
            WEIGHT_RATE: [fault_model(f"bitflip:rate={spec.flip_rate!r}")],
            OUTPUT_FLIP: [fault_model(spec.output_flip)],
            OUTPUT_BURST: [fault_model(text) for text in spec.bursts],
        }

    @cached_property
    def _parameters(self) -> Population:
        return Population(self._engine.select_regions(("param:*",)))

    @cached_property
    def _outputs(self) -> dict[int | None, Population]:
        """The outputs of operations that can be corrupted, by batch.

        Integer outputs are left out: a corrupted index may read out of bounds, with a result that differs from run to run.
        """
        regions = [region for region in self._engine.select_regions(("op:*",)) if region.codec.kind != "int"]
        by_batch = RegionsByBatch(Target("", "", "", "", tuple(regions), 1.0), LAW)
        return dict(zip(by_batch.steps, by_batch.populations, strict=True))

    def find(self, error_model: str, seed: int) -> Found:
        """Draw faults until one changes an answer; ``seed`` determines the batch and all faults."""
        in_weights, tries, batch = error_model in IN_WEIGHTS, Counter[str](), self.draw_batch(seed)
        size = 1 if in_weights else self._engine.preferred_group_size(True)
        for first in range(0, self._spec.tries, size):
            numbers = range(first, min(first + size, self._spec.tries))
            drawn = [self.draw(error_model, batch, np.random.default_rng([seed, number])) for number in numbers]
            for faults, outcome in zip(drawn, self._outcomes(drawn), strict=True):
                end = end_of(outcome)
                tries[end] += 1
                if end == SDC:
                    return Found(faults, batch, tries)
        return Found((), batch, tries)

    def _outcomes(self, many: list[tuple[Fault, ...]]) -> list[TrialOutcome]:
        """The outcome of each set of faults.

        After a run that raised an error, the engine's state is verified.
        """
        result: list[TrialOutcome] = []
        outcomes = self._engine.trials(many)
        for _ in many:
            with unusable_if_raised():
                result.append(next(outcomes))
            if result[-1].error:
                with unusable_if_raised(result[-1].error, known=True):
                    self._engine.check_intact()
        return result

    def draw_batch(self, seed: int) -> int:
        """Draw the batch for the faults of a trial, with a probability proportional to its samples."""
        return int(np.searchsorted(self._ends, np.random.default_rng(seed).integers(self._ends[-1]), side="right"))

    def draw(self, error_model: str, batch: int, rng: np.random.Generator) -> tuple[Fault, ...]:
        """Draw faults that act in one batch only; an error model with a rate may draw none."""
        model = self._model(error_model, rng)
        if error_model in IN_WEIGHTS:
            return tuple(replace(fault, step=batch) for fault in model.draw(self._parameters, rng, LAW))
        return model.draw(self._outputs[batch], rng, LAW)

    def _model(self, error_model: str, rng: np.random.Generator) -> FaultModel:
        models = self._models[error_model]
        return models[int(rng.integers(len(models)))] if len(models) > 1 else models[0]


def end_of(outcome: TrialOutcome) -> str:
    """The worst outcome over all samples, where a changed answer is worse than a detectable error."""
    codes = outcome.codes
    if (codes == Outcome.SDC).any():
        return SDC
    if ((codes > Outcome.SDC) & (codes != Outcome.SPARED)).any():
        return DUE
    return BENIGN if (codes == Outcome.BENIGN).any() else MASKED


def fault_of_operation(faults: tuple[Fault, ...]) -> str:
    """The module whose operation all faults are in; empty for faults in weights."""
    from unsilent.faults.naming import parse_site

    if not faults or not all(is_transient(fault.site) for fault in faults):
        return ""
    names = {parse_site(fault.site).name.rpartition("#")[0] for fault in faults}
    return names.pop() if len(names) == 1 else ""
