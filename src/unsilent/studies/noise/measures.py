"""Measures how much replicas differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.replicas import Replica, ReplicaRow, ReplicaStore, Switches
from unsilent.statistics.distances import Distances, distance, weight_distances
from unsilent.statistics.groups import GroupSpread, group_spread
from unsilent.statistics.replica_spread import (
    first_differing_index,
    mean_over_pairs,
    median_first_differing_step,
    pairwise_churn,
    spread,
)
from unsilent.studies.noise.records import ChurnMatrix, LossSpread, VariantNoise

HELD = 2**30
"""Maximum number of bytes of weights kept in memory together; larger weights are read again for each pair."""
POINTS = 240
"""Maximum number of points of a curve over steps."""


def measure(
    name: str,
    switches: Switches,
    rows: Sequence[ReplicaRow],
    twin: ReplicaRow,
    store: ReplicaStore,
    confidence: float,
) -> VariantNoise:
    """All measures of one variant, from at least 3 replicas."""
    trained, every = store.baseline, store.spec.every
    predictions = np.stack([row.predictions for row in rows])
    wrong = predictions != np.array(trained.labels)
    accuracies = 1 - wrong.mean(axis=1)
    losses = [row.loss for row in rows]
    distances, twins, notes = _distances(rows, store)
    steps = [_parting(twin, row, every, trained.steps) for row in rows]
    finite = all(map(math.isfinite, losses))
    notes += (
        [] if finite else ["a loss on held-out samples is not finite, so no standard deviation of losses is reported"]
    )
    return VariantNoise(
        name=name,
        switches=str(switches),
        n=len(rows),
        is_deterministic=not switches.varies_between_replicas,
        distinct_final_states=len({row.final_state_hash for row in rows}),
        accuracy=spread(accuracies, confidence, max_difference=1.0),
        loss=spread(losses, confidence) if finite else None,
        churn=mean_over_pairs(pairwise_churn(predictions), confidence, max_difference=1.0),
        raw_weight_distance=None if distances is None else distances.mean_raw(confidence),
        unit_sphere_distance=None if distances is None else distances.mean_unit(confidence),
        groups=tuple(_groups(wrong, trained.group_masks, confidence)),
        median_divergence_step=median_first_differing_step(steps, confidence),
        divergence_steps=tuple(steps),
        accuracies=tuple(map(float, accuracies)),
        losses=tuple(losses),
        twin_churn=tuple(float((p != twin.predictions).mean()) for p in predictions),
        twin_unit_distances=twins,
        seconds=float(np.mean([row.seconds for row in rows])),
        notes=tuple(notes),
    )


def _parting(twin: ReplicaRow, row: ReplicaRow, every: int, steps: int) -> int | None:
    """The first step (from 0) after which the weights differ; None if they never differ.

    If hashes were not taken in every step, the result is the last step that is possible.
    """
    index = first_differing_index(twin.hashes.tolist(), row.hashes.tolist())
    return None if index is None else min((index + 1) * every, steps) - 1


def _distances(
    rows: Sequence[ReplicaRow], store: ReplicaStore
) -> tuple[Distances | None, tuple[float, ...], list[str]]:
    """Distances between the weights of all pairs, distances from the clean twin, and notes.

    The distances are ``None`` if weights were not stored or are not finite.
    """
    twin = store.row_with_weights(Replica(Switches(), 0)).flat_weights
    if twin is None:
        return None, (), ["final weights are too large to store, so distances are not reported"]

    def read_weights(index: int) -> NDArray[Any]:
        weights = store.row_with_weights(rows[index].replica).flat_weights
        assert weights is not None
        return weights

    load = cache(read_weights) if twin.nbytes * len(rows) <= HELD else read_weights
    distances = weight_distances(load, len(rows))
    twins = tuple(distance(twin, load(index))[1] for index in range(len(rows)))
    if not np.isfinite(distances.raw).all():
        return None, (), ["a run ended with weights that are not finite, so distances are not reported"]
    return distances, twins, []


def _groups(wrong: NDArray[np.bool_], groups: Mapping[str, NDArray[np.bool_]], confidence: float) -> list[GroupSpread]:
    """The spread of the error in each group that has at least two samples."""
    large = {name: members for name, members in groups.items() if members.sum() >= 2}
    return group_spread(wrong, large, confidence) if large else []


def churn_matrix(result: Sequence[tuple[str, Sequence[ReplicaRow]]]) -> ChurnMatrix:
    """The churn between all pairs of replicas, over all variants."""
    rows = [row for _, mine in result for row in mine]
    churn = pairwise_churn(np.stack([row.predictions for row in rows]))
    return ChurnMatrix(tuple((name, len(mine)) for name, mine in result), [list(map(float, line)) for line in churn])


def loss_spread(name: str, rows: Sequence[ReplicaRow]) -> LossSpread:
    """The spread of the training loss over replicas, at steps that are evenly spaced on a logarithmic scale."""
    losses = np.stack([row.losses for row in rows])
    last = losses.shape[1]
    steps = np.unique(np.round(np.geomspace(1, last, min(POINTS, last))).astype(int) - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        sd = losses[:, steps].std(axis=0, ddof=1)
    return LossSpread(name, tuple(map(int, steps)), tuple(map(float, sd)))
