"""Whether a device computes right: operations with known answers, and a recorded training step, executed again and again."""

from __future__ import annotations

from unsilent.selftest.recording import record_step, record_training
from unsilent.selftest.running import SelfTest, run_selftest

__all__ = ["SelfTest", "record_step", "record_training", "run_selftest"]
