"""HDF5 files: every layout and dtype against h5py; one bit changes one element, undone byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.hdf5_cases import (
    CHUNK,
    DTYPES,
    LAYOUTS,
    NOTICED,
    SHAPE,
    content_of,
    flip,
    h5py,
    patched,
    stored,
    values,
    words,
    write,
)
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.editing import apply_edit, undo_edit, undo_record_of

BITS = {2: 14, 4: 30, 8: 62, 1: 6}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    result = tmp_path_factory.mktemp("hdf5") / "all.h5"
    with h5py.File(result, "w") as file:
        write(file)
    return result


@pytest.fixture(scope="module")
def checkpoint(path):
    with Checkpoint(path) as result:
        yield result


def test_lists_every_dataset_with_its_dtype_and_elements(checkpoint, path):
    assert checkpoint.format == "HDF5"
    with h5py.File(path) as file:
        for layout in LAYOUTS:
            for name, dataset in file[layout].items():
                tensor = checkpoint.tensor(f"model/{layout}/{name}")
                assert (tensor.dtype, tensor.shape) == (dataset.dtype.name, SHAPE)
                assert tensor.big_endian == name.startswith(">")
                assert np.array_equal(content_of(checkpoint, tensor), words(dataset[()])), tensor.name
        assert len(checkpoint.tensors) == sum(len(group) for group in file.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bit_changes_one_element(checkpoint, path, layout):
    before = path.read_bytes()
    for place, dtype in enumerate(DTYPES):
        tensor = checkpoint.tensor(f"model/{layout}/{dtype}")
        element, bit = (place * 13 + 5) % 100, BITS[tensor.item_size] - place % 3
        patches, receipt = checkpoint.plan([flip(tensor, element, bit)], "fixed")
        old, new = words(values(dtype)), words(stored(patched(before, patches), f"{layout}/{dtype}"))
        assert np.flatnonzero(old ^ new).tolist() == [element]
        assert (old ^ new)[element] == 1 << bit
        assert receipt.applied_faults[0].before[0] == old[element]
        assert receipt.applied_faults[0].after[0] == new[element]

        stale = patched(before, checkpoint.plan([flip(tensor, element, bit)])[0])
        if layout in NOTICED:
            with pytest.raises(OSError, match=r"[Cc]hecksum|can't|filter"):
                stored(stale, f"{layout}/{dtype}")
        else:
            assert np.array_equal(words(stored(stale, f"{layout}/{dtype}")), new)


def test_edits_of_all_layouts_at_once_are_written_and_undone(path):
    before = path.read_bytes()
    with Checkpoint(path) as checkpoint:
        editable = [t for t in checkpoint.tensors.values() if not t.reason_not_editable]
        assert len(editable) == len(LAYOUTS) * len(DTYPES)
        faults = [flip(tensor, element, 1) for tensor in editable for element in (0, 33, tensor.numel - 1)]
        patches, _ = checkpoint.plan(faults, "fixed")
    apply_edit(path, patches, None)
    with h5py.File(path) as file:
        for tensor in editable:
            changed = words(file[tensor.stored_as][()]) ^ words(values(tensor.stored_as.partition("/")[2]))
            assert np.flatnonzero(changed).tolist() == [0, 33, tensor.numel - 1], tensor.name
            assert set(changed.tolist()) == {0, 2}
    undo_edit(path)
    assert path.read_bytes() == before
    assert not undo_record_of(path).exists()


@pytest.mark.parametrize(
    "make", [{"userblock_size": 1024}, {"libver": "latest"}, {"libver": "v110", "fs_strategy": "page"}]
)
def test_other_kinds_of_files(tmp_path, make):
    where = tmp_path / "x.h5"
    with h5py.File(where, "w", **make) as file:
        write(file, dtypes=("<f4",))
        file.create_dataset("plain/growing", data=values("<f4"), chunks=CHUNK, maxshape=(None, None))
        file["plain/number"] = np.float32(0.5)
    before = where.read_bytes()
    with Checkpoint(where) as checkpoint:
        assert len(checkpoint.tensors) == len(LAYOUTS) + 2
        for tensor in checkpoint.tensors.values():
            after = patched(before, checkpoint.plan([flip(tensor, tensor.numel - 1, 22)], "fixed")[0])
            changed = words(stored(after, tensor.stored_as)) ^ words(stored(before, tensor.stored_as))
            assert np.flatnonzero(changed).tolist() == [tensor.numel - 1], tensor.name


def test_bfloat16(tmp_path):
    where = tmp_path / "x.h5"
    bits = np.arange(6, dtype="<u2") * 1000
    number = h5py.h5t.IEEE_F16LE.copy()
    number.set_fields(15, 7, 8, 0, 7)
    number.set_ebias(127)
    with h5py.File(where, "w") as file:
        file["keras"] = bits.view("V2")
        file["keras"].attrs["dtype"] = "bfloat16"
        file["opaque"] = bits.view("V2")
        dataset = h5py.h5d.create(file.id, b"number", number, h5py.h5s.create_simple((6,)))
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, number)
    with Checkpoint(where) as checkpoint:
        for name in ("keras", "number"):
            tensor = checkpoint.tensor(f"model/{name}")
            assert (tensor.dtype, tensor.reason_not_editable) == ("bfloat16", "")
            assert np.array_equal(content_of(checkpoint, tensor), bits)
        assert "opaque" in checkpoint.tensor("model/opaque").obstacle


def test_what_is_not_covered_is_listed_with_the_reason(tmp_path):
    where, data = tmp_path / "x.h5", values("<f4")
    with h5py.File(where, "w", libver="latest") as file:
        file.create_dataset("lzf", data=data, compression="lzf")
        file.create_dataset("scaled", data=values("<i4"), scaleoffset=0)
        file.create_dataset("external", data=data, external=[(str(tmp_path / "other.bin"), 0, data.nbytes)])
        file.create_dataset("unwritten", SHAPE, "f4")
        file.create_dataset("partly", SHAPE, "f4", chunks=CHUNK)[0] = 1
        virtual = h5py.VirtualLayout(SHAPE, "f4")
        virtual[:] = h5py.VirtualSource("other.h5", "x", SHAPE)
        file.create_virtual_dataset("virtual", virtual)
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((3,)), compact)
        file["text"], file["texts"] = "a", ["a", "b"]
        file["pairs"] = np.zeros(3, "f4,i4")
        file["complex"] = np.zeros(3, "c8")
        file["reference"] = file["text"].ref
        file.create_dataset("enum", (2,), h5py.enum_dtype({"a": 1, "b": 2}))
        file.create_dataset("ragged", (2,), h5py.vlen_dtype("f4"))
        file["empty"], file["none"] = np.zeros((0, 3), "f4"), h5py.Empty("f4")
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")
        file["soft"] = h5py.SoftLink("/lzf")
        file["groups/again"], file["a_lzf"] = file["/"], file["lzf"]
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = data
    with Checkpoint(where) as checkpoint:
        reasons = {name.removeprefix("model/"): t.obstacle for name, t in checkpoint.tensors.items()}
        assert set(reasons) == {
            "a_lzf", "compact", "complex", "empty", "enum", "external", "none", "pairs", "partly", "ragged", "reference",
            "scaled", "text", "texts", "unwritten", "virtual",
        }  # fmt: skip
        assert {name for name, reason in reasons.items() if not reason} == {"empty", "none"}
        expected = {
            "a_lzf": "LZF", "scaled": "scale-offset", "external": "another file", "virtual": "other datasets",
            "partly": "never written", "unwritten": "never written", "compact": "description", "enum": "enum",
            "complex": "compound",
        }  # fmt: skip
        assert all(text in reasons[name] for name, text in expected.items())
        for name, reason in reasons.items():
            tensor = checkpoint.tensor(f"model/{name}")
            assert not reason or not tensor.is_readable
        with pytest.raises(UsageError, match="LZF"):
            next(checkpoint.content(checkpoint.tensor("model/a_lzf")))
