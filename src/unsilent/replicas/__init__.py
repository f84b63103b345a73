"""Clean twins and repeats of one training: run in processes, kept in one file, shared by whoever asks for the same ones."""

from __future__ import annotations

from unsilent.replicas.looks import Look, Looked
from unsilent.replicas.run import run_replicas
from unsilent.replicas.spec import Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.store import ReplicaStore
from unsilent.replicas.switches import SWITCHES, VARIANTS, Switches

__all__ = [
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
