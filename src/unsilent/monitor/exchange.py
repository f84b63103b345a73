"""What ranks tell each other in each step: one row of whole numbers, gathered by all, on processors and beside the training."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unsilent.errors import UsageError

TIMEOUT = datetime.timedelta(minutes=30)
"""Until a rank that tells nothing is an error; as long as torch waits by default."""
LEAVING_SECONDS = 2.0
"""That a rank waits at its end for the row of the others."""


class RankRow(NamedTuple):
    """What one rank says of one step.

    Attributes:
        step: Of the monitor.
        level: The highest of any rule: of `unsilent.detectors.rule`.
        score: The largest of any rule.
        series: Number of the series that it is of; -1: none.
        is_shared: Whether that series is of what ranks share (updates, which follow from gradients of all ranks).
        changed: How many tensors have other bits than after the step before.
        replicas: Of the fingerprints of tensors that all ranks should have alike, one number.
        gradients, values, state: The intervals of sampling that the rank needs.
        failed: Whether its monitor has failed.
        ended: Whether its monitor ends: this row is its last.
    """

    step: int
    level: int = 0
    score: float = 0.0
    series: int = -1
    is_shared: int = 0
    changed: int = 0
    replicas: int = 0
    gradients: int = 1
    values: int = 1
    state: int = 1
    failed: int = 0
    ended: int = 0

    def to_words(self) -> list[int]:
        """As whole numbers."""
        return [*self[:2], struct.unpack("q", struct.pack("d", self.score))[0], *self[3:]]

    @classmethod
    def from_words(cls, words: list[int]) -> RankRow:
        """The reverse of `to_words`."""
        return cls(words[0], words[1], struct.unpack("d", struct.pack("q", words[2]))[0], *words[3:])


class RankInfo(NamedTuple):
    """Who a rank is, and what it monitors."""

    rank: int
    host: str
    device: str
    settings: Mapping[str, Any]
    series: tuple[str, ...]


class Exchange:
    """Gathers rows of all ranks; of this process alone without torch.distributed.

    Args:
        ranks: ``all``, ``alone`` or a process group.

    Attributes:
        rank, world_size: Of this process in the group.
    """

    def __init__(self, ranks: Any = "all") -> None:
        self._group = _processor_group(ranks)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.world_size = 1 if self._group is None else dist.get_world_size(self._group)
        self._work: tuple[Any, Tensor, list[Tensor]] | None = None

    def introduce(self, info: RankInfo, ignored: frozenset[str]) -> list[RankInfo]:
        """Who all ranks are. Raises ``UsageError`` in every rank where settings differ, but for those that are ignored."""
        if self._group is None:
            return [info]
        everybody: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybody, tuple(info), group=self._group)
        result = [RankInfo(*one) for one in everybody]
        for name in info.settings:
            values = [str(one.settings.get(name)) for one in result]
            if name not in ignored and len(set(values)) > 1:
                told = ", ".join(f"{value} in rank {number}" for number, value in enumerate(values))
                raise UsageError(
                    f"the ranks have different settings of the monitor: {name} is {told}; give all ranks the same"
                )
        return result

    def begin(self, row: RankRow) -> None:
        """Send the row of a step; nobody waits."""
        own = torch.tensor(row.to_words(), dtype=torch.int64)
        if self._group is None:
            self._work = None, own, [own]
            return
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        self._work = dist.all_gather(rows, own, group=self._group, async_op=True), own, rows

    def end(self) -> list[RankRow] | None:
        """The rows of all ranks that `begin` sent for; None where there are none."""
        work, self._work = self._work, None
        if work is None:
            return None
        if work[0] is not None:
            work[0].wait()
        return [RankRow.from_words(row.tolist()) for row in work[2]]

    def is_open(self) -> bool:
        """Whether the other ranks can be reached: a program may end torch.distributed before the monitor."""
        try:
            return self._group is None or dist.get_rank(self._group) >= 0
        except (ValueError, RuntimeError):
            return False

    def close(self, last: RankRow | None = None) -> None:
        """Leave the group.

        ``last`` is for ranks that make further steps; nobody waits for them. None: this rank ends by an error; ranks that wait
        for its row get an error as well.
        """
        if last is not None:
            self.begin(last)
        deadline = time.monotonic() + LEAVING_SECONDS
        while self._is_waiting() and time.monotonic() < deadline:
            time.sleep(0.001)
        # A group that is waited for in another thread cannot be left: the process would hang until all ranks have answered.
        if self._group is not None and not self._is_waiting() and self.is_open():
            dist.destroy_process_group(self._group)
            self._group = self._work = None

    def _is_waiting(self) -> bool:
        return self._work is not None and self._work[0] is not None and not self._work[0].is_completed()


def _processor_group(ranks: Any) -> Any:
    """A group of its own for messages between processors, so that no device is waited for; None: this process is alone."""
    if isinstance(ranks, str) and ranks not in ("all", "alone"):
        raise UsageError(f"ranks is {ranks!r}; expected 'all', 'alone' or a process group")
    if ranks == "alone" or not (dist.is_available() and dist.is_initialized()):
        return None
    members = None if ranks == "all" else dist.get_process_group_ranks(ranks)
    if len(members or range(dist.get_world_size())) < 2:
        return None
    return dist.new_group(members, backend="gloo", timeout=TIMEOUT)


def settings_by_name(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values; tuples stay."""
    return {
        field.name: value
        if isinstance(value := getattr(settings, field.name), (bool, int, float, str, tuple, type(None)))
        else str(value)
        for field in dataclasses.fields(settings)
    }


def host_name() -> str:
    """Of this machine."""
    return platform.node() or "unknown"


def device_name(device: torch.device) -> str:
    """The device, and of a CUDA device its model."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
