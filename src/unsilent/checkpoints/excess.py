"""Tensors of more elements than their files have: views that repeat a few bytes very often, as only hostile files have them.

Every tensor may be a view of the same bytes, and a view may repeat one element 2^60 times, so that a file of a few
hundred bytes could take years to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.stored_tensors import StoredTensor

MOST_TIMES = 16
"""How often the tensors of a checkpoint may have every byte of its files."""
LEAST_BYTES = 2**28
"""Bytes that they may have beyond that, for small checkpoints."""


def without_excess(tensors: Iterable[StoredTensor], files: CheckpointFiles) -> Iterator[StoredTensor]:
    """The tensors; where too many bytes come together, the rest is only listed. Packed elements do not count."""
    left, known = LEAST_BYTES, set[str]()
    for tensor in tensors:
        for file in {block.file for block in tensor.blocks} - known:
            known.add(file)
            left += MOST_TIMES * files.size(file)
        size = tensor.nbytes
        if not tensor.blocks or any(block.packing is not None for block in tensor.blocks):
            yield tensor
        elif size <= left:
            left -= size
            yield tensor
        else:
            why = f"it repeats the bytes of its file to {size:,} bytes in all, which no checkpoint does"
            yield replace(tensor, blocks=(), obstacle=why)
