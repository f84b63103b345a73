"""Lists of faults in files: this package's JSON lines, and files of SCI-FI, PyTorchALFI and hdf5_corrupter.

A file is read into entries, one a trial (`read_entries`); an entry says what it corrupts in the words of its file, and `resolve`
makes `Fault` records of it for the tensors that a model really has. Files come from anywhere: they are parsed, never executed,
and the first error is reported with file, place and column.

Adding a format: a module with a frozen dataclass that has ``entries``, and a row in `FORMATS`.
"""

from unsilent.faults.lists.entries import FaultListEntry, ListedCorruption, NthLayer
from unsilent.faults.lists.files import FORMATS, kind_of_list, read_entries, read_list_bytes
from unsilent.faults.lists.resolving import ModelTensors, resolve_entry

__all__ = [
    "FORMATS",
    "FaultListEntry",
    "ListedCorruption",
    "ModelTensors",
    "NthLayer",
    "kind_of_list",
    "read_entries",
    "read_list_bytes",
    "resolve_entry",
]
