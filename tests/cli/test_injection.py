"""``unsilent replay-injection FILE.csv``: what it prints, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.cli.file_sorts import sort_of_file
from unsilent.cli.progress import make_observer
from unsilent.cli.replay_injection import COMMAND

pytestmark = pytest.mark.slow

FILE = """model,resnet18
stage,fwrd_inject
fmodel,RD
target_worker,1
target_layer,basicblock_2_basic_0_conv2
target_epoch,0
target_step,0
inj_pos,0/3/3/5
inj_values,4.5e+10
learning_rate,0.001
seed,123
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("images.npz", images=rng.integers(0, 256, (60, 32, 32, 3), np.uint8), labels=rng.integers(0, 10, 60))
    Path("fault.csv").write_text(FILE)
    return Path("fault.csv")


def test_a_file_is_replayed_and_its_log_written(files, capsys):
    with make_observer(quiet=False, plain=True) as observer:
        asked = {"data": "images.npz", "steps": 1, "batch_size": 8, "images": 30, "plain": True}
        assert COMMAND.call(file=files, observer=observer, **asked) == 0
    out, err = capsys.readouterr()
    lines = [line.partition(", loss")[0] for line in out.splitlines()]
    twin = lines.index("without the fault: Epoch: 0/80, step: 0/49")
    assert lines[twin + 1] == "with the fault: Epoch: 0/80, step: 0/49"
    assert out.endswith("# Log: replay_fault.txt\n")
    assert "Epoch: 0/80, step: 1/49" in err
    assert "Position is (0, 3, 3, 5), Golden data is " in Path("replay_fault.txt").read_text()


def test_json_is_one_object_and_quiet_is_quiet(files, capsys):
    assert COMMAND.call(file=files, data="images.npz", steps=0, batch_size=8, log=Path("x.txt"), json=True) == 0
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["log"] == "x.txt"
    assert told["fault"]["site"] == "op:basicblock_2.basic_0.conv2#convolution.0/fwd/out"


def test_errors_are_those_of_the_file(files):
    files.write_text(FILE.replace("0/3/3/5", "0/3/3"))
    with pytest.raises(UsageError, match=r"fault.csv, row 8, column 2: index has 3 parts, expected 4"):
        COMMAND.call(file=files, data="images.npz")


def test_what_is_taken_for_an_injection(files):
    files.rename("A.CSV")
    assert sort_of_file(Path("A.CSV")) == "injection"
    assert sort_of_file(Path("images.npz")) == "checkpoint"
