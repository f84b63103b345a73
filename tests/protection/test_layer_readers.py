"""What is read of layers, against numpy; checksums of clean layers are rounding errors, and of corrupted ones are not."""

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.protection.layer_readers import QUANTILE_LEVELS, SITES_OF_LAYER, has_reader, make_reader

GENERATOR = torch.Generator().manual_seed(0)
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


@pytest.mark.parametrize("name", LAYERS)
def test_sites_are_means_over_positions_of_some_channels(name):
    layer, inputs, output = computed(name)
    sites = make_reader("sites", layer, output, GENERATOR)((inputs,), output).numpy()
    values = output.double().numpy()
    axis = values.ndim - 1 if isinstance(layer, nn.Linear) else 1
    means = np.moveaxis(values, axis, 1).reshape(len(values), values.shape[axis], -1).mean(2)
    assert sites.shape == (len(values), min(SITES_OF_LAYER, values.shape[axis]))
    columns = [np.abs(means - site[:, None]).max(0).argmin() for site in sites.T]
    assert len(set(columns)) == len(columns)
    np.testing.assert_allclose(sites, means[:, columns], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_ranges_and_quantiles(name):
    layer, inputs, output = computed(name)
    values = output.double().numpy().reshape(len(output), -1)
    low_high = make_reader("range", layer, output, GENERATOR)((inputs,), output).numpy()
    np.testing.assert_allclose(low_high, np.stack([values.min(1), values.max(1)], 1), rtol=1e-6)
    quantiles = make_reader("quantiles", layer, output, GENERATOR)((inputs,), output).numpy()
    if values.shape[1] < 2000:
        expected = np.quantile(values, QUANTILE_LEVELS, axis=1, method="nearest").T
        np.testing.assert_allclose(quantiles, expected, rtol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_the_checksum_of_a_clean_layer_is_a_rounding_error(name):
    layer, inputs, output = computed(name)
    residual = make_reader("checksum", layer, output, GENERATOR)((inputs,), output)
    assert residual.shape == (len(output), 1)
    assert residual.max() < 4


@pytest.mark.parametrize("name", LAYERS)
def test_the_checksum_names_the_sample_whose_output_changed(name):
    layer, inputs, output = computed(name)
    reader = make_reader("checksum", layer, output, GENERATOR)
    output[1].view(-1)[3] += 30 if layer.weight.dtype == torch.bfloat16 else 1
    residual = reader((inputs,), output)[:, 0]
    assert residual.argmax() == 1
    assert residual[1] > 30 * residual[0]


@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_that_changed_later_is_seen(name):
    layer, inputs, output = computed(name)
    reader = make_reader("checksum", layer, output, GENERATOR)
    kept = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.view(-1)[5] = 100
        assert reader((inputs,), layer(inputs)).min() > 4
        layer.weight.copy_(kept)


def test_what_is_not_finite_is_read():
    layer, inputs, output = computed("convolution")
    output[2, 0, 0, 0] = torch.nan
    for kind in ("range", "quantiles", "checksum"):
        reading = make_reader(kind, layer, output, GENERATOR)((inputs,), output)
        assert not reading[2].isfinite().all(), kind
        assert reading[[0, 1, 3, 4]].isfinite().all(), kind


def test_layers_without_numbers_for_samples_are_not_read():
    assert not has_reader("sites", nn.Identity(), (torch.zeros(2, 2),))
    assert not has_reader("sites", nn.Identity(), torch.zeros(2))
    assert not has_reader("sites", nn.Identity(), torch.zeros(2, 2, dtype=torch.int64))
    assert not has_reader("checksum", nn.LayerNorm(2), torch.zeros(2, 2))
    assert has_reader("sites", nn.LayerNorm(2), torch.zeros(2, 2))
