"""Undo records that came with a checkpoint: they change bytes of its tensors and nothing else."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.editing import apply_edit, edits_of, undo_edit, undo_record_of
from unsilent.checkpoints.stored_tensors import Patch
from unsilent.cli.main import run


def write_record(path, file, offset, before, after):
    entry = {
        "version": 1,
        "edit": 1,
        "checkpoint": path.name,
        "patches": [[file, offset, before.hex(), after.hex()]],
        "injection": [],
    }
    undo_record_of(path).write_text(json.dumps(entry) + "\n")


@pytest.fixture
def folder(tmp_path):
    result = tmp_path / "sharded"
    result.mkdir()
    save_file({"w": torch.ones(4)}, result / "model.safetensors")
    (result / "script.py").write_bytes(b"print('good')")
    return result


def test_a_file_without_tensors_is_not_changed(folder):
    write_record(folder, "script.py", 0, b"import evil  ", b"print('good')")
    with pytest.raises(UsageError, match="belongs to no tensor") as raised:
        undo_edit(folder)
    assert "\n" not in str(raised.value)
    assert (folder / "script.py").read_bytes() == b"print('good')"


def test_the_header_of_a_file_is_not_changed(folder):
    content = (folder / "model.safetensors").read_bytes()
    write_record(folder, "model.safetensors", 8, b"x", content[8:9])
    with pytest.raises(UsageError, match="belongs to no tensor"):
        undo_edit(folder)
    end = len(content) - 1
    write_record(folder, "model.safetensors", end, b"\0" + b"x", content[end:] + b"x")
    with pytest.raises(UsageError, match="belongs to no tensor"):
        undo_edit(folder)
    assert (folder / "model.safetensors").read_bytes() == content


def test_a_file_with_another_name_is_not_changed(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "precious.safetensors")
    os.link(tmp_path / "precious.safetensors", folder / "model.safetensors")
    before = (tmp_path / "precious.safetensors").read_bytes()
    with pytest.raises(UsageError, match="hard link"):
        apply_edit(folder, [Patch("model.safetensors", len(before) - 1, before[-1:], b"\7")], {})
    write_record(folder, "model.safetensors", len(before) - 1, b"\7", before[-1:])
    with pytest.raises(UsageError, match="hard link"):
        undo_edit(folder)
    assert (tmp_path / "precious.safetensors").read_bytes() == before


@pytest.mark.parametrize("crc", ["stale", "fixed"])
@pytest.mark.parametrize("name", ["other/lr", "model/w"])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_interrupted_edit_is_undone_wherever_it_stopped(crc, name, done, tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"model": {"w": torch.arange(6.0)}, "lr": 0.5}, path)
    before = path.read_bytes()
    assert run(["checkpoint", "corrupt", str(path), "--at", name, "--crc", crc, "--fault", "bitflip:count=1"]) == 0
    (edit,) = edits_of(path)
    changed = bytearray(before)
    for patch in edit.patches[:done]:
        changed[patch.offset : patch.offset + len(patch.after)] = patch.after
    path.write_bytes(changed)
    record = undo_record_of(path)
    record.write_bytes(record.read_bytes().splitlines(keepends=True)[0])
    assert edits_of(path)[0].state == "interrupted"
    undo_edit(path)
    assert path.read_bytes() == before


def test_ranges_are_those_of_tensors_and_checksums(tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"model": {"w": torch.arange(6.0)}, "lr": 0.5, "step": 3}, path)
    with Checkpoint(path) as checkpoint:
        ranges = checkpoint.editable_ranges()[""]
        (block,) = checkpoint.tensor("model/w").blocks
        assert sum(end - begin for begin, end in ranges) == 24 + 8 + 4 * 4
        assert (block.offset, block.offset + 24) in ranges
