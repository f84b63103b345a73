"""What is read of layers, against numpy; checksums of clean layers are rounding errors, and of corrupted ones are not."""

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.protection.layer_readers import QUANTILE_LEVELS, SITES_OF_LAYER, LayerCosts, LayerReaders, make_reader
from unsilent.protection.layer_watch import LayerRun

LAYERS = {
    "linear": (nn.Linear(24, 96), (5, 24)),
    "linear of tokens": (nn.Linear(24, 96, bias=False), (5, 7, 24)),
    "convolution": (nn.Conv2d(6, 80, 3, padding=1), (5, 6, 9, 8)),
    "strided groups": (nn.Conv2d(6, 12, 3, stride=2, groups=3), (5, 6, 9, 8)),
    "depthwise": (nn.Conv2d(6, 6, 5, padding="same", groups=6, padding_mode="circular"), (5, 6, 9, 8)),
    "dilated": (nn.Conv1d(6, 10, 3, dilation=2, padding=2), (5, 6, 20)),
    "volume": (nn.Conv3d(2, 4, 2), (2, 2, 4, 5, 6)),
    "double": (nn.Linear(24, 96, dtype=torch.float64), (5, 24)),
    "half": (nn.Linear(24, 96, dtype=torch.bfloat16), (5, 24)),
}


def computed(name):
    """A layer, its input and its output."""
    torch.manual_seed(1)
    layer, shape = LAYERS[name]
    inputs = torch.randn(shape, dtype=layer.weight.dtype)
    with torch.no_grad():
        return layer, inputs, layer(inputs)


def run_of(layer, inputs, output):
    return LayerRun("layer", 1, layer, (inputs,), {}, output)


def read(kind, layer, inputs, output, **settings):
    return make_reader(kind, run_of(layer, inputs, output), **settings)(run_of(layer, inputs, output), None)


@pytest.mark.parametrize("name", LAYERS)
def test_sites_are_means_over_positions_of_some_channels(name):
    layer, inputs, output = computed(name)
    sites = read("sites", layer, inputs, output).numpy()
    values = output.double().numpy()
    axis = values.ndim - 1 if isinstance(layer, nn.Linear) else 1
    means = np.moveaxis(values, axis, 1).reshape(len(values), values.shape[axis], -1).mean(2)
    assert sites.shape == (len(values), min(SITES_OF_LAYER, values.shape[axis]) + 2)
    columns = [np.abs(means - site[:, None]).max(0).argmin() for site in sites[:, :-2].T]
    assert len(set(columns)) == len(columns)
    np.testing.assert_allclose(sites[:, :-2], means[:, columns], rtol=1e-4, atol=1e-5)
    seen = values.reshape(len(values), -1)
    np.testing.assert_allclose(sites[:, -2:], np.stack([seen.min(1), seen.max(1)], 1), rtol=1e-6)


def test_with_a_stride_some_positions_are_read():
    layer, inputs, output = computed("linear of tokens")
    ends = sorted(float(read("sites", layer, inputs, output, seed=s, stride=2)[:, -1].max()) for s in (0, 64))
    assert ends == sorted(float(output[:, start::2].max()) for start in (0, 1))
    layer, inputs, output = computed("convolution")  # of planes, the channels of the means alone
    every = output.shape[1] // SITES_OF_LAYER
    seen = [output[:, first::every, start::2].amax((1, 2, 3)) for first in range(every) for start in (0, 1)]
    largest = read("sites", layer, inputs, output, stride=2)[:, -1]
    assert any(torch.equal(largest, one) for one in seen)
    layer, inputs, output = computed("linear")
    assert torch.equal(read("sites", layer, inputs, output, stride=2), read("sites", layer, inputs, output))


