"""The largest magnitudes of one step, combined over ranks and copied to the host asynchronously."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from unsilent.basics.errors import UsageError
from unsilent.detectors.moment_bounds import Floats
from unsilent.guard.host_copy import HostCopy
from unsilent.guard.magnitude_pass import MagnitudePass
from unsilent.guard.watched_tensors import WatchedTensor

Ranks = Any
"""``all`` (all ranks of torch.distributed if it is in use), ``alone``, or a process group."""


def process_group_for(ranks: Literal["all", "alone"] | Any) -> Any:
    """The process group that combines results; None if this process is alone."""
    is_group = dist.is_available() and isinstance(ranks, dist.ProcessGroup)
    if not is_group and not (isinstance(ranks, str) and ranks in ("all", "alone")):
        raise UsageError(f"ranks is {ranks!r}; expected 'all', 'alone' or a process group")
    if ranks == "alone" or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if ranks == "all" else ranks
    return group if dist.get_world_size(group) > 1 else None


def check_alike(parts: Sequence[WatchedTensor], group: Any) -> None:
    """Raise `UsageError` on every rank if the ranks watch different tensors."""
    number = zlib.crc32("\n".join(part.name for part in parts).encode())
    both = torch.tensor([number, -number], device=parts[0].tensor.device if parts else None)
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    if int(both[0]) != -int(both[1]):
        raise UsageError(
            "the ranks train different parameters, so one guard cannot watch them together; "
            "give Guard a process group of ranks with equal parameters (ranks=group), or ranks='alone'"
        )


def any_rank(flag: bool, group: Any, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the group, or on this process if there is no group."""
    if group is None:
        return flag
    raised = torch.tensor(int(flag), device=device)
    dist.all_reduce(raised, dist.ReduceOp.MAX, group)
    return bool(raised)


def differs_between_ranks(number: int, group: Any, device: torch.device) -> bool:
    """Whether the ranks of the group have different numbers; False without a group."""
    if group is None:
        return False
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    return bool(ends.sum())


class PendingMagnitudes:
    """Starts to compute the largest magnitudes of watched tensors, without waiting for the device.

    Attributes:
        numbers: Indices of the tensors among all watched tensors.
        seconds_waited: Seconds of waiting for other ranks and the device.
    """

    def __init__(self, step: int, find: MagnitudePass, numbers: Sequence[int], group: Any) -> None:
        self.step, self.numbers, self.seconds_waited = step, numbers, 0.0
        result = find()
        if group is not None:
            begun = time.perf_counter()
            # The maximum of NaN and a number may be either; a negative second moment would be hidden by any larger number.
            result.nan_to_num_(nan=float("inf"), posinf=float("inf"))
            result = torch.where(result < 0, float("inf"), result)
            dist.all_reduce(result, dist.ReduceOp.MAX, group)
            self.seconds_waited += time.perf_counter() - begun
        self._copy = HostCopy(result)

    def read(self) -> Floats:
        """The largest magnitudes, float64[n]; waits for the device if they are not complete."""
        before = self._copy.seconds_waited
        result = self._copy.read()
        self.seconds_waited += self._copy.seconds_waited - before
        return np.asarray(result)
