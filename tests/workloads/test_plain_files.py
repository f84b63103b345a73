"""Data files that are none: devices, pipes, folders, and archives that unpack to far more than they are."""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.faults.hardware import description_file as accelerators
from unsilent.faults.lists.files import read_list_bytes
from unsilent.papers.isca23.injections import read_injection
from unsilent.studies.pvf.card import read_card
from unsilent.workloads import load, npz
from unsilent.workloads.click_csv import from_csv
from unsilent.workloads.npz import read_npz
from unsilent.workloads.saved_files import read_images, read_saved, read_weights

READERS = {
    "npz": lambda path: read_npz(path, "arrays"),
    "images": lambda path: read_images(path, 10),
    "weights": read_weights,
    "safetensors": lambda path: read_saved(path, "weights"),
    "clicks": from_csv,
    "list of faults": read_list_bytes,
    "injection": read_injection,
    "accelerator": accelerators.load_accelerator,
    "card": read_card,
    "program": load,
    "user's code": lambda path: load(f"{path}:make"),
}
ENDINGS = {"safetensors": "safetensors", "accelerator": "toml", "program": "pt2", "user's code": "py"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_plain_files_are_read(tmp_path, reader, kind):
    path = tmp_path / f"file.{ENDINGS.get(reader, 'dat')}"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    with pytest.raises(UsageError, match="is not a regular file|Is a directory") as raised:
        READERS[reader](str(path))
    assert "\n" not in str(raised.value)


def npy(shape, values, dtype="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + values


def archive(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return str(path)


@pytest.mark.slow
def test_an_archive_that_unpacks_to_far_more_than_it_is(tmp_path, monkeypatch):
    most = 2**26
    monkeypatch.setattr(npz, "MOST_UNPACKED", most)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("a.npy", "w", force_zip64=True) as member:
        member.write(npy((most // 4,), b""))
        for _ in range(most >> 24):
            member.write(bytes(2**24))
    with pytest.raises(UsageError, match=r"unpacks to 67,108,\d+ bytes, [\d,]+ times its size; save it uncompressed"):
        read_npz(str(path), "arrays")
    assert read_npz(str(path), "arrays", only=("b",)) == {}


@pytest.mark.parametrize(
    "content",
    [
        npy((10**9,), b"\0" * 40),
        npy((2,), b"\0" * 40),
        npy((-1,), b"\0" * 40),
        npy((10**9, 10**9, 10**9), b"\0" * 40),
        npy((5,), b"\0" * 40, "|O"),
        b"\x93NUMPY\x09\x09",
        b"",
    ],
    ids=["more", "less", "negative", "overflow", "objects", "version", "empty"],
)
def test_a_header_that_announces_another_size(tmp_path, content):
    with pytest.raises(UsageError, match="is damaged, or is not a .npz file"):
        read_npz(archive(tmp_path / "a.npz", a=content), "arrays")


def test_sound_archives_are_read(tmp_path):
    wanted = {"a": np.arange(12.0).reshape(3, 4).T, "b": np.zeros((0, 3), np.uint8), "c": np.array(5, np.int64)}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **wanted)
        found = read_npz(str(tmp_path / "a.npz"), "arrays")
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[k], v) and found[k].dtype == v.dtype for k, v in wanted.items())


def test_compressed_weights_are_refused(tmp_path):
    torch.save({"w": torch.zeros(1000)}, tmp_path / "sound.pt")
    assert read_weights(str(tmp_path / "sound.pt"))["w"].shape == (1000,)
    with (
        zipfile.ZipFile(tmp_path / "sound.pt") as old,
        zipfile.ZipFile(tmp_path / "new.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(UsageError, match="holds compressed parts"):
        read_weights(str(tmp_path / "new.pt"))
