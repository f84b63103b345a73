"""Manifests cover every byte that a loader reads: of dtypes without a layout, of the pickle, of all files of a folder."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unsilent
from checkpoints.fuzz_mutations import mutated
from checkpoints.fuzz_seeds import write_seeds
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.hashes import hash_files
from unsilent.checkpoints.manifest import manifest_path, read_manifest, verify
from unsilent.checkpoints.verified_saving import CheckpointDamaged
from unsilent.checkpoints.zip_directory import ZipDirectory
from unsilent.cli.main import run


def command(capsys, *arguments):
    """Exit code, what is printed, and the error of a command."""
    capsys.readouterr()
    code = run(["checkpoint", *map(str, arguments)])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return code, shown.out, shown.err


@pytest.fixture
def adam_file(tmp_path):
    """A small training saved with `verified_save`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "adam.pt"
    unsilent.verified_save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


def flips_of_pickle(path):
    """Offset and bit of every bit of ``data.pkl``."""
    with CheckpointFiles(path) as files:
        entry = next(e for name, e in ZipDirectory(files, "").entries.items() if name.endswith("data.pkl"))
    return [(entry.offset + byte, 1 << bit) for byte in range(entry.size) for bit in range(8)]


def flipped_is_damaged(path, offset, mask):
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(content)
    try:
        with pytest.raises(CheckpointDamaged):
            unsilent.verified_load(path)
    finally:
        content[offset] ^= mask
        path.write_bytes(content)


def test_flipped_bits_of_the_pickle_are_damage(adam_file):
    for offset, mask in random.Random(1).sample(flips_of_pickle(adam_file), 150):
        flipped_is_damaged(adam_file, offset, mask)
    unsilent.verified_load(adam_file)


@pytest.mark.claim
def test_each_flipped_bit_of_the_pickle_is_damage(adam_file):
    flips = flips_of_pickle(adam_file)
    assert len(flips) > 8000
    for offset, mask in flips:
        flipped_is_damaged(adam_file, offset, mask)


def test_elements_of_dtypes_without_a_layout_are_covered(tmp_path, capsys):
    path = tmp_path / "fp8.safetensors"
    scales = torch.full((4,), 0.5).to(torch.float8_e8m0fnu)
    save_file({"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale": scales}, path)
    assert command(capsys, "manifest", path)[0] == 0
    content = bytearray(path.read_bytes())
    size = struct.unpack("<Q", content[:8])[0]
    content[8 + size + json.loads(content[8 : 8 + size])["w_scale"]["data_offsets"][0]] ^= 0x40
    path.write_bytes(content)
    assert command(capsys, "verify", path)[0] == 1
    with pytest.raises(CheckpointDamaged):
        unsilent.verified_load(path)


def test_appended_bytes_are_damage(tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    unsilent.verified_save({"w": torch.arange(6.0)}, path)
    with open(path, "ab") as file:
        file.write(bytes(16))
    code, shown, _ = command(capsys, "verify", path)
    assert (code, "w.safetensors has changed" in shown) == (1, True)


@pytest.fixture
def trainer_folder(tmp_path):
    """A folder like those of transformers' Trainer."""
    folder = tmp_path / "checkpoint-4"
    (folder / "inner").mkdir(parents=True)
    save_file({"w": torch.ones(2, 3)}, folder / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": []}, folder / "optimizer.pt")
    torch.save({"last_epoch": 4}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "inner" / "notes.txt").write_text("n")
    return folder


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "inner/notes.txt"]
)
def test_every_file_of_a_folder_is_covered(name, trainer_folder, capsys):
    code, shown, _ = command(capsys, "manifest", trainer_folder)
    assert (code, "5 files" in shown) == (0, True)
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert (code, "Every byte of 5 files" in shown) == (0, True)
    content = bytearray((trainer_folder / name).read_bytes())
    content[-1] ^= 1
    (trainer_folder / name).write_bytes(content)
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert code == 1
    (trainer_folder / name).unlink()
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert (code, f"{name} is missing" in shown) == (1, True)
    with pytest.raises(CheckpointDamaged):
        unsilent.verified_load(trainer_folder)


def test_changed_optimizer_of_a_folder_is_named(trainer_folder, capsys):
    assert command(capsys, "manifest", trainer_folder)[0] == 0
    torch.save({"state": {0: {"exp_avg": torch.full((2, 3), math.nan)}}}, trainer_folder / "optimizer.pt")
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert (code, "optimizer" in shown) == (1, True)


def test_what_a_manifest_does_not_cover_is_named(trainer_folder, capsys):
    assert command(capsys, "manifest", trainer_folder)[0] == 0
    (trainer_folder / "new.pt").write_bytes(b"new")
    (trainer_folder / "inner" / "link").symlink_to("notes.txt")
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert code == 1
    assert "new.pt is not in the manifest" in shown
    assert "inner/link is not covered: it is a symbolic link" in shown
    os.mkfifo(trainer_folder / "pipe")
    code, shown, _ = command(capsys, "manifest", trainer_folder)
    assert (code, "pipe is not covered: it is not a regular file" in shown) == (1, True)
    content = json.loads(command(capsys, "manifest", trainer_folder, "--json")[1])
    assert len(content["problems"]) == 2


