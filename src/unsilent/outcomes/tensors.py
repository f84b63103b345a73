"""Conversion of nested outputs (tuples, lists, dicts, dataclasses) to tensors, samples and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.nested import leaves_in
from unsilent.sites.memory import WORDS


def leaves(output: Any) -> Iterator[Tensor]:
    """The tensors of an output in a fixed order; numbers and numeric arrays become tensors, others are skipped."""
    for _, leaf in leaves_in(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, np.ndarray):
            if leaf.dtype.kind in "biufc":
                yield torch.from_numpy(np.ascontiguousarray(leaf))
        elif isinstance(leaf, (bool, int, float)):
            yield torch.tensor(leaf if isinstance(leaf, bool) or abs(leaf) < 2**63 else float(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def array_of(value: Any) -> NDArray[Any]:
    """A tensor, array, list or number as a numpy array on the CPU; types unknown to numpy become float64.

    A value without such a form becomes an array of objects.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.layout != torch.strided else value
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32):
            value = value.to(torch.float64)
        return np.asarray(value.resolve_conj().resolve_neg().numpy())
    if isinstance(value, (list, tuple)):
        value = [array_of(item) for item in value]
        if len({item.shape for item in value}) > 1:
            return np.array([None] * len(value))
    return np.asarray(value)


def float8_as_float32(tensor: Tensor) -> Tensor:
    """A float8 tensor as float32, since torch has few float8 operations; other tensors are unchanged."""
    return tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor reshaped to two dimensions, ``[n, everything else]``."""
    return tensor.reshape(tensor.shape[0], prod(tensor.shape[1:])) if tensor.ndim else tensor.reshape(1, 1)


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of the same width, so that -0 differs from 0 and a NaN equals itself."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype == torch.bool else tensor.contiguous().view(WORDS[tensor.element_size()])


def samples_that_differ(golden: Tensor, faulty: Tensor, samples: int) -> Tensor:
    """Mask of the samples that differ in any bit, bool[samples].

    A tensor without a sample dimension counts for all samples.

    The result is on the device of the tensors, and the CPU does not wait for it.
    """
    if golden.shape != faulty.shape or golden.dtype != faulty.dtype:
        return torch.ones(samples, dtype=torch.bool, device=faulty.device)
    return _any_of_sample(words_of(golden) != words_of(faulty), samples)


def samples_with_nonfinite(tensor: Tensor, samples: int, wait: bool = True) -> Tensor:
    """Mask of the samples with NaN or infinity, bool[samples], on the tensor's device.

    ``wait``: check one sum first, which is enough for nearly all tensors; the CPU then waits for a GPU.
    """
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return torch.zeros(samples, dtype=torch.bool, device=tensor.device)
    tensor = float8_as_float32(tensor)
    if wait and torch.isfinite(tensor.sum()):  # the sum is NaN or infinite if a value is
        return torch.zeros(samples, dtype=torch.bool, device=tensor.device)
    return _any_of_sample(~torch.isfinite(tensor), samples)


def _any_of_sample(flags: Tensor, samples: int) -> Tensor:
    if flags.ndim and flags.shape[0] == samples:
        return rows_of(flags).any(1)
    return flags.any().expand(samples)
