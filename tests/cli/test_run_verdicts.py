"""A script that is not changed, under ``unsilent run --on-alarm replay``: it ends with the exit code of the fault verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import ctypes
    import sys

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(30 * 8, 4)
    if sys.argv[1] == "data":
        data[25 * 8] = float("nan")


    def loss_of(out, x):
        return (out - x[:, :2]).square().mean()


    def train(loss_of):
        for (x,) in DataLoader(TensorDataset(data), 8):
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
            optimizer.step()


    class Executions:
        def __init__(self):
            self.count = ctypes.c_int(0)  # nothing leads to the number, so that it is not put back

        def __call__(self, out, x):
            self.count.value += 1
            return loss_of(out, x) * (1e9 if self.count.value == 26 else 1)


    train(Executions() if sys.argv[1] == "transient" else loss_of)
"""


@pytest.mark.slow
def test_a_script_ends_with_the_exit_code_of_its_verdict(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    words = [sys.executable, "-m", "unsilent", "run", "--on-alarm", "replay", "--sampling", "fixed:1", "--events"]

    def run(number, kind):
        return subprocess.run(
            [*words, f"{number}.jsonl", "train.py", kind], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env=os.environ | {"NPU_ASD_CONFIG": "enable:true"},
        )  # fmt: skip

    ended = [run(number, kind) for number, kind in enumerate(("clean", "data", "transient", "transient"))]
    assert [one.returncode for one in ended] == [0, 1, 16, 17], ended[2].stderr
    assert "data (UNSILENT-S01)" in ended[1].stderr
    assert "transient (UNSILENT-T01)" in ended[2].stderr
    assert "device (UNSILENT-D04)" in ended[3].stderr
    (line,) = [one for one in ended[2].stderr.splitlines() if "kind of fault" in one]
    assert "event code 80818C00" in line
    assert "level minor" in line
    events = [json.loads(line) for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    assert events[-1]["how"] == "stopped"
