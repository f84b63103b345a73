"""A local transformers folder: small random models of several architectures, with the network cut off."""

from __future__ import annotations

import importlib
import json
import socket

import numpy as np
import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.workloads import load

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def _gpt2(kind="GPT2LMHeadModel"):
    config = transformers.GPT2Config(vocab_size=99, n_positions=24, n_embd=32, n_layer=2, n_head=2, **IDS)
    return getattr(transformers, kind)(config)


def _bert(kind="BertForSequenceClassification", labels=3):
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=99, num_labels=labels, **SMALL))


def _vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=4, **SMALL)
    return transformers.ViTForImageClassification(config)


def _llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, num_key_value_heads=1, **SMALL, **IDS))


def _t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=99, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )


MODELS = {
    "gpt2": (_gpt2, "NextToken()", (16, 24, 99), {"embedding", "attention", "mlp", "norm"}),
    "bert": (_bert, "Top1()", (16, 3), {"embedding", "attention", "mlp", "norm", "head"}),
    "vit": (_vit, "Top1()", (16, 4), {"embedding", "attention", "mlp", "norm", "head"}),
    "llama": (_llama, "NextToken()", (16, 32, 99), {"embedding", "attention", "mlp", "norm", "head"}),
    "t5": (_t5, "NextToken()", (16, 32, 99), {"embedding", "attention", "mlp", "norm"}),
    "bert-regression": (lambda: _bert(labels=1), "Tolerance", (16, 1), {"head"}),
    "bert-bare": (lambda: _bert("BertModel"), "Tolerance", (16, 32, 32), {"head"}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    transformers.utils.logging.disable_progress_bar()
    for name, (make, *_) in MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
    transformers.utils.logging.enable_progress_bar()
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", MODELS)
def test_architectures(models, name, capfd):
    _, judge, shape, components = MODELS[name]
    first, second = (load(f"hf:{models / name}") for _ in range(2))
    assert capfd.readouterr() == ("", "")
    assert repr(first.judge).startswith(judge)
    model, (batch,) = first.model(), first.batches()
    with torch.no_grad():
        output = first.run(model, batch)
        again = second.run(second.model(), second.batches()[0])
    assert output.shape == shape
    assert torch.isfinite(output).all()
    assert torch.equal(output, again)
    assert not first.judge(output, output, batch).incorrect.any()
    assert not model.training
    assert components <= first.components.keys()
    listed = sorted(name for names in first.components.values() for name in names)
    assert listed == sorted(name for name, _ in model.named_parameters())
    assert first.info["synthetic_inputs"] is True
    assert first.info["data"].startswith("synthetic: seeded")
    assert json.loads(json.dumps(first.info)) == first.info


def test_weights_are_those_of_the_folder(models):
    from safetensors.torch import load_file

    stored = load_file(models / "bert" / "model.safetensors")
    ours = load(f"hf:{models / 'bert'}").model().state_dict()
    assert all(torch.equal(ours[key], value) for key, value in stored.items())


def test_options(models):
    workload = load(f"hf:{models / 'gpt2'}", {"eval": "6", "batch": "4", "length": "5", "seed": "3"})
    assert [tuple(batch["input_ids"].shape) for batch in workload.batches()] == [(4, 5), (2, 5)]
    other = load(f"hf:{models / 'gpt2'}", {"eval": "6", "length": "5", "seed": "4"})
    assert not torch.equal(other.batches()[0]["input_ids"][:4], workload.batches()[0]["input_ids"])


def test_tokenizer_of_the_folder(models, tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    model = _gpt2()
    model.save_pretrained(tmp_path)
    words = {word: i for i, word in enumerate(["?", *"abcdefghijklmnopqrstuvwxyz"])}
    raw = Tokenizer(kinds.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?").save_pretrained(tmp_path)
    workload = load(f"hf:{tmp_path}")
    assert "the Python reference, tokenised" in workload.info["data"]
    assert workload.info["synthetic_inputs"] is True
    ids = workload.batches()[0]["input_ids"]
    assert ids.shape == (16, 24)
    assert len(ids.unique()) > 10


def test_inputs_of_the_users_own(models, tmp_path):
    tokens = np.arange(40, dtype=np.int32).reshape(5, 8)
    np.savez(tmp_path / "in.npz", input_ids=tokens, attention_mask=np.ones((5, 8), bool))
    workload = load(f"hf:{models / 'bert'}", {"batch": "2"}, data=str(tmp_path / "in.npz"))
    assert [len(batch["input_ids"]) for batch in workload.batches()] == [2, 2, 1]
    assert workload.batches()[0]["input_ids"].dtype == torch.int64
    assert workload.info["synthetic_inputs"] is False
    pixels = np.random.default_rng(0).random((3, 3, 16, 16))
    np.savez(tmp_path / "pixels.npz", pixel_values=pixels)
    (batch,) = load(f"hf:{models / 'vit'}", data=str(tmp_path / "pixels.npz")).batches()
    assert batch["pixel_values"].dtype == torch.float32


IDS_5 = np.zeros((5, 8), np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": IDS_5}, r"unknown input of BertForSequenceClassification in .* 'tokens'"),
        (
            {"input_ids": IDS_5, "attention_mask": IDS_5[:4]},
            r"expected the same number of samples, at least 1, in each",
        ),
        ({}, r"holds arrays of these lengths: none"),
        ({"input_ids": IDS_5 + 99}, r"'input_ids' ranges from 99 to 99; the model has tokens 0 to 98"),
        ({"input_ids": IDS_5 - 1}, r"'input_ids' ranges from -1 to -1"),
        ({"input_ids": IDS_5.astype(str)}, r"'input_ids' is <U\d+ \[5, 8\]; expected numbers"),
        ({"input_ids": np.array([None] * 5)}, r"is damaged, or is not a .npz file of plain arrays"),
        ({"input_ids": IDS_5[:0]}, r"'input_ids' is int64 \[0, 8\]; expected numbers"),
        (
            {"input_ids": np.zeros((2, 999), int)},
            r"cannot run on input_ids \[2, 999\]: .*; try batch=1 or other inputs",
        ),
    ],
)
def test_bad_inputs(models, tmp_path, arrays, message):
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(UsageError, match=message) as caught:
        load(f"hf:{models / 'bert'}", data=str(tmp_path / "in.npz"))
    assert "\n" not in str(caught.value)


def test_unreadable_inputs(models, tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "bare.npy", IDS_5)
    for name, message in [
        ("text.npz", "is damaged, or is not a .npz"),
        ("bare.npy", "holds a single array without a name; expected a .npz with arrays named like 'input_ids'"),
        ("gone.npz", "cannot read .*: No such file"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(f"hf:{models / 'bert'}", data=str(tmp_path / name))


def _edited(models, tmp_path, **changes):
    """A copy of the BERT folder with another config."""
    for path in (models / "bert").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"hf:{tmp_path}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, r"config.json names no architectures"),
        ({"architectures": ["NoSuchModel"]}, r"transformers [\d.]+\w* has no model 'NoSuchModel', and code in the folder is"),
        ({"architectures": ["logging"]}, r"has no model 'logging'"),
        ({"model_type": "no-such-type"}, r"cannot read config.json: "),
        ({"num_hidden_layers": 3}, r"the weights of BertForSequence\w+ lack 'bert\.encoder\.layer\.2\..*' \(16 tensors are"),
        ({"vocab_size": 50}, r"cannot load BertForSequenceClassification: "),
    ],
)  # fmt: skip
def test_bad_config(models, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(_edited(models, tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_bad_folders(models, tmp_path):
    with pytest.raises(UsageError, match=r"no config.json in .*gone; expected a folder"):
        load(f"hf:{tmp_path / 'gone'}")
    with pytest.raises(UsageError, match=r"no config.json in \.; expected a folder"):
        load("hf:")
    ref = _edited(models, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header at all")
    with pytest.raises(UsageError, match=r"cannot load BertForSequenceClassification: "):
        load(ref)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no \*\.safetensors in "):
        load(ref)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"cannot read config.json: "):
        load(ref)


def test_bad_options(models):
    for options, message in [
        ({"eval": "0"}, "option 'eval' is 0; expected 1 to"),
        ({"length": "0"}, "option 'length' is 0"),
        ({"batch": "17"}, r"option 'batch' is 17; expected 1 to 16 \(samples in all\)"),
        ({"tokens": "9"}, "unknown option of workload 'hf:.*gpt2' 'tokens'"),
    ]:
        with pytest.raises(UsageError, match=message):
            load(f"hf:{models / 'gpt2'}", options)
    with pytest.raises(UsageError, match="brings its own weights"):
        load(f"hf:{models / 'gpt2'}", weights="w")


def test_no_padding_token(tmp_path):
    _gpt2("GPT2ForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot run on .*padding token.*; try batch=1"):
        load(f"hf:{tmp_path}")
    assert len(load(f"hf:{tmp_path}", {"batch": "1"}).batches()) == 16


def test_inputs_that_cannot_be_made_up(tmp_path):
    config = transformers.Wav2Vec2Config(
        conv_dim=[8],
        conv_stride=[4],
        conv_kernel=[4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **SMALL,
    )
    transformers.Wav2Vec2Model(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no synthetic 'input_values' can be made for Wav2Vec2Model; give data="):
        load(f"hf:{tmp_path}")


def test_missing_extra(models, monkeypatch):
    real = importlib.import_module

    def without(name, package=None):
        if name.split(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UsageError, match=r"needs transformers; pip install 'unsilent\[transformers\]'"):
        load(f"hf:{models / 'gpt2'}")


def test_user_settings_of_transformers_are_left(models):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(f"hf:{models / 'gpt2'}")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# -- generation --------------------------------------------------------------------------------------------------------


def _by_hand(model, ids, count):
    """Greedy decoding without a cache: the new tokens alone; what follows an end token is padding."""
    rows = ids
    for _ in range(count):
        new = model(input_ids=rows, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ended = (rows[:, ids.shape[1] :] == IDS["eos_token_id"]).any(1, keepdim=True)
        rows = torch.cat([rows, torch.where(ended, torch.full_like(new, IDS["eos_token_id"]), new)], 1)
    return rows[:, ids.shape[1] :]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_gives_the_new_tokens_alone(models, name, capfd):
    options = {"generate": "5", "eval": "3", "length": "9"}
    workload = load(f"hf:{models / name}", options)
    model, (batch,) = workload.model(), workload.batches()
    with torch.no_grad():
        output, again = workload.run(model, batch), workload.run(model, batch)
        expected = _by_hand(model, batch["input_ids"], 5)
    assert output.shape[1] <= 5
    assert torch.equal(output, expected[:, : output.shape[1]])
    assert torch.equal(output, again)
    assert repr(workload.judge) == "ExactSequence()"
    assert workload.info["new_tokens"] == 5
    assert capfd.readouterr() == ("", "")


def test_generation_without_sampling_whatever_the_folder_says(models, tmp_path):
    model = _gpt2()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, max_length=10, **IDS
    )
    model.save_pretrained(tmp_path)
    workload = load(f"hf:{tmp_path}", {"generate": "6", "eval": "2", "length": "9"})
    model, (batch,) = workload.model(), workload.batches()
    with torch.no_grad():
        output = workload.run(model, batch)
        assert torch.equal(output, _by_hand(model, batch["input_ids"], 6)[:, : output.shape[1]])


def test_generation_with_a_decoder_of_its_own(models):
    workload = load(f"hf:{models / 't5'}", {"generate": "4", "eval": "3"})
    (batch,) = workload.batches()
    assert batch.keys() == {"input_ids", "attention_mask"}
    with torch.no_grad():
        output = workload.run(workload.model(), batch)
    assert output.shape[0] == 3
    assert 1 <= output.shape[1] <= 4


def test_prompts_leave_room_for_what_is_generated(models):
    workload = load(f"hf:{models / 'gpt2'}", {"generate": "8"})
    assert workload.batches()[0]["input_ids"].shape == (16, 16)  # of 24 positions


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("gpt2", "0", r"option 'generate' is 0; expected 1 to 23 \(new tokens"),
        ("gpt2", "-1", "option 'generate' is -1"),
        ("gpt2", "24", "option 'generate' is 24; expected 1 to 23"),
        ("bert", "8", "BertForSequenceClassification cannot generate text; leave options= generate=8 out"),
        ("vit", "8", "ViTForImageClassification cannot generate text"),
        ("bert-bare", "8", "BertModel cannot generate text"),
    ],
)
def test_generation_that_cannot_be(models, name, tokens, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(f"hf:{models / name}", {"generate": tokens})
    assert "\n" not in str(caught.value)


@pytest.mark.claim
def test_the_cache_is_a_site_of_what_is_generated_and_the_engines_agree(models):
    from unsilent.studies.pvf.study import pvf

    ref, fault = f"hf:{models / 'gpt2'}", "bitflip:bits=exponent_msb"
    options = {"generate": 4, "eval": 2, "length": 6}
    rows = {}
    for engine in ("auto", "plain"):
        done = pvf(ref, at="kv:*", fault=fault, trials=12, options=options, engine=engine)
        rows[engine] = [(r.target, r.sdc, r.due, r.masked, r.benign) for r in done.rows]
        assert {r.target for r in done.rows} >= {"kv", "kv:0", "kv:1"}
    assert rows["auto"] == rows["plain"]
    with pytest.raises(UsageError, match=r"no key/value cache to corrupt: .* add --with generate=N"):
        pvf(ref, at="kv:*", trials=2, options={"eval": 2})
