"""Random trials that are checked against a plain run, drawn from all trials on a tape since the last check."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.faults import Fault

Faults = Sequence[Fault]


class ValidationSample(NamedTuple):
    """One trial on one batch, with the trials that were evaluated together with it.

    ``group_faults``: the faults of all these trials; those of the trial itself are at ``group_index``.
    ``group_samples``: the samples that counted in each trial; None for all.
    """

    batch: int
    group_faults: Sequence[Faults]
    group_index: int
    group_samples: Sequence[NDArray[np.int64]] | None = None

    @property
    def faults(self) -> Faults:
        """The faults of the trial itself."""
        return self.group_faults[self.group_index]


class ValidationSamples:
    """One random trial of each kind for each batch, drawn uniformly.

    The kind of a trial is whether the output changed, and whether the trial ran alone.
    """

    def __init__(self) -> None:
        self._chance = random.Random(0)  # noqa: S311 - nothing secret
        self._witnesses: dict[tuple[int, bool, bool], tuple[int, ValidationSample]] = {}

    def add(self, batch: int, company: Sequence[Faults], place: int, changed: bool,
        samples: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:  # fmt: skip
        """Add a trial that was completed on the tape."""
        kind = batch, changed, len(company) > 1
        seen, witness = self._witnesses.get(kind, (0, None))
        if witness is None or self._chance.random() * (seen + 1) < 1:
            witness = ValidationSample(batch, company, place, samples)
        self._witnesses[kind] = seen + 1, witness

    def take(self) -> Iterator[ValidationSample]:
        """Remove all trials and return one of any kind for each batch."""
        witnesses, self._witnesses = self._witnesses, {}
        batches: dict[int, list[ValidationSample]] = {}
        for (batch, _, _), (_, witness) in witnesses.items():
            batches.setdefault(batch, []).append(witness)
        for of_batch in batches.values():
            yield self._chance.choice(of_batch)
