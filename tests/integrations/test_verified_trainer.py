"""transformers' Trainer with verified saving: every file of every checkpoint is covered, and only what differs is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import unsilent  # noqa: E402
from unsilent.checkpoints.verified_saving import CheckpointDamaged  # noqa: E402
from unsilent.cli.main import run  # noqa: E402
from unsilent.integrations.transformers import VerifiedResumeCallback, VerifiedSavingCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


class Changed(transformers.TrainerCallback):
    """Changes a saved file before it is verified."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def on_save(self, args, state, control, **given):
        path = f"{args.output_dir}/checkpoint-{state.global_step}/{self.name}"
        saved = torch.load(path)
        saved["state"][0]["exp_avg"].view(-1)[0] = self.value
        torch.save(saved, path)


class Begun(transformers.TrainerCallback):
    """Notes at which step a training begins."""

    def on_train_begin(self, args, state, control, **given):
        self.step = state.global_step


def train(folder, changed=None, resume=None, max_steps=4, **arguments):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 8))]
    settings = transformers.TrainingArguments(
        str(folder), max_steps=max_steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", **arguments
    )  # fmt: skip
    trainer = transformers.Trainer(model=transformers.LlamaForCausalLM(config), args=settings, train_dataset=rows)
    if changed:
        trainer.add_callback(changed)
    trainer.add_callback(VerifiedSavingCallback(trainer))
    if resume is None:
        trainer.train()
        return folder / "checkpoint-4"
    trainer.add_callback(VerifiedResumeCallback(trainer))
    resumed = Begun()
    trainer.add_callback(resumed)
    trainer.train(resume_from_checkpoint=resume)
    return resumed.step


def test_every_file_of_a_checkpoint_is_covered(tmp_path, capsys):
    folder = train(tmp_path)
    content = json.loads((tmp_path / "checkpoint-4.manifest.json").read_text())
    assert set(content["files"]) == {path.name for path in folder.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= set(content["files"])
    assert any(name.startswith("optimizer/") for name in content["tensors"])
    assert unsilent.verified_load(folder) == folder
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert run(["checkpoint", "verify", str(folder)]) == 1, name
        (folder / name).write_bytes(whole)
    state = torch.load(folder / "optimizer.pt")
    state["state"][0]["exp_avg"].view(-1)[0] = math.nan
    torch.save(state, folder / "optimizer.pt")
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(folder)]) == 1
    assert "optimizer/0/exp_avg has changed" in capsys.readouterr().out


def test_an_optimizer_that_differs_from_memory_is_found(tmp_path):
    with pytest.raises(CheckpointDamaged, match="optimizer/"):
        train(tmp_path, Changed("optimizer.pt", 1e30))


def test_a_checkpoint_of_the_model_alone_is_verified(tmp_path):
    folder = train(tmp_path, save_only_model=True)
    assert not (folder / "optimizer.pt").exists()
    assert run(["checkpoint", "verify", str(folder)]) == 0


def test_a_trainer_resumes_from_the_newest_checkpoint_that_verifies(tmp_path):
    newest = train(tmp_path) / "optimizer.pt"
    assert unsilent.last_good_checkpoint(tmp_path).good.step_from == "manifest"
    assert train(tmp_path, resume=True, max_steps=6) == 4
    newest = tmp_path / "checkpoint-6" / "optimizer.pt"
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged, match="checkpoint-6 is not as it was saved"):
        train(tmp_path, resume=str(newest.parent), max_steps=8)
    assert train(tmp_path, resume=True, max_steps=8) == 4
    for manifest in tmp_path.glob("*.manifest.json"):
        manifest.unlink()
    with pytest.raises(CheckpointDamaged, match=r"No checkpoint below .* verifies\."):
        train(tmp_path, resume=True, max_steps=10)
