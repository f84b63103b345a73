"""The built-in models compute what they claim, checked against slow and obvious references."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.workloads import help_texts, load
from unsilent.workloads.character_models import character_llama
from unsilent.workloads.cifar_resnet import BasicBlock, CifarResNet
from unsilent.workloads.digits import CLASSIFIERS, digits
from unsilent.workloads.dlrm import Dlrm, interact
from unsilent.workloads.inverted_residuals import (
    DigitsEfficientNet,
    DigitsMobileNet,
    InvertedResidual,
    SqueezeExcitation,
)
from unsilent.workloads.model_fitting import parameter_count


def test_digits_split_is_disjoint_and_complete():
    data = digits()
    assert (len(data.train), len(data.test)) == (1347, 450)
    assert data.train.min() >= -1
    assert data.train.max() <= 1
    assert np.bincount(data.test_labels).min() > 40


@pytest.mark.parametrize("name", few(sorted(CLASSIFIERS), "digits-cnn"))
def test_digits_accuracy_is_that_of_the_model(zoo, name):
    data, model = digits(), zoo(name).model()
    with torch.no_grad():
        right = [
            int(model(image[None]).argmax()) == label for image, label in zip(data.test, data.test_labels, strict=True)
        ]
    # One image at a time rounds differently from all at once: allow one undecided image.
    assert np.mean(right) == pytest.approx(zoo(name).info["accuracy"]["value"], abs=1.1 / 450)


def test_speaking_module_names(zoo):
    assert [name for name, _ in zoo("digits-cnn").model().named_children()] == ["stem", "block1", "block2", "head"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chargpt", "llama-chars"])
def test_language_models_never_look_ahead(zoo, name):
    workload = zoo(name)
    model, tokens = workload.model(), workload.batches()[0][:4]
    with torch.no_grad():
        golden = scores_of(model, tokens)
        for at in (1, 31, 63):
            changed = tokens.clone()
            changed[:, at] = (changed[:, at] + 1) % 97
            output = scores_of(model, changed)
            assert torch.equal(output[:, :at], golden[:, :at])
            assert not torch.equal(output[:, at:], golden[:, at:])


@pytest.mark.slow
def test_chargpt_head_is_tied(zoo):
    model = zoo("chargpt").model()
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.slow
def test_chargpt_text_held_out():
    data = help_texts.load_help_texts()
    letters = help_texts.ALPHABET + "?"
    train, test = ("".join(letters[i] for i in part) for part in (data.train, data.test))
    paragraphs = test.split("\n\n")
    assert len(paragraphs) > 50
    known = set(train.split("\n\n"))
    assert not [p for p in paragraphs if p and p in known]


def test_chargpt_encoding():
    assert help_texts.encode("\n ~é").tolist() == [0, 1, 95, 96]


@pytest.mark.slow
def test_chargpt_accuracy_is_that_of_the_model(zoo):
    data, model = help_texts.load_help_texts(), zoo("chargpt").model()
    right = total = 0
    with torch.no_grad():
        for start in range(0, len(data.test) - 65, 64):
            scores = model(data.test[start : start + 64][None])[0]
            right += int((scores.argmax(1) == data.test[start + 1 : start + 65]).sum())
            total += 64
    assert right / total == pytest.approx(zoo("chargpt").info["accuracy"]["value"], abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chargpt", "llama-chars"])
def test_language_models_save_30_percent_of_the_unigram_cross_entropy(zoo, name):
    data, model = help_texts.load_help_texts(), zoo(name).model()
    counts = np.array([np.count_nonzero(data.train == token) + 1 for token in range(97)])
    unigram = -np.mean([math.log(counts[token] / counts.sum()) for token in data.test.tolist()])
    assert help_texts.unigram_cross_entropy() == pytest.approx(unigram, rel=1e-9)
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, len(data.test) - 65, 64):
            scores = scores_of(model, data.test[start : start + 64][None])[0].double().numpy()
            following = data.test[start + 1 : start + 65].numpy()
            total += np.sum(np.log(np.exp(scores).sum(1)) - scores[np.arange(64), following])
            count += 64
    assert total / count <= 0.7 * unigram
    if name == "llama-chars":
        assert zoo(name).info["accuracy"]["value"] == pytest.approx(1 - total / count / unigram, abs=0.001)


def scores_of(model, tokens):
    """Scores of the next character, float32 [n, t, 97]."""
    output = model(tokens)
    return getattr(output, "logits", output)


def test_character_llama():
    model = character_llama("w", 16, 2, key_value_heads=2)
    assert model(torch.zeros(2, 64, dtype=torch.int64)).logits.shape == (2, 64, 97)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (8, 16)


def test_llama_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="workload 'w' needs transformers; pip install"):
        character_llama("w", 16, 2)


def test_squeeze_excitation_against_loops():
    layer = SqueezeExcitation(4, 2).double()
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 6))
    weights = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    expected = np.empty_like(x)
    for n, sample in enumerate(x):
        means = [channel.sum() / 30 for channel in sample]
        inner = [
            w @ means + b for w, b in zip(weights["reduce.weight"][:, :, 0, 0], weights["reduce.bias"], strict=True)
        ]
        inner = [v / (1 + math.exp(-v)) for v in inner]
        for c in range(4):
            gate = weights["restore.weight"][c, :, 0, 0] @ inner + weights["restore.bias"][c]
            expected[n, c] = sample[c] / (1 + math.exp(-gate))
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("c_out", "stride"), [(8, 1), (12, 1), (8, 2)])
@pytest.mark.parametrize("squeeze", [False, True])
def test_inverted_residual_adds_its_input_where_the_shape_allows(c_out, stride, squeeze):
    block = InvertedResidual(8, c_out, stride, 4, nn.ReLU6, squeeze).eval()
    nn.init.zeros_(block.project[1].weight)  # leaves the residual alone
    x = torch.rand(2, 8, 8, 8)
    expected = x if (c_out, stride) == (8, 1) else torch.zeros(2, c_out, 8 // stride, 8 // stride)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(("make", "act"), [(DigitsMobileNet, nn.ReLU6), (DigitsEfficientNet, nn.SiLU)])
def test_depthwise_convolutions_and_activations(make, act):
    model = make()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    depthwise = [m[0] for name, m in model.named_modules() if name.endswith(".depthwise")]
    assert [(m.groups, m.kernel_size) for m in depthwise] == [(m.in_channels, (3, 3)) for m in depthwise]
    assert len(depthwise) == 5
    assert {type(m) for m in model.modules() if "activation" in type(m).__module__} == {act}
    gates = [m for m in model.modules() if isinstance(m, SqueezeExcitation)]
    assert len(gates) == (5 if make is DigitsEfficientNet else 0)


def test_dlrm_interaction_against_loops():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5, 4, 3))  # samples, vectors, width
    expected = []
    for sample in vectors:
        row = list(sample[0])
        for i in range(4):
            row += [sum(sample[i][c] * sample[j][c] for c in range(3)) for j in range(i)]
        expected.append(row)
    tensors = torch.from_numpy(vectors)
    ours = interact(tensors[:, 0], [tensors[:, i] for i in (1, 2, 3)])
    assert ours.shape == (5, 3 + 6)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)


def test_dlrm_shape():
    model = Dlrm(13, [10] * 26)
    assert model.top_l[0].in_features == 26 * 27 // 2 + 16
    assert [name for name, _ in model.named_children()] == ["bot_l", "emb_l", "top_l"]
    assert sum(isinstance(module, nn.Sigmoid) for module in model.modules()) == 1
    assert isinstance(model.top_l[-1], nn.Sigmoid)
    assert all(table.mode == "sum" for table in model.emb_l)


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018)])
def test_cifar_resnet_sizes(depth, parameters):
    model = CifarResNet(depth)
    assert parameter_count(model) == parameters
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == depth
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_option_a_shortcut():
    block = BasicBlock(16, 32, 2).eval()
    nn.init.zeros_(block.bn2.weight)  # leaves the shortcut alone
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.slow
def test_seed_trains_another_model(zoo):
    other = load("digits-cnn", {"seed": "1"})
    assert other.info["accuracy"]["value"] >= 0.97
    assert not torch.equal(other.model().stem[0].weight, zoo("digits-cnn").model().stem[0].weight)


def test_unreadable_seed():
    with pytest.raises(UsageError, match="option 'seed' is 'x'"):
        load("digits-cnn", {"seed": "x"})
