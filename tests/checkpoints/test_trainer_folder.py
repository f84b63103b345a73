"""Folders of a training as transformers' Trainer writes them: every file is read, or named as not read."""

from __future__ import annotations

import collections
import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint_checks import bytes_of
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.cli.main import run


def write_folder(folder, model="safetensors"):
    """The files that a Trainer leaves after some steps."""
    generator = torch.Generator().manual_seed(2)
    net = torch.nn.Linear(3, 2)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}])
    optimizer.step()
    folder.mkdir()
    if model == "safetensors":
        save_file(net.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(net.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 4, "_last_lr": [0.5]}, folder / "scheduler.pt")
    rng = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "cpu": torch.get_rng_state(),
    }
    torch.save(rng, folder / "rng_state.pth")
    torch.save(collections.OrderedDict(), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    return folder


@pytest.fixture(params=["safetensors", "bin"])
def folder(request, tmp_path):
    return write_folder(tmp_path / "checkpoint-4", request.param)


def command(capsys, *arguments):
    capsys.readouterr()
    code = run(["checkpoint", *map(str, arguments)])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return code, shown.out + shown.err


def test_all_of_the_training_is_listed(folder):
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.format == "transformers"
        assert {
            "model/weight",
            "model/bias",
            "optimizer/0/exp_avg",
            "optimizer/1/exp_avg_sq",
            "scheduler/last_epoch",
        } <= set(checkpoint.tensors)
        assert {t.section for t in checkpoint.tensors.values()} == {"model", "optimizer", "scheduler", "rng"}
        assert checkpoint.unread_files == ["trainer_state.json", "training_args.bin"]
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        content = b"".join(checkpoint.content(checkpoint.tensor("optimizer/0/exp_avg")))
        assert content == state[0]["exp_avg"].numpy().tobytes()


def test_the_optimizer_is_corrupted_and_restored(folder, tmp_path, capsys):
    before, copy = bytes_of(folder), tmp_path / "copy"
    shutil.copytree(folder, copy)
    saved = tmp_path / "injection.json"
    assert command(capsys, "corrupt", folder, "--section", "optimizer", "--crc", "fixed", "--save", saved)[0] == 0
    changed = [name for name, content in bytes_of(folder).items() if content != before[name]]
    assert changed == ["optimizer.pt"]
    assert command(capsys, "replay", copy, saved, "--crc", "fixed")[0] == 0
    assert bytes_of(copy) == bytes_of(folder)
    code, text = command(capsys, "diff", folder, copy)
    assert (code, "identical" in text) == (0, True)
    assert command(capsys, "undo", folder)[0] == 0
    assert bytes_of(folder) == before
    code, text = command(capsys, "diff", folder, copy)
    assert (code, "1 differs: in 1 element, 1 bit" in " ".join(text.split())) == (1, True)


def test_files_that_are_not_read_are_named(folder, tmp_path, capsys):
    code, text = command(capsys, "inspect", folder, "--plain")
    assert (code, "2 files of the folder not read" in text, "training_args.bin" in text) == (0, True, True)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    code, text = command(capsys, "diff", folder, copy, "--plain")
    assert (code, "2 files not read, with the same bytes" in text) == (0, True)
    (copy / "trainer_state.json").write_text("{}")
    code, text = command(capsys, "diff", folder, copy, "--plain")
    assert (code, "1 file not read, with other bytes" in text) == (1, True)
    (copy / "trainer_state.json").unlink()
    code, text = command(capsys, "diff", folder, copy, "--plain")
    assert (code, "1 file not read, only in" in text) == (1, True)


def test_files_of_other_folders_that_belong_to_no_tensor_are_named(tmp_path):
    folder = tmp_path / "sharded"
    (folder / "inside").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "inside" / "notes.txt").write_text("x")
    (folder / "link").symlink_to(folder / "model.safetensors")
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.unread_files == ["inside/notes.txt", "link"]
