"""Limits of what is read of files, and the estimate of what values of JSON take."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from reader_worst_files import JSON
from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import MOST_JSON_MEMORY, json_memory, parse_json, read_lines, read_plain
from unsilent.checkpoints import editing


@pytest.mark.parametrize("shape", [name for name in JSON if name not in ("deep", "deep objects", "zeros", "line ends")])
def test_values_of_json_take_no_more_memory_than_estimated(shape: str) -> None:
    content = JSON[shape](2**18)
    tracemalloc.start()
    parse_json(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.1 * json_memory(content) + 2**16  # the list of nested ones is copied while it grows


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1" + b"0" * 5000 + b"]", b"\xff", b"[1"])
def test_what_is_no_json_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(content)


def test_json_that_would_take_too_much_memory_is_refused_before_a_value_is_made() -> None:
    content = b"[" + b"[]," * (MOST_JSON_MEMORY // 170) + b"[]]"
    tracemalloc.start()
    with pytest.raises(ValueError, match="MiB of memory"):
        parse_json(content)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(2**40)
    for read in (lambda: read_plain(path, 2**20), lambda: list(read_lines(path, 2**20, 2**20))):
        with pytest.raises(UsageError, match="larger than 1 MiB"):
            read()


def test_lines_that_are_too_long_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"ab\ncd\nend")
    assert list(read_lines(path, 100, 100)) == [b"ab\n", b"cd\n", b"end"]
    with pytest.raises(UsageError, match="a line of"):
        list(read_lines(path, 100, 2))


def test_no_undo_record_is_written_that_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    before = path.read_bytes()
    patches = [editing.Patch("", len(before) - n, b"\0", b"\1") for n in (1, 3, 5)]
    monkeypatch.setattr(editing, "MOST_JSON_MEMORY", 4500)
    with pytest.raises(UsageError, match="nothing was changed"):
        editing.apply_edit(path, patches, [])
    assert path.read_bytes() == before
    assert not editing.undo_record_of(path).exists()
    editing.apply_edit(path, patches[:1], [])
    assert [edit.state for edit in editing.edits_of(path)] == ["written"]
