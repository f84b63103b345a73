"""Digests of the bits of tensors; they depend on the positions of the elements.

A sum, an XOR or a norm does not detect two equal changes that cancel out, two exchanged elements, or a lane that is wrong in an
even number of elements. On the host a digest is XXH3, which takes hardly longer than a sum. On a device it is a weighted sum of
words of at most 32 bits, modulo 2**64: the words lie in rows, the total of the rows before each row is multiplied by a factor,
and each column has a random odd weight. The 32 bits above a word are needed to detect two equal changes in the highest bit: a sum
as wide as its words cannot detect them, whatever the weights. Digests of a host and of a device differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from unsilent.outcomes.tensors import leaves
from unsilent.sites.memory import WORDS, content_of
from unsilent.sites.modules import parameters_of

LEAST_ROW, MOST_ROW = 1 << 14, 1 << 21
"""Smallest and largest number of words in a row; a device needs memory for at most twice as many integers."""
ROWS = 32
"""Number of rows of a large tensor, chosen so that there are few calls."""
SMALL = 2048
"""Largest number of elements of a tensor whose digest a device computes together with those of others."""
SAMPLE = 16384
"""Number of elements of a tensor in a fingerprint, evenly spread if there are more."""
FACTOR = 0x1E3779B97F4A7C15
"""Factor between rows. It is 5 modulo 8, so no sum or difference of two of its powers ends in many zero bits."""


@torch.no_grad()
def digests_of(tensors: Sequence[Tensor]) -> Tensor:
    """Digests of n tensors, int64[n] on their device.

    If some of the tensors are on the host (step counters), the result is on the device of the others.

    Digests are equal for equal elements, whatever the layout and the alignment in memory.
    """
    devices = [tensor.device for tensor in tensors]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    on_host = [place for place, device in enumerate(devices) if device.type == "cpu"]
    host = torch.tensor([_host_digest(tensors[place]) for place in on_host], dtype=torch.int64)
    if len(on_host) == len(tensors):
        return host
    elsewhere = [place for place, device in enumerate(devices) if device.type != "cpu"]
    parts = [device_digests([tensors[place] for place in elsewhere]), host.to(device, non_blocking=True)]
    return _in_order(torch.cat(parts), [*elsewhere, *on_host])


@torch.no_grad()
def device_digests(tensors: Sequence[Tensor]) -> Tensor:
    """Digests of tensors on devices, as in `digests_of`, without waiting for a device.

    The result is on the device of the first tensor.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    large = []
    for place, tensor in enumerate(tensors):
        if 0 < tensor.numel() <= SMALL:
            small.setdefault((tensor.dtype, tensor.device), []).append(place)
        else:
            large.append(place)
    parts = [_large_digest(tensors[place]).reshape(1) for place in large]
    parts += [_small_digests([tensors[place] for place in places]) for places in small.values()]
    order = [*large, *(place for places in small.values() for place in places)]
    return _in_order(torch.cat([part.to(device, non_blocking=True) for part in parts]), order)


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One digest of several tensors in their order, int64[] on the device of the first."""
    samples = [_sample(t) for t in tensors if t.layout is torch.strided and t.numel()]
    if not samples:
        return torch.zeros((), dtype=torch.int64)
    return device_digests([device_digests(samples)])[0]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLE)] if flat.numel() > SAMPLE else flat


def state_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Parameters, buffers, gradients and optimizer states by name; for a DTensor, the part on this rank."""
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in named.items()}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(parameters_of([optimizer])):
            name = names.setdefault(id(parameter), f"optimizer {number} parameter {place}")
            named[name] = parameter
            if parameter.grad is not None:
                named[f"gradient of {name}"] = parameter.grad
            for key, tensor in enumerate(leaves(optimizer.state.get(parameter, {}))):
                named[f"{name} state {key} of optimizer {number}"] = tensor
    held = {name: getattr(t, "_local_tensor", t).detach() for name, t in named.items()}
    return {name: t for name, t in held.items() if t.layout is torch.strided and t.numel()}


def digest_text(tensors: Mapping[str, Tensor]) -> str:
    """A digest of tensors with their names, in hexadecimal digits."""
    digests = digests_of([*tensors.values()]).tolist()
    content = "\n".join(f"{name} {digest}" for name, digest in zip(tensors, digests, strict=True))
    return xxhash.xxh3_64_hexdigest(content.encode())


def _host_digest(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(content_of(tensor)) - (1 << 63)


def _in_order(values: Tensor, places: Sequence[int]) -> Tensor:
    """The values sorted by their positions in ``places``."""
    if list(places) == sorted(places):
        return values
    return values[torch.tensor(places).argsort().to(values.device, non_blocking=True)]


def _elements_as_integers(tensor: Tensor) -> Tensor:
    """The elements in order as integers of at most 32 bits each."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    dense = tensor.detach().contiguous()
    # A dimension of size 1 may have any stride in a contiguous tensor, and torch then refuses a view of other words.
    return dense.as_strided((dense.numel(),), (1,)).view(WORDS[min(4, dense.element_size())])


def _large_digest(tensor: Tensor) -> Tensor:
    words = _elements_as_integers(tensor)
    row = min(MOST_ROW, max(LEAST_ROW, 1 << (max(1, len(words)) // ROWS).bit_length()))
    total = words[:row].to(torch.int64, copy=True)
    for part in words[row:].split(row):
        if len(part) < len(total):
            total *= FACTOR
            total[: len(part)] += part
        else:
            torch.add(part, total, alpha=FACTOR, out=total)
    return total.mul_(_weights(row, words.device)[: len(total)]).sum()


def _small_digests(tensors: Sequence[Tensor]) -> Tensor:
    """Digests of small tensors of one dtype, computed together to save calls."""
    words = [_elements_as_integers(tensor) for tensor in tensors]
    device = words[0].device
    ends = torch.tensor([len(part) for part in words]).cumsum(0) - 1
    weights = _weights(LEAST_ROW, device)
    flat = _flatten_dense_tensors(words) * torch.cat([weights[: len(part)] for part in words])
    totals = flat.cumsum(0)[ends.to(device, non_blocking=True)]
    return torch.cat([totals[:1], totals.diff()])


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers, int64[count], from splitmix64; a larger ``count`` only appends numbers."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
