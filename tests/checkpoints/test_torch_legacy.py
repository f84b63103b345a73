"""Files of the legacy torch.save: listed and read, never edited or unpickled."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from checkpoint_checks import (
    DTYPES,
    assert_cut_files_are_refused,
    assert_damage_raises_usage_errors,
    bytes_of,
    content,
    flipped,
    one_of_each_dtype,
    only_usage_errors,
    refused,
    words,
)
from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import Call, Mapped, Name
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats.torch_pickle import PickledObject, leaves


def save(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


@pytest.fixture
def small(tmp_path):
    return save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "lr": 0.5, "epoch": 3}, tmp_path / "small.pt")


class TestReading:
    def test_every_dtype(self, tmp_path):
        state = one_of_each_dtype()
        path = save(state, tmp_path / "a.pt")
        for dtype in DTYPES:
            assert content(path, f"model/{dtype}") == words(state[dtype]).tobytes()

    def test_names_and_values_are_those_of_the_zip_format(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": 3,
        }
        old = save(state, tmp_path / "old.pt")
        torch.save(state, tmp_path / "new.pt")
        with Checkpoint(old) as legacy, Checkpoint(tmp_path / "new.pt") as new:
            assert legacy.format == "torch.save (legacy)"
            assert list(legacy.tensors) == list(new.tensors)
            for name, tensor in new.tensors.items():
                other = legacy.tensors[name]
                assert (other.dtype, other.shape, other.value) == (tensor.dtype, tensor.shape, tensor.value)
                if other.is_readable:
                    assert b"".join(legacy.content(other)) == b"".join(new.content(tensor))

    def test_views_strides_and_shared_storages(self, tmp_path):
        whole = torch.arange(24.0).reshape(4, 6)
        state = {
            "whole": whole,
            "part": whole[1:3, 2:5],
            "turned": whole.t(),
            "one": torch.tensor(7),
            "none": torch.zeros(0),
        }
        path = save(state, tmp_path / "a.pt")
        for name, tensor in state.items():
            assert content(path, f"model/{name}") == words(tensor).tobytes()

    def test_a_whole_model(self, tmp_path):
        model = torch.nn.Linear(3, 2)
        path = save(model, tmp_path / "a.pt")
        with Checkpoint(path) as checkpoint:
            name = next(name for name in checkpoint.tensors if name.endswith("weight"))
        assert content(path, name) == words(model.weight).tobytes()

    def test_long_pickles(self, tmp_path):
        state = {f"layer.{'x' * 250}.{i}": torch.tensor([i]) for i in range(5000)}
        path = save(state, tmp_path / "a.pt")
        assert content(path, f"model/layer.{'x' * 250}.4999") == words(torch.tensor([4999])).tobytes()

    def test_editing_is_refused(self, small):
        with pytest.raises(UsageError, match="save it again with torch.save"), flipped(small, "model/w", 0, 3):
            pass


class TestHostile:
    def test_other_pickles_are_refused(self, tmp_path):
        for protocol in range(2, 6):
            (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": [1.0, 2.0]}, protocol))
            refused(tmp_path / "a.pkl", "a pickle that torch.save did not write")

    def test_nothing_is_unpickled(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path}/executed",)

        path = save({"w": torch.ones(3), "bomb": Bomb()}, tmp_path / "a.pt")
        assert content(path, "model/w") == words(torch.ones(3)).tobytes()
        (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb(), 2))
        assert not only_usage_errors(tmp_path / "b.pt")
        assert not (tmp_path / "executed").exists()

    def test_cut_off_anywhere(self, small):
        assert_cut_files_are_refused(small, small)

    def test_flipped_bits(self, small):
        before = bytes_of(small)
        assert_damage_raises_usage_errors(small, small, 400)
        assert bytes_of(small) == before

    def test_keys_that_hold_themselves_or_nest(self):
        nested = ("a",)
        for _ in range(5000):
            nested = (nested, nested)
        call = Call(Name("a", "b"))
        call.arguments = (call, call)
        for key in (nested, call, 10**5000, Name("a", "b")):
            ((path, value),) = leaves(Mapped([(key, 1)]), "x", 100)
            assert value == 1
            assert len(path[0]) < 1000

    def test_parameters_around_parameters(self):
        call = Call(Name("torch._utils", "_rebuild_parameter"), ())
        for _ in range(5000):
            call = Call(Name("torch._utils", "_rebuild_parameter"), (call,))
        ((path, leaf),) = leaves(call, "x", 100_000)
        assert path == ()
        assert isinstance(leaf, PickledObject)
