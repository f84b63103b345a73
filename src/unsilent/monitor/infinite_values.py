"""Values that the user named and that are infinite by design, such as the scores of an attention under its mask."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from unsilent.detectors.series import VALUE, Bools, Series
from unsilent.events.sinks import LOGGER
from unsilent.monitor.signals.row import Ints, SignalValues

FIRST_VALUES = 5
"""A value that is not finite in one of its first readings is one that need not be."""


class InfiniteValues:
    """Finds them, so that a rule is not given numbers that would hide whatever it finds in other series."""

    def __init__(self) -> None:
        self._is_value: Bools = np.zeros(0, np.bool_)
        self._is_infinite: Bools = np.zeros(0, np.bool_)
        self._readings: Ints = np.zeros(0, np.int64)

    def leave_out(self, step: int, series: Sequence[Series], signals: SignalValues) -> SignalValues:
        """The signals of a step, without numbers that are not finite in these series. Their finite numbers stay."""
        further = series[len(self._is_value) :]
        if further:
            self._is_value = np.append(self._is_value, [entry.feature == VALUE for entry in further])
            self._is_infinite = np.pad(self._is_infinite, (0, len(further)))
            self._readings = np.pad(self._readings, (0, len(further)))
        if not self._is_value.any():
            return signals
        self._readings += signals.seen
        bad = self._is_value & signals.seen & ~np.isfinite(signals.values)
        new = bad & ~self._is_infinite & (self._readings <= FIRST_VALUES)
        if new.any():
            self._is_infinite |= new
            names = dict.fromkeys(series[number].tensor for number in np.flatnonzero(new).tolist())
            logging.getLogger(LOGGER).warning(
                "step %d: %s has an element that is not finite in one of the first steps; from now on it is judged only where "
                "all of its elements are finite",
                step, ", ".join(names),
            )  # fmt: skip
        return signals._replace(seen=signals.seen & ~(bad & self._is_infinite))
