"""Computes thresholds from clean samples, and from them the detections of the faults of one store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.statistics.conformal import conformal_threshold
from unsilent.studies.coverage.inference.detector_rows import AFTER_CALL, layers_run
from unsilent.studies.coverage.inference.spec import (
    CALIBRATION,
    CLAMP,
    FOUND,
    JUDGED,
    REPAIR,
    RERUN,
    RUNGS,
    SHIFTED,
    TEST,
    TIMED,
    InferenceCoverageBaseline,
    InferenceCoverageRow,
    InferenceCoverageSpec,
)

if TYPE_CHECKING:
    from unsilent.campaigns.store import Store

Floats = NDArray[np.float64]
Value = TypeVar("Value", bound=np.generic)
CLEAN_PER_ALARM = 10
"""Minimum expected number of false alarms in the clean samples for a rate to be reported."""


def clean_samples_needed(rate: float) -> int:
    """The number of clean samples that are needed to report a rate of false alarms.

    >>> clean_samples_needed(0.001)
    10000
    """
    return math.ceil(CLEAN_PER_ALARM / rate - 1e-9)


def check_clean_samples(wanted: int, rate: float, available: int | None = None) -> None:
    """Raise ``UsageError`` if there are too few clean samples for a rate of false alarms.

    Args:
        wanted: ``--clean-samples``.
        rate: Rate of false alarms.
        available: Number of samples that the workload has for thresholds or for false alarms, whichever is smaller; ``None`` if
            it is not known yet.
    """
    needed = clean_samples_needed(rate)
    if (wanted if available is None else available) >= needed:
        return
    if available is not None and available < wanted:
        raise UsageError(
            f"--clean-samples is {wanted:,}, but the workload has {available:,} clean samples for thresholds or for false "
            f"alarms, besides those that detectors learn from; a rate of false alarms of {rate:g} needs {needed:,}: choose "
            "a higher --rate, or give the workload more clean samples"
        )
    raise UsageError(
        f"--clean-samples is {wanted:,}; a rate of false alarms of {rate:g} needs {needed:,} or more: choose a higher --rate, or "
        "run a campaign with more --clean-samples"
    )


class Detected(NamedTuple):
    """Detections of each fault by one detector at one rate, float64[faults] each.

    Attributes:
        changed: Number of answers that the fault changed.
        share: Share of the changed answers that were detected.
        layers, flops: Mean share of layers and of FLOPs that have run at the first alarm; NaN without an alarm, or if
            an older store does not have the layers of the detector.
        by_layer: Share of the changed answers that are restored by running a layer again at the first alarm.
        by_ladder: Share of the changed answers that the ladder restores: layer, call again, repair, clamp.
        by_rung: Share of the detected answers that each rung restores, float64[faults, rungs]; NaN if none is detected.
    """

    changed: Floats
    share: Floats
    layers: Floats
    flops: Floats
    by_layer: Floats
    by_ladder: Floats
    by_rung: Floats


@dataclass(frozen=True, eq=False)
class ScoredStore:
    """The rows of a store as arrays.

    Attributes:
        faults: Rows with a fault that changed answers.
        clean: Largest margins of clean samples, float64[samples], by part and detector.
        originals: Number of each clean sample's original, from 0, int64[samples], by part.
        times: CPU seconds, see `InferenceCoverageRow`; empty if they were not measured.
    """

    store: Store[InferenceCoverageSpec, InferenceCoverageBaseline, InferenceCoverageRow]
    rows: Sequence[InferenceCoverageRow]
    faults: Sequence[InferenceCoverageRow]
    clean: Mapping[str, Mapping[str, Floats]]
    originals: Mapping[str, NDArray[np.int64]]
    times: Floats

    @property
    def detectors(self) -> list[str]:
        """The names of the detectors."""
        return [info.name for info in self.store.baseline.detectors]

    @property
    def least_clean(self) -> int:
        """The number of clean samples for calibration or for test, whichever is smaller."""
        return min(len(next(iter(self.clean[part].values()))) for part in (CALIBRATION, TEST))

    def threshold(self, detector: str, rate: float) -> float:
        """The margin above which a detector raises an alarm, for a given rate of false alarms."""
        return conformal_threshold(self.clean[CALIBRATION][detector], rate)

    def by_original(self, part: str, values: NDArray[Value]) -> list[NDArray[Value]]:
        """The values of the clean samples of a part, grouped by original sample."""
        names = self.originals[part]
        order = np.argsort(names, kind="stable")
        return np.split(values[order], np.cumsum(np.bincount(names))[:-1])

    def margins(self, detector: str) -> list[Floats]:
        """Margins of each fault, float64[layers, changed]."""
        infos = self.store.baseline.detectors
        ends = np.cumsum([len(info.layers) for info in infos])
        number = self.detectors.index(detector)
        first = int(ends[number]) - len(infos[number].layers)
        return [row.margins[first : ends[number]].astype(np.float64) for row in self.faults]

    def detected(self, detector: str, rate: float) -> Detected:
        """The detections of each fault, at the threshold for a rate of false alarms."""
        info = self.store.baseline.detectors[self.detectors.index(detector)]
        names, layers, flops = np.array(info.layers), layers_run(info), np.array(info.flops)
        in_order = np.lexsort((names == AFTER_CALL, layers))
        threshold = self.threshold(detector, rate)
        values = []
        for row, margins in zip(self.faults, self.margins(detector), strict=True):
            crossed = margins > threshold
            is_found = crossed.any(0)
            first = in_order[crossed[in_order].argmax(0)]
            repeated = f"{row.layer}#2" in names
            again = is_found & (names[first] == row.layer) & (row.layer != "") & (not repeated)
            back = row.restored.astype(bool)
            ladder = is_found & (again | back[[RUNGS.index(rung) for rung in (RERUN, REPAIR, CLAMP)]].any(0))
            values.append(
                [
                    row.changed, is_found.mean(), _mean(layers[first][is_found]), _mean(flops[first][is_found]),
                    again.mean(), ladder.mean(), *(_mean(restored[is_found]) for restored in back),
                ]
            )  # fmt: skip
        table = np.array(values, np.float64).reshape(-1, 6 + len(RUNGS))
        changed, share, layers, flops_run, by_layer, by_ladder = table[:, :6].T
        return Detected(changed, share, layers, flops_run, by_layer, by_ladder, table[:, 6:])

    def false_alarm_shares(self, detector: str) -> list[Floats]:
        """For each changed answer, the share of clean samples with at least as large a margin."""
        clean = np.sort(self.clean[TEST][detector])
        largest = [margins.max(0) for margins in self.margins(detector)]
        return [1 - np.searchsorted(clean, answers, side="left") / len(clean) for answers in largest]


def _mean(values: NDArray[np.generic]) -> float:
    return float(values.mean()) if len(values) else math.nan


def score_store(
    store: Store[InferenceCoverageSpec, InferenceCoverageBaseline, InferenceCoverageRow],
) -> ScoredStore:
    """Read a store; raises ``UsageError`` if clean samples are missing."""
    rows = list(store.rows())
    names = [info.name for info in store.baseline.detectors]
    clean, originals = {}, {}
    for part in (CALIBRATION, TEST, SHIFTED):
        part_rows = [row for row in rows if row.trial.target == part and row.end == JUDGED]
        if len(part_rows) < store.baseline.clean_trials[part]:
            why = next((row.error or row.end for row in rows if row.trial.target == part and row.end != JUDGED), "")
            raise UsageError(
                f"{store.path} has {len(part_rows)} of {store.baseline.clean_trials[part]} trials of clean samples ({part})"
                f"{f': {why}' if why else ''}; run again the command that made it"
            )
        part_rows.sort(key=lambda row: row.trial.k)
        values = np.hstack([row.margins for row in part_rows]).astype(np.float64)
        originals[part] = np.unique(np.concatenate([row.originals for row in part_rows]), return_inverse=True)[1]
        clean[part] = dict(zip(names, values, strict=True))
    times = next((row.times for row in rows if row.end == TIMED), np.zeros((0, 2)))
    return ScoredStore(store, rows, [row for row in rows if row.end == FOUND], clean, originals, times)
