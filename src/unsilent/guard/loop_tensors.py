"""Selection of further tensors of a loop that are kept and restored, such as averages of weights.

A new tensor is kept with one state. If it has changed by the next state, it is kept with all later ones. If not, it is kept from
the moment its version changes (torch raises the version with every write except writes through ``.data``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from unsilent.engine.holding import HeldTraining

LEAST_ROOM = 16 << 20
"""Smallest limit, in bytes, on new tensors that are kept while it is not known whether they change."""
NEW, CHANGING, STILL = "new", "changing", "still"


class _Known(NamedTuple):
    """Classification of a tensor, and its version at that time."""

    kind: str
    version: int


class LoopTensors:
    """Selects the further tensors that are kept with each state.

    Args:
        room: Bytes of the training's state; new tensors are kept up to this total size.
    """

    def __init__(self, room: int) -> None:
        self._room = max(room, LEAST_ROOM)
        self._known = WeakIdKeyDictionary()

    def choose(self, tensors: Sequence[Tensor], newest: HeldTraining | None) -> list[Tensor]:
        """The tensors to keep with the next state; ``newest`` is the state kept before."""
        chosen, used = [], 0
        for tensor in tensors:
            known = self._known.get(tensor)
            if known is None:
                known = _Known(NEW, -1)
            elif known.kind == NEW:
                same = newest.has_content_of(tensor) if newest is not None else None
                known = known if same is None else _Known(STILL if same else CHANGING, tensor._version)
            elif known.kind == STILL and known.version != tensor._version:
                known = _Known(CHANGING, -1)
            used += tensor.nbytes if known.kind == NEW else 0
            if known.kind == NEW and used > self._room:
                known = _Known(STILL, tensor._version)
            self._known[tensor] = known
            if known.kind != STILL:
                chosen.append(tensor)
        return chosen


def versions_of(tensors: Sequence[tuple[str, Tensor]], restored: Sequence[Tensor]) -> Mapping[str, tuple[Tensor, int]]:
    """Tensor and version number by name, for the tensors that are not kept."""
    restored_ids = {id(tensor) for tensor in restored}
    return {name: (tensor, tensor._version) for name, tensor in tensors if id(tensor) not in restored_ids}
