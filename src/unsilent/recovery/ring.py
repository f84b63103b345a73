"""The last states of a training, each to be put back bit for bit: copies in memory that is used again and again.

Never an algebraic undo of an optimizer: it loses just the states it is needed for (a second moment of 1e-6 comes back as 0
after a gradient of 1e6, in float32).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.engine.available import free_memory
from unsilent.engine.holding import HeldTraining
from unsilent.errors import UsageError, unknown
from unsilent.sizes import human_bytes
from unsilent.workloads.trainings.randomness import GENERATORS, state_of

Where = Literal["device", "host", "file"]
PLACES = ("device", "host", "file")


class Ring:
    """The newest ``depth`` states.

    Args:
        others: schedulers, scalers and the like, with ``state_dict`` and ``load_state_dict``, and random generators besides the
            global ones. depth: states that are held. where: on the device of each tensor, in (pinned) memory of the host, or in
            a file. gradients: hold those, too; without, a step has to begin by setting them to zero.

    Attributes:
        generators: the random generators besides the global ones. others: schedulers and the like. More may be added to both.

    Raises:
        UsageError: bad arguments; at `keep`, a ring that does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        others: Sequence[Any] = (),
        *,
        depth: int = 2,
        where: Where = "device",
        gradients: bool = True,
    ) -> None:
        if where not in PLACES:
            raise unknown("place for the states of a ring (where)", where, PLACES)
        if depth < 1:
            raise UsageError(f"depth is {depth}; expected 1 or more")
        self.generators = [other for other in others if isinstance(other, GENERATORS)]
        others = [other for other in others if not isinstance(other, GENERATORS)]
        for generator in self.generators:
            state_of(generator)
        for other in others:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise UsageError(
                    f"{type(other).__name__} has no state_dict and load_state_dict, so it cannot be put back"
                )
        self.others = others
        self._parts = (model, list(optimizers))
        self._where, self._gradients = where, gradients
        self._slots: list[_Slot] = []
        self._slots += [_Slot(where, self._slots) for _ in range(depth)]
        self._held: list[HeldTraining] = []
        self._next = 0

    def __len__(self) -> int:
        """States that can be put back."""
        return len(self._held)

    def keep(self) -> HeldTraining:
        """Copy the state as it is now; the oldest one goes when there are ``depth`` of them.

        The ``generators`` of what is returned can be put back at any time.
        """
        slot = self._slots[self._next % len(self._slots)]
        if len(self._held) == len(self._slots):
            self._held.pop(0)
        held = HeldTraining(
            *self._parts,
            self.others,
            gradients=self._gradients,
            copies=slot,
            generators=self.generators,
        )
        self._held.append(held)
        self._next += 1
        return held

    def back(self, count: int = 1) -> None:
        """Put back the state of ``count`` calls of `keep` ago (1: the newest), and forget it and those after it."""
        if not 1 <= count <= len(self._held):
            raise UsageError(f"the ring holds {len(self._held)} states; asked for the one {count} ago")
        self._held[-count].restore()
        del self._held[-count:]
        self._next -= count

    def clear(self) -> None:
        """Forget all states."""
        self._held.clear()

    @property
    def nbytes(self) -> int:
        """Memory that all slots take."""
        return sum(slot.nbytes for slot in self._slots)


class _Slot:
    """Memory for the copies of one state, made when it is first needed and whenever tensors change in kind or number."""

    def __init__(self, where: Where, ring: Sequence[_Slot]) -> None:
        self._where, self._ring = where, ring
        self._buffers: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._buffers)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if any(t.layout is not torch.strided for t in tensors):
            raise UsageError(
                "a state with sparse tensors (sparse=True of an embedding) cannot be kept; use dense gradients"
            )
        kinds = [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]
        if kinds != self._kinds:
            self._buffers = []
            self._check_room(tensors)
            self._buffers, self._kinds = self._made(tensors), kinds
        if tensors:
            with torch.no_grad():
                # Nobody waits for a device: what changes the tensors, and what reads copies, comes after this on its stream.
                torch._foreach_copy_(self._buffers, list(tensors), non_blocking=True)
        return self._buffers

    def _made(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._where == "device":
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        if self._where == "host":
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        sizes = [_room(t) for t in tensors]
        storage = _mapped(max(1, sum(sizes)))
        result, place = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = torch.empty(0, dtype=tensor.dtype)
            start = place // tensor.element_size()
            result.append(flat.set_(storage, start, tensor.shape, tensor.stride()))
            place += size
        return result

    def _check_room(self, tensors: Sequence[Tensor]) -> None:
        """Raise `UsageError` where the copies do not fit, or those of the other slots that come next."""
        empty = sum(1 for slot in self._ring if slot is self or not slot.nbytes)
        need: dict[torch.device, int] = {}
        for tensor in tensors:
            device = tensor.device if self._where == "device" else torch.device("cpu")
            need[device] = need.get(device, 0) + _room(tensor)
        if self._where == "file":
            return  # a full disk says so itself
        for device, size in need.items():
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
            if free is not None and empty * size > free:
                other = "in memory of the host (where='host') or in a file" if device.type == "cuda" else "in a file"
                raise UsageError(
                    f"the ring needs {human_bytes(empty * size)} on {device} ({empty} x {human_bytes(size)}), where "
                    f"{human_bytes(int(free))} is free; keep it {other} (where='file')"
                )


def _mapped(size: int) -> torch.UntypedStorage:
    """Memory that lies in a file without a name, so that nothing of it is left however the process ends."""
    handle, path = tempfile.mkstemp(prefix="unsilent-ring-")
    try:
        try:
            os.ftruncate(handle, size)
            storage = torch.UntypedStorage.from_file(path, True, size)
        finally:
            os.unlink(path)  # before it takes any room: a process that is killed later leaves nothing
        os.posix_fallocate(handle, 0, size)  # a disk that is full later would kill the process
    except OSError as error:
        raise UsageError(
            f"one state of the ring needs {human_bytes(size)} in {os.path.dirname(path)}: {error.strerror}; make room there, or "
            "name another folder in TMPDIR"
        ) from None
    finally:
        os.close(handle)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def _room(tensor: Tensor) -> int:
    """Bytes of a dense copy with the same strides, rounded up to 16."""
    if not tensor.numel():
        return 16
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return -(-(last + 1) * tensor.element_size() // 16) * 16
