"""The payloads of collectives as sites: ``comm:all_reduce.0/in`` before, ``comm:all_reduce.0/out`` after.

Only collectives that are called in the step's own threads are observed, including those of the backward passes of DDP and FSDP.
A fault in ``out`` waits for the end of the collective. A fault in an ``in`` that the collective does not write is applied to a
copy that only this collective sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unsilent.basics.nested import tensors_in

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
"""Torch's Python names of dispatched operations, if the two names differ."""
_OUTPUT_FIRST = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "gather", "scatter"),
)
"""Collectives whose output argument precedes the input argument; other collectives send the tensor that they write."""
_SPACES = ("c10d", "_c10d_functional", "c10d_functional")


def collective_name(func: Any) -> str | None:
    """The name of a collective: ``all_reduce`` for ``c10d.allreduce_``; None for any other operation."""
    space, _, name = str(func._schema.name).partition("::")
    name = name.removesuffix("_")
    if space not in _SPACES or name in ("wait_tensor", "barrier", "monitored_barrier"):
        return None
    return _NAMES.get(name, name)


class CollectiveNamer:
    """Numbers the collectives of a step to name them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def next_name(self, func: Any) -> str | None:
        """The name of the next collective, or None; must be called once for each operation, in order."""
        name = collective_name(func)
        if name is None:
            return None
        k = self._counts[name]
        self._counts[name] = k + 1
        return f"{name}.{k}"


def payload_argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """Number of the tensor argument that is sent, and whether the collective also writes to it."""
    space, _, name = str(func._schema.name).partition("::")
    if space != "c10d":
        return 0, False
    if name.removesuffix("_") not in _OUTPUT_FIRST:
        return 0, True
    return sum(1 for _ in tensors_in(args[0])), False


def received(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Tensor | None:
    """The received tensor, after the communication has ended."""
    for item in result if isinstance(result, (tuple, list)) else (result,):
        if hasattr(item, "wait") and not isinstance(item, Tensor):
            item.wait()
    received_into = args[0] if func._schema.name.startswith("c10d::") else result
    return next(tensors_in(received_into), None)