@pytest.mark.parametrize("name", LAYERS)
def test_ranges_and_quantiles(name):
    layer, inputs, output = computed(name)
    values = output.double().numpy().reshape(len(output), -1)
    low_high = read("range", layer, inputs, output).numpy()
    np.testing.assert_allclose(low_high, np.stack([values.min(1), values.max(1)], 1), rtol=1e-6)
    quantiles = read("quantiles", layer, inputs, output).numpy()
    if values.shape[1] < 2000:
        expected = np.quantile(values, QUANTILE_LEVELS, axis=1, method="nearest").T
        np.testing.assert_allclose(quantiles, expected, rtol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_the_checksum_of_a_clean_layer_is_a_rounding_error(name):
    layer, inputs, output = computed(name)
    residual = read("checksum", layer, inputs, output)
    assert residual.shape == (len(output), 1)
    assert residual.max() < 4


@pytest.mark.parametrize("name", LAYERS)
def test_the_checksum_names_the_sample_whose_output_changed(name):
    layer, inputs, output = computed(name)
    reader = make_reader("checksum", run_of(layer, inputs, output))
    output[1].view(-1)[3] += 30 if layer.weight.dtype == torch.bfloat16 else 1
    residual = reader(run_of(layer, inputs, output), None)[:, 0]
    assert residual.argmax() == 1
    assert residual[1] > 30 * residual[0]


@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_that_changed_later_is_seen(name):
    layer, inputs, output = computed(name)
    reader = make_reader("checksum", run_of(layer, inputs, output))
    kept = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.view(-1)[5] = 100
        assert reader(run_of(layer, inputs, layer(inputs)), None).min() > 4
        layer.weight.copy_(kept)


def test_what_is_not_finite_is_read():
    layer, inputs, output = computed("convolution")
    output[2, 0, 0, 0] = torch.nan
    for kind in ("range", "quantiles", "checksum"):
        reading = read(kind, layer, inputs, output)
        assert not reading[2].isfinite().all(), kind
        assert reading[[0, 1, 3, 4]].isfinite().all(), kind


def test_products_and_attention_have_checksums():
    torch.manual_seed(2)
    first, second = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 8, 6)
    heads = [torch.randn(3, 2, 5, 8) for _ in range(3)]
    attention = nn.functional.scaled_dot_product_attention
    for name, function, inputs in (("matmul", torch.matmul, (first, second)), (attention.__name__, attention, heads)):
        run = LayerRun(name, 1, function, tuple(inputs), {}, function(*inputs))
        clean = make_reader("checksum", run)(run, None)[:, 0]
        assert clean.max() < 16
        run.output[1, 1, 2, 3] += 1
        residual = make_reader("checksum", run)(run, None)[:, 0]
        assert residual[1] > 1000
        assert residual[[0, 2]].max() < 16


def test_residuals_are_those_of_numpy_in_double_precision():
    layer, inputs, output = computed("linear of tokens")
    output[1, 2, 3] += 0.01
    weight, x, y = (t.detach().double().numpy() for t in (layer.weight, inputs, output))
    total = np.abs(y.sum(-1) - x @ weight.sum(0))
    size = np.abs(x) @ np.abs(weight).sum(0)
    expected = (total / size / np.finfo(np.float32).eps).max(1)
    residual = read("checksum", layer, inputs, output)[:, 0].double().numpy()
    np.testing.assert_allclose(residual, expected, atol=2)


def test_layers_that_cannot_be_read():
    matrix = torch.zeros(2, 2)
    assert not LayerReaders("sites", 0).can_read(run_of(nn.Identity(), matrix, torch.zeros(2)))
    assert not LayerReaders("checksum", 0).can_read(run_of(nn.LayerNorm(2), matrix, matrix))
    assert not LayerReaders("sites", 0).can_read(run_of(torch.matmul, matrix, matrix))
    assert LayerReaders("sites", 0).can_read(run_of(nn.LayerNorm(2), matrix, matrix))


def test_small_models_are_read_whole_and_large_ones_in_part():
    def chosen(width, positions):
        costs = LayerCosts()
        for number in range(40):
            layer = nn.Linear(width, width, device="meta")
            costs.add(run_of(layer, None, torch.empty(1, positions, width, device="meta"))._replace(name=f"l{number}"))
        return costs.choose(40 * 4 * width * width)

    assert chosen(16, 8) == (tuple(f"l{number}" for number in range(40)), 1)
    large, larger = chosen(512, 512), chosen(4096, 512)
    assert len(large.modules) < len(larger.modules) <= 40
    assert large.modules[-1] == larger.modules[-1] == "l39"
    assert larger.stride <= large.stride
