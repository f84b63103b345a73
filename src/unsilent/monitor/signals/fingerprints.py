"""Fingerprints of the bits of parameters and optimizer state: taken after an optimizer step, compared before the next one.

The fingerprint of a tensor is the sum of its 64-bit words, modulo 2**64. It differs for every change of a single bit, and of
several bits unless their changes cancel out (the same bit set in one word and cleared in another). It needs no threshold, and one
read of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unsilent.monitor.signals.magnitudes import local_tensor

COUNTERS = "step counters"
"""Name of all tensors of one element in the state of an optimizer together."""


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Fingerprints of n tensors, int64[n] on the device of the first."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    return torch.stack([_bit_sum(tensor).to(device) for tensor in tensors])


def _bit_sum(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.view(-1)
    size = flat.element_size()
    per_word = 8 // size if size < 8 else 1
    whole = flat.numel() // per_word * per_word
    if not whole or flat.data_ptr() % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -flat.numel() * size % 8))
        return flat.clone().view(torch.int64).sum()
    total = flat[:whole].view(torch.int64).sum()
    return total + _bit_sum(flat[whole:]) if whole < flat.numel() else total


class StateTensors:
    """Parameters and the tensors of an optimizer's state, by name, as they are now."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
        self.names: list[str] = []
        self.tensors: list[list[Tensor]] = []
        self.is_parameter: list[bool] = []
        counters: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        for name, parameter in parameters:
            self._add(name, [parameter], True)
            for number, optimizer in enumerate(optimizers):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, Tensor) or not value.numel():
                        continue
                    if value.numel() == 1:
                        counters.setdefault((number, value.dtype, value.device), []).append(value)
                    else:
                        self._add(f"{name}/{key}", [value], False)
        for (number, *_), values in counters.items():
            self._add(f"{COUNTERS} of optimizer {number}", values, False)

    def _add(self, name: str, tensors: list[Tensor], is_parameter: bool) -> None:
        self.names.append(name)
        self.tensors.append(tensors)
        self.is_parameter.append(is_parameter)

    def versions(self, number: int) -> list[tuple[int, int]]:
        """What changes when somebody writes to the tensors of an entry through torch, or replaces them."""
        return [(id(tensor), tensor._version) for tensor in self.tensors[number]]

    def bit_sums(self, numbers: Sequence[int]) -> Tensor:
        """Fingerprints of these entries, int64[n]."""
        return bit_sums([self._of_entry(number) for number in numbers])

    def _of_entry(self, number: int) -> Tensor:
        tensors = self.tensors[number]
        return (
            local_tensor(tensors[0])
            if len(tensors) == 1
            else torch.stack([local_tensor(t).reshape(()) for t in tensors])
        )
