"""The clean batches of a campaign: for detectors to learn from, for thresholds, for faults and false alarms, and shifted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.engine.device_placement import place
from unsilent.studies.coverage.inference.spec import CALIBRATION, CLEAN_TARGETS, InferenceCoverageSpec
from unsilent.workloads.base import CalibratedWorkload, InferenceWorkload, own_originals
from unsilent.workloads.batch_samples import count_samples

LEAST_PROFILE_BATCHES = 2
"""Fewest batches that detectors learn from: parts of a combination are scaled with other batches than they learn from."""


@dataclass(frozen=True)
class CleanBatches:
    """Clean batches of one part.

    Attributes:
        batches: On the device.
        originals: Which original each sample of each batch is of; no original is in two batches.
    """

    batches: Sequence[Any]
    originals: Sequence[Sequence[int]]

    def __getitem__(self, some: slice) -> CleanBatches:
        return CleanBatches(self.batches[some], self.originals[some])

    def count_with(self, samples: int) -> int:
        """How many batches from the first on have so many samples; all of them where they have fewer."""
        ends = np.cumsum([len(batch) for batch in self.originals])
        return min(int(np.searchsorted(ends, samples)) + 1, len(self.batches))

    def evenly_chosen(self, most: int) -> list[Any]:
        """Batches that are equally far apart, at most so many."""
        count = min(most, len(self.batches))
        return [self.batches[number * len(self.batches) // count] for number in range(count)]


def read_clean_batches(
    workload: CalibratedWorkload, spec: InferenceCoverageSpec, device: str
) -> tuple[list[Any], dict[str, CleanBatches]]:
    """Batches that detectors learn from, and those of each of `CLEAN_TARGETS`.

    Raises:
        UsageError: there are too few for calibration to be divided; originals that do not fit the batches.
    """
    profile, parts = list[Any](), {}
    for part in CLEAN_TARGETS:
        more = 2 * spec.profile_samples if part == CALIBRATION else 0  # whole batches may be more than those
        clean = _read_part(workload, part, spec.clean_samples + more, device)
        if part == CALIBRATION:
            # Half of all samples at most.
            wanted = min(spec.profile_samples, sum(map(len, clean.originals)) // 2)
            count = max(clean.count_with(wanted), LEAST_PROFILE_BATCHES)
            profile, clean = list(clean.batches[:count]), clean[count:]
        if not clean.batches:
            raise UsageError(
                f"{workload.name} gives too few clean batches of part {part}: there are {len(profile)}, "
                "some of which detectors learn from; lower --profile-samples, or give more and smaller batches"
            )
        parts[part] = clean[: clean.count_with(spec.clean_samples)]
    return profile, parts


def _read_part(workload: CalibratedWorkload, part: str, samples: int, device: str) -> CleanBatches:
    """All batches of a part and their originals, by the method ``clean_originals``; without it, each sample is its own."""
    batches = [place(batch, device, None) for batch in workload.clean_batches(part, samples)]
    name_originals = getattr(workload, "clean_originals", None)
    names = list(own_originals(batches) if name_originals is None else name_originals(part, samples))
    if [len(batch) for batch in names] != [count_samples(batch) for batch in batches]:
        raise UsageError(
            f"{workload.name}: clean_originals({part!r}, {samples}) does not name one original for each sample of each batch of "
            "clean_batches; return one list of numbers for each batch"
        )
    if sum(len(set(batch)) for batch in names) != len({name for batch in names for name in batch}):
        raise UsageError(
            f"{workload.name}: an original has clean samples of part {part!r} in two batches; put all of them into one"
        )
    return CleanBatches(batches, names)


class EvaluatedOn:
    """A workload with other batches to evaluate.

    Args:
        workload: The same in everything else.
        batches: In the place of its own.
    """

    def __init__(self, workload: InferenceWorkload, batches: Sequence[Any]) -> None:
        self._workload, self._batches = workload, batches
        self.name, self.judge = workload.name, workload.judge
        self.components, self.info = workload.components, workload.info

    def model(self) -> nn.Module:
        """The model of the workload."""
        return self._workload.model()

    def batches(self) -> Sequence[Any]:
        """The other batches."""
        return self._batches

    def run(self, model: nn.Module, batch: Any) -> Any:
        """One evaluation of one batch."""
        return self._workload.run(model, batch)
