"""Trained weights are kept whole or not at all, and damaged ones are never used."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.workloads import cache
from unsilent.workloads.cache import TrainedWeightsRecipe, folder, load_or_train
from unsilent.workloads.model_fitting import Goal

RECIPE = TrainedWeightsRecipe("toy", 1, {"seed": 0}, "abc")
GOAL = Goal("accuracy", 0.5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head.weight = self.embedding.weight


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSILENT_CACHE", str(tmp_path))
    return tmp_path


def _get(score=0.75, calls=None, recipe=RECIPE):
    def train(model):
        (calls if calls is not None else []).append(1)
        with torch.no_grad():
            model.embedding.weight.add_(1)
            model.norm.running_mean.fill_(3)
        return score

    return load_or_train(recipe, Tied, train, GOAL, seed=0)


def test_second_time_comes_from_the_file(kept):
    calls = []
    first, score = _get(calls=calls)
    again, same = _get(calls=calls, score=0.6)
    assert len(calls) == 1
    assert score == same == 0.75
    assert not again.training
    assert again.head.weight is again.embedding.weight
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    assert again.norm.running_mean.tolist() == [3] * 4
    assert [path.suffix for path in kept.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("change", [{"workload": "other"}, {"version": 2}, {"options": {"seed": 1}}, {"data": "abd"}])
def test_key_depends_on_everything(change):
    assert replace(RECIPE, **change).key != RECIPE.key


def test_key_does_not_depend_on_the_order_of_options():
    assert replace(RECIPE, options={"a": 1, "b": 2}).key == replace(RECIPE, options={"b": 2, "a": 1}).key


def test_key_depends_on_torch(monkeypatch):
    before = RECIPE.key
    monkeypatch.setattr(torch, "__version__", "9.9.1+cpu")
    assert RECIPE.key != before


def _damage_empty(path):
    path.write_bytes(b"")


def _damage_cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def _damage_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _damage_text(path):
    path.write_bytes(b"no safetensors here " * 100)


def _damage_other_model(path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, path)


@pytest.mark.parametrize("damage", [_damage_empty, _damage_cut, _damage_bit, _damage_text, _damage_other_model])
def test_damaged_file_is_trained_anew(kept, damage):
    calls = []
    first, _ = _get(calls=calls)
    path = next(kept.iterdir())
    damage(path)
    second, _ = _get(calls=calls)
    assert len(calls) == 2
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    _get(calls=calls)
    assert len(calls) == 2


def test_score_below_the_floor_is_not_kept(kept):
    with pytest.raises(UnsilentError, match=r"'toy' reached accuracy 0\.4000, expected at least 0\.5"):
        _get(score=0.4)
    assert not list(kept.iterdir())


def test_cache_under_a_file(kept, monkeypatch):
    (kept / "file").write_text("x")
    monkeypatch.setenv("UNSILENT_CACHE", str(kept / "file" / "deeper"))
    calls = []
    with pytest.raises(UsageError, match=r"cannot save trained weights in .*deeper: Not a directory; free space"):
        _get(calls=calls)
    assert not calls, "a cache that cannot be written is told before training"


def test_full_disk(kept, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device.*set UNSILENT_CACHE"):
        _get()
    assert not list(kept.iterdir())


def test_first_of_two_trainings_stands(kept):
    """Another process finishes while this one trains: its weights are the ones both use."""

    def slow(model):
        other, _ = _get()
        with torch.no_grad():
            model.embedding.weight.zero_()
        slow.other = other
        return 0.9

    model, score = load_or_train(RECIPE, Tied, slow, GOAL, seed=0)
    assert score == 0.75
    assert torch.equal(model.embedding.weight, slow.other.embedding.weight)


KILLED = """
import os, signal
from torch import nn
from unsilent.workloads.cache import TrainedWeightsRecipe, load_or_train
from unsilent.workloads.model_fitting import Goal
def train(model):
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
load_or_train(TrainedWeightsRecipe("killed", 1, {}, ""), lambda: nn.Linear(2, 2), train, Goal("accuracy", 0), seed=0)
"""


@pytest.mark.slow
def test_killed_while_writing(kept):
    done = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "UNSILENT_CACHE": str(kept)})
    assert done.returncode == -signal.SIGKILL
    assert not list(kept.glob("*.safetensors"))
    (left,) = kept.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    os.utime(left, (0, 0))
    young = kept / ".unsilent-young"  # may be in use
    young.write_bytes(b"")
    _get()
    assert sorted(path.suffix or path.name for path in kept.iterdir()) == sorted([young.name, ".safetensors"])


def test_folder(monkeypatch):
    monkeypatch.setenv("UNSILENT_CACHE", "/a/b")
    assert folder() == Path("/a/b")
    monkeypatch.delenv("UNSILENT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert folder() == Path("/x/unsilent")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folder() == Path.home() / ".cache" / "unsilent"
