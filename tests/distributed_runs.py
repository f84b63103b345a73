"""Gangs of the smallest training there is, and faults in copies of its checkpoints."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import DrawOptions, corruptible, draw_faults
from unsilent.checkpoints.editing import apply_edit
from unsilent.faults.models import fault_model
from unsilent.workloads.distributed import Gang
from unsilent.workloads.distributed.strategy_names import PACKAGES

TRAINING = ("train-resnet", {"steps": "40", "batch": "16", "width": "4"})
CUT, END = 6, 12


def strategy_row(name, *more):
    """A row of a table of tests, skipped where the strategy's package is not installed."""
    package = PACKAGES.get(name)
    lacks = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(name, *more, marks=pytest.mark.skipif(lacks, reason=f"needs {package}"))


def altered(clean, copy, glob, model="bitflip:bits=30"):
    """A copy of a checkpoint with one fault, made with the checkpoint tools."""
    copy.write_bytes(clean.read_bytes())
    with Checkpoint(copy) as checkpoint:
        faults = draw_faults(checkpoint, corruptible(checkpoint, [glob]), fault_model(model), DrawOptions(seed=1))
        patches, _ = checkpoint.plan(faults, "fixed")
    apply_edit(copy, patches, {})
    return copy


def read(path):
    return torch.load(path, weights_only=True)


class Run:
    """A gang, its clean checkpoint at `CUT`, the uninterrupted run's state at `END`, and the clean resume."""

    def __init__(self, strategy, ranks, folder):
        self.folder = folder
        self.gang = Gang(*TRAINING, strategy=strategy, world_size=ranks, deadline=120)
        self.clean = self.gang.train_to(CUT, folder / "clean.pt")
        self.uninterrupted = self.gang.train_to(END, folder / "uninterrupted.pt")
        self.golden = self.resume(self.clean, evaluate_every=1, remember_clean=True, save_to=folder / "golden.pt")

    def resume(self, files, until_step=END, **options):
        return self.gang.resume(files, until_step=until_step, **options)
