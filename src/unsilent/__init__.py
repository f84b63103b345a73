"""Unsilent makes silent data corruption in deep learning audible: inject faults, measure what they do.

Importing this package is instant; what needs torch or numpy is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.errors import (
    InjectionError,
    StoreError,
    UnsilentError,
    UsageError,
    UserCodeError,
)
from unsilent.basics.lazy_module import lazy_names
from unsilent.version import __version__

if TYPE_CHECKING:
    from unsilent.checkpoints.last_good import last_good_checkpoint
    from unsilent.checkpoints.verified_saving import verified_load, verified_save
    from unsilent.compare.comparing import compare_models
    from unsilent.faults import Fault, FaultModel, fault_model
    from unsilent.faults.value_functions import value_model
    from unsilent.guard.guard import Guard
    from unsilent.monitor.monitor import Monitor
    from unsilent.outcomes import judge, judge_by_decision
    from unsilent.protection.protect import protect
    from unsilent.sites import inject
    from unsilent.studies.checkpoint.study import checkpoint_study
    from unsilent.studies.coverage.inference.study import inference_coverage
    from unsilent.studies.coverage.study import coverage
    from unsilent.studies.noise.study import noise
    from unsilent.studies.plan.study import plan
    from unsilent.studies.pvf.study import pvf
    from unsilent.studies.stored_results import read_result
    from unsilent.studies.training.study import training
    from unsilent.workloads import Workload, load
    from unsilent.workloads.trainings import Training

_LAZY = {
    "Fault": "unsilent.faults",
    "FaultModel": "unsilent.faults",
    "Guard": "unsilent.guard",
    "Monitor": "unsilent.monitor",
    "fault_model": "unsilent.faults",
    "judge_by_decision": "unsilent.outcomes",
    "judge": "unsilent.outcomes",
    "inject": "unsilent.sites",
    "load": "unsilent.workloads",
    "Workload": "unsilent.workloads",
    "Training": "unsilent.workloads.trainings",
    "checkpoint_study": "unsilent.studies.checkpoint.study",
    "compare_models": "unsilent.compare.comparing",
    "coverage": "unsilent.studies.coverage.study",
    "inference_coverage": "unsilent.studies.coverage.inference.study",
    "last_good_checkpoint": "unsilent.checkpoints.last_good",
    "noise": "unsilent.studies.noise.study",
    "plan": "unsilent.studies.plan.study",
    "protect": "unsilent.protection.protect",
    "pvf": "unsilent.studies.pvf.study",
    "read_result": "unsilent.studies.stored_results",
    "training": "unsilent.studies.training.study",
    "value_model": "unsilent.faults.value_functions",
    "verified_load": "unsilent.checkpoints.verified_saving",
    "verified_save": "unsilent.checkpoints.verified_saving",
}

__all__ = [
    "Fault",
    "FaultModel",
    "Guard",
    "InjectionError",
    "Monitor",
    "StoreError",
    "Training",
    "UnsilentError",
    "UsageError",
    "UserCodeError",
    "Workload",
    "__version__",
    "checkpoint_study",
    "compare_models",
    "coverage",
    "fault_model",
    "inference_coverage",
    "inject",
    "judge",
    "judge_by_decision",
    "last_good_checkpoint",
    "load",
    "noise",
    "plan",
    "protect",
    "pvf",
    "read_result",
    "training",
    "value_model",
    "verified_load",
    "verified_save",
]


__getattr__ = lazy_names("unsilent", _LAZY, __all__)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
