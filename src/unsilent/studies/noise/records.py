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
        replica: Which one was looked at.
        step: From 0.
        kernel, module, phase: What ran, where; empty where there is none.
        kind: ``kernel`` (other bits for the same values), ``random`` (it draws), ``moved`` (it takes other
            elements of the same tensor), ``dealt`` (the same random numbers meet other elements), ``data``
            (it is given something else from outside of the step), ``path`` (another operation runs),
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
        changes_bits: None where it cannot be tried here.
        explanation: One sentence without its subject.
        diverging_operation: Where it makes runs part.
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
        n: Replicas.
        is_deterministic: Nothing is drawn, so all of them should be the same run.
        distinct_final_states: Different final states.
        accuracy, loss: On held-out samples; the loss is None where one is not finite.
        churn, raw_weight_distance, unit_sphere_distance: Of pairs; distances are None where weights were not
            kept or are not finite.
        groups: Classes and sub-groups.
        median_divergence_step: Median step, from 0, at which replicas part from the clean twin.
        twin_churn, twin_unit_distances, divergence_steps, accuracies, losses: Of each replica, by number.
        seconds: Of one run, mean.
        diverging_operation: The operation at which the replica parts that parts first; None where it is not
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

    ``level``: that was asked of a rank test (None: none); ``smallest_p``: the least p value such a test can give.
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
