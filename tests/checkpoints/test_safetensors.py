"""Safetensors files: whatever the format's own loader refuses is refused here, and what both accept has the same tensors."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from checkpoint_checks import content, refused, words
from checkpoints.fuzz_mutations import JSON_VALUES
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.comparing import DIFFERS, compare
from unsilent.checkpoints.formats.safetensors_file import DTYPES

W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BEHIND = {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(fields, size):
    return packed({"w": fields}, bytes(range(size)))


REFUSED = {
    "bytes after the last tensor": packed({"w": W}, bytes(24)),
    "a hole at the start": packed({"w": {**W, "data_offsets": [4, 12]}}, bytes(12)),
    "a hole between tensors": packed({"w": W, "v": {**BEHIND, "data_offsets": [9, 13]}}, bytes(13)),
    "bytes of no tensor": packed({}, bytes(8)),
    "metadata that is a list": packed({"w": W, "__metadata__": []}, bytes(8)),
    "metadata with a number": packed({"w": W, "__metadata__": {"step": 1}}, bytes(8)),
    "metadata with an object": packed({"w": W, "__metadata__": {"a": {}}}, bytes(8)),
    "a dtype of no version": packed({"w": {**W, "dtype": "F33"}}, bytes(8)),
    "half a byte": packed({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)),
    "a length with a sign": packed(b'{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
    "half of a surrogate pair": packed(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "a constant that JSON has not": packed(b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":NaN}}'),
    "a header of UTF-16": packed('{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16-le")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_its_own_loader_refuses_is_refused(name, tmp_path):
    with pytest.raises(SafetensorError):
        deserialize(REFUSED[name])
    path = tmp_path / "w.safetensors"
    path.write_bytes(REFUSED[name])
    with pytest.raises(UsageError) as raised, Checkpoint(path):
        pass
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", [packed({}), packed({"w": W, "__metadata__": None}, bytes(8))])
def test_an_empty_file_and_empty_metadata_are_read(file, tmp_path):
    assert len(deserialize(file)) <= 1
    (tmp_path / "w.safetensors").write_bytes(file)
    with Checkpoint(tmp_path / "w.safetensors") as checkpoint:
        assert len(checkpoint.tensors) == len(deserialize(file))


def test_every_dtype_of_the_format_is_read(tmp_path):
    path = tmp_path / "w.safetensors"
    for dtype, fields in {
        "float4_e2m1fn_x2": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]},
        "F4": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]},
        "F6_E2M3": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
        "F6_E3M2": {"dtype": "F6_E3M2", "shape": [8], "data_offsets": [0, 6]},
        "float8_e8m0fnu": {"dtype": "F8_E8M0", "shape": [6], "data_offsets": [0, 6]},
        "float8_e4m3fnuz": {"dtype": "F8_E4M3FNUZ", "shape": [6], "data_offsets": [0, 6]},
        "float8_e5m2fnuz": {"dtype": "F8_E5M2FNUZ", "shape": [6], "data_offsets": [0, 6]},
        "complex64": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
    }.items():
        size = fields["data_offsets"][1]
        deserialize(one(fields, size))
        path.write_bytes(one(fields, size))
        with Checkpoint(path) as checkpoint:
            assert checkpoint.tensor("model/w").dtype == dtype
            assert checkpoint.tensor("model/w").nbytes == size
        assert content(path, "model/w") == bytes(range(size))


def test_shapes_of_packed_dtypes_are_those_of_torch(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "w.safetensors"
    path.write_bytes(one({"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}, 6))
    with safe_open(path, "pt") as file, Checkpoint(path) as checkpoint:
        tensor = file.get_tensor("w")
        assert checkpoint.tensor("model/w").shape == tuple(tensor.shape)
        assert checkpoint.tensor("model/w").dtype == str(tensor.dtype).removeprefix("torch.")


# Both loaders on damaged files.


def a_file(draw):
    """A small sound file."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)
    tensors = {}
    for name in draw.sample("abcdef", draw.randrange(4)):
        shape = [draw.randrange(4) for _ in range(draw.randrange(3))]
        tensors[name] = torch.ones(shape).to(draw.choice(dtypes))
    return save(tensors, draw.choice((None, {}, {"format": "pt"})))


