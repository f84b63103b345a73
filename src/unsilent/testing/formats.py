"""Contract tests for checkpoint formats: reading, editing, undoing edits and refusing damaged files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.editing import apply_edit, undo_edit
from unsilent.checkpoints.formats.known import FORMATS, Format, format_of
from unsilent.faults.record import Fault

CUTS, DAMAGES = 12, 20
NUMPY_DTYPES = {np.dtype(code).name for code in np.typecodes["All"]}
FOREIGN = {"empty": b"", "text": b"a text\n", "json": b'{"a": [1, 2]}', "random": np.random.default_rng(0).bytes(4096)}


def bytes_of(path: Path) -> dict[str, bytes]:
    """The contents of all files of a checkpoint, by path."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@contextmanager
def flipped(
    path: Path, name: str, element: int, bit: int, checksums: str = "stale", known_format: Format | None = None
) -> Iterator[None]:
    """Flip one bit of one element in a ``with`` block; afterwards check that undoing restores every file."""
    before = bytes_of(path)
    with Checkpoint(path, known_format) as checkpoint:
        tensor = checkpoint.tensor(name)
        mask = np.array([1 << bit], tensor.codec.word_dtype)
        fault = Fault(tensor.site, tensor.dtype, tensor.shape, np.array([element]), "xor", mask)
        patches, receipt = checkpoint.plan([fault], checksums)
    record = apply_edit(path, patches, receipt.to_json())
    assert record is not None
    try:
        yield
    finally:
        undo_edit(path, known_format=known_format)
    assert bytes_of(path) == before
    assert not record.exists()


def read_contents(path: Path, known_format: Format | None = None) -> dict[str, bytes] | None:
    """The bytes of each tensor in a checkpoint; None if reading raises a ``UsageError`` of one line."""
    try:
        with Checkpoint(path, known_format) as checkpoint:
            readable = [tensor for tensor in checkpoint.tensors.values() if tensor.is_readable]
            return {tensor.name: b"".join(checkpoint.content(tensor)) for tensor in readable}
    except UsageError as error:
        if "\n" in str(error):
            raise
        return None


class FormatContract(ABC):
    """Tests of a checkpoint format.

    A subclass defines `make_format` and `write_checkpoint`.
    """

    @abstractmethod
    def make_format(self) -> Format:
        """The format to test."""

    @abstractmethod
    def write_checkpoint(self, folder: Path) -> tuple[Path, Mapping[str, NDArray[Any]]]:
        """Write a checkpoint into a folder and return its path and its tensors.

        Tensors are given by the names that the format uses.

        Values of a dtype that numpy does not have are given as words (unsigned integers).
        """

    def test_its_files_are_recognised_and_others_are_not(self, tmp_path: Path) -> None:
        known, (path, _) = self.make_format(), self.write_checkpoint(tmp_path)
        with CheckpointFiles(path) as files:
            tried = FORMATS if known in FORMATS else (*FORMATS, known)
            assert format_of(files, tried).name == known.name, "another format takes these files for its own"
        for name, content in FOREIGN.items():
            (tmp_path / name).write_bytes(content)
            with CheckpointFiles(tmp_path / name) as files:
                assert not known.matches(files), f"{name} content is taken for a checkpoint"

    def test_its_tensors_have_the_values_that_were_saved(self, tmp_path: Path) -> None:
        path, values = self.write_checkpoint(tmp_path)
        with Checkpoint(path, self.make_format()) as checkpoint:
            assert checkpoint.tensors
            for name, value in values.items():
                assert checkpoint.tensor(name).shape == value.shape
                listed, saved = checkpoint.tensor(name).dtype, value.dtype
                is_word = saved.kind == "u" and listed not in NUMPY_DTYPES
                assert is_word or listed == saved.name, f"{name} was saved as {saved.name}, but is listed as {listed}"
                assert b"".join(checkpoint.content(checkpoint.tensor(name))) == _as_stored(value), name

    def test_a_flipped_bit_changes_one_element_and_is_undone(self, tmp_path: Path) -> None:
        known, (path, values) = self.make_format(), self.write_checkpoint(tmp_path)
        before = read_contents(path, known)
        assert before is not None
        for name, value in values.items():
            with Checkpoint(path, known) as checkpoint:
                if not value.size or checkpoint.tensor(name).reason_not_editable:
                    continue
            for bit in (0, 8 * value.itemsize - 1):
                with flipped(path, name, value.size - 1, bit, "fixed", known):
                    now = read_contents(path, known)
                words = np.frombuffer(_as_stored(value), f"<u{value.itemsize}").copy()
                words[-1] ^= words.dtype.type(1 << bit)
                assert now == {**before, name: words.tobytes()}, name

    def test_a_file_that_ends_early_never_gives_other_values(self, tmp_path: Path) -> None:
        known, (path, _) = self.make_format(), self.write_checkpoint(tmp_path)
        whole = read_contents(path, known)
        for file in _files(path):
            content = file.read_bytes()
            for length in sorted({i * len(content) // CUTS for i in range(CUTS)}):
                file.write_bytes(content[:length])
                contents = read_contents(path, known)
                assert contents is None or contents == whole, (
                    f"{file.name}, cut off after {length} of {len(content)} bytes"
                )
            file.write_bytes(content)

    def test_damage_is_read_or_refused_in_one_line(self, tmp_path: Path) -> None:
        known, (path, _), draw = self.make_format(), self.write_checkpoint(tmp_path), np.random.default_rng(0)
        for file in _files(path):
            content = file.read_bytes()
            for _ in range(DAMAGES if content else 0):
                damaged = bytearray(content)
                for _ in range(int(draw.choice((1, 1, 4)))):
                    damaged[draw.integers(len(content))] ^= 1 << int(draw.integers(8))
                file.write_bytes(damaged)
                read_contents(path, known)
            file.write_bytes(content)

    def test_a_name_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        path, _ = self.write_checkpoint(tmp_path)
        with Checkpoint(path, self.make_format()) as checkpoint, pytest.raises(UsageError, match="unknown tensor"):
            checkpoint.tensor("no such tensor")


def _as_stored(value: NDArray[Any]) -> bytes:
    """The bytes of the elements in C order, least significant byte first."""
    return np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
