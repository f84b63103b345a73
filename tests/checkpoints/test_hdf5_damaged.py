"""Damaged and hostile HDF5 files, and a reading process that is damaged itself, end in one line."""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from checkpoints.hdf5_cases import CHUNK, h5py, usable_or_refused, values, write
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats import hdf5_reader

HOSTILE = (-1, 2**62, 2**80, 10**18, None, "x", [], {}, 1.5, True, float("nan"), [1, 2], 0, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    result = tmp_path_factory.mktemp("damaged") / "some.h5"
    with h5py.File(result, "w") as file:
        write(file, layouts=("contiguous", "fletcher", "gzip_all"), dtypes=("<f4", ">i2"))
        file["text"] = "a"
        file.create_dataset("growing", data=values("<f4"), chunks=CHUNK, maxshape=(None, None))
    return result


def test_truncated_files(path, tmp_path):
    content = path.read_bytes()
    where = tmp_path / "short.h5"
    for length in (9, 60, 96, 700, len(content) // 2, len(content) - 1):
        where.write_bytes(content[:length])
        assert usable_or_refused(where) == 0
    where.write_bytes(content[:5])
    with pytest.raises(UsageError, match="known checkpoint format"):
        Checkpoint(where)


@pytest.mark.parametrize(("seed", "count"), [(0, 8), pytest.param(1, 300, marks=pytest.mark.slow)])
def test_bit_rot(path, tmp_path, seed, count):
    rng = np.random.default_rng(seed)
    content = path.read_bytes()
    where = tmp_path / "rotten.h5"
    listed = 0
    for _ in range(count):
        rotten = np.frombuffer(content, np.uint8).copy()
        # Half of the flips hit the descriptions, which lie at the file's begin.
        for _ in range(int(rng.integers(1, 4))):
            rotten[rng.integers(8, rng.choice([4096, len(rotten)]))] ^= 1 << rng.integers(8)
        where.write_bytes(rotten.tobytes())
        listed += usable_or_refused(where)
    assert listed < count


def listing_of(path, monkeypatch):
    answers = []
    with monkeypatch.context() as patch:
        plain = hdf5_reader._answer
        patch.setattr(hdf5_reader, "_answer", lambda *given: answers.append(plain(*given)) or answers[-1])
        Checkpoint(path).close()
    return answers[0]


def places(value, at=()):
    """Every place in JSON."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*at, key))


def with_changed(value, at, new):
    if not at:
        return new
    result = copy.copy(value)
    result[at[0]] = with_changed(value[at[0]], at[1:], new)
    return result


def test_hostile_listings(path, monkeypatch):
    answer = listing_of(path, monkeypatch)
    everywhere = list(places(answer))
    rng = np.random.default_rng(2)
    cases = [with_changed(answer, at, new) for at in everywhere[:12] for new in HOSTILE]
    for _ in range(300):
        at = everywhere[rng.integers(len(everywhere))]
        cases.append(with_changed(answer, at, HOSTILE[rng.integers(len(HOSTILE))]))
    results = []
    for case in cases:
        monkeypatch.setattr(hdf5_reader, "_answer", lambda *_, case=case: case)
        results.append(usable_or_refused(path))
    assert set(results) == {0, 1}


@pytest.mark.parametrize(
    ("what", "key", "value"),
    [
        ("overlap", "offset", 5000),
        ("beyond the end", "offset", 10**9),
        ("no size", "offset", -1),
        ("too large", "shape", [2**40, 2**40]),
        ("not of its grid", "chunks", [[5000, 8, 0, [0, 0]]]),
    ],
)
def test_hostile_listings_are_refused_for_what_they_say(path, monkeypatch, what, key, value):
    answer = copy.deepcopy(listing_of(path, monkeypatch))
    record = next(record for record in answer["datasets"] if record["layout"] == "contiguous")
    record[key] = value
    if what == "overlap":
        other = [r for r in answer["datasets"] if r["layout"] == "contiguous"][1]
        record["offset"] = other["offset"] + 4
    monkeypatch.setattr(hdf5_reader, "_answer", lambda *_: answer)
    with pytest.raises(UsageError, match=what.replace("no size", "is none")):
        Checkpoint(path)


CHILDREN = {
    "says nothing": "",
    "says what is no JSON": "print('[' * 200000)",
    "fails": "raise SystemExit(3)",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "does not end": "import time; time.sleep(600)",
    "says too much": "import os\nwhile True: os.write(1, b' ' * 2**20)",
    "lists nothing": "print('{}')",
}


@pytest.mark.parametrize("script", CHILDREN.values(), ids=CHILDREN)
def test_a_reading_process_that(path, tmp_path, monkeypatch, script):
    child = tmp_path / "child.py"
    child.write_text(script)
    monkeypatch.setattr(hdf5_reader, "LISTING", child)
    monkeypatch.setattr(hdf5_reader, "MOST_METADATA", 2**22)
    if "write" in script:
        child.write_text(f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**23, 2**23))\n{script}")
    if "sleep" in script:
        monkeypatch.setattr(hdf5_reader, "LIMITS", replace(hdf5_reader.LIMITS, seconds=0.3))
    with pytest.raises(UsageError) as raised:
        Checkpoint(path)
    assert "cannot be read as HDF5" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_limits_end_the_reading_process(path, tmp_path, monkeypatch):
    for limits in (replace(hdf5_reader.LIMITS, memory=30 * 2**20), replace(hdf5_reader.LIMITS, chunks=3)):
        monkeypatch.setattr(hdf5_reader, "LIMITS", limits)
        with pytest.raises(UsageError, match="cannot be read as HDF5"):
            Checkpoint(path)
    # A loop: libhdf5 has had some on damaged files.
    child = tmp_path / "child.py"
    script = f"import sys; sys.path.insert(0, {os.fspath(hdf5_reader.LISTING.parent)!r})\nimport hdf5_listing\n"
    child.write_text(script + "hdf5_listing._limit(2**30, 1, 2**20)\nwhile True: pass")
    monkeypatch.setattr(hdf5_reader, "LISTING", child)
    with pytest.raises(UsageError, match="killed by signal"):
        Checkpoint(path)


def test_other_files_are_never_opened(tmp_path):
    pipe, where = tmp_path / "pipe.h5", tmp_path / "x.h5"
    os.mkfifo(pipe)  # to open it would wait forever
    with h5py.File(where, "w", libver="latest") as file:
        file["link"] = h5py.ExternalLink(str(pipe), "/x")
        file.create_dataset("external", (4,), "f4", external=[(str(pipe), 0, 16)])
        layout = h5py.VirtualLayout((4,), "f4", maxshape=(None,))
        layout[:] = h5py.VirtualSource(str(pipe), "x", (4,))
        file.create_virtual_dataset("virtual", layout)
    with Checkpoint(where) as checkpoint:
        assert all(tensor.obstacle for tensor in checkpoint.tensors.values())
        assert set(checkpoint.tensors) == {"model/external", "model/virtual"}


def test_without_h5py_the_extra_is_named(path, monkeypatch):
    monkeypatch.setattr(hdf5_reader, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'unsilent\[hdf5\]'"):
        Checkpoint(path)


def test_files_that_change_or_are_no_hdf5(path, tmp_path):
    where = tmp_path / "x.h5"
    shutil.copy(path, where)
    with Checkpoint(where) as checkpoint:
        os.truncate(where, 3000)
        with pytest.raises(UsageError, match="ends at byte"):
            list(checkpoint.content(checkpoint.tensor("model/contiguous/<f4")))
    where.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(2000))
    assert usable_or_refused(where) == 0


def test_names_are_shown_as_one_line(tmp_path):
    where = tmp_path / "x.h5"
    with h5py.File(where, "w") as file:
        h5py.h5d.create(file.id, b"a\n\x1b[31m\xff", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((0,)))
    with Checkpoint(where) as checkpoint:
        assert list(checkpoint.tensors) == [r"model/a\x0a\x1b[31m\xff"]
