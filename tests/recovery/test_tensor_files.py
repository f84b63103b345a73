"""Nested tensors in a file: the same bits, memory layout and nesting again, and nothing in it is executed."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from safetensors.torch import save_file

from unsilent.basics.errors import UsageError
from unsilent.recovery.tensor_files import host_copy, read_tensors, write_tensors
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

NESTING = {
    "model": {"fc.weight": torch.randn(3, 4), "fc.weight/exp_avg": torch.tensor(-0.0)},
    "list": [torch.arange(3), (torch.ones(2, dtype=torch.bfloat16), "text", None, True)],
    "numbers": {"lr": 1e-3, "inf": math.inf, 3: 2**80},
    "empty": [{}, (), torch.zeros(0, 2)],
}


def test_a_nesting_comes_back_with_its_bits(tmp_path):
    write_tensors(tmp_path / "a.safetensors", NESTING)
    again = read_tensors(tmp_path / "a.safetensors")
    assert first_snapshot_difference(NESTING, again) is None
    assert isinstance(again["list"][1], tuple)
    assert again["numbers"] == NESTING["numbers"]
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_strides_and_shared_memory(tmp_path):
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    shared = torch.arange(6.0)
    write_tensors(tmp_path / "a", host_copy([images, shared, shared[2:], shared.expand(2, 6)]))
    again = read_tensors(tmp_path / "a")
    assert again[0].stride() == images.stride()
    assert torch.equal(again[0], images)
    assert torch.equal(again[2], shared[2:])
    assert torch.equal(again[3], shared.expand(2, 6))


def test_names_that_meet_are_kept_apart(tmp_path):
    nesting = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    write_tensors(tmp_path / "a", nesting)
    assert read_tensors(tmp_path / "a") == {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}


@pytest.mark.parametrize("value", [object(), torch.eye(2).to_sparse(), {"a": {1, 2}}])
def test_what_a_file_cannot_hold_is_named_and_nothing_is_left(value, tmp_path):
    with pytest.raises(UsageError):
        write_tensors(tmp_path / "a", {"batch": value})
    assert list(tmp_path.iterdir()) == []


def tensors_without_nesting(path):
    save_file({"a": torch.ones(2)}, path)


def hostile(nesting):
    return lambda path: save_file({"a": torch.ones(2)}, path, {"nesting": nesting})


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(pickle.dumps(print)),
        lambda path: path.write_bytes(b"\xff" * 100),
        tensors_without_nesting,
        hostile("[" * 9000),
        hostile('{"tensor": "b", "strides": null}'),
        hostile('{"tensor": "a", "strides": [1000000000000]}'),
        hostile('{"tensor": "a", "strides": [-1]}'),
        hostile('{"tensor": "a", "strides": [1, 1]}'),
        hostile('{"dict": 3}'),
        hostile('{"dict": [[[], 3]]}'),
        hostile("{}"),
    ],
)
def test_any_other_file_is_refused_in_one_line(make, tmp_path):
    make(tmp_path / "a")
    with pytest.raises(UsageError) as error:
        read_tensors(tmp_path / "a")
    assert "\n" not in str(error.value)
