"""Replicas: repeated fault-free runs of one training, stored as a campaign.

The run without any switch is the clean twin. Studies of the same training share the stored runs.
"""

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
