"""Faults of values: bit codecs, fault models and the `Fault` record.

Pure numpy, loaded on first use; runs no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.faults.codecs import BIT_CLASSES, CODECS, Codec, codec
    from unsilent.faults.models import FAULT_MODELS, FaultModel, fault_model
    from unsilent.faults.population import SAMPLING_LAWS, Population, Region
    from unsilent.faults.record import OPERATIONS, Fault

_NAMES_BY_MODULE = {
    "codecs": ("BIT_CLASSES", "CODECS", "Codec", "codec"),
    "models": ("FAULT_MODELS", "FaultModel", "fault_model"),
    "population": ("SAMPLING_LAWS", "Population", "Region"),
    "record": ("OPERATIONS", "Fault"),
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "BIT_CLASSES",
    "CODECS",
    "FAULT_MODELS",
    "OPERATIONS",
    "SAMPLING_LAWS",
    "Codec",
    "Fault",
    "FaultModel",
    "Population",
    "Region",
    "codec",
    "fault_model",
]


__getattr__ = lazy_names(__name__, _LAZY, __all__)
