"""Lists of faults in files: this package's JSON lines, and files of SCI-FI, PyTorchALFI and hdf5_corrupter.

A file is read into entries, one for each trial (`read_entries`). An entry describes its corruption in the terms of its file, and
`resolve_entry` converts it to `Fault` records for the tensors of a model. Files are not trusted: they are parsed, never executed,
and the first error is reported with file, place and column.

To add a format: a module with a frozen dataclass that has ``entries``, and a row in `FORMATS`.
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
