"""Trainings that can be repeated bit for bit: the interface, the built-in trainings, and `Training` for user code."""

from __future__ import annotations

from unsilent.workloads.trainings.base import Evaluation, Seeds, StepRecord, TrainingState, TrainingWorkload
from unsilent.workloads.trainings.loop import Training

__all__ = ["Evaluation", "Seeds", "StepRecord", "Training", "TrainingState", "TrainingWorkload"]
