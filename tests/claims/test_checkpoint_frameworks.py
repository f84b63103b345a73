"""The same faults in checkpoints of PyTorch and Keras (docs/evidence/checkpoints.md).

Claims: the ``.keras`` file gets the same bits in the same elements, is loaded without an error, and its resume has the same
verdict as that of the PyTorch file in nearly all pairs.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="no keras"),
    pytest.mark.filterwarnings("ignore"),  # those of keras
]


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("KERAS_BACKEND", "torch")
        yield importlib.import_module("benchmarks.checkpoint_frameworks")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def words(ending):
    return ending.weights.view(np.uint32)


def test_the_same_bits_of_the_same_weights(bench, tmp_path):
    clean = []
    for framework in bench.FRAMEWORKS:
        framework().train(0, 3).save(tmp_path / f"clean{framework.suffix}")
        clean.append(framework(tmp_path / f"clean{framework.suffix}").ending())
    for seed in range(3):
        paths = bench.altered(tmp_path, "weights", 100, seed, "element")
        masks = [
            words(framework(path).ending()) ^ words(own)
            for framework, path, own in zip(bench.FRAMEWORKS, paths, clean, strict=True)
        ]
        assert np.bitwise_count(masks[0]).sum() == 100
        assert np.array_equal(*masks)
    paths = bench.altered(tmp_path, "weights", 100, 0, "layer")
    assert np.bitwise_count(words(bench.Keras(paths[1]).ending()) ^ words(clean[1])).sum() <= 100


def test_the_first_step_differs_by_the_place_of_epsilon_alone(bench):
    """PyTorch adds it after the correction of the bias, Keras before."""
    keras = bench.Keras().train(0, 1).ending().weights
    corrected = bench.PyTorch()
    corrected.optimizer.param_groups[0]["eps"] = bench.EPSILON / (1 - 0.999) ** 0.5
    apart = [
        np.linalg.norm(each.train(0, 1).ending().weights - keras) / np.linalg.norm(keras)
        for each in (bench.PyTorch(), corrected)
    ]
    assert apart[0] > 1e-3
    assert apart[1] < 1e-6


def test_both_frameworks_end_alike(bench, tmp_path):
    clean, *pairs = bench.measure(2, tmp_path)
    assert abs(clean.pytorch.accuracy - clean.keras.accuracy) <= bench.GAP
    assert min(clean.pytorch.accuracy, clean.keras.accuracy) > 0.9
    assert len(pairs) == 24
    verdicts = [
        [bench.is_harmful(end, own) for end, own in ((p.pytorch, clean.pytorch), (p.keras, clean.keras))] for p in pairs
    ]
    assert {first for first, _ in verdicts} == {True, False}
    assert sum(first == second for first, second in verdicts) >= 22
