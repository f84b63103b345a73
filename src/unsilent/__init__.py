"""Unsilent makes silent data corruption in deep learning audible: it injects faults and measures their effects.

Importing this package is instant; modules that need torch or numpy are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.errors import InjectionError as InjectionError
from unsilent.basics.errors import StoreError as StoreError
from unsilent.basics.errors import UnsilentError as UnsilentError
from unsilent.basics.errors import UsageError as UsageError
from unsilent.basics.errors import UserCodeError as UserCodeError
from unsilent.basics.lazy_module import lazy_names
from unsilent.version import __version__ as __version__

if TYPE_CHECKING:
    from unsilent.checkpoints.last_good import last_good_checkpoint as last_good_checkpoint
    from unsilent.checkpoints.verified_saving import verified_load as verified_load
    from unsilent.checkpoints.verified_saving import verified_save as verified_save
    from unsilent.compare.comparing import compare_models as compare_models
    from unsilent.faults import Fault as Fault
    from unsilent.faults import FaultModel as FaultModel
    from unsilent.faults import fault_model as fault_model
    from unsilent.faults.value_functions import value_model as value_model
    from unsilent.guard.guard import Guard as Guard
    from unsilent.monitor.monitor import Monitor as Monitor
    from unsilent.outcomes import judge as judge
    from unsilent.outcomes import judge_by_decision as judge_by_decision
    from unsilent.protection.protect import protect as protect
    from unsilent.sites import inject as inject
    from unsilent.studies.checkpoint.study import checkpoint_study as checkpoint_study
    from unsilent.studies.coverage.inference.study import inference_coverage as inference_coverage
    from unsilent.studies.coverage.study import coverage as coverage
    from unsilent.studies.noise.study import noise as noise
    from unsilent.studies.plan.study import plan as plan
    from unsilent.studies.pvf.study import pvf as pvf
    from unsilent.studies.stored_results import read_result as read_result
    from unsilent.studies.training.study import training as training
    from unsilent.workloads import Workload as Workload
    from unsilent.workloads import load as load
    from unsilent.workloads.trainings import Training as Training

_LAZY = {
    "unsilent.checkpoints.last_good": ("last_good_checkpoint",),
    "unsilent.checkpoints.verified_saving": ("verified_load", "verified_save"),
    "unsilent.compare.comparing": ("compare_models",),
    "unsilent.faults": ("Fault", "FaultModel", "fault_model"),
    "unsilent.faults.value_functions": ("value_model",),
    "unsilent.guard.guard": ("Guard",),
    "unsilent.monitor.monitor": ("Monitor",),
    "unsilent.outcomes": ("judge", "judge_by_decision"),
    "unsilent.protection.protect": ("protect",),
    "unsilent.sites": ("inject",),
    "unsilent.studies.checkpoint.study": ("checkpoint_study",),
    "unsilent.studies.coverage.inference.study": ("inference_coverage",),
    "unsilent.studies.coverage.study": ("coverage",),
    "unsilent.studies.noise.study": ("noise",),
    "unsilent.studies.plan.study": ("plan",),
    "unsilent.studies.pvf.study": ("pvf",),
    "unsilent.studies.stored_results": ("read_result",),
    "unsilent.studies.training.study": ("training",),
    "unsilent.workloads": ("Workload", "load"),
    "unsilent.workloads.trainings": ("Training",),
}
_PRESENT = ("InjectionError", "StoreError", "UnsilentError", "UsageError", "UserCodeError", "__version__")
__getattr__, __all__ = lazy_names("unsilent", _LAZY, _PRESENT)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
