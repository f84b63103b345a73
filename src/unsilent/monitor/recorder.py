"""Recorder of all series of a training, on which rules can be tried later."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unsilent.basics.errors import UsageError, system_errors
from unsilent.basics.plainfiles import move_aside
from unsilent.detectors.series import Recording, Series, is_recording
from unsilent.monitor.signals.row import SignalValues


class Recorder:
    """Collects the signals of steps; `save` writes a recording that `load_recording` reads.

    A recording that exists already is renamed.

    Args:
        path: File of the recording.
        most: Number of last steps that are kept; ``None`` for all.

    Raises:
        UsageError: The file cannot be written, or is not a recording.
    """

    def __init__(self, path: Path | None = None, most: int | None = None) -> None:
        self._path = path = None if path is None else path.absolute()  # the job may go to another folder
        if path is not None:
            is_new = not path.exists()
            with system_errors(f"cannot write the recording to {path}", "give another file"):
                path.open("ab").close()
            if is_new:
                path.unlink()
            else:
                _check_is_ours(path)
        self._rows: deque[tuple[int, SignalValues, float]] = deque(maxlen=most)

    def add(self, step: int, signals: SignalValues, seconds: float) -> None:
        """Add a step."""
        self._rows.append((step, signals, seconds))

    def clear(self) -> None:
        """Forget all steps."""
        self._rows.clear()

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps of the recording."""
        return tuple(step for step, _, _ in self._rows)

    def recording(self, series: Sequence[Series]) -> Recording:
        """The recording of all steps so far.

        Series that were added later count as not seen in earlier steps.
        """
        values = np.full((len(self._rows), len(series)), np.nan)
        seen = np.zeros((len(self._rows), len(series)), np.bool_)
        for row, (_, signals, _) in enumerate(self._rows):
            values[row, : len(signals.values)], seen[row, : len(signals.seen)] = signals.values, signals.seen
        seconds = np.array([seconds for _, _, seconds in self._rows], dtype=np.float64)
        return Recording(tuple(series), values, seen, seconds)

    def save(self, series: Sequence[Series]) -> None:
        """Write the recording to its file."""
        if self._path is not None:
            _check_is_ours(self._path)  # it may have come meanwhile
            move_aside(self._path)
            self.recording(series).save(self._path)


def _check_is_ours(path: Path) -> None:
    """Raise ``UsageError`` if the path has a file that is not a recording and not empty."""
    if path.is_dir() or (path.exists() and path.stat().st_size and not is_recording(path)):
        raise UsageError(f"{path} holds something else than a recording; give another file")
