"""References to every built-in workload, with files made here for those that take weights and images of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from exactness.harness import Reference
from unsilent.workloads import ZOO
from unsilent.workloads.cifar_resnet import CifarResNet

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Real data beside the repository, used where it is there."""
REAL = {"cifar-resnet32": ("cifar10-test-a.npz", "resnet32-d509ac18.th")}
OFFSETS = ("op:emb_l.*#arange.*",)
"""Offsets of embedding bags. torch does not check them: a corrupted one reads memory that is out of bounds or was never
written, so that two plain runs differ, or the process dies."""
PREFIX = "cifar-resnet"


def references(folder: Path, images: int = 8) -> dict[str, Reference]:
    """By name; ``folder`` takes the files, ``images`` is how many a CIFAR workload evaluates, in batches of unequal size."""
    found = {name: _cifar(name, folder, images) if name.startswith(PREFIX) else Reference(name) for name in ZOO}
    return {**found, "dlrm": Reference("dlrm", undefined=OFFSETS)}


def bank() -> Reference | None:
    """The DLRM on a real CSV; None where that is not there."""
    path = SHARED / "bank-full.csv"
    return Reference("dlrm", {"drop": "duration"}, data=str(path), undefined=OFFSETS) if path.exists() else None


def _cifar(name: str, folder: Path, images: int) -> Reference:
    options = {"eval": str(images), "batch": str(images * 2 // 3), "min_accuracy": "0"}
    data, weights = (SHARED / file for file in REAL.get(name, ("", "")))
    if not (data.is_file() and weights.is_file()):
        data, weights = _made(int(name.removeprefix(PREFIX)), folder)
    return Reference(name, options, data=str(data), weights=str(weights))


def _made(depth: int, folder: Path) -> tuple[Path, Path]:
    """Random images and seeded weights, batch-norm statistics included."""
    data, weights = folder / "images.npz", folder / f"{depth}.th"
    if not data.exists():
        rng = np.random.default_rng(0)
        np.savez(data, images=rng.integers(0, 256, (16, 32, 32, 3), np.uint8), labels=rng.integers(0, 10, 16))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(depth)
        state = CifarResNet(depth).state_dict()
        for key, tensor in state.items():
            if key.endswith(("running_mean", "running_var")):
                tensor.copy_(torch.rand_like(tensor) + (0.5 if key.endswith("var") else -0.5))
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, weights)
    return data, weights
