"""Replicas with what the study makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from unsilent.replicas import REPLICAS, ReplicaStore
from unsilent.report.model import Report

if TYPE_CHECKING:
    from unsilent.studies.noise.records import NoiseResult


def size(store: ReplicaStore) -> int:
    """Replicas that the question of a store asks for."""
    from unsilent.studies.noise.study import asked_of

    return len(set(asked_of(store).wanted(store.description)))


def analyse(store: ReplicaStore, confidence: float = 0.95) -> NoiseResult:
    """What the replicas of a store say; raises ``UsageError`` where some are missing."""
    from unsilent.studies.noise.study import asked_of, read_noise

    return read_noise(asked_of(store, confidence), store)


def report(result: NoiseResult) -> Report:
    """What is shown of it."""
    from unsilent.studies.noise.report import report

    return report(result)


NOISE = replace(REPLICAS, analyse=analyse, report=report, size=size)
