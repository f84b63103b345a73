"""Measurements of a rank on its own part of a model: values that are not finite or extreme, changed bits, hashes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from unsilent.basics.nested import leaves_in
from unsilent.outcomes.tensors import words_of
from unsilent.sites.memory import content_of
from unsilent.sites.modules import named_buffers, named_parameters
from unsilent.sites.training.updates import local
from unsilent.workloads.distributed.orders import EXTREME, Ints

Tensors = dict[str, Tensor]


def own_tensors(model: nn.Module) -> tuple[Tensors, int]:
    """Floating-point parameters, then buffers, of this rank's part, by name; and how many are parameters."""
    parameters = {name: local(p.detach()) for name, p in named_parameters(model) if p.is_floating_point()}
    buffers = {name: local(b) for name, b in named_buffers(model) if b.is_floating_point()}
    return parameters | buffers, len(parameters)


def count_values(tensors: Tensors) -> tuple[Ints, Ints]:
    """Per tensor the elements that are not finite, and the finite ones that are extreme."""
    finite = [torch.isfinite(tensor) for tensor in tensors.values()]
    extreme = [(tensor.abs() > EXTREME) & mask for tensor, mask in zip(tensors.values(), finite, strict=True)]
    return _counts([~mask for mask in finite]), _counts(extreme)


def count_changed(tensors: Tensors, clean: Tensors | None) -> Ints:
    """Per tensor the elements whose bits differ from the clean ones; -1 where there are none to compare with."""
    if clean is None:
        return np.full(len(tensors), -1, np.int64)
    return _counts([words_of(tensor) != words_of(clean[name]) for name, tensor in tensors.items()])


def _counts(masks: list[Tensor]) -> Ints:
    return np.array([int(mask.sum()) for mask in masks], np.int64)


class CleanModels:
    """Parts of the model at each evaluation of the clean resume, on this rank; in a file for the next process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._by_step: dict[int, Tensors] | None = None

    def start(self) -> None:
        """Forget what there is."""
        self._by_step = {}

    def add(self, step: int, tensors: Tensors) -> None:
        """Remember copies of the tensors at a step."""
        assert self._by_step is not None
        self._by_step[step] = {name: tensor.clone() for name, tensor in tensors.items()}

    def save(self) -> None:
        """Save the parts for the process that may have to take our place."""
        torch.save(self._by_step, self._file)

    def at(self, step: int) -> Tensors | None:
        """The tensors at a step; None where there was no evaluation of a clean resume."""
        if self._by_step is None:
            self._by_step = torch.load(self._file, weights_only=True) if self._file.exists() else {}
        return self._by_step.get(step)


def state_hashes(snapshot: Mapping[str, Any], parameters: set[str]) -> dict[str, str]:
    """xxh3-128 of a full state: ``parameters``, ``buffers``, ``optimizers`` and ``all``."""
    model = snapshot["model"]
    parts = {
        "parameters": {name: tensor for name, tensor in model.items() if name in parameters},
        "buffers": {name: tensor for name, tensor in model.items() if name not in parameters},
        "optimizers": snapshot["optimizers"],
        "all": snapshot,
    }
    return {part: _hash(value) for part, value in parts.items()}


def _hash(value: Any) -> str:
    digest = xxhash.xxh3_128()
    for path, leaf in leaves_in(value):
        digest.update("/".join(path).encode())
        if isinstance(leaf, Tensor):
            digest.update(f";{leaf.dtype};{list(leaf.shape)};".encode())
            digest.update(content_of(leaf))
        else:
            digest.update(f";{leaf!r};".encode())
    return digest.hexdigest()
