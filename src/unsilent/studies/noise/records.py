"""Result records of the noise study, which reports read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unsilent.basics.interval import Interval
from unsilent.campaigns.campaign_result import CampaignResult
from unsilent.statistics.groups import GroupSpread
from unsilent.statistics.replica_spread import Spread


@dataclass(frozen=True, slots=True)
class DivergingOperation:
    """The operation at which a replica diverges from the clean twin.

    Attributes:
        replica: Name of the replica.
        step: Step of the divergence, from 0.
        kernel, module, phase: Kernel, module and phase of the operation; empty if it has none.
        kind: ``kernel`` (different results for equal inputs), ``random`` (it draws random numbers), ``moved`` (it
            takes other elements of the same tensor), ``dealt`` (the same random numbers are applied to other
            elements), ``data`` (its inputs from outside of the step differ), ``path`` (another operation runs),
            ``start`` (the weights differ before the step).
    """

    replica: str
    step: int
    kind: str
    kernel: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class SwitchEffect:
    """The effect of one switch alone on the bits of a run.

    Attributes:
        changes_bits: Whether the switch changes bits; ``None`` if it cannot be used here.
        explanation: Sentence without a subject.
        diverging_operation: Operation at which runs diverge.
    """

    switch: str
    kind: str
    text: str
    changes_bits: bool | None
    explanation: str
    diverging_operation: DivergingOperation | None = None


@dataclass(frozen=True, slots=True)
class VariantNoise:
    """How much replicas of one set of switches differ.

    Attributes:
        n: Number of replicas.
        is_deterministic: Whether no switch varies between replicas, so that all replicas should be bit-identical.
        distinct_final_states: Number of different final states.
        accuracy, loss: Spread of accuracy and loss on held-out samples; the loss is ``None`` if one is not finite.
        churn, raw_weight_distance, unit_sphere_distance: Means over pairs of replicas; distances are ``None`` if
            weights were not stored or are not finite.
        groups: Spread of the error of classes and sub-groups.
        median_divergence_step: Median step, from 0, at which replicas diverge from the clean twin.
        twin_churn, twin_unit_distances, divergence_steps, accuracies, losses: Values of each replica, by number.
        seconds: Mean duration of a run in seconds.
        diverging_operation: Operation at which the earliest diverging replica diverges; ``None`` if it is not
            known.
    """

    name: str
    switches: str
    n: int
    is_deterministic: bool
    distinct_final_states: int
    accuracy: Spread
    loss: Spread | None
    churn: Interval
    raw_weight_distance: Interval | None
    unit_sphere_distance: Interval | None
    groups: tuple[GroupSpread, ...]
    median_divergence_step: Interval
    divergence_steps: tuple[int | None, ...]
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    twin_churn: tuple[float, ...]
    twin_unit_distances: tuple[float, ...]
    seconds: float
    diverging_operation: DivergingOperation | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LossSpread:
    """The standard deviation of the training loss over replicas, at selected steps counted from 0."""

    variant: str
    steps: tuple[int, ...]
    sd: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChurnMatrix:
    """The share of predictions that differ, for all pairs of replicas.

    ``variants`` gives the name and the number of replicas of each variant, in the order of the rows.
    """

    variants: tuple[tuple[str, int], ...]
    churn: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, repr=False)
class NoiseResult(CampaignResult):
    """The result of a noise study.

    ``level``: requested level of a rank test (``None`` for no test); ``smallest_p``: smallest p value that such a test can give.
    """

    KIND: ClassVar[str] = "unsilent.studies.noise.kind:NOISE"
    workload: str
    command: str
    spec: Mapping[str, Any]
    seed: int
    training: str
    steps: int
    samples: int
    parameters: int
    device: str
    confidence: float
    level: float | None
    smallest_p: float
    variants: tuple[VariantNoise, ...]
    effects: tuple[SwitchEffect, ...]
    churn_matrix: ChurnMatrix
    curves: tuple[LossSpread, ...]
    store: str
    seconds: float
    cpu_seconds: float
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    info: Mapping[str, Any]
    notes: tuple[str, ...] = ()