def damaged(whole, draw):
    """The file with another header, other bytes, or another length."""
    length = int.from_bytes(whole[:8], "little")
    text, data = whole[8 : 8 + length], whole[8 + length :]
    way = draw.randrange(6)
    if way == 0:
        return whole + bytes(draw.randrange(1, 20))
    if way == 1:
        return whole[: draw.randrange(len(whole))]
    if way == 2:
        at = draw.randrange(len(whole))
        return whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :]
    if way == 3:
        at = draw.randrange(len(text))
        piece = draw.choice(
            (b"", b" ", b"-", b"0", b"1", b"e1", b".0", b",", b"{", b"}", b'"', b"\\u0000", b"\n", b"\xff")
        )
        return packed(text[:at] + piece + text[at + draw.randrange(3) :], data)
    header = json.loads(text)
    name = draw.choice([*header, "__metadata__", "new"])
    value = header.get(name)
    if way == 4 and isinstance(value, dict) and "shape" in value:
        field = draw.choice(("dtype", "shape", "data_offsets", "data_offsets"))
        if field == "dtype":
            value[field] = draw.choice([*DTYPES, "f32"])
        else:
            value[field] = [max(0, n + draw.choice((-1, 0, 1, 8))) for n in value[field]]
    else:
        header[name] = draw.choice((*JSON_VALUES, W, {**W, "data_offsets": [0, 0], "shape": [0]}, {"a": "b"}))
    if draw.random() < 0.3:
        header = dict(draw.sample(list(header.items()), len(header)))
    return packed(header, data[: draw.choice((len(data), len(data), 0))] + bytes(draw.choice((0, 0, 0, 8))))


def refused_or_the_same(whole, path):
    """Whether safetensors loads it; it is refused here then, or has the same tensors."""
    path.write_bytes(whole)
    try:
        expected = dict(deserialize(whole))
    except SafetensorError:
        with pytest.raises(UsageError), Checkpoint(path):
            pass
        return False
    try:
        checkpoint = Checkpoint(path)
    except UsageError:
        return False
    with checkpoint:
        tensors = {t.stored_as: t for t in checkpoint.tensors.values()}
        assert set(tensors) == set(expected)
        for name, found in expected.items():
            assert b"".join(checkpoint.content(tensors[name])) == bytes(found["data"])
            assert tensors[name].dtype in (DTYPES.get(found["dtype"]), found["dtype"], "float4_e2m1fn_x2")
            if found["dtype"] != "F4":
                assert list(tensors[name].shape) == list(found["shape"])
    return True


@pytest.mark.slow
def test_the_two_loaders_agree_on_damaged_files(tmp_path):
    draw = random.Random(11)
    outcomes = []
    for _ in range(800):
        whole = a_file(draw)
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            with contextlib.suppress(ValueError, LookupError, AttributeError):  # it was damaged before
                whole = damaged(whole, draw)
        outcomes.append(refused_or_the_same(whole, tmp_path / "w.safetensors"))
    assert min(outcomes.count(True), outcomes.count(False)) > 100, "hardly any file is read, or refused"


def test_scales_of_eight_bits_are_compared_byte_by_byte(tmp_path):
    scales = torch.full((4,), 0.5).to(torch.float8_e8m0fnu)
    (tmp_path / "one.safetensors").write_bytes(save({"scale": scales}))
    other = torch.tensor(words(scales)).clone()
    other[2] ^= 0x40
    (tmp_path / "other.safetensors").write_bytes(save({"scale": other.view(torch.float8_e8m0fnu)}))
    with Checkpoint(tmp_path / "one.safetensors") as first, Checkpoint(tmp_path / "other.safetensors") as second:
        (difference,) = compare(first, second)
    assert (difference.status, difference.elements, difference.bits, difference.first) == (DIFFERS, 1, 1, 2)


def test_a_record_with_a_field_of_no_version_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(packed({"w": {**W, "scale": 1}}, bytes(8)))
    refused(path, "scale")
