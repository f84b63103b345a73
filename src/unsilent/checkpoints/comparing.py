"""Comparison of two checkpoints, tensor by tensor, also across formats and numbers of shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.stored_tensors import OBJECT, StoredTensor, dense_block
from unsilent.faults.codecs import CODECS, Array

SAME, DIFFERS, OTHER_TYPE, MISSING, ADDED, UNREAD = (
    "same", "differs", "other dtype or shape", "missing in the second", "missing in the first", "not readable",
)  # fmt: skip
_FILE = "file "
"""Prefix of the name of a file that is not read."""


@dataclass(frozen=True)
class TensorDifference:
    """The result of comparing one tensor in two checkpoints.

    Attributes:
        name: Name in both checkpoints.
        status: One of the constants of this module.
        elements: Number of elements that differ; None if they were not compared one by one.
        bits: Number of bits that differ.
        largest_relative_change: Largest ``|b - a| / |a|`` over elements that differ (``|b - a|`` if a is 0); infinite if a number
            became NaN or infinite; None for integers.
        first: Flat index of the first element that differs.
        remark: Both dtypes and shapes, or the reason why the tensor was not read.
        kind: ``tensor``, ``number``, ``object`` (not read, compared by its description in the file) or ``file`` (not read,
            compared byte by byte).
    """

    name: str
    status: str
    elements: int | None = None
    bits: int | None = None
    largest_relative_change: float | None = None
    first: int | None = None
    remark: str = ""
    kind: str = "tensor"


def compare(
    first: Checkpoint, second: Checkpoint, progress: Callable[[int], object] = lambda _: None
) -> Iterator[TensorDifference]:
    """Compare two checkpoints and yield a result for every tensor and number in either.

    Values that only the second checkpoint has come last.

    Args:
        progress: Called with the number of compared bytes of a tensor.
    """
    seconds = {**second.tensors, **_unread_files(second)}
    firsts = {**first.tensors, **_unread_files(first)}
    for name, tensor in firsts.items():
        counterpart = seconds.get(name)
        if counterpart is None:
            result = TensorDifference(name, MISSING, remark=_type(tensor))
        else:
            result = _difference_of_tensor(first, tensor, second, counterpart, progress)
        kind = _kind_of_content(tensor)
        yield result if kind == result.kind else replace(result, kind=kind)
    for name, tensor in seconds.items():
        if name not in firsts:
            yield TensorDifference(name, ADDED, remark=_type(tensor), kind=_kind_of_content(tensor))


def _unread_files(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The files of a folder that its format does not read, each as a tensor of bytes."""
    result = {}
    for file in checkpoint.unread_files:
        name = f"{_FILE}{escape_unprintable(file)}"
        if checkpoint.files.has(file) and not os.path.islink(checkpoint.path / file):
            shape = (checkpoint.files.size(file),)
            result[name] = StoredTensor(name, "uint8", shape, (dense_block(file, 0, shape),))
        else:
            result[name] = StoredTensor(name, OBJECT, (), (), obstacle="it is no regular file")
    return result


def _kind_of_content(tensor: StoredTensor) -> str:
    if tensor.name.startswith(_FILE):
        return "file"
    return "object" if tensor.is_object else "number" if tensor.is_number else "tensor"


def _difference_of_tensor(
    first: Checkpoint,
    tensor: StoredTensor,
    second: Checkpoint,
    counterpart: StoredTensor,
    progress: Callable[[int], object],
) -> TensorDifference:
    name = tensor.name
    is_file = name.startswith(_FILE)
    if tensor.dtype != counterpart.dtype or (tensor.shape != counterpart.shape and not is_file):
        return TensorDifference(name, OTHER_TYPE, remark=f"{_type(tensor)}, {_type(counterpart)}")
    if tensor.value is not None and counterpart.value is not None and not (tensor.blocks and counterpart.blocks):
        are_nan = tensor.value != tensor.value and counterpart.value != counterpart.value
        return _as_a_whole(name, are_nan or tensor.value == counterpart.value, f"{tensor.value}, {counterpart.value}")
    if tensor.fingerprint and counterpart.fingerprint:
        same = (tensor.fingerprint, tensor.obstacle) == (counterpart.fingerprint, counterpart.obstacle)
        return _as_a_whole(name, same, tensor.obstacle)
    if not (tensor.is_readable and counterpart.is_readable):
        reason = tensor.obstacle or counterpart.obstacle or "its dtype is not known"
        return TensorDifference(name, UNREAD, remark=reason)
    if tensor.shape != counterpart.shape:
        return TensorDifference(name, DIFFERS, remark=f"{tensor.nbytes:,} bytes, {counterpart.nbytes:,} bytes")
    counter = _Counter(tensor)
    for a, b in _parts_of_equal_length(first.content(tensor), second.content(counterpart)):
        counter.add(a, b)
        progress(len(a))
    return counter.result()


def _as_a_whole(name: str, is_same: bool, remark: str) -> TensorDifference:
    """The result for a value that is compared as a whole, with a remark if it differs."""
    return TensorDifference(name, SAME) if is_same else TensorDifference(name, DIFFERS, remark=remark)


def _type(tensor: StoredTensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


class _Counter:
    """Counts the differing elements of a tensor that is compared in parts."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._elements = self._bits = self._done = 0
        self._largest: float | None = None
        self._first: int | None = None
        self._codec = CODECS.get(tensor.dtype)

    def add(self, a: memoryview, b: memoryview) -> None:
        item = self._tensor.item_size or 1
        if a != b:
            left, right = (np.frombuffer(part, np.uint8) for part in (a, b))
            self._bits += int(np.bitwise_count(left ^ right).sum())
            places = np.flatnonzero((left != right).reshape(-1, item).any(axis=1))
            self._elements += places.size
            if self._first is None:
                self._first = self._done + int(places[0])
            if self._codec is not None and self._codec.kind == "float":
                words = [np.frombuffer(part, self._codec.word_dtype)[places] for part in (a, b)]
                change = _largest_relative_change(*map(self._codec.decode, words))
                self._largest = max(change, self._largest or 0.0)
        self._done += len(a) // item

    def result(self) -> TensorDifference:
        if not self._elements:
            return TensorDifference(self._tensor.name, SAME, 0, 0)
        if self._tensor.raw_size:  # elements that are not whole bytes
            return TensorDifference(self._tensor.name, DIFFERS, None, self._bits, remark=_type(self._tensor))
        counts = (self._elements, self._bits, self._largest, self._first)
        return TensorDifference(self._tensor.name, DIFFERS, *counts, _type(self._tensor))


def _largest_relative_change(before: Array, after: Array) -> float:
    with np.errstate(all="ignore"):
        change = np.abs(after - before)
        # Halves, because the difference of two finite numbers may be too large for their dtype.
        ratio = np.where(np.isinf(change), np.abs(after / 2 - before / 2) / np.abs(before / 2), change / np.abs(before))
        relative = np.where(before == 0, change, ratio)
    # Equal infinities, or two different NaNs: only bits differ.
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    return float(np.where(same, 0.0, np.nan_to_num(relative, nan=np.inf, posinf=np.inf)).max(initial=0.0))


def _parts_of_equal_length(
    first: Iterator[memoryview], second: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield pairs of equally long parts of two contents that may be divided into parts differently."""
    a, b = memoryview(b""), memoryview(b"")
    while True:
        a = a if len(a) else next(first, a)
        b = b if len(b) else next(second, b)
        length = min(len(a), len(b))
        if not length:
            return
        yield a[:length], b[:length]
        a, b = a[length:], b[length:]
