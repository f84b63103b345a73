"""The clean batches of a campaign, divided by purpose: profile, calibration, test and shifted."""

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
"""Minimum number of batches that detectors learn from: parts of a combination learn from some and are scaled with others."""


@dataclass(frozen=True)
class CleanBatches:
    """Clean batches that serve one purpose.

    Attributes:
        batches: Batches on the device.
        originals: Original of each sample of each batch; no original is in two batches.
    """

    batches: Sequence[Any]
    originals: Sequence[Sequence[int]]

    def __getitem__(self, some: slice) -> CleanBatches:
        return CleanBatches(self.batches[some], self.originals[some])

    def count_with(self, samples: int) -> int:
        """How many of the first batches are needed to reach a number of samples; all if there are fewer."""
        ends = np.cumsum([len(batch) for batch in self.originals])
        return min(int(np.searchsorted(ends, samples)) + 1, len(self.batches))

    def evenly_chosen(self, most: int) -> list[Any]:
        """Up to ``most`` batches at equal distances."""
        count = min(most, len(self.batches))
        return [self.batches[number * len(self.batches) // count] for number in range(count)]


def read_clean_batches(
    workload: CalibratedWorkload, spec: InferenceCoverageSpec, device: str
) -> tuple[list[Any], dict[str, CleanBatches]]:
    """The batches that detectors learn from, and the batches of each part in `CLEAN_TARGETS`.

    Raises:
        UsageError: there are too few calibration batches to divide, or the originals do not fit the batches.
    """
    profile, parts = list[Any](), {}
    for part in CLEAN_TARGETS:
        more = 2 * spec.profile_samples if part == CALIBRATION else 0  # whole batches may have more samples
        clean = _read_part(workload, part, spec.clean_samples + more, device)
        if part == CALIBRATION:
            # Use at most half of all samples.
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
    """Read all batches of a part, and the original that each sample is a copy of.

    Without a method ``clean_originals``, each sample counts as its own original.
    """
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
    """A workload whose evaluation batches are replaced by others.

    Args:
        workload: Workload that is used for everything else.
        batches: Batches that replace its evaluation batches.
    """

    def __init__(self, workload: InferenceWorkload, batches: Sequence[Any]) -> None:
        self._workload, self._batches = workload, batches
        self.name, self.judge = workload.name, workload.judge
        self.components, self.info = workload.components, workload.info

    def model(self) -> nn.Module:
        """The model of the workload."""
        return self._workload.model()

    def batches(self) -> Sequence[Any]:
        """The replaced batches."""
        return self._batches

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Evaluate the model on one batch."""
        return self._workload.run(model, batch)
