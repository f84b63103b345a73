"""The weight fault matrices of PyTorchALFI (Gräfe, Qutub, Geissler, Paulitsch; github.com/IntelLabs/pytorchalfi).

Read in ``alficore/wrapper/ptfiwrap.py``, ``alficore/ptfiwrap_utils/pyfihelpers.py``, ``pytorchfi/pytorchfi/core.py`` and
``errormodels.py`` at f51f508: a numpy array of integers with 7 rows and one fault in each column, pickled to
``…_fault_locs.bin``. The rows of weight faults are layer, k (output channel), channel, depth, height, width, value, with -1 if
the layer does not have the dimension; height and width of a Linear are its row and column. The layer is the number of the module
among the modules of the scenario's ``layer_types``, in the order of ``model.modules()``. The value of a bit flip counts **from
the sign** of the float32, so it is bit 31 - value; the value of a ``number`` is written unchanged (an integer, like all numbers
in the array).

The file does not contain this information: neuron faults have the same number of rows, and only the scenario lists the counted
layers. So the user must give both (`PyTorchAlfi`). Neuron faults are refused, because a column contains a place in a batch but
not the images of the batch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.pickle_values import MAGIC as PICKLE
from unsilent.basics.printable import short_repr
from unsilent.faults.lists.entries import ColumnNames, FaultListEntry, ListedCorruption, NthLayer, WrongEntry, errors_at
from unsilent.faults.lists.pickled import NotAnArray, read_array

NUMPY = b"\x93NUMPY"
KINDS = ("conv2d", "conv3d", "fcc")
"""PyTorchALFI's names for Conv2d, Conv3d and Linear."""
ROWS = ("layer", "k", "channel", "depth", "height", "width", "value")
SIGN = 31
FORMAT_OPTION_EXAMPLE = "--faults-as pytorchalfi:rnd_mode=weights,rnd_value_type=bitflip,layer_types=conv2d+fcc"
_PLACES = tuple(f"row {number} ({name})" for number, name in enumerate(ROWS))
_LARGEST = 2**53


@dataclass(frozen=True)
class PyTorchAlfi:
    """The fault matrix of a PyTorchALFI run, with settings from the run's scenario file."""

    rnd_mode: str = ""
    rnd_value_type: str = ""
    layer_types: tuple[str, ...] = ()
    max_faults_per_image: int = 1

    def __post_init__(self) -> None:
        missing = [key for key in ("rnd_mode", "rnd_value_type", "layer_types") if not getattr(self, key)]
        if missing:
            raise UsageError(
                f"a PyTorchALFI matrix does not contain its settings; give {', '.join(missing)} from its scenario "
                f"file, like {FORMAT_OPTION_EXAMPLE}"
            )
        if self.rnd_mode == "neurons":
            raise UsageError(
                "PyTorchALFI's neuron faults name a position in a batch but not the images of the batch, so they cannot be run "
                "here; corrupt operations with --at 'op:*' instead"
            )
        if self.rnd_mode != "weights":
            raise unknown_name_error("rnd_mode", self.rnd_mode, ("weights",))
        if self.rnd_value_type not in ("bitflip", "number"):
            raise unknown_name_error("rnd_value_type", self.rnd_value_type, ("bitflip", "number"))
        for kind in self.layer_types:
            if kind not in KINDS:
                raise unknown_name_error("kind in layer_types", kind, KINDS)
        if self.max_faults_per_image < 1:
            raise UsageError(f"max_faults_per_image is {self.max_faults_per_image}; expected 1 or more")

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """One entry for each column, or for each group of columns that belongs to one image."""
        if "neurons_inj" in name.rpartition("/")[2]:
            raise WrongEntry(
                "the file name says neuron faults, which do not name their images; give a list of weight faults",
            )
        matrix, each = _matrix(content), self.max_faults_per_image
        if matrix.shape[1] % each:
            raise WrongEntry(f"has {matrix.shape[1]} columns, which is not a multiple of max_faults_per_image={each}")
        for first in range(0, matrix.shape[1], each):
            parts = []
            for number in range(first, first + each):
                with errors_at(f"column {number}"):
                    parts.append(self._corrupt(matrix[:, number]))
            yield FaultListEntry(f"column {first}" + (f"-{first + each - 1}" if each > 1 else ""), tuple(parts))

    def _corrupt(self, column: NDArray[Any]) -> ListedCorruption:
        values = column.tolist()
        for number, value in enumerate(values[:-1]):
            if value != int(value):
                raise WrongEntry(f"found {short_repr(value)}; expected a whole number", _PLACES[number])
        layer, k, channel, depth, height, width = map(int, values[:-1])
        used = {1: k, 2: channel, 3: depth, 4: height, 5: width}
        there = (4, 5) if k == channel == depth == -1 else (1, 2, 4, 5) if depth == -1 else (1, 2, 3, 4, 5)
        for number in (0, *there):
            if (value := used.get(number, layer)) < 0:
                raise WrongEntry(f"found {value}; expected 0 or more", _PLACES[number])
        columns = ColumnNames(_PLACES[0], tuple(_PLACES[number] for number in there), _PLACES[6])
        where = (NthLayer(layer, self.layer_types), tuple(used[number] for number in there))
        if self.rnd_value_type == "number":
            return ListedCorruption(*where, "set", values[-1], columns)
        if values[-1] not in range(SIGN + 1):
            drawn = " (-1: the bit was drawn during the run)" if values[-1] == -1 else ""
            text = f"found {short_repr(values[-1])}{drawn}; expected a bit from 0 (the sign) to {SIGN}"
            raise WrongEntry(text, _PLACES[6])
        return ListedCorruption(*where, "xor", SIGN - int(values[-1]), columns, required_dtype="float32")


def _matrix(content: bytes) -> NDArray[Any]:
    """The matrix of numbers in a pickle or ``.npy``; raises `WrongEntry`."""
    if content[:1] == PICKLE:
        try:
            result = read_array(content)
        except NotAnArray as error:
            raise WrongEntry(
                f"is not a pickle of a plain numpy array ({error}), so loading it could run code; "
                "if you trust the file, convert it: numpy.save('faults.npy', pickle.load(open(FILE, 'rb')))"
            ) from None
    elif content.startswith(NUMPY):
        result = _npy(content)
    else:
        raise WrongEntry("expected the matrix as a pickle (…_fault_locs.bin) or .npy")
    if result.ndim != 2 or result.shape[0] != len(ROWS):
        hint = ""
        if result.ndim == 2 and result.shape[0] > len(ROWS):
            hint = "; an updated_rs file repeats faults for every image: give …_fault_locs.bin of the same run"
        raise WrongEntry(
            f"has shape {list(result.shape)}; expected {len(ROWS)} rows ({', '.join(ROWS)}) and one column per fault{hint}"
        )
    if result.dtype.kind == "f":
        for row, column in np.argwhere(~(np.abs(result[:-1]) < _LARGEST))[:1]:
            with errors_at(f"column {column}"):
                raise WrongEntry(f"found {result[row, column]}; expected a number", _PLACES[row])
    return result


def _npy(content: bytes) -> NDArray[Any]:
    """The array of a ``.npy`` file, whose header is checked against its size."""
    file = io.BytesIO(content)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, fortran, dtype = read[np.lib.format.read_magic(file)](file)
        if dtype.kind not in "iuf" or dtype.itemsize > 8:
            raise WrongEntry(f"holds {dtype}; expected whole numbers")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    except UsageError:
        raise
    except Exception:  # a damaged header can raise anything
        raise WrongEntry("is not a valid .npy file of plain numbers") from None
