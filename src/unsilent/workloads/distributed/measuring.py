"""Measurements of one rank's part of a model: non-finite or extreme values, changed bits, hashes."""

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
    """This rank's floating-point parameters and buffers by name, and the number of parameters.

    Parameters come first.
    """
    parameters = {name: local(p.detach()) for name, p in named_parameters(model) if p.is_floating_point()}
    buffers = {name: local(b) for name, b in named_buffers(model) if b.is_floating_point()}
    return parameters | buffers, len(parameters)


def count_values(tensors: Tensors) -> tuple[Ints, Ints]:
    """For each tensor, the number of elements that are not finite and of finite elements that are extreme."""
    finite = [torch.isfinite(tensor) for tensor in tensors.values()]
    extreme = [(tensor.abs() > EXTREME) & mask for tensor, mask in zip(tensors.values(), finite, strict=True)]
    return _counts([~mask for mask in finite]), _counts(extreme)


def count_changed(tensors: Tensors, clean: Tensors | None) -> Ints:
    """For each tensor, the number of elements that differ from the clean tensor in their bits.

    -1 if there is no clean tensor.
    """
    if clean is None:
        return np.full(len(tensors), -1, np.int64)
    return _counts([words_of(tensor) != words_of(clean[name]) for name, tensor in tensors.items()])


def _counts(masks: list[Tensor]) -> Ints:
    return np.array([int(mask.sum()) for mask in masks], np.int64)


class CleanModels:
    """This rank's part of the model at each evaluation of the clean resume.

    The parts are kept in a file for a process that replaces this one.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._by_step: dict[int, Tensors] | None = None

    def start(self) -> None:
        """Delete all stored parts and begin a new collection."""
        self._by_step = {}

    def add(self, step: int, tensors: Tensors) -> None:
        """Store copies of the tensors at a step."""
        assert self._by_step is not None
        self._by_step[step] = {name: tensor.clone() for name, tensor in tensors.items()}

    def save(self) -> None:
        """Save the parts to the file for a process that replaces this one."""
        torch.save(self._by_step, self._file)

    def at(self, step: int) -> Tensors | None:
        """The tensors at a step, or None if the clean resume was not evaluated at that step."""
        if self._by_step is None:
            self._by_step = torch.load(self._file, weights_only=True) if self._file.exists() else {}
        return self._by_step.get(step)


def state_hashes(snapshot: Mapping[str, Any], parameters: set[str]) -> dict[str, str]:
    """xxh3-128 hashes of a full state: of ``parameters``, ``buffers``, ``optimizers`` and ``all``."""
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
