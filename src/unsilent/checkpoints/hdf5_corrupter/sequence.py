"""Repetition of a saved injection sequence: each entry's bits, at its index or at a random element of its location.

As in ``corrupt_hdf5_file_based_on_sequence`` of ``corrupter.py``, the tensor of an entry is drawn again from those of its
location; probability, number and locations of the settings have no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.hdf5_corrupter.locations import editable_tensors, is_below, tensors_below
from unsilent.checkpoints.hdf5_corrupter.successive import SuccessiveInjections, shortest_form_mask
from unsilent.checkpoints.injection_file import renamed
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.faults.lists.hdf5_corrupter import SequenceEntry, read_sequence
from unsilent.faults.record import Fault


def repeat_sequence(
    checkpoint: Checkpoint, content: bytes, name: str, names: Mapping[str, str], seed: int
) -> tuple[list[Fault], list[str]]:
    """The faults of a sequence, and notes for the user.

    Args:
        checkpoint: Checkpoint for the injection.
        content: Content of the sequence's file.
        name: Name of the sequence, for messages.
        names: Locations in the sequence, or parts of their names -> names in the checkpoint.
        seed: Seed for choices that the file leaves open.

    Raises:
        UsageError: the sequence is damaged, or an entry does not fit the checkpoint.
    """
    entries = read_sequence(content, name)
    rng, result = np.random.default_rng(seed), SuccessiveInjections(checkpoint)
    where = {entry.location: renamed(entry.location.removeprefix("/"), names) for entry in entries}
    everywhere = tensors_below(checkpoint, editable_tensors(checkpoint), where.values())
    below = {location: [t for t in everywhere if is_below(t, here)] for location, here in where.items()}
    counts: Counter[str] = Counter()
    for entry in entries:
        if entry.bits is None:
            counts["missed"] += 1
            continue
        choices = _fitting(below[entry.location], entry, name)
        tensor = choices[int(rng.integers(len(choices)))]
        counts["tensor"] += bool(entry.coordinates) and len({t.name for t in choices}) > 1
        counts["element"] += not entry.coordinates
        element = _flat(entry.coordinates, tensor) if entry.coordinates else int(rng.integers(tensor.numel))
        if tensor.codec.kind == "int":
            counts["integer"] += 1
            mask = shortest_form_mask(result.word(tensor, element), tensor.codec, rng)
        else:
            mask = _mask(entry, tensor, name)
        result.inject(tensor, element, "xor", mask)
    counts["not finite"] = result.not_finite()
    return result.faults(), _notes(counts, seed)


def _fitting(choices: Sequence[StoredTensor], entry: SequenceEntry, name: str) -> Sequence[StoredTensor]:
    """The tensors among ``choices`` whose shape contains the index of an entry."""
    if not entry.coordinates:
        return choices
    result = [t for t in choices if len(entry.coordinates) == len(t.shape or (1,))]
    result = [t for t in result if all(i < n for i, n in zip(entry.coordinates, t.shape or (1,), strict=True))]
    if not result:
        first = choices[0]
        raise UsageError(
            f"{name} {entry.file_position}: index {list(entry.coordinates)} is in none of {len(choices)} tensors, the first is "
            f"{first.name} {list(first.shape)}; expected an index of one, give the checkpoint's names with --map OLD=NEW"
        )
    return result


def _flat(index: Sequence[int], tensor: StoredTensor) -> int:
    """The C-order position of an index; hdf5_corrupter writes the index of a scalar as ``[0]``."""
    return int(np.ravel_multi_index(tuple(index), tensor.shape or (1,)))


def _mask(entry: SequenceEntry, tensor: StoredTensor, name: str) -> int:
    """The bits of an entry as a mask; a bit that is listed twice is not flipped."""
    width, mask = tensor.codec.bits, 0
    if entry.bits is None or isinstance(entry.bits, int):
        raise UsageError(
            f"{name} {entry.file_position}: bit {entry.bits} is of an integer, but {tensor.name} is {tensor.dtype}; "
            "expected a list of bits"
        )
    for bit in entry.bits:
        if bit >= width:
            raise UsageError(
                f"{name} {entry.file_position}: bit {bit} is not in {tensor.name}, {tensor.dtype} with bits 0-{width - 1}; give "
                "a checkpoint of the dtype (float_precision) that the sequence was saved for"
            )
        mask ^= 1 << (width - 1 - bit)
    return mask


def _notes(counts: Counter[str], seed: int) -> list[str]:
    """Notes on differences from hdf5_corrupter that matter for this file."""
    texts = {
        "missed": "entries without bits, because the injection's probability let them pass, are left out",
        "element": f"entries without an index: the element is drawn with seed {seed}",
        "tensor": f"entries with an index that several tensors of the location have: the tensor is drawn with seed {seed}",
        "integer": f"entries in integers: a digit of the shortest binary form is drawn with seed {seed}, as in its own replay",
        "not finite": "values become NaN or infinite; without --allowNaNValues hdf5_corrupter replaces such bits by others",
    }
    notes = ["the file counts bits from the sign: its bit 0 is bit 31 of a float32"]
    return notes + [f"{text} ({counts[key]:,})" for key, text in texts.items() if counts[key]]
