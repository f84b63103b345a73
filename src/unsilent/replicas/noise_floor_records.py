"""Records of the noise floors of a training, which can be read without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unsilent.campaigns.spec import JsonRecord
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import DamagedRecordError, parse_record
from unsilent.replicas.spec import MOST_REPLICAS

FLOOR = "floor"
"""Name of the records of noise floors, which are stored in the order of `NoiseFloors`."""


@dataclass(frozen=True, slots=True)
class ReplicaDifferences(JsonRecord):
    """Differences between fault-free replicas and their clean twin at the end of training.

    Attributes:
        switches: Switches that vary between the replicas.
        accuracy, loss: Difference of each replica's held-out accuracy and loss from the twin's.
        churn: Share of each replica's predictions that differ from the twin's.
        identical_to_twin: Whether each replica's results equal the twin's bit for bit.
        window: Number of steps that ``loss_band`` averages over.
        loss_band: Largest absolute difference from the twin of the mean training loss, for each window of steps.
        twin_losses_hash: Hash of the twin's losses.
    """

    switches: str
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    churn: tuple[float, ...]
    identical_to_twin: tuple[bool, ...]
    window: int
    loss_band: tuple[float, ...]
    twin_losses_hash: str = ""


@dataclass(frozen=True, slots=True)
class NoiseFloors:
    """The two noise floors with which a faulty run is compared.

    Attributes:
        implementation: Noise floor of replicas whose implementation switches vary, for example the order of sums.
        seeds: Noise floor of replicas with other seeds for initialisation, data order, augmentation and dropout.
    """

    implementation: ReplicaDifferences
    seeds: ReplicaDifferences


def parse_noise_floor(text: str, spec: object, baseline: object) -> ReplicaDifferences:
    """A noise floor parsed from JSON; raises ``DamagedRecordError``."""
    record = parse_record(ReplicaDifferences, text, "floor")
    count = len(record.accuracy)
    if not 1 <= count <= MOST_REPLICAS or {len(record.loss), len(record.churn), len(record.identical_to_twin)} != {
        count
    }:
        raise DamagedRecordError("its noise floor has columns of unequal lengths")
    right = are_numbers((*record.accuracy, *record.loss)) and are_numbers((*record.churn, *record.loss_band), least=0)
    if not right or record.window < 1:
        raise DamagedRecordError("its noise floor has impossible numbers")
    return record


def store_noise_floors(store: Store[Any, Any, Any], floors: NoiseFloors) -> None:
    """Store both noise floors, replacing those stored before."""
    store.replace_records(FLOOR, [floors.implementation.to_json(), floors.seeds.to_json()])


def stored_floors(store: Store[Any, Any, Any]) -> NoiseFloors | None:
    """The noise floors in a store; None if one of them is missing."""
    result = store.records(FLOOR)
    return NoiseFloors(*result) if len(result) == len(NoiseFloors.__slots__) else None


def are_numbers(values: Sequence[float], least: float = -math.inf) -> bool:
    """Whether all values are finite and at least ``least``."""
    return all(math.isfinite(v) and v >= least for v in values)
