"""Trainings that can be run again bit for bit: the contract, the built-in ones, and `Training` for the user's own."""

from __future__ import annotations

from unsilent.workloads.trainings.base import Evaluation, Seeds, StepRecord, TrainingState, TrainingWorkload
from unsilent.workloads.trainings.loop import Training

__all__ = ["Evaluation", "Seeds", "StepRecord", "Training", "TrainingState", "TrainingWorkload"]
