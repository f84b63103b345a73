"""Archives of ``torch.save``: whatever torch's own reader refuses of their structure is refused here."""

from __future__ import annotations

import io
import random
import struct
import zipfile

import numpy as np
import pytest
import torch

from checkpoints.fuzz_mutations import ZIP_FIELDS, extreme_field, zip_field
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint

STRUCTURE = ("PytorchStreamReader", "hasRecord", "enforce fail", "record size", "endianness")
"""In torch's errors on the structure of an archive."""


def archive():
    content = io.BytesIO()
    torch.save({"w": torch.arange(3.0), "v": torch.ones(2)}, content)
    return content.getvalue()


def rebuilt(change):
    """The archive with every record as ``change(name, content)`` lists it."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive())) as old, zipfile.ZipFile(result, "w") as new:
        for entry in old.infolist():
            for name, content in change(entry.filename, old.read(entry)):
                new.writestr(name, content)
    return result.getvalue()


def without(end):
    return rebuilt(lambda name, content: [] if name.endswith(end) else [(name, content)])


def holding(end, new):
    return rebuilt(lambda name, content: [(name, new if name.endswith(end) else content)])


def with_field(signature, offset, layout, value):
    """The archive with a field after the first of a signature changed."""
    content = bytearray(archive())
    struct.pack_into(layout, content, content.index(signature) + offset, value)
    return bytes(content)


REFUSED = {
    "no version": without("/version"),
    "a version of the future": holding("/version", b"99\n"),
    "a version that is no number": holding("/version", b"x"),
    "an order of bytes that is none": holding("/byteorder", b"middle"),
    "no tensor": without("data/0"),
    "a record that is too short": holding("data/0", bytes(8)),
    "a record that is too long": holding("data/0", bytes(16)),
    "records in another folder": rebuilt(lambda name, content: [(f"x/{name}", content)]),
    "a record outside of the folder": rebuilt(
        lambda name, content: [("first/record", b""), (name, content)][name[-1] != "l" :]
    ),
    "another number of entries": with_field(b"PK\x06\x06", 24, "<Q", 3),
    "several disks": with_field(b"PK\x06\x07", 16, "<L", 2),
    "a part on another disk": with_field(b"PK\x01\x02", 34, "<H", 7),
    "an unknown compression": with_field(b"PK\x01\x02", 10, "<H", 99),
    "an entry that is a folder": with_field(b"PK\x01\x02", 38, "<L", 0x10),
    "another size": with_field(b"PK\x01\x02", 24, "<L", 1),
}


def is_loaded(content):
    """Whether torch loads an archive; raises ``ValueError`` where it refuses something other than its structure."""
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        if not any(word in str(error) for word in STRUCTURE):
            raise ValueError from None
        return False
    return True


def is_read(content, path):
    path.write_bytes(content)
    try:
        with Checkpoint(path):
            return True
    except UsageError:
        return False


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name, tmp_path):
    with pytest.raises(Exception, match="."):
        torch.load(io.BytesIO(REFUSED[name]), weights_only=True)
    assert not is_read(REFUSED[name], tmp_path / "w.pt")


def test_two_directories_that_disagree_are_refused(tmp_path):
    """Torch reads the directory of the 64-bit end record; other programs may read the other one."""
    content = bytearray(archive())
    end = content.rindex(b"PK\x05\x06")
    begin = struct.unpack_from("<L", content, end + 16)[0]
    struct.pack_into("<L", content, end + 16, begin - 1)
    assert is_loaded(bytes(content))
    assert not is_read(bytes(content), tmp_path / "w.pt")


def test_changed_archives_that_torch_refuses_are_refused(tmp_path):
    draw, whole = random.Random(9), archive()
    refused = 0
    for _ in range(400):
        content = draw.choice((zip_field, zip_field, extreme_field))(whole, whole, draw)
        try:
            if is_loaded(content):
                continue
        except (ValueError, Warning):
            continue
        refused += 1
        assert not is_read(content, tmp_path / "w.pt")
    assert refused > 100


def test_every_field_of_an_archive_that_torch_refuses_is_refused(tmp_path):
    whole = archive()
    for signature, fields in ZIP_FIELDS.items():
        for offset, size in fields:
            at = whole.index(signature) + offset
            old = int.from_bytes(whole[at : at + size], "little")
            for value in {0, 1, 2, old + 1, 256**size - 1} - {old}:
                content = whole[:at] + (value % 256**size).to_bytes(size, "little") + whole[at + size :]
                try:
                    assert is_loaded(content) or not is_read(content, tmp_path / "w.pt"), (signature, offset, value)
                except ValueError:
                    continue


def test_the_content_is_that_of_torch(tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(archive())
    with Checkpoint(path) as checkpoint:
        content = b"".join(checkpoint.content(checkpoint.tensor("model/w")))
    assert content == np.arange(3, dtype="<f4").tobytes()


def test_tensors_that_torch_does_not_swap_are_refused_in_a_big_endian_archive(tmp_path):
    plain, big = tmp_path / "plain.pt", tmp_path / "big.pt"
    torch.save({"w": torch.tensor([1, 2], dtype=torch.uint16)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(big, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    assert torch.load(big)["w"].tolist() == [1, 2], "not swapped, although the archive says so"
    with pytest.raises(UsageError, match="two orders of bytes"):
        Checkpoint(big)
