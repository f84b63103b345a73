"""The payloads of collectives as sites: ``comm:all_reduce.0/in`` before, ``comm:all_reduce.0/out`` after.

Seen are the collectives that are called in the step's own threads, those of DDP's and FSDP's backward included. A struck ``out``
waits for the collective to end; a struck ``in`` that the collective does not write is a copy that it alone sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unsilent.sites.operands import tensors_in, written_by

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""Torch's Python names of its dispatched operations, where they differ."""
_SPACES = ("c10d", "_c10d_functional", "c10d_functional")


def collective_name(func: Any) -> str | None:
    """``c10d.allreduce_`` -> ``all_reduce``; None for what is no collective."""
    space, _, name = str(func._schema.name).partition("::")
    name = name.removesuffix("_")
    if space not in _SPACES or name in ("wait_tensor", "barrier", "monitored_barrier"):
        return None
    return _NAMES.get(name, name)


class Collectives:
    """Counts the collectives of a step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def meet(self, func: Any) -> str | None:
        """The name of a collective that is about to run; None where it is none. To be asked once for each, in order."""
        name = collective_name(func)
        if name is None:
            return None
        k = self._counts[name]
        self._counts[name] = k + 1
        return f"{name}.{k}"


def payload(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """Number of the tensor argument that is sent, and whether the collective writes it, too."""
    written = {id(t) for t in written_by(func, args, kwargs)}
    tensors = [*tensors_in(tuple(args)), *tensors_in(tuple(kwargs.values()))]
    number = next((i for i, t in enumerate(tensors) if id(t) not in written), 0)
    return number, id(tensors[number]) in written


def received(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Tensor | None:
    """The tensor with what came, once it has come."""
    found = written_by(func, args, kwargs) or list(tensors_in(result))
    for item in result if isinstance(result, (tuple, list)) else (result,):
        if hasattr(item, "wait") and not isinstance(item, Tensor):
            item.wait()
    return found[0] if found else None
