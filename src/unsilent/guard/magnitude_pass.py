"""Repeated computation of the largest magnitudes of the same tensors, on CUDA devices as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsilent.basics.cuda_capture import capture
from unsilent.guard.watched_tensors import WatchedTensor, magnitudes_of

log = logging.getLogger("unsilent.guard")


class MagnitudePass:
    """Finds the largest magnitudes of some tensors each time it is called.

    Args:
        parts: Tensors of this pass.

    The first call computes the magnitudes directly, the second call captures the computation as a CUDA graph, and later calls
    launch the graph. If a tensor has moved in memory, the sequence starts again.
    """

    def __init__(self, parts: Sequence[WatchedTensor]) -> None:
        self.parts = list(parts)
        self._capturable = bool(parts) and all(p.tensor.is_cuda and is_plain(p.tensor) for p in parts)
        self._places: list[tuple[int, int]] = []
        self._graph: Any = None
        self._result = torch.zeros(0)

    def __call__(self) -> Tensor:
        """The largest magnitude of each tensor, float64[n]; the next call may overwrite the result."""
        if not self._capturable:
            return magnitudes_of(self.parts)
        places = [(p.tensor.data_ptr(), p.tensor.numel()) for p in self.parts]
        if places != self._places:
            self._places, self._graph = places, None
            return magnitudes_of(self.parts)
        if self._graph is None:
            self._capture()
        if self._graph is None:
            return magnitudes_of(self.parts)
        self._graph.replay()
        return self._result

    def _capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():  # the training itself is capturing
            return
        try:
            graph, self._result = capture(partial(magnitudes_of, self.parts), self.parts[0].tensor.device)
        except RuntimeError as error:
            self._capturable = False
            log.info("the check of the guard runs without a CUDA graph: %s", error)
            return
        self._graph = graph


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a dense tensor or parameter, not an instance of another subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
