"""Asynchronous copies from a device to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class HostCopy:
    """Starts an asynchronous copy of a tensor to the host.

    Attributes:
        seconds_waited: Seconds that `read` waited for the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.seconds_waited = 0.0
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = on_host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_arrived(self) -> bool:
        """Whether the copy is complete, so that `read` does not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """The copy on the host; waits until it is complete."""
        begun = time.perf_counter()
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        result = self._tensor.cpu()
        self.seconds_waited += time.perf_counter() - begun
        return result
