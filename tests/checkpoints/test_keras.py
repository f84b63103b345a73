"""``.keras`` files: the HDF5 file inside of the zip, its CRC-32, and what Keras notices."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

from checkpoints.hdf5_cases import LAYOUTS, flip, h5py, patched, usable_or_refused, values, words, write
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.editing import apply_edit, undo_edit

WEIGHTS = "model.weights.h5"


@pytest.fixture
def path(tmp_path):
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened["layers/dense/vars/0"] = values("<f4")
        opened["optimizer/vars/0"] = np.int64(3)
        opened["optimizer/vars/1"] = values("<f4")
        write(opened.create_group("layers/all"), dtypes=("<f4", ">f8"))
    result = tmp_path / "model.keras"
    with zipfile.ZipFile(result, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps({"class_name": "Sequential"}))
        archive.writestr(WEIGHTS, file.getvalue())
    return result


def weights(content: bytes) -> bytes:
    """The HDF5 file, read as Keras does: with its CRC-32 checked."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return archive.read(WEIGHTS)


def test_names_and_elements(path):
    with Checkpoint(path) as checkpoint:
        assert checkpoint.format == "Keras"
        assert {t.section for t in checkpoint.tensors.values()} == {"model", "optimizer"}
        assert {"model/dense/vars/0", "optimizer/vars/0", "optimizer/vars/1"} < set(checkpoint.tensors)
        with h5py.File(io.BytesIO(weights(path.read_bytes()))) as file:
            for tensor in checkpoint.tensors.values():
                content = b"".join(bytes(part) for part in checkpoint.content(tensor))
                assert np.array_equal(
                    np.frombuffer(content, f"<u{tensor.item_size}"), words(file[tensor.stored_as][()])
                )


def test_one_bit_changes_one_element_and_the_archive_stays_whole(path):
    before = path.read_bytes()
    with Checkpoint(path) as checkpoint, h5py.File(io.BytesIO(weights(before))) as old:
        tensors = list(checkpoint.tensors.values())
        assert len(tensors) == 3 + 2 * len(LAYOUTS)
        faults = [flip(tensor, tensor.numel // 3, 6) for tensor in tensors]
        for number, tensor in enumerate(tensors):
            fixed = patched(before, checkpoint.plan([faults[number]], "fixed")[0])
            with h5py.File(io.BytesIO(weights(fixed))) as new:
                changed = words(new[tensor.stored_as][()]) ^ words(old[tensor.stored_as][()])
                assert np.flatnonzero(changed).tolist() == [tensor.numel // 3]
            stale = patched(before, checkpoint.plan([faults[number]])[0])
            with zipfile.ZipFile(io.BytesIO(stale)) as archive, pytest.raises(zipfile.BadZipFile, match="CRC"):
                archive.read(WEIGHTS)
        patches, _ = checkpoint.plan(faults, "fixed")
    apply_edit(path, patches, None)
    with h5py.File(io.BytesIO(weights(path.read_bytes()))) as new:
        assert all(np.isfinite(new[tensor.stored_as][()]).all() for tensor in tensors)
    undo_edit(path)
    assert path.read_bytes() == before


def test_compressed_weights_are_refused(path, tmp_path):
    other = tmp_path / "other.keras"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(WEIGHTS, archive.read(WEIGHTS))
    with pytest.raises(UsageError, match="compressed"):
        Checkpoint(other)


def test_damaged_archives(path, tmp_path):
    content, where = path.read_bytes(), tmp_path / "damaged.keras"
    rng = np.random.default_rng(3)
    for length in (30, len(content) // 2, len(content) - 10):
        where.write_bytes(content[:length])
        assert usable_or_refused(where) == 0
    for _ in range(5):
        rotten = np.frombuffer(content, np.uint8).copy()
        rotten[rng.integers(len(content), size=20)] ^= 16
        where.write_bytes(rotten.tobytes())
        usable_or_refused(where)


KERAS = """
import sys, keras, numpy as np
keras.utils.set_random_seed(1)
def dense(units, dtype, name): return keras.layers.Dense(units, dtype=dtype, name=name)
path, mode = sys.argv[1:]
if mode == "save":
    model = keras.Sequential([keras.Input((5,)), dense(4, "float32", "first"), dense(2, "bfloat16", "second")])
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((8, 5), "f4"), np.ones((8, 2), "f4"), verbose=0)
    model.save(path)
else:
    model = keras.saving.load_model(path)
values = [*model.weights, *model.optimizer.variables]
np.savez(path + "." + mode + ".npz", *[keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")) for v in values])
"""


def keras(path, mode):
    """What Keras says on its error stream, and the values it has; in a process of its own, as it starts slowly."""
    done = subprocess.run(
        [sys.executable, "-c", KERAS, path, mode],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return done.stderr, []
    with np.load(f"{path}.{mode}.npz") as file:
        return "", [file[f"arr_{n}"] for n in range(len(file.files))]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("keras") is None, reason="no keras")
def test_keras_loads_what_was_edited(tmp_path):
    path = tmp_path / "model.keras"
    error, old = keras(path, "save")
    assert not error
    before = path.read_bytes()
    for name, element in (("model/dense/vars/0", 7), ("model/dense_1/vars/0", 3), ("optimizer/vars/2", 1)):
        with Checkpoint(path) as checkpoint:
            tensor = checkpoint.tensor(name)
            assert tensor.reason_not_editable == ""
            high = tensor.item_size * 8 - 3
            stale, _ = checkpoint.plan([flip(tensor, element, high)])
            fixed, _ = checkpoint.plan([flip(tensor, element, high)], "fixed")
        path.write_bytes(patched(before, stale))
        assert "CRC" in keras(path, "stale")[0]
        path.write_bytes(patched(before, fixed))
        error, new = keras(path, "fixed")
        assert not error
        changed = [np.flatnonzero(a != b).tolist() for a, b in zip(old, new, strict=True)]
        assert [at for at in changed if at] == [[element]]
        path.write_bytes(before)
