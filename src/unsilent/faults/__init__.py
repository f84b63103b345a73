"""What goes wrong: bit codecs, fault models and the `Fault` record. Pure numpy; runs no model."""

from unsilent.faults.codecs import BIT_CLASSES, CODECS, Codec, codec
from unsilent.faults.models import FAULT_MODELS, FaultModel, fault_model
from unsilent.faults.population import SAMPLING_LAWS, Population, Region
from unsilent.faults.record import OPERATIONS, Fault

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
