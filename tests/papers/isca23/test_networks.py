"""The published DenseNet and EfficientNet: against numpy, their sizes counted by hand, and where published files corrupt them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from oracles import published_oracle as oracle
from unsilent.basics.errors import UsageError
from unsilent.papers.isca23.injections import injection_text, parse_injection, read_injection
from unsilent.papers.isca23.layer_lists import convolutions
from unsilent.papers.isca23.mapping import fault_from_injection
from unsilent.papers.isca23.training import PublishedTraining, split_and_normalise, untrained_network

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "isca23"
"""Published injection files beside the repository; the test that reads them skips where they are absent."""


def model_with_any_weights(name, dropout=0.0):
    """In float64, with biases and norms that are not those of a fresh network, and its weights as arrays."""
    model = untrained_network(name, width=4).double()
    make = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=make, dtype=torch.float64))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model, {key: value.detach().numpy() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_densenet_gives_what_numpy_gives(dropout):
    model, weights = model_with_any_weights("densenet", dropout)
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = oracle.densenet(weights, x.permute(0, 2, 3, 1).numpy(), kept=1.0 - dropout)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-8, atol=1e-8)


def test_efficientnet_gives_what_numpy_gives():
    model, weights = model_with_any_weights("effnet")
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = oracle.efficientnet(weights, x.permute(0, 2, 3, 1).numpy())
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-8, atol=1e-8)


def kernels_biases_norms(model):
    kernels = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    biases = sum(p.numel() for name, p in model.named_parameters() if "bias" in name.split(".")[-2])
    norms = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    return kernels, biases, norms


def test_the_full_width_has_the_parameters_of_a_densenet_121():
    kernels, biases, norms, channels = 3 * 64 * 49 + 64 * 64 * 9, 64 + 64, 64, 64
    for layers in (6, 12, 24, 16):
        for _ in range(layers):
            kernels += channels * 128 + 128 * 32 * 9
            biases += 128 + 32
            norms += channels + 128
            channels += 32
        if layers != 16:
            half = channels // 2
            kernels += channels * half + half * half * 9
            biases += 2 * half
            norms += channels
            channels = half
    model = untrained_network("densenet")
    assert channels == model.fc.in_features == 1024
    assert kernels_biases_norms(model) == (kernels, biases, norms)
    assert sum(p.numel() for p in model.parameters()) == kernels + biases + 2 * norms + 1024 * 10 + 10
    weight = model.get_submodule("dense_block_4.bottleneck_15.conv1").weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (992 + 128)), rel=0.01)


def test_the_full_width_has_the_parameters_of_an_efficientnet_b0():
    kernels, biases, norms, channels = 3 * 32 * 9 + 320 * 1280, 0, 32 + 1280, 32
    blocks = (
        (16, 1, 1, 3),
        (24, 2, 6, 3),
        (40, 2, 6, 5),
        (80, 3, 6, 3),
        (112, 3, 6, 5),
        (192, 4, 6, 5),
        (320, 1, 6, 3),
    )
    for out, repeats, times, k in blocks:
        for _ in range(repeats):
            wide = channels * times
            kernels += channels * wide + wide * k * k + 2 * wide * (wide // 4) + wide * out
            biases += wide + wide // 4
            norms += 2 * wide + out
            channels = out
    model = untrained_network("effnet")
    assert kernels_biases_norms(model) == (kernels, biases, norms)
    assert sum(p.numel() for p in model.parameters()) == kernels + biases + 2 * norms + 1280 * 10 + 10
    weight = model.get_submodule("block6.mbconv_3.dwconv").weight  # Keras counts 25 * 1152 inputs and 25 outputs of it
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (25 * 1153)), rel=0.02)


@pytest.mark.parametrize(
    ("model", "layer", "first", "last", "site", "shape"),
    [
        ("densenet", "densenet_dense_block_4_bottleneck_9_conv1", "89/0/0/112", "89/0/0/127",
         "op:dense_block_4.bottleneck_9.conv1#convolution.0/fwd/out", (128, 128, 1, 1)),
        ("densenet", "densenet_dense_block_1_bottleneck_5_conv2_grad_in", "97/6/6/64", "97/6/6/79",
         "op:dense_block_1.bottleneck_5.conv2#convolution.0/grad_in/out", (128, 128, 8, 8)),
        ("effnet", "block4_mbconv_0_se_expand_conv_grad_in", "45/0/0/20", "45/0/0/35",
         "op:block4.mbconv_0.se.expand_conv#convolution.0/grad_in/out", (128, 60, 1, 1)),
        ("effnet", "block2_mbconv_0_conv1_grad_in", "71/0/7/3", "71/0/7/3",
         "op:block2.mbconv_0.conv1#convolution.0/grad_in/out", (128, 16, 16, 16)),
    ],
)  # fmt: skip
def test_where_published_files_corrupt(model, layer, first, last, site, shape):
    """Runs of sixteen begin at a multiple of sixteen only if the tensor has the channels that the artifact's has."""
    stage = "bkwd_inject" if layer.endswith("grad_in") else "fwrd_inject"
    rows = [
        f"model,{model}", f"stage,{stage}", "fmodel,N16_RD", "target_worker,6", f"target_layer,{layer}", "target_epoch,29",
        "target_step,26", f"inj_pos,{first}" + ("" if first == last else f",{last}"),
        "inj_values,1.5" + ("" if first == last else ",2.5"), "learning_rate,0.001", "seed,123",
    ]  # fmt: skip
    fault = fault_from_injection(parse_injection("\n".join(rows), "x.csv"))
    assert (fault.site, fault.shape) == (site, shape)
    _, c, h, w = shape
    image, row, column, channel = (int(i) for i in first.split("/"))
    assert int(fault.elements[0]) == ((image * c + channel) * h + row) * w + column
    if first != last:
        assert (((image * h + row) * w + column) * c + channel) % 16 == 0


def test_published_files_are_read_to_the_byte_and_mapped():
    files = sorted(PUBLISHED.rglob("*.csv"))
    if not files:
        pytest.skip("the published files are not here")
    for file in files:
        injection = read_injection(file)
        assert injection_text(injection).encode() == file.read_bytes()
        assert len(fault_from_injection(injection)) == len(injection.inj_pos)


def test_layers_that_the_artifact_does_not_corrupt_are_not_listed():
    assert len(convolutions(1, 64, "densenet")) == 2 + 2 * 58 + 2 * 3
    assert len(convolutions(1, 64, "effnet")) == 2 + 4 * 16
    assert not [layer for layer in convolutions(1, 64, "effnet") if "dwconv" in layer]
    with pytest.raises(UsageError, match="unknown published network 'nfnet'"):
        convolutions(1, 64, "nfnet")


@pytest.mark.parametrize("name", ["densenet", "effnet"])
def test_rates_decay_as_published_and_a_batch_needs_two_images_of_each_worker(name):
    images = torch.zeros(20, 32, 32, 3, dtype=torch.uint8)
    known, _ = split_and_normalise(images, torch.zeros(20, dtype=torch.int64), 16)
    done = PublishedTraining(name, known, rate=2e-3, batch=16, width=4)
    steps, end = {"densenet": (5000, 1e-4), "effnet": (2000, 5e-4)}[name]
    assert done.rate(steps // 2) == pytest.approx((2e-3 + end) / 2)
    assert done.rate(steps) == done.rate(9999) == pytest.approx(end)
    assert isinstance(done.optimizer, torch.optim.Adam)
    with pytest.raises(UsageError, match="batch is 8; expected 16 or more, because batch norm"):
        PublishedTraining(name, known, rate=2e-3, batch=8, width=4)
