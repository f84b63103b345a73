"""The noise floor of a training, measured from its stored replicas, for the test of `unsilent.statistics.floor`.

Every study that trains asks the same two questions: which clean runs are stored, and how far is a run from the clean twin?
"""

from __future__ import annotations

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.replicas import Replica, ReplicaRow, ReplicaStore, Switches
from unsilent.replicas.spec import same_replica_bits
from unsilent.statistics.distances import distance
from unsilent.statistics.null_distribution import NullDistribution, RunComparison

ACCURACY, LOSS, CHURN, UNIT = "accuracy", "loss", "churn", "unit"
"""Measures: differences of accuracy (a share) and loss on held-out samples, the share of predictions that differ, and the
distance of weights scaled to unit length (only if weights were stored)."""


class Floor:
    """The replicas of one training with the same switches, for comparison with the clean twin.

    Args:
        store: Store of the replicas.
        switches: Switches of the replicas; the runs to be judged must have the same noise.

    Raises:
        UsageError: the store has no clean twin.
    """

    def __init__(self, store: ReplicaStore, switches: Switches) -> None:
        self._store, self._switches = store, switches
        self.twin = store.clean_twin()
        self._labels = np.array(store.baseline.labels)
        self._weights = store.row_with_weights(self.twin.replica).flat_weights

    def null_comparisons(self, numbers: range) -> NullDistribution:
        """Comparisons of the replicas with these numbers; raises ``UsageError`` if one is not stored."""
        rows = self._store.runs_with_switches(self._switches, numbers.stop, weights=True)
        result = {row.trial.k: self.compare_with_twin(row) for row in rows if row.trial.k in numbers}
        if missing := [number for number in numbers if number not in result]:
            raise UsageError(f"replica {Replica(self._switches, missing[0])} is not stored; run it first")
        return NullDistribution([result[number] for number in numbers])

    def compare_with_twin(self, row: ReplicaRow) -> RunComparison:
        """The comparison of a run with the clean twin."""
        accuracy, clean = (float((run.predictions == self._labels).mean()) for run in (row, self.twin))
        values = {
            ACCURACY: accuracy - clean,
            LOSS: row.loss - self.twin.loss,
            CHURN: float(np.mean(row.predictions != self.twin.predictions)),
        }
        weights = row.flat_weights
        if weights is not None and self._weights is not None:
            values[UNIT] = distance(self._weights, weights)[1]
        return RunComparison(
            str(row.replica),
            str(self.twin.replica),
            values,
            noise_source=str(row.replica.switches),
            same_bits=same_replica_bits(row, self.twin),
        )
