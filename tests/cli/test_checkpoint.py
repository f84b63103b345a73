"""``unsilent checkpoint``: what its verbs take for a checkpoint."""

from __future__ import annotations

import pytest
import torch

from conftest import in_process
from unsilent.cli.table import COMMANDS

FURTHER = {"diff": ("whole.pt",), "replay": ("injection.json",)}


@pytest.mark.parametrize("name", ["model.safetensors.index.json", ".metadata"])
@pytest.mark.parametrize(
    "verb", [name.split()[1] for name in COMMANDS if name.startswith("checkpoint ") and name != "checkpoint study"]
)
def test_a_file_that_lists_others_is_refused_with_the_folder(tmp_path, verb, name):
    (tmp_path / name).write_text("{}")
    done = in_process("checkpoint", verb, tmp_path / name, *FURTHER.get(verb, ()))
    assert done.returncode == 2
    assert done.stderr.endswith(f"expected all of it: give the folder {tmp_path}\n")
    assert done.stderr.count("\n") == 1


def test_the_other_of_two_is_refused_as_well(tmp_path):
    done = in_process("checkpoint", "diff", tmp_path, tmp_path / "model.safetensors.index.json")
    assert f"give the folder {tmp_path}" in done.stderr


def test_inspect_counts_one_value_and_several(tmp_path):
    state = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([1e30, -2e30, 3.0]), "c": torch.ones(4)}
    torch.save(state, tmp_path / "n.pt")
    shown = in_process("checkpoint", "inspect", "n.pt", "--quiet", cwd=tmp_path).stdout
    assert "1 tensor with NaN or infinite values, 1 tensor with values beyond ±1e+06." in " ".join(shown.split())
    assert "`model/a` has 1 NaN or infinite value\n" in shown
    assert "`model/b` has 2 values beyond ±1e+06\n" in shown
