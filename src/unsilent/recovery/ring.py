"""Copies of the last states of a training, in memory that is reused, for exact restoration.

An optimizer is never undone algebraically, because this would lose exactly the needed states (in float32, a second moment of 1e-6
becomes 0 after a gradient of 1e6).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.free_memory import available_memory_bytes
from unsilent.basics.options import check_count
from unsilent.basics.sizes import human_bytes
from unsilent.engine.holding import HeldTraining
from unsilent.workloads.trainings.randomness import GENERATORS, generator_state

# A copy over the bus takes many times as long as a copy on the device. So the state is first copied on the device, in
# the order of the training's own work, and from that copy to the host by a stream of its own, while the training goes
# on.


class StagedCopy:
    """Copies tensors from a CUDA device to the host, through a buffer on the device.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._buffers: list[Tensor] = []
        self._last: Any = None

    def copy(self, host: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Start a copy; ``synchronize`` of the returned object waits until the copy on the host is complete.

        Work that is launched afterwards on the current stream may change the tensors.
        """
        if [_kind_of_tensor(t) for t in self._buffers] != [_kind_of_tensor(t) for t in tensors]:
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
        """Make the device, but not the host, wait until the buffer has been copied."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def _begin_copy_to_host(self, host: Sequence[Tensor]) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(host), self._buffers, non_blocking=True)
            return self._stream.record_event()


def _kind_of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


log = logging.getLogger("unsilent.guard")
SnapshotLocation = Literal["device", "host", "file"]
SNAPSHOT_LOCATIONS = ("device", "host", "file")


class SnapshotRing:
    """Holds copies of the newest ``snapshot_count`` states of a training.

    Args:
        stateful_objects: Schedulers, scalers and similar objects with ``state_dict`` and ``load_state_dict``, and random
            generators besides the global ones.
        snapshot_count: Number of states that are held.
        snapshot_location: Location of states: the device of each tensor, (pinned) memory of the host, or a file.
        snapshot_gradients: Whether to hold gradients, too; otherwise a step must begin by setting them to zero.

    Attributes:
        generators: The random generators besides the global ones.
        stateful_objects: Schedulers and similar objects. Further entries may be added to both.
        further_tensors: Further tensors that the next states hold.

    Raises:
        UsageError: the arguments are invalid; from `keep`: the ring does not fit into memory or on the disk.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        stateful_objects: Sequence[Any] = (),
        *,
        snapshot_count: int = 2,
        snapshot_location: SnapshotLocation = "device",
        snapshot_gradients: bool = True,
    ) -> None:
        if snapshot_location not in SNAPSHOT_LOCATIONS:
            raise unknown_name_error("snapshot_location", str(snapshot_location), SNAPSHOT_LOCATIONS)
        self._count = check_count("snapshot_count", snapshot_count, 1)
        self.generators = [value for value in stateful_objects if isinstance(value, GENERATORS)]
        stateful_objects = [value for value in stateful_objects if not isinstance(value, GENERATORS)]
        for generator in self.generators:
            generator_state(generator)
        for value in stateful_objects:
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"{type(value).__name__} has no state_dict and load_state_dict, so it cannot be restored"
                )
        self.stateful_objects = stateful_objects
        self.further_tensors: list[Tensor] = []
        self._parts = (model, list(optimizers))
        self._where, self._gradients = snapshot_location, snapshot_gradients
        self._slots: list[_Slot] = []
        self._held: list[tuple[HeldTraining, _Slot]] = []
        self._next = 0
        check_room(self.live_tensors(), self._count, snapshot_location)

    def __len__(self) -> int:
        """Number of states that can be restored."""
        return len(self._held)

    def keep(self) -> HeldTraining:
        """Copy the current state, in place of the oldest copy if the ring is full.

        The ``generators`` of the returned state can be restored at any time.
        """
        place = self._next % self._count
        if place == len(self._slots):
            self._slots.append(_Slot(self._where, self._slots, self._count))
        slot = self._slots[place]
        if len(self._held) == self._count:
            self._held.pop(0)
        held = self._copy(slot)
        self._held.append((held, slot))
        self._next += 1
        return held

    def restore_snapshot(self, count: int = 1) -> None:
        """Restore the state that was kept ``count`` calls of `keep` ago (1: the last), and drop it and later ones."""
        if not 1 <= count <= len(self._held):
            raise UsageError(
                f"the ring holds {len(self._held)} snapshots, but number {count} was requested, counted from 1, the newest"
            )
        self._put_back(count)
        del self._held[-count:]
        self._next -= count

    def put_back_oldest(self) -> None:
        """Restore the oldest state, and keep all copies."""
        self._put_back(len(self._held))

    def _put_back(self, count: int) -> None:
        held, slot = self._held[-count]
        slot.wait()
        held.restore()

    def hold(self) -> HeldTraining:
        """A copy of the current state outside of the ring; raises the same errors as `keep`."""
        slot = _Slot(self._where, [], 1)
        held = self._copy(slot)
        slot.wait()
        return held

    def _copy(self, slot: _Slot) -> HeldTraining:
        return HeldTraining(
            *self._parts,
            self.stateful_objects,
            gradients=self._gradients,
            further=self.further_tensors,
            copies=slot,
            generators=self.generators,
        )

    @property
    def newest(self) -> HeldTraining | None:
        """The newest state in the ring; None if there is none."""
        return self._held[-1][0] if self._held else None

    def live_tensors(self) -> list[Tensor]:
        """The tensors of the current state, not copies of them."""
        return HeldTraining(*self._parts, gradients=self._gradients, copies=lambda tensors: tensors).live

    def clear(self) -> None:
        """Drop all states."""
        self._held.clear()

    @property
    def nbytes(self) -> int:
        """Memory of all copies in bytes, without the buffer on the device for copies to the host."""
        return sum(slot.nbytes for slot in self._slots)


class _Slot:
    """Memory for the copy of one state, allocated at first use and again if shapes, dtypes or devices change."""

    def __init__(self, where: SnapshotLocation, ring: Sequence[_Slot], count: int) -> None:
        self._where, self._ring, self._count = where, ring, count
        self._buffers: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._staged: StagedCopy | None = None
        self._event: Any = None

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._event is not None:
            self._event.synchronize()

    def _find_staged(self, tensors: Sequence[Tensor]) -> StagedCopy | None:
        """The buffer for copies from the device to the host; None if tensors are copied directly."""
        known = next((slot._staged for slot in self._ring if slot._staged is not None), None)
        devices = {t.device for t in tensors if t.is_cuda}
        if self._where != "host" or known is not None or len(devices) != 1:
            return known
        (device,) = devices
        need = sum(_room(t) for t in tensors if t.is_cuda)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if need < torch.cuda.mem_get_info(device)[0] + unused:
            return StagedCopy(device)
        log.info("no room for one more state on %s: each state is copied to the host while the training waits", device)
        return None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._buffers)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if any(t.layout is not torch.strided for t in tensors):
            raise UsageError(
                "a state with sparse tensors (sparse=True of an embedding) cannot be saved; use dense gradients"
            )
        kinds = [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]
        if kinds != self._kinds:
            self._buffers = []
            filled = sum(1 for slot in self._ring if slot is not self and slot.nbytes)
            check_room(tensors, self._count - filled, self._where)
            self._buffers, self._kinds = self._new_buffers(tensors), kinds
            self._staged = self._find_staged(tensors)
        pairs = list(zip(self._buffers, tensors, strict=True))
        staged = [pair for pair in pairs if self._staged is not None and pair[1].device == self._staged.device]
        direct = [pair for pair in pairs if self._staged is None or pair[1].device != self._staged.device]
        if self._staged is not None and staged:
            self._event = self._staged.copy(*zip(*staged, strict=True))
        if direct:
            with torch.no_grad():
                # No wait for the device: later changes of the tensors and reads of the copies follow on the same stream.
                torch._foreach_copy_([copy for copy, _ in direct], [live for _, live in direct], non_blocking=True)
        return self._buffers

    def _new_buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._where == "device":
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        if self._where == "host":
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        sizes = [_room(t) for t in tensors]
        storage = _memory_in_unnamed_file(max(1, sum(sizes)))
        result, place = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = torch.empty(0, dtype=tensor.dtype)
            start = place // tensor.element_size()
            result.append(flat.set_(storage, start, tensor.shape, tensor.stride()))
            place += size
        return result


def check_room(tensors: Sequence[Tensor], count: int, where: SnapshotLocation) -> None:
    """Raise `UsageError` if there is not enough space for ``count`` copies of the tensors."""
    need: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.device if where == "device" else torch.device("cpu")
        need[device] = need.get(device, 0) + _room(tensor)
    for device, size in need.items():
        if where == "file":
            free: int | None = shutil.disk_usage(tempfile.gettempdir()).free
        else:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
        if free is not None and count * size > free:
            advice = {
                "device": "the snapshots in host memory (snapshot_location='host') or in a file (snapshot_location='file')",
                "host": "the snapshots in a file (snapshot_location='file')",
                "file": "fewer of them",
            }[where if device.type == "cuda" or where == "file" else "host"]
            place = tempfile.gettempdir() if where == "file" else str(device)
            raise UsageError(
                f"the snapshots need {human_bytes(count * size)} on {place} ({count} x {human_bytes(size)}), but "
                f"{human_bytes(int(free))} is free; keep {advice}"
            )


def _memory_in_unnamed_file(size: int) -> torch.UntypedStorage:
    """Memory in an unnamed file, which the system deletes when the process ends."""
    handle, path = tempfile.mkstemp(prefix="unsilent-ring-")
    try:
        try:
            os.ftruncate(handle, size)
            storage = torch.UntypedStorage.from_file(path, True, size)
        finally:
            os.unlink(path)  # before the file takes space: a process that is killed later leaves no file
        os.posix_fallocate(handle, 0, size)  # a disk that is full later would kill the process
    except OSError as error:
        raise UsageError(
            f"one snapshot needs {human_bytes(size)} in {os.path.dirname(path)}: {error.strerror}; free space there, or "
            "set TMPDIR to another folder"
        ) from None
    finally:
        os.close(handle)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def _room(tensor: Tensor) -> int:
    """Size in bytes of a dense copy with the same strides, rounded up to a multiple of 16."""
    if not tensor.numel():
        return 16
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return -(-(last + 1) * tensor.element_size() // 16) * 16
