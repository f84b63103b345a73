"""Unsilent makes silent data corruption in deep learning audible: inject faults, measure what they do.

Importing this package is instant; what needs torch or numpy is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unsilent.errors import InjectionError, StoreError, UnsilentError, UsageError, UserCodeError
from unsilent.version import __version__

if TYPE_CHECKING:
    from unsilent.faults import Fault, FaultModel, fault_model
    from unsilent.outcomes import decide, judge
    from unsilent.render.html import write_html
    from unsilent.sites import inject
    from unsilent.studies.pvf.study import pvf
    from unsilent.workloads import Workload, load
    from unsilent.workloads.trainings import Training

_LAZY = {
    "Fault": "unsilent.faults",
    "FaultModel": "unsilent.faults",
    "fault_model": "unsilent.faults",
    "decide": "unsilent.outcomes",
    "judge": "unsilent.outcomes",
    "inject": "unsilent.sites",
    "load": "unsilent.workloads",
    "Workload": "unsilent.workloads",
    "Training": "unsilent.workloads.trainings",
    "pvf": "unsilent.studies.pvf.study",
    "write_html": "unsilent.render.html",
}

__all__ = [
    "Fault",
    "FaultModel",
    "InjectionError",
    "StoreError",
    "Training",
    "UnsilentError",
    "UsageError",
    "UserCodeError",
    "Workload",
    "__version__",
    "decide",
    "fault_model",
    "inject",
    "judge",
    "load",
    "pvf",
    "write_html",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'unsilent' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
