"""Tests of whether a device computes correctly, with operations of known answers and a recorded training step."""

from __future__ import annotations

from unsilent.selftest.recording import record_step, record_training
from unsilent.selftest.running import SelfTest, run_selftest

__all__ = ["SelfTest", "record_step", "record_training", "run_selftest"]
