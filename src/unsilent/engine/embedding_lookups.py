"""Counts of how often each row of each embedding table is looked up in one evaluation.

Lookups are counted at operation level. This includes functional embeddings and tables shared with an output layer,
besides ``nn.Embedding`` and ``nn.EmbeddingBag`` modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unsilent.sites import Parameters
from unsilent.sites.dispatch_mode import DispatchMode

_EMBEDDINGS = ("aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")


class EmbeddingLookupCounter(DispatchMode):
    """Counts the lookups of embedding rows in an evaluation, in ``counts``.

    ``counts``: int64[rows] by parameter name.
    """

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self._names = {s.memory.tensor.data_ptr(): n for n, s in parameters.sites.items() if s.memory.tensor.ndim == 2}
        self.counts: dict[str, NDArray[np.int64]] = {}

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.name().partition(".")[0] in _EMBEDDINGS:
            weight, indices = args[0], args[1]
            name = self._names.get(weight.data_ptr())
            if name is not None:
                seen = torch.bincount(indices.reshape(-1).long().cpu(), minlength=weight.shape[0]).numpy()
                self.counts[name] = self.counts.get(name, np.zeros(weight.shape[0], np.int64)) + seen
        return func(*args, **kwargs)
