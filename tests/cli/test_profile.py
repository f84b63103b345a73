"""``unsilent profile``: the file that it writes, what it prints, and what it refuses."""

import json

import pytest
import torch

from unsilent.cli.main import run
from unsilent.protection.profile import load_profile
from unsilent.workloads import load

WORKLOAD = """
import torch
from torch import nn
from unsilent.workloads import Workload


class Clean(Workload):
    def clean_batches(self, part, samples):
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(50, 8, generator=generator) for _ in range(samples // 50)]


def clean():
    torch.manual_seed(0)
    return Clean(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), [torch.randn(4, 8)], name="small")


def without():
    return Workload(nn.Linear(8, 4), [torch.randn(4, 8)])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.py").write_text(WORKLOAD)
    return tmp_path


def test_a_profile_is_written_and_read(folder, capsys):
    assert run(["profile", "w.py:clean", "--detector", "dr-dna+golden-test", "--json", "--device", "cpu"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["profile"] == "small.profile"
    assert result["layers"] == ["0", "1", "2"]  # a small model is read whole
    profile = load_profile("small.profile", load("w.py:clean").model())
    assert (profile.threshold, profile.samples) == (result["threshold"], 400)
    assert profile.detector.name == "dr-dna+golden-test"
    assert run(["profile", "w.py:clean", "--layer", "2", "--samples", "500", "-o", "two"]) == 0
    assert "1 layers" in capsys.readouterr().out
    assert load_profile("two", load("w.py:clean").model()).samples == 200
    torch.manual_seed(1)
    assert run(["profile", "w.py:clean", "-o", "no/folder"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["w.py:without"], "has no clean inputs"),
        (["w.py:clean", "--samples", "100"], "there are 100 clean samples in 2 batches"),
        (["w.py:clean", "--samples", "0"], "--samples is 0"),
        (["w.py:clean", "--detector", "dr-house"], "unknown detector 'dr-house'"),
        (["w.py:clean", "--layer", "head.*"], "unknown layer 'head.*'"),
    ],
)
def test_what_is_refused(folder, capsys, words, message):
    assert run(["profile", *words]) == 2
    assert message in capsys.readouterr().err
