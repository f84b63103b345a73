"""The rules on activations by name, with settings in the form ``dr-dna:bins=64``."""

from __future__ import annotations

from unsilent.basics.name_and_parameters import build_named
from unsilent.detectors.activations.checksum import Checksum
from unsilent.detectors.activations.dr_dna import DrDna
from unsilent.detectors.activations.quantile_monitor import QuantileMonitor
from unsilent.detectors.activations.rule import ActivationRule
from unsilent.detectors.activations.value_range import ClippedActivations, MagnitudeSymptom, Nonfinite, ValueRange

ACTIVATION_RULES: dict[str, type[ActivationRule]] = {
    rule.name: rule
    for rule in (DrDna, ValueRange, ClippedActivations, QuantileMonitor, MagnitudeSymptom, Nonfinite, Checksum)
}
"""Rules on activations in the order in which they are listed."""


def make_activation_rule(text: str) -> ActivationRule:
    """The rule described by a text ``name:key=value,key=value``.

    Raises ``UsageError`` if there is none.

    >>> make_activation_rule("dr-dna:bins=64").bins
    64
    """
    return build_named("rule", text, ACTIVATION_RULES)
