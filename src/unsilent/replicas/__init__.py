"""Clean twins and repeats of one training: a campaign whose trials are runs, shared by whoever asks for the same ones."""

from __future__ import annotations

from unsilent.replicas.kind import REPLICAS, ReplicaStore
from unsilent.replicas.looks import Look, Looked
from unsilent.replicas.run import run_replicas
from unsilent.replicas.spec import Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.switches import SWITCHES, VARIANTS, Switches

__all__ = [
    "REPLICAS",
    "SWITCHES",
    "VARIANTS",
    "Look",
    "Looked",
    "Replica",
    "ReplicaRow",
    "ReplicaSpec",
    "ReplicaStore",
    "Switches",
    "Trained",
    "run_replicas",
]
