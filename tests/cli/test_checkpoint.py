"""``unsilent checkpoint``: what its verbs take for a checkpoint."""

from __future__ import annotations

import pytest

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
