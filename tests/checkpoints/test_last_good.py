"""The newest checkpoint that verifies: by the step of its manifest, its state or its name, and by time."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import unsilent
from conftest import in_process
from unsilent.basics.errors import UsageError
from unsilent.checkpoints.manifest import manifest_path, read_manifest
from unsilent.cli.main import run


def save(folder: Path, name: str, step: int | None = None, state: dict[str, object] | None = None) -> Path:
    unsilent.verified_save({"w": torch.arange(8.0), **(state or {})}, folder / name, step=step)
    return folder / name


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.find(struct.pack("<f", 5.0))  # an element of the tensor, or the middle of a file without
    content[place if place > 0 else len(content) // 2] ^= 1
    path.write_bytes(content)


def last_good(folder: Path, **options: object) -> tuple[str | None, int | None, str]:
    good = unsilent.last_good_checkpoint(folder, **options).good
    return (None, None, "") if good is None else (good.path.name, good.step, good.step_from)


def test_the_step_is_in_the_manifest(tmp_path):
    manifest = unsilent.verified_save({"w": torch.ones(2)}, tmp_path / "c.pt", step=70)
    assert read_manifest(manifest).step == 70
    unsilent.verified_save({"w": torch.ones(2)}, tmp_path / "c.pt")
    assert read_manifest(manifest).step is None
    with pytest.raises(UsageError, match="step is -1; expected 0 or more"):
        unsilent.verified_save({"w": torch.ones(2)}, tmp_path / "c.pt", step=-1)


def test_a_manifest_without_a_step_is_read_and_a_wrong_one_refused(tmp_path):
    from unsilent.checkpoints.manifest import manifest_digest

    manifest = unsilent.verified_save({"w": torch.ones(2)}, tmp_path / "c.pt")
    for change, step in (({}, None), ({"step": 3}, 3), ({"step": "3"}, UsageError), ({"step": -3}, UsageError)):
        values = json.loads(manifest.read_text())
        del values["step"], values["xxh3_128"]
        values |= change
        manifest.write_text(json.dumps({**values, "xxh3_128": manifest_digest(values)}))
        if step is UsageError:
            with pytest.raises(UsageError, match="is no manifest"):
                read_manifest(manifest)
        else:
            assert read_manifest(manifest).step == step
        manifest = unsilent.verified_save({"w": torch.ones(2)}, tmp_path / "c.pt")


def test_the_step_comes_from_the_manifest_then_from_the_state_then_from_the_name(tmp_path):
    for name, step, state, expected in (
        ("a-1.pt", 40, {"step": 30}, (40, "manifest")),
        ("b-1.pt", None, {"step": 50}, (50, "state")),
        ("c-1.pt", None, {"global_step": 60}, (60, "state")),
        ("d-70.pt", None, {"epoch": 1}, (70, "name")),
        ("step-80", None, {}, (80, "name")),  # a folder of torch.distributed.checkpoint
        ("e-90.safetensors", None, {}, (90, "name")),
    ):
        save(tmp_path, name, step, state)
        assert last_good(tmp_path) == (name, *expected)


def test_of_a_corrupt_newest_one_the_one_before_is_taken(tmp_path):
    for step in (10, 20, 30):
        path = save(tmp_path, f"step-{step}.pt", step)
    change_a_byte(path)
    result = unsilent.last_good_checkpoint(tmp_path)
    assert (result.good.path, result.good.step, result.exit_code) == (tmp_path / "step-20.pt", 20, 0)
    assert [(c.path.name, c.verdict) for c in result.checkpoints] == [
        ("step-30.pt", "not as its manifest says: model/w has changed"), ("step-20.pt", "verified"),
        ("step-10.pt", "not verified: older"),
    ]  # fmt: skip


def test_what_was_written_at_the_step_of_the_fault_or_later_is_named(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, f"step-{step}.pt", step)
    result = unsilent.last_good_checkpoint(tmp_path, before_step=20)
    assert result.good.step == 10
    assert [c.path.name for c in result.not_before] == ["step-30.pt", "step-20.pt"]
    assert last_good(tmp_path, before_step=21)[1] == 20
    none = unsilent.last_good_checkpoint(tmp_path, before_step=10)
    assert (none.good, none.exit_code) == (None, 1)
    with pytest.raises(UsageError, match="^before_step= is -1; expected 0 or more"):
        unsilent.last_good_checkpoint(tmp_path, before_step=-1)


def test_those_without_a_step_are_ordered_by_time_and_that_is_said(tmp_path):
    for name, time in (("old.pt", 1_000), ("new.pt", 3_000), ("middle.pt", 2_000)):
        os.utime(save(tmp_path, name), (time, time))
    result = unsilent.last_good_checkpoint(tmp_path)
    assert [c.path.name for c in result.checkpoints] == ["new.pt", "middle.pt", "old.pt"]
    shown = in_process("checkpoint", "last-good", tmp_path, "--plain").stdout
    assert (
        "3 checkpoints have no known step, and are listed after those with one, by the time of the last change" in shown
    )
    # Nobody knows whether these are older than a step.
    assert last_good(tmp_path, before_step=5) == (None, None, "")


def test_one_without_a_manifest_is_not_taken(tmp_path):
    save(tmp_path, "step-10.pt", 10)
    torch.save({"w": torch.ones(2), "step": 20}, tmp_path / "step-20.pt")
    result = unsilent.last_good_checkpoint(tmp_path)
    assert result.good.step == 10
    assert (result.checkpoints[0].verdict, result.checkpoints[0].step_from) == (
        "not verified: it has no manifest",
        "state",
    )


def test_folders_of_a_trainer_and_folders_inside(tmp_path):
    model = nn.Linear(2, 2)
    for step in (100, 200):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(torch.optim.Adam(model.parameters()).state_dict(), folder / "optimizer.pt")
        assert run(["checkpoint", "manifest", str(folder)]) == 0
    assert last_good(tmp_path) == last_good(tmp_path / "run") == ("checkpoint-200", 200, "name")
    change_a_byte(folder / "optimizer.pt")
    assert last_good(tmp_path) == ("checkpoint-100", 100, "name")
    with pytest.raises(UsageError, match="checkpoint-100 is a checkpoint itself; give the folder that it is in"):
        unsilent.last_good_checkpoint(tmp_path / "run" / "checkpoint-100")


def test_a_manifest_of_what_was_removed_and_drafts_are_no_checkpoints(tmp_path):
    save(tmp_path, "step-10.pt", 10)
    save(tmp_path, "step-20.pt", 20).unlink()
    draft = tmp_path / ".host.step-30.pt.x.unsilent-draft"
    draft.mkdir()
    torch.save({"step": 30}, draft / "content.pt")
    (tmp_path / "latest.pt").symlink_to("step-10.pt")
    assert [c.path.name for c in unsilent.last_good_checkpoint(tmp_path).checkpoints] == ["step-10.pt"]


def test_a_folder_that_a_killed_save_had_moved_away_is_put_back_and_found(tmp_path):
    save(tmp_path, "step-10", 10)
    (tmp_path / "step-10").rename(tmp_path / ".step-10.old")
    assert last_good(tmp_path) == ("step-10", 10, "manifest")


def test_a_damaged_manifest_hides_nothing(tmp_path):
    save(tmp_path, "step-10.pt", 10)
    change_a_byte(manifest_path(save(tmp_path, "step-20.pt", 20)))
    result = unsilent.last_good_checkpoint(tmp_path)
    assert result.good.step == 10
    assert (result.checkpoints[0].step, result.checkpoints[0].step_from) == (20, "name")
    assert result.checkpoints[0].verdict.startswith("not verified: ")


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        save(Path(), f"step-{step}.pt", step)
    done = in_process("checkpoint", "last-good", ".", "--before-step", 30, "--json")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["checkpoint"], shown["step"], shown["step_from"]) == (
        0,
        "step-20.pt",
        20,
        "manifest",
    )
    assert [(r["checkpoint"], r["step"], r["before_step"]) for r in shown["results"]] == [
        ("step-30.pt", 30, False), ("step-20.pt", 20, True), ("step-10.pt", 10, True)
    ]  # fmt: skip
    done = in_process("checkpoint", "last-good", ".", "--before-step", 30)
    assert "step-20.pt is the newest checkpoint before step 30 that verifies (step 20, from its manifest)" in " ".join(
        done.stdout.split()
    )
    assert "written at step 30 or later: step-30.pt" in done.stdout


def test_none_that_is_good_is_one_line_and_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process("checkpoint", "last-good", ".")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.strip() == "No checkpoint was found below ."
    change_a_byte(save(Path(), "step-10.pt", 10))
    done = in_process("checkpoint", "last-good", ".", "--plain")
    assert done.returncode == 1
    said = "No checkpoint below . verifies. step-10.pt (step 10): not as its manifest says: model/w has changed"
    assert done.stdout.startswith(f"# {said}\n")
    done = in_process("checkpoint", "last-good", "step-10.pt")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "step-10.pt is no folder; give the folder that checkpoints are in" in done.stderr
    done = in_process("checkpoint", "last-good", ".", "--before-step", 10)
    assert "No checkpoint below . is known to be older than step 10" in " ".join(done.stdout.split())
