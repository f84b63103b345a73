"""Every single-bit flip of a small model, tried one by one with nothing of the package: the truth a campaign estimates."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn


def every_flip(model: nn.Module, batches: list[torch.Tensor]) -> dict[tuple[str, int, int], float]:
    """(tensor name, element, bit) -> share of samples whose answer is incorrect: another argmax, or not finite."""
    state = model.state_dict()
    # A counter of batches is no weight.
    names = [n for n in (*dict(model.named_parameters()), *dict(model.named_buffers())) if state[n].is_floating_point()]
    with torch.no_grad():
        golden = [model(b).numpy() for b in batches]
    truth = {}
    for name in names:
        tensor = state[name]
        words = tensor.numpy().reshape(-1).view(np.uint32)
        for element in range(words.size):
            for bit in range(8 * tensor.element_size()):
                mask = words.dtype.type(1 << bit)
                words[element] ^= mask
                with torch.no_grad():
                    wrong = [incorrect(g, model(b).numpy()) for g, b in zip(golden, batches, strict=True)]
                words[element] ^= mask
                truth[name, element, bit] = float(np.concatenate(wrong).mean())
    return truth


def incorrect(golden: np.ndarray, faulty: np.ndarray) -> np.ndarray:
    """bool[n]."""
    return (golden.argmax(1) != faulty.argmax(1)) | ~np.isfinite(faulty).all(1)


def pvf_by_module(truth: dict[tuple[str, int, int], float]) -> dict[str, float]:
    """Uniform over elements of a module, then over the bits of that element."""
    elements: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, element, _), value in truth.items():
        elements[name.rpartition(".")[0]][name, element].append(value)
    return {m: float(np.mean([np.mean(bits) for bits in e.values()])) for m, e in elements.items()}
