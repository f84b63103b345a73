"""Each built-in workload is loaded once per test session; the cache of trained weights is that of all tests."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from unsilent.workloads import ZOO, load
from unsilent.workloads.cifar_resnet import CifarResNet

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Real data beside the repository; tests that use it skip where it is absent."""
TRAINED = {
    "digits-cnn": 0.97,
    "digits-vit": 0.95,
    "digits-efficientnet": 0.95,
    "digits-mobilenet": 0.95,
    "chargpt": 0.45,
    "llama-chars": 0.3,
    "dlrm": 0.78,
    "scenes-unet": 0.70,
    "scenes-segformer": 0.70,
    "scenes-detector": 0.60,
}
"""Workloads that are trained here, with their floors."""

_SLOW = (
    "digits-efficientnet",
    "chargpt",
    "llama-chars",
    "digits-vit",
    "digits-mobilenet",
    "scenes-unet",
    "scenes-segformer",
    "scenes-detector",
)
QUICK = [name for name in ZOO if name not in _SLOW]
"""Workloads that the fast tier loads; the others take longer to train."""


@pytest.fixture(scope="session")
def cifar_files(tmp_path_factory):
    """Random weights (by depth) and images in the files that the CIFAR workloads read."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        images=rng.integers(0, 256, (80, 32, 32, 3), np.uint8),
        labels=rng.integers(0, 10, 80),
    )
    for depth in (20, 32, 44, 56):
        torch.manual_seed(depth)
        state = {f"module.{key}": value for key, value in CifarResNet(depth).state_dict().items()}
        torch.save({"state_dict": state, "best_prec1": 10.0}, folder / f"{depth}.th")
    return folder


@pytest.fixture(scope="session")
def zoo(cache, cifar_files):
    """``zoo(name)``: the workload, loaded once a session."""

    @functools.cache
    def get(name):
        return fresh(name, cifar_files)

    return get


def fresh(name, cifar_files):
    """Load a built-in workload anew."""
    if not name.startswith("cifar-resnet"):
        return load(name)
    depth = name.removeprefix("cifar-resnet")
    return load(
        name,
        {"eval": "4", "batch": "2", "min_accuracy": "0"},
        data=str(cifar_files / "images.npz"),
        weights=str(cifar_files / f"{depth}.th"),
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small only get slower when several threads compete with other processes for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
