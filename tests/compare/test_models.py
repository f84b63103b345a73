"""What texts name: workloads, checkpoints, programs, adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.compare.models import load_models

TINY = "tiny.py:make"


@pytest.fixture
def checkpoints(tiny):
    """Files of the tiny model: as it is, its last layer negated, in a parallel and a compiled wrapper, of another size."""
    model = unsilent.load(TINY).model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, "a.pt")
    broken = {**state, "last.weight": -state["last.weight"], "last.bias": -state["last.bias"]}
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in broken.items()}}, "b.pth")
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, "c.pt")
    torch.save({**state, "last.bias": torch.zeros(4)}, "other.pt")
    return tiny


def outputs(model, batches):
    return torch.cat([model.run(batch) for batch in batches])


def test_two_checkpoints_of_one_architecture(checkpoints):
    pair = load_models("a.pt", "b.pth", TINY)
    original, deployed, batches = pair.original, pair.deployed, list(pair.workload.batches())
    with torch.no_grad():
        first, second = outputs(original, batches), outputs(deployed, batches)
    torch.testing.assert_close(first, -second)
    assert (original.name, deployed.name) == ("a.pt", "b.pth")
    found = unsilent.compare_models("a.pt", "b.pth", workload=TINY)
    assert found.changed.estimate == 1


def test_a_checkpoint_compared_with_the_workload_leaves_its_model_as_it_is(checkpoints):
    pair = load_models(TINY, "b.pth")
    assert pair.original.module is pair.workload.model() is not pair.deployed.module
    assert unsilent.compare_models(TINY, "c.pt").measures["identical"].estimate == 1


def test_a_program_reads_the_inputs_of_the_original(checkpoints):
    model = unsilent.load(TINY).model()
    batch = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(model, (torch.randn(7, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, "model.pt2")
    found = unsilent.compare_models(TINY, "model.pt2")
    assert (found.n, found.changed.estimate) == (14, 0)
    assert not Path("inputs.pt").exists()


def test_a_workload_of_the_users_own_as_deployed_model(checkpoints):
    found = unsilent.compare_models(TINY, "tiny.py:raises")
    assert found.measures["identical"].estimate == 1


def test_labels_and_options_are_those_of_the_workload():
    found = unsilent.compare_models("digits-cnn", unsilent.load("digits-cnn"), options={"eval": "40"})
    assert (found.n, found.lost.estimate, found.gained.estimate) == (40, 0, 0)
    assert found.measures["right, original"].estimate > 0.9
    assert found.data.startswith("scikit-learn digits")


@pytest.mark.parametrize(
    ("original", "deployed", "workload", "message"),
    [
        ("a.pt", "b.pth", None, "a.pt holds weights, not a model to run; name a workload of its architecture with workload="),
        ("a.pt", "other.pt", TINY, r"other.pt does not fit tiny: it has 'last.bias' as \[4\], expected \[3\]"),
        ("a.pt", "no.pt", TINY, "no.pt"),
        ("a.pt", "tiny.py", TINY, "needs a name after it"),
        (TINY, "model.pt2", None, "model.pt2"),
        ("digits-cnn", "digits-mlp", None, "unknown model 'digits-mlp'; did you mean .*FILE.pt2"),
        ("digits-cnn", "digits-vi", None, "did you mean 'digits-vit'"),
        ("digits-cnn", "compile", None, "did you mean 'compiled'"),
        (TINY, "weights.dat", None, "unknown model 'weights.dat'.* Known: bf16, chargpt, .* Or give a checkpoint FILE.pt, "),
        (TINY, "some/weights.dat", None, "unknown model 'some/weights.dat'"),
        ("digits-cn", "int8", None, "did you mean 'digits-cnn'"),
        ("a.pt", "digits-cnn", TINY, "digits-cnn cannot run on batch 0"),
    ],
)  # fmt: skip
def test_bad_names_are_said_in_one_line(checkpoints, original, deployed, workload, message):
    with pytest.raises(UsageError, match=message) as raised:
        unsilent.compare_models(original, deployed, workload=workload)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("adapter", ["int8", "int8:tensor", "prune:0.8", "prune:0.8+int8", "bf16"])
def test_adapters_make_copies(checkpoints, adapter):
    pytest.importorskip("unsilent.compare.adapters.names")
    found = unsilent.compare_models(TINY, adapter)
    assert (found.deployed, found.n) == (adapter, 14)
    assert found.measures["identical"].estimate < 1


@pytest.mark.parametrize("adapter", ["int9", "prun:0.8", "intt8+prune:0.5"])
def test_unknown_adapters_are_compared_with_known_ones(checkpoints, adapter):
    pytest.importorskip("unsilent.compare.adapters.names")
    with pytest.raises(UsageError, match="did you mean"):
        unsilent.compare_models(TINY, adapter)


def test_workloads_are_named_as_the_user_named_them(checkpoints):
    Path("own.py").write_text(
        "import torch, unsilent\ndef make():\n    return unsilent.Workload(torch.nn.Linear(6, 3), [torch.ones(2, 6)])\n"
    )
    torch.save({"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}, "misfit.pt")
    found = unsilent.compare_models("own.py:make", "bf16")
    assert (found.original, found.deployed) == ("own.py:make", "bf16")
    with pytest.raises(UsageError, match="does not fit own.py:make"):
        unsilent.compare_models("own.py:make", "misfit.pt")


def found_ids(folder, number):
    return unsilent.load(f"hf:{folder}", {"eval": "4", "length": "12"}).batches()[0]["input_ids"][number].tolist()


def test_two_folders_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=99, n_positions=24, n_embd=32, n_layer=2, n_head=2, pad_token_id=None)
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    found = unsilent.compare_models(
        f"hf:{tmp_path / 'a'}", f"hf:{tmp_path / 'b'}", options={"eval": "4", "length": "12"}
    )
    assert (found.n, found.language.positions, found.language.greedy.prompts) == (4, 48, 4)
    assert found.language.kl.min() > 0
    number, text = found.worst_inputs[0]
    assert text == " ".join(str(i) for i in found_ids(tmp_path / "a", number))
    made = unsilent.compare_models(
        f"hf:{tmp_path / 'a'}", f"hf:{tmp_path / 'b'}", options={"eval": "4", "generate": "5"}
    )
    assert made.judge == "exact-sequence"
    assert (made.language.greedy.tokens, made.language.sequences) == (5, ())
    assert "transformers" in sys.modules
