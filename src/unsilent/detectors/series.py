"""Series of numbers that rules read, one number for each training step, and recordings of series in files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import open_plain, parse_json

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GRADIENT = "gradient"
"""Gradient of a parameter: local to its rank, before any reduction among ranks, without the factor of a loss scaler."""
NORM_INPUT_GRADIENT = "norm-input-gradient"
"""Gradient of the input of a normalisation layer, named as the layer: the feature value of the first ASD."""
UPDATE = "update"
"""The change of a parameter by one optimizer step."""
LOSS = "loss"
"""The number whose backward pass ran, without the factor of a loss scaler."""
VALUE = "value"
"""A tensor that the user named: the input, output or gradient of a module, or of `watch_gradient`."""
CLIPPED_NORM = "norm before clipping"
"""The norm of all gradients that a program clips together, as `torch.nn.utils.clip_grad_norm_` returns it."""
MOST_UNPACKED = 2**29
"""Largest unpacked size of a recording in bytes; each number takes nine bytes."""
FEATURES = (GRADIENT, NORM_INPUT_GRADIENT, UPDATE, LOSS, VALUE)
L2, LARGEST, NUMBER = "l2", "max", "number"
STATISTICS = (L2, LARGEST, NUMBER)
"""L2 norm and largest magnitude of a tensor, or the number itself (of a loss)."""


class Series(NamedTuple):
    """Name and description of a series with one number per step.

    Attributes:
        feature: One of `FEATURES`.
        tensor: Name of the parameter, layer or value; empty for the loss.
        statistic: One of `STATISTICS`.
        elements: Number of elements of the tensor in this rank.
        dimensions: Number of dimensions of the tensor.
    """

    feature: str
    tensor: str
    statistic: str
    elements: int = 1
    dimensions: int = 0


@dataclass(frozen=True, eq=False)
class Recording:
    """Series of one rank of a training.

    Attributes:
        series: Names of the columns.
        values: float64[steps, n], the value of each series in each step.
        seen: bool[steps, n]; False: the tensor was not in the sample of the step or had no gradient, so its value is meaningless.
        seconds: float64[steps], time of each step since the first one.
    """

    series: tuple[Series, ...]
    values: Floats
    seen: Bools
    seconds: Floats

    def __post_init__(self) -> None:
        shape = (len(self.seconds), len(self.series))
        if self.values.shape != shape or self.seen.shape != shape or self.seconds.ndim != 1:
            raise UsageError(
                f"a recording of {shape[0]} steps and {shape[1]} series has values {list(self.values.shape)} and seen "
                f"{list(self.seen.shape)}; expected [steps, series]"
            )

    def columns(self, wanted: Callable[[Series], bool]) -> Recording:
        """The recording with only the wanted series."""
        chosen = [number for number, entry in enumerate(self.series) if wanted(entry)]
        series = tuple(self.series[number] for number in chosen)
        return Recording(series, self.values[:, chosen], self.seen[:, chosen], self.seconds)

    def save(self, path: str | Path) -> None:
        """Write the recording to an .npz file without pickled objects."""
        Path(path).write_bytes(self.content())

    def content(self) -> bytes:
        """The bytes of the file that `save` writes."""
        names = np.frombuffer(json.dumps(self.series).encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, series=names, values=self.values, seen=self.seen, seconds=self.seconds)
        return buffer.getvalue()


def is_recording(path: str | Path) -> bool:
    """Whether a file has the parts that `Recording.save` writes."""
    try:
        with zipfile.ZipFile(path) as file:
            return sorted(file.namelist()) == ["seconds.npy", "seen.npy", "series.npy", "values.npy"]
    except (OSError, zipfile.BadZipFile):
        return False


def _series(values: object) -> Series:
    """Convert values from a file to a series; raises ``TypeError``."""
    if not isinstance(values, list):
        raise TypeError("a series is no list")
    return Series(*values)


def load_recording(path: str | Path) -> Recording:
    """Load a recording from a file of `Recording.save`.

    Raises ``UsageError`` for any other file.
    """
    try:
        with open_plain(path) as content, zipfile.ZipFile(content) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > MOST_UNPACKED:
                raise ValueError(f"it unpacks to {unpacked >> 20:,} MiB, at most {MOST_UNPACKED >> 20} MiB are read")
            content.seek(0)
            with np.load(content, allow_pickle=False) as file:
                series = tuple(map(_series, parse_json(file["series"].tobytes())))
                values, seconds = (file[name].astype(np.float64, copy=False) for name in ("values", "seconds"))
                return Recording(series, values, file["seen"].astype(np.bool_, copy=False), seconds)
    # A header can declare any size; the memory for it is requested, but not used.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{path} is not a recording of a monitor ({error}); expected a file written by Recording.save"
        ) from None