def test_a_missing_manifest_is_looked_for_and_not_advised_of_a_damaged_state(trainer_folder, capsys):
    code, _, error = command(capsys, "verify", trainer_folder)
    assert (code, "that you trust" in error) == (2, True)
    unsilent.verified_save({"w": torch.ones(2)}, trainer_folder / "model.safetensors")
    assert "single files have one" in command(capsys, "verify", trainer_folder)[2]
    assert command(capsys, "manifest", trainer_folder)[0] == 0
    code, _, error = command(capsys, "verify", trainer_folder / "optimizer.pt")
    assert (code, f"its folder has one: unsilent checkpoint verify {trainer_folder}" in error) == (2, True)


def test_paths_of_a_missing_manifest_are_those_of_the_user(trainer_folder, capsys, monkeypatch):
    monkeypatch.chdir(trainer_folder.parent)
    error = command(capsys, "verify", "checkpoint-4")[2]
    assert "no manifest checkpoint-4.manifest.json that says what checkpoint-4 should be" in error
    assert "there is no checkpoint none;" in command(capsys, "verify", "none")[2]
    command(capsys, "manifest", "checkpoint-4")
    error = command(capsys, "verify", "checkpoint-4/optimizer.pt")[2]
    assert "its folder has one: unsilent checkpoint verify checkpoint-4" in error


def test_a_damaged_manifest_is_not_taken_for_a_damaged_checkpoint(adam_file):
    path = manifest_path(adam_file)
    good = path.read_bytes()
    files = read_manifest(path)
    for offset in random.Random(2).sample(range(len(good)), 200):
        content = bytearray(good)
        content[offset] ^= 1 << random.Random(offset).randrange(8)
        path.write_bytes(content)
        try:
            assert read_manifest(path) == files, "a flip without effect, as in the white space"
        except UsageError:
            pass
    path.write_bytes(good)
    assert verify(adam_file, read_manifest(path)) == []


def test_hashes_of_files_are_those_of_coreutils(trainer_folder):
    """FIPS 180-4, and sizes, against ``sha256sum``."""
    import subprocess

    with CheckpointFiles(trainer_folder) as files:
        hashes = hash_files(files)
    for name, file in hashes.items():
        done = subprocess.run(["sha256sum", trainer_folder / name], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == file.sha256
        assert (trainer_folder / name).stat().st_size == file.size


def test_a_renamed_only_tensor_is_damage(tmp_path, capsys):
    torch.save({"weight": torch.ones(3)}, tmp_path / "one.pt")
    torch.save({"weighu": torch.ones(3)}, tmp_path / "other.pt")
    assert command(capsys, "manifest", tmp_path / "one.pt")[0] == 0
    code, shown, _ = command(capsys, "verify", tmp_path / "other.pt", "--manifest", manifest_path(tmp_path / "one.pt"))
    assert (code, "none of the tensors of the manifest" in shown) == (1, True)


def test_the_fast_hash_says_what_it_shows(adam_file, capsys):
    assert command(capsys, "manifest", adam_file, "--fast")[0] == 0
    code, shown, _ = command(capsys, "verify", adam_file)
    assert (code, "does not show deliberate changes" in shown) == (0, True)


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_no_mutated_checkpoint_is_called_intact(count, tmp_path, capsys):
    """Damage to checkpoints of every format (seed 7): bits, cuts, fields, opcodes; files added, renamed and removed."""
    seeds = write_seeds(tmp_path / "seeds")
    sound = [path for paths in seeds.values() for path in paths if command(capsys, "manifest", path)[0] == 0]
    assert len(sound) > 5
    draw = random.Random(7)
    verdicts = Counter()
    for _ in range(count):
        path = draw.choice(sound)
        copy = tmp_path / "case" / path.name
        copy.parent.mkdir()
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
        shutil.copyfile(manifest_path(path), manifest_path(copy))
        files = sorted(p for p in copy.rglob("*") if p.is_file()) or [copy]
        file, before = draw.choice(files), snapshot(copy)
        change = draw.choice(("content", "content", "content", "content", "added", "renamed", "removed"))
        if change == "content" or not copy.is_dir():
            file.write_bytes(mutated(file.read_bytes(), draw.choice(files).read_bytes(), draw)[1])
        elif change == "added":
            file.with_name("added.pt").write_bytes(file.read_bytes())
        elif change == "renamed":
            file.rename(file.with_name(f"{file.name}1"))
        else:
            file.unlink()
        is_same = snapshot(copy) == before
        code = command(capsys, "verify", copy)[0]
        assert code == (0 if is_same else 1), (path, change)
        if not is_same:
            with pytest.raises(CheckpointDamaged):
                unsilent.verified_load(copy)
        verdicts[code] += 1
        shutil.rmtree(copy.parent)
    assert verdicts[1] > 0.7 * count


def snapshot(path):
    """The content of every file of a checkpoint."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(p): p.read_bytes() for p in files}


@pytest.mark.parametrize("name", [b"x\n.txt", b"\xff.txt", "ä.txt".encode(), b"x\\x0a.txt"])
def test_names_of_files_are_compared_as_they_are(name, trainer_folder, capsys):
    other = os.path.join(os.fsencode(trainer_folder), name)
    for path in (other, os.path.join(os.fsencode(trainer_folder), b"x\\x0a.txt")):
        with open(path, "wb") as file:
            file.write(b"1")
    assert command(capsys, "manifest", trainer_folder)[0] == 0
    assert command(capsys, "verify", trainer_folder)[0] == 0
    os.unlink(other)
    code, shown, _ = command(capsys, "verify", trainer_folder)
    assert (code, "is missing" in shown, shown.isprintable() or "\n" in shown) == (1, True, True)
