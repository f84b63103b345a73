"""HDF5's filters: Fletcher-32, shuffle and gzip against libhdf5, their order, and chunks that do not fit."""

from __future__ import annotations

import io
import tracemalloc
import zlib

import numpy as np
import pytest

from checkpoints.hdf5_cases import SHAPE, content_of, flip, h5py, patched, stored, values, words
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats.hdf5_filters import Fletcher32, fletcher32


def test_filters_in_another_order_and_chunks_that_skipped_one(tmp_path):
    where, data = tmp_path / "x.h5", values("<f4")
    with h5py.File(where, "w") as file:
        for name, order in {
            "inside": ("fletcher32", "deflate", "shuffle"),
            "skipping": ("shuffle", "deflate", "fletcher32"),
        }.items():
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_chunk(SHAPE)
            for filter_name in order:
                getattr(properties, f"set_{filter_name}")(*([4] if filter_name == "deflate" else []))
            space = h5py.h5s.create_simple(SHAPE)
            dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, properties)
            if name == "inside":
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data)
            else:
                dataset.write_direct_chunk((0, 0), data.tobytes() + fletcher32(data.tobytes()), filter_mask=0b011)
    before = where.read_bytes()
    with Checkpoint(where) as checkpoint:
        inside, skipping = checkpoint.tensor("model/inside"), checkpoint.tensor("model/skipping")
        assert inside.blocks[0].packing is not None
        assert skipping.blocks[0].packing is None
        for tensor in (inside, skipping):
            assert np.array_equal(content_of(checkpoint, tensor), words(stored(before, tensor.stored_as)))
            after = patched(before, checkpoint.plan([flip(tensor, 9, 30)], "fixed")[0])
            assert np.flatnonzero(words(stored(after, tensor.stored_as)) ^ words(data)).tolist() == [9]
        # A checksum inside of compressed bytes is made with them, so no reader notices.
        after = patched(before, checkpoint.plan([flip(inside, 9, 30)])[0])
        assert np.flatnonzero(words(stored(after, "inside")) ^ words(data)).tolist() == [9]


def test_chunks_as_h5py_compresses_them_fit_or_are_refused(tmp_path):
    where, data = tmp_path / "x.h5", values("<f4", (60, 40))
    with h5py.File(where, "w") as file:
        for level in (1, 4, 9):
            file.create_dataset(
                f"{level}", data=data, chunks=data.shape, compression="gzip", compression_opts=level, shuffle=True
            )
    before, fitted = where.read_bytes(), 0
    with Checkpoint(where) as checkpoint:
        for tensor in checkpoint.tensors.values():
            for element in range(3, data.size, 301):
                try:
                    patches, _ = checkpoint.plan([flip(tensor, element, element % 32)])
                except UsageError as error:
                    assert "cannot be compressed" in str(error)  # noqa: PT017
                    continue
                changed = words(stored(patched(before, patches), tensor.stored_as)) ^ words(data)
                assert np.flatnonzero(changed).tolist() == [element]
                fitted += 1
    assert fitted


def test_a_chunk_that_does_not_fit_is_refused(tmp_path):
    where = tmp_path / "x.h5"
    with h5py.File(where, "w") as file:
        file.create_dataset("zeros", data=np.zeros(1000, "f4"), chunks=(1000,), compression="gzip")
    with Checkpoint(where) as checkpoint, pytest.raises(UsageError, match="cannot be compressed to the") as raised:
        checkpoint.plan([flip(checkpoint.tensor("model/zeros"), 7, 30)])
    assert "\n" not in str(raised.value)


def test_a_chunk_unpacks_to_its_size_at_most(tmp_path):
    where = tmp_path / "x.h5"
    with h5py.File(where, "w") as file:
        for name, stored_chunk in {
            "bomb": zlib.compress(bytes(50_000_000)),
            "short": zlib.compress(bytes(3)),
            "rot": b"x" * 30,
        }.items():
            dataset = file.create_dataset(name, (16,), "f4", chunks=(16,), compression="gzip")
            dataset.id.write_direct_chunk((0,), stored_chunk)
    with Checkpoint(where) as checkpoint:
        for tensor in checkpoint.tensors.values():
            tracemalloc.start()
            with pytest.raises(UsageError, match="damaged"):
                next(checkpoint.content(tensor))
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
            tracemalloc.stop()


def reference_fletcher32(data):
    """H5_checksum_fletcher32, line by line."""
    sum1 = sum2 = 0
    at, words_left = 0, len(data) // 2
    while words_left:
        count = min(words_left, 360)
        words_left -= count
        for _ in range(count):
            sum1 += data[at] << 8 | data[at + 1]
            sum2 += sum1
            at += 2
        sum1, sum2 = (sum1 & 0xFFFF) + (sum1 >> 16), (sum2 & 0xFFFF) + (sum2 >> 16)
    if len(data) % 2:
        sum1 += data[at] << 8
        sum2 += sum1
        sum1, sum2 = (sum1 & 0xFFFF) + (sum1 >> 16), (sum2 & 0xFFFF) + (sum2 >> 16)
    sum1, sum2 = (sum1 & 0xFFFF) + (sum1 >> 16), (sum2 & 0xFFFF) + (sum2 >> 16)
    return (sum2 << 16 | sum1).to_bytes(4, "little")


def test_fletcher32_is_the_one_of_libhdf5():
    rng = np.random.default_rng(1)
    cases = [rng.bytes(n) for n in (0, 1, 2, 3, 719, 720, 721, 722, 5001, 20000)]
    cases += [bytes(n) for n in (1, 2, 1000)] + [b"\xff" * n for n in (1, 2, 719, 720, 722, 9000)]
    cases += [bytes(10) + b"\xff\xff", b"\xff\xff" + bytes(10), b"\x80\0\x7f\xff" * 3, b"\0\1\xff\xfe" + bytes(6)]
    for case in cases:
        assert fletcher32(case) == reference_fletcher32(case), case[:8]
        parts = Fletcher32()
        for begin in range(0, len(case), 500):
            parts.update(case[begin : begin + 500])
        assert parts.stored() == reference_fletcher32(case)


def test_odd_chunks_with_a_checksum_are_those_of_h5py():
    file = io.BytesIO()
    data = np.arange(35, dtype="u1")
    with h5py.File(file, "w") as opened:
        opened.create_dataset("x", data=data, chunks=(35,), fletcher32=True)
        _, raw = opened["x"].id.read_direct_chunk((0,))
    assert raw == data.tobytes() + fletcher32(data.tobytes())
