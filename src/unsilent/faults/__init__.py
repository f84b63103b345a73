"""Faults of values: bit codecs, fault models and the `Fault` record.

Uses only numpy, which is loaded on first use; does not run models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.faults.codecs import BIT_CLASSES as BIT_CLASSES
    from unsilent.faults.codecs import CODECS as CODECS
    from unsilent.faults.codecs import Codec as Codec
    from unsilent.faults.codecs import codec as codec
    from unsilent.faults.models import FAULT_MODELS as FAULT_MODELS
    from unsilent.faults.models import FaultModel as FaultModel
    from unsilent.faults.models import fault_model as fault_model
    from unsilent.faults.population import SAMPLING_LAWS as SAMPLING_LAWS
    from unsilent.faults.population import Population as Population
    from unsilent.faults.population import Region as Region
    from unsilent.faults.record import OPERATIONS as OPERATIONS
    from unsilent.faults.record import Fault as Fault

_LAZY = {
    "unsilent.faults.codecs": ("BIT_CLASSES", "CODECS", "Codec", "codec"),
    "unsilent.faults.models": ("FAULT_MODELS", "FaultModel", "fault_model"),
    "unsilent.faults.population": ("SAMPLING_LAWS", "Population", "Region"),
    "unsilent.faults.record": ("OPERATIONS", "Fault"),
}
__getattr__, __all__ = lazy_names(__name__, _LAZY)
