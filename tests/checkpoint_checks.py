"""What the tests of all checkpoint formats ask: edit one bit and undo it, read, and open copies that are cut off or damaged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.testing.formats import bytes_of as bytes_of
from unsilent.testing.formats import flipped as flipped
from unsilent.testing.formats import read_contents

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int64")


def one_of_each_dtype(numel: int = 30) -> dict[str, torch.Tensor]:
    """A tensor of every editable dtype, by its name."""
    values = torch.arange(numel, dtype=torch.float32).reshape(5, -1) - 7
    return {dtype: values.to(getattr(torch, dtype)) for dtype in DTYPES}


def words(tensor: torch.Tensor) -> np.ndarray:
    """The words of a tensor, flat and unsigned."""
    dense = tensor.detach().contiguous()
    # A dimension of size 1 may have any stride in a contiguous tensor.
    plain = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return plain.view(f"u{tensor.element_size()}")


def content(path: Path, name: str) -> bytes:
    """All bytes of a tensor as a checkpoint gives them."""
    with Checkpoint(path) as checkpoint:
        return b"".join(checkpoint.content(checkpoint.tensor(name)))


def assert_one_word_differs(new: torch.Tensor, old: torch.Tensor, element: int, bit: int) -> None:
    """The two differ in one bit of one element."""
    difference = words(new) ^ words(old)
    assert np.flatnonzero(difference).tolist() == [element]
    assert int(difference[element]) == 1 << bit


def bits_of(dtype: str) -> Sequence[int]:
    """Positions of bits that are tried: the lowest, one in the middle, the highest."""
    width = 8 * getattr(torch, dtype).itemsize
    return (0, width // 2, width - 1)


def only_usage_errors(path: Path) -> bool:
    """Open a checkpoint, read every tensor that can be read; true where that works, false after one line of an error."""
    return read_contents(path) is not None


def assert_cut_files_are_refused(file: Path, path: Path, places: int = 50) -> None:
    """A file of a checkpoint that ends early is refused, wherever it ends."""
    whole = file.read_bytes()
    try:
        for length in sorted({round(i * (len(whole) - 1) / (places - 1)) for i in range(places)}):
            file.write_bytes(whole[:length])
            assert not only_usage_errors(path), f"{file.name} with {length} of {len(whole)} bytes was accepted"
    finally:
        file.write_bytes(whole)


def assert_damage_raises_usage_errors(file: Path, path: Path, times: int, seed: int = 0) -> None:
    """A file with some flipped bits is read, or refused by a `UsageError`."""
    whole, draw = file.read_bytes(), random.Random(seed)
    try:
        for _ in range(times):
            damaged = bytearray(whole)
            for _ in range(draw.choice((1, 1, 4))):
                damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            only_usage_errors(path)
    finally:
        file.write_bytes(whole)


def refused(path: Path, match: str) -> None:
    """A checkpoint that is refused in one line."""
    with pytest.raises(UsageError, match=match) as raised, Checkpoint(path):
        pass
    assert "\n" not in str(raised.value)
