"""Clean twins and repeats of one training: a campaign whose trials are runs, shared by whoever asks for the same ones."""

from __future__ import annotations

from unsilent.replicas.kind import REPLICAS, ReplicaStore
from unsilent.replicas.run import run_replicas
from unsilent.replicas.spec import Replica, ReplicaBaseline, ReplicaRow, ReplicaSpec
from unsilent.replicas.step_trace import StepTrace, StepTraceId
from unsilent.replicas.switches import SWITCHES, VARIANTS, Switches

__all__ = [
    "REPLICAS",
    "SWITCHES",
    "VARIANTS",
    "Replica",
    "ReplicaBaseline",
    "ReplicaRow",
    "ReplicaSpec",
    "ReplicaStore",
    "StepTrace",
    "StepTraceId",
    "Switches",
    "run_replicas",
]
