"""Copies from a device to memory of the host that a training does not wait for.

A copy over the bus takes many times as long as one on the device. So the state is first copied on the device, in the order of the
training's own work, and from that copy to the host by a stream of its own, while the training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StagedCopy:
    """Copies tensors of one CUDA device to the host by way of one copy on the device, which all states share.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._buffers: list[Tensor] = []
        self._last: Any = None

    def copy(self, host: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Begin to copy; what is returned has ``synchronize``, which waits until the host has all.

        Work that is launched afterwards on the current stream may change the tensors.
        """
        if [_kind(t) for t in self._buffers] != [_kind(t) for t in tensors]:
            if self._last is not None:
                self._last.synchronize()
            self._buffers = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        elif self._last is not None:
            self._wait_on_device(self._last)
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, list(tensors), non_blocking=True)
            self._last = self._begin_copy_to_host(host)
        return self._last

    def _wait_on_device(self, event: Any) -> None:
        """Let the device wait until the copy on it has been read; the host goes on."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def _begin_copy_to_host(self, host: Sequence[Tensor]) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(host), self._buffers, non_blocking=True)
            return self._stream.record_event()


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device
