"""What goes wrong: bit codecs, fault models and the `Fault` record. Pure numpy, loaded on first use; runs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unsilent.errors import missing_name_error

if TYPE_CHECKING:
    from unsilent.faults.codecs import BIT_CLASSES, CODECS, Codec, codec
    from unsilent.faults.models import FAULT_MODELS, FaultModel, fault_model
    from unsilent.faults.population import SAMPLING_LAWS, Population, Region
    from unsilent.faults.record import OPERATIONS, Fault

_LAZY = {
    "BIT_CLASSES": "codecs",
    "CODECS": "codecs",
    "FAULT_MODELS": "models",
    "OPERATIONS": "record",
    "SAMPLING_LAWS": "population",
    "Codec": "codecs",
    "Fault": "record",
    "FaultModel": "models",
    "Population": "population",
    "Region": "population",
    "codec": "codecs",
    "fault_model": "models",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise missing_name_error(__name__, name, __all__)
    import importlib

    return getattr(importlib.import_module(f"unsilent.faults.{_LAZY[name]}"), name)
