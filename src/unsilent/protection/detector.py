"""The interface of detectors of corrupted answers, and a table of detectors by name.

A detector learns from clean inputs of a model with the right weights, and then gives each sample of a call a *margin* for each
layer: the larger, the more unusual. The detector does not decide whether a margin is an alarm: the threshold comes from further
clean samples, from their largest margins over layers (`unsilent.statistics.conformal`), so that all detectors can be compared at
equal false-alarm rates. Detectors of corrupted weights check the present weights when margins are requested.

    detector = make_detector("dr-dna+weight-integrity")
    detector.calibrate(model, clean_batches)
    margins = detector.margins(record_pass(model, batch=batch))       # float64[layers, samples]

Another package registers a detector as an entry point of the group ``unsilent.detectors``: a class, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from torch import nn

from unsilent.basics.entry_points import DETECTORS as GROUP
from unsilent.basics.entry_points import WithInstalled
from unsilent.basics.errors import UsageError
from unsilent.basics.name_and_parameters import build_named, parse_named
from unsilent.detectors.activations.rule import Floats
from unsilent.detectors.activations.rules import ACTIVATION_RULES
from unsilent.protection.activation_detector import ActivationDetector
from unsilent.protection.combination import Combination
from unsilent.protection.duplication import Duplication
from unsilent.protection.golden_test import GoldenTest
from unsilent.protection.recorded_pass import RecordedPass
from unsilent.protection.weight_detector import WeightDetector
from unsilent.workloads.base import call_model


class InferenceDetector(Protocol):
    """Interface of a detector of corrupted answers of a model.

    Attributes:
        name: Text that the detector was made from.
        needs_layers: Whether it reads the runs of layers in a `RecordedPass`; if not, `record_pass` need not keep them.
    """

    name: str
    needs_layers: bool

    @property
    def nbytes(self) -> int:
        """Memory in bytes that the detector takes besides the model."""

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Learn from a model with the right weights, in eval mode, and from clean batches.

        Raises:
            UsageError: there are too few samples, values are not finite, or no layer can be read.
        """

    def margins(self, recorded: RecordedPass) -> Floats:
        """Margins, which say how unusual each sample is after each layer, float64[layers, samples].

        There is one row if no layers are read. Margins of weights are the same for all samples.
        """


@runtime_checkable
class StoredDetector(Protocol):
    """Further methods of a detector of another package, needed to store it in a profile file."""

    def learnt(self) -> Any:
        """The results of `calibrate`, as tensors and JSON values in dicts and lists."""

    def know(self, learnt: Any, model: nn.Module) -> None:
        """Restore what `learnt` returned; tuples may have become lists."""


DETECTORS: dict[str, Callable[..., InferenceDetector]] = {
    **dict.fromkeys(ACTIVATION_RULES, ActivationDetector),
    WeightDetector.kind: WeightDetector,
    GoldenTest.kind: GoldenTest,
    Duplication.kind: Duplication,
}
"""Detectors in the order in which they are listed."""
ALL_DETECTORS = WithInstalled("detector", GROUP, DETECTORS)
"""Detectors, including those of other packages."""


def make_detector(what: str | InferenceDetector, layers: Iterable[str] = (), seed: int = 0) -> InferenceDetector:
    """The detector that a text ``name:key=value,key=value`` names.

    Several texts joined by ``+`` give a combination.

    Args:
        what: Text like ``dr-dna:bins=64`` or ``dr-dna+weight-integrity+abft``; a detector object is returned unchanged.
        layers: Globs over names of modules that rules on activations read; by default they choose themselves.
        seed: Seed of the choice of sites.

    Raises:
        UsageError: there is no such detector, it has no such parameter, or a detector object is given with ``layers``.

    >>> make_detector("dr-dna+weight-integrity:slices=8").name
    'dr-dna+weight-integrity:slices=8'
    """
    if not isinstance(what, str):
        return _check_detector(what, tuple(layers))
    parts = [_make_part(part.strip(), tuple(layers), seed) for part in what.split("+")]
    return parts[0] if len(parts) == 1 else Combination(parts)


def _make_part(text: str, layers: tuple[str, ...], seed: int) -> InferenceDetector:
    if parse_named(text)[0] in ACTIVATION_RULES:
        return ActivationDetector(text, layers, seed)
    return _check_detector(build_named("detector", text, ALL_DETECTORS))


def _check_detector(detector: Any, layers: tuple[str, ...] = ()) -> InferenceDetector:
    """The object itself.

    Raises ``UsageError`` if it lacks an attribute or method of a detector.
    """
    has_methods = all(callable(getattr(detector, name, None)) for name in ("calibrate", "margins"))
    if isinstance(detector, type) and has_methods:
        raise UsageError(f"detector is the class {detector.__name__}; expected an object: write {detector.__name__}(…)")
    if not has_methods or not all(hasattr(detector, name) for name in ("name", "needs_layers", "nbytes")):
        raise UsageError(
            f"detector is of type {type(detector).__name__}; expected a text, like 'dr-dna+weight-integrity', or an object with "
            "the attributes and methods of InferenceDetector"
        )
    if layers:
        raise UsageError(
            f"layers is given, but {detector.name} is an object, which reads what it was made for; leave layers out"
        )
    return cast("InferenceDetector", detector)


def check_can_be_stored(detector: InferenceDetector) -> None:
    """Raise ``UsageError`` for a detector that cannot be stored in a file.

    An example is a detector of another package without a registered name.
    """
    for part in detector.parts if isinstance(detector, Combination) else (detector,):
        if type(part) in (ActivationDetector, WeightDetector, GoldenTest, Duplication):
            continue
        name = parse_named(part.name)[0]
        if name not in ALL_DETECTORS or ALL_DETECTORS[name] is not type(part):
            raise UsageError(
                f"the detector {part.name} cannot be stored: no name stands for {type(part).__name__}; register it as an entry "
                f"point of {GROUP}, or keep the profile in memory"
            )
        if not isinstance(part, StoredDetector):
            raise UsageError(
                f"the detector {part.name} cannot be stored, as it has no methods learnt and know; add them, or keep the profile "
                "in memory"
            )


def largest_margins(detector: InferenceDetector, recorded: RecordedPass) -> Floats:
    """The largest margin over layers of each sample, float64[samples].

    Thresholds are determined from these margins, and compared with them.
    """
    return np.asarray(detector.margins(recorded).max(0))
