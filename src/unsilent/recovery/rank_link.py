"""Communication between ranks besides the training: gathering values, and passing a batch to the next rank.

Only processes of one job communicate here. Tensors are sent unchanged, through memory of the host; all other values are pickled,
as torch.distributed does with objects.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_Kind = tuple[torch.dtype, tuple[int, ...], bool, bool]
"""Dtype and shape of a tensor, whether it is on a device, and whether it requires a gradient."""


class RankLink:
    """Communication among the ranks of a CPU process group, or this process alone if there is no group.

    Attributes:
        rank, world_size: Rank of this process in the group, and size of the group.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of the ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first_problem(self, problem: str) -> str:
        """The first text of any rank that is not empty; every rank gets the same one."""
        return next((f"{text} (rank {rank})" for rank, text in enumerate(self.gather(problem)) if text), "")

    def pass_on(self, parcel: Parcel, device: torch.device) -> Any:
        """Send a value to the next rank, and receive the value of the previous rank.

        Received tensors that were on a device are placed on ``device``.
        """
        parcels = self.gather((parcel.content, parcel.kinds))
        content, kinds = parcels[self.rank - 1]
        outgoing = [tensor.detach().cpu().contiguous() for tensor in parcel.tensors]
        incoming = [torch.empty(shape, dtype=dtype) for dtype, shape, _, _ in kinds]
        after, before = ((self.rank + step) % self.world_size for step in (1, -1))
        waits = [dist.isend(t, group_dst=after, group=self._group, tag=n) for n, t in _numbered_bytes(outgoing)]
        waits += [dist.irecv(t, group_src=before, group=self._group, tag=n) for n, t in _numbered_bytes(incoming)]
        for wait in filter(None, waits):
            wait.wait()
        tensors = []
        for tensor, (_, _, is_on_device, has_gradient) in zip(incoming, kinds, strict=True):
            tensors.append((tensor.to(device) if is_on_device else tensor).requires_grad_(has_gradient))
        return _Unpacker(content, tensors).load()


class Parcel:
    """Nested values with tensors, prepared for sending.

    Raises the errors of pickle for a value that cannot be pickled.

    Attributes:
        content: Pickled values without the tensors.
        tensors, kinds: The tensors, and a description of each that the receiver needs in advance.
    """

    def __init__(self, value: Any) -> None:
        packer = _Packer(stream := io.BytesIO())
        packer.dump(value)
        self.content, self.tensors = stream.getvalue(), packer.tensors
        self.kinds = [_kind_of_tensor(tensor) for tensor in packer.tensors]


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _kind_of_tensor(tensor: Tensor) -> _Kind:
    return tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu", tensor.requires_grad


def _numbered_bytes(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the bytes of each tensor that is not empty, with its number."""
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            yield number, tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
