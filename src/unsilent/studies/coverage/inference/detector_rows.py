"""Maps the rows of a detector's margins to layers, and to the order in which layers run.

Rows of a combination are stacked part by part, so a later row may be known earlier. Rows without a layer, for example of
checksums of weights, are known after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unsilent.studies.coverage.inference.spec import DetectorInfo

if TYPE_CHECKING:
    from unsilent.protection.detector import InferenceDetector
    from unsilent.protection.layer_watch import LayerRun
    from unsilent.protection.recorded_pass import RecordedPass

AFTER_CALL = "after the call"
"""Name for rows without a layer."""


def name_rows(detector: InferenceDetector, recorded: RecordedPass) -> list[str]:
    """The name of the layer run behind each row of margins, or `AFTER_CALL`."""
    from unsilent.protection.activation_detector import ActivationDetector
    from unsilent.protection.combination import Combination
    from unsilent.protection.duplication import Duplication

    runs: Sequence[LayerRun] = ()
    if isinstance(detector, Combination):
        return [name for part in detector.parts for name in name_rows(part, recorded)]
    if isinstance(detector, Duplication):
        runs = detector.runs_computed_twice(recorded)
    elif isinstance(detector, ActivationDetector):
        runs = [run for run in recorded.layers if run.name in detector.layers and len(run.output) == recorded.samples]
    return [name_of_run(run) for run in runs] or [AFTER_CALL]


def name_of_run(run: LayerRun) -> str:
    """The name of a layer run; from the third forward pass on, the number of the pass is appended."""
    return f"{run.name}{run.number if run.number > 2 else ''}"


def layers_run(info: DetectorInfo) -> NDArray[np.float64]:
    """The share of the judged layers that have run when each row of margins is known, float64[rows]."""
    by_flops = np.argsort(info.flops, kind="stable")
    layers = list(dict.fromkeys(info.layers[row] for row in by_flops if info.layers[row] != AFTER_CALL))
    places = {name: (place + 1) / len(layers) for place, name in enumerate(layers)}
    return np.array([places.get(name, 1.0) for name in info.layers])
