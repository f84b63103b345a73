"""Execution of reduction programs in place with the process groups of torch.distributed.

A program is about reducing devices ``0 .. k - 1``; `ProgramRunner` maps them to ranks, creates the process groups and derives
from the program's states which chunks of the payload each collective works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.placement.programs import Program, State, Step, check, held_chunks, shares, states

# These are the names from torch 2.13 on, where the earlier names are deprecated.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class WrongResult(UnsilentError):
    """Raised if the result of a program differs from that of `torch.distributed.all_reduce`."""


class ProcessGroups:
    """The process groups of this job, each created once.

    Every rank must request the same groups in the same order.

    Raises:
        UsageError: torch.distributed is not initialised.
    """

    def __init__(self) -> None:
        if not distributed.is_initialized():
            raise UsageError("there is no process group; call torch.distributed.init_process_group first.")
        everyone = tuple(range(distributed.get_world_size()))
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {everyone: distributed.group.WORLD}

    def of(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """The process group of these ranks, created on first use; the order of the ranks does not matter."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = distributed.new_group(list(key))
        return self._groups[key]


@dataclass(frozen=True)
class Call:
    """A collective in which this rank takes part.

    Attributes:
        collective: One of `unsilent.placement.programs.COLLECTIVES`.
        group: The process group.
        size: Number of ranks in the group.
        root: Rank that is the root of a reduce or broadcast.
        chunks_in: Input chunks, in torch's order of the group's ranks.
        chunks_out: Output chunks, in the same order.
    """

    collective: str
    group: ProcessGroup | None
    size: int
    root: int
    chunks_in: tuple[int, ...]
    chunks_out: tuple[int, ...]


class ProgramRunner:
    """Runs a program in this rank.

    Every rank of the job creates the same runner and calls it equally often.

    Args:
        program: Program to run.
        goal: One of `unsilent.placement.programs.GOALS`.
        members: Ranks that act as the program's devices, one list for each independent reduction: ``[[0, 2], [1, 3]]`` runs a
            program of two devices twice at the same time. By default all ranks of the job, in order.
        groups: Process groups shared with other runners.

    Attributes:
        chunks: Chunks of the payload that this rank holds at the end.

    Raises:
        UsageError: The program does not reach the goal, or its devices do not fit the ranks of the job.
    """

    def __init__(
        self,
        program: Program,
        goal: str = "all-reduce",
        members: Sequence[Sequence[int]] | None = None,
        groups: ProcessGroups | None = None,
    ) -> None:
        check(program, goal)
        groups = groups or ProcessGroups()
        world = distributed.get_world_size()
        if members is None:
            members = [list(range(world))]
        _check_members(program, members, world)
        self._devices = program.devices
        self._everyone: ProcessGroup | None = None
        self._calls: list[Call] = []
        self.chunks = self._chunks_at_start = tuple(range(program.devices))
        rank, trace = distributed.get_rank(), list(states(program, goal))
        for ranks in members:
            everyone = groups.of(ranks)
            calls = [self._call(*move, ranks, groups) for move in zip(program.steps, trace, trace[1:], strict=False)]
            if rank in ranks:
                device = ranks.index(rank)
                self._everyone = everyone
                self._calls = [call for call in calls if call is not None]
                self._chunks_at_start = held_chunks(trace[0][device], program.devices)
                self.chunks = held_chunks(trace[-1][device], program.devices)

    @staticmethod
    def _call(step: Step, before: State, after: State, ranks: Sequence[int], groups: ProcessGroups) -> Call | None:
        """The collective of this rank in a step, or None.

        The process groups of all ranks are created.
        """
        call, k = None, len(before)
        for devices in step.groups:
            group = groups.of([ranks[device] for device in devices])
            if distributed.get_rank() not in [ranks[device] for device in devices]:
                continue
            device = ranks.index(distributed.get_rank())
            torch_order = sorted(devices, key=lambda device: ranks[device])
            held = {device: held_chunks(before[device], k) for device in devices}
            if step.collective == "broadcast":
                held[device] = held[devices[0]]
            chunks_in = chunks_out = held[device]
            if step.collective == "reduce-scatter":
                chunks_by_device = dict(zip(devices, shares(held[device], len(devices)), strict=True))
                chunks_in = tuple(chunk for device in torch_order for chunk in chunks_by_device[device])
                chunks_out = chunks_by_device[device]
            elif step.collective == "all-gather":
                chunks_out = tuple(chunk for device in torch_order for chunk in held[device])
            call = Call(step.collective, group, len(devices), ranks[devices[0]], chunks_in, chunks_out)
        return call

    def run(self, payload: Tensor, verify: bool = False) -> Tensor:
        """Run the program in place, and return the payload.

        Chunks of the payload that this rank does not hold at the end (see ``chunks``) keep intermediate values. A payload that is
        not divisible by the number of devices is padded with zeros during the run.

        Args:
            payload: Tensor to reduce, of the same shape and dtype on all ranks.
            verify: Whether to compare the result with that of `torch.distributed.all_reduce`, at the cost of this call.

        Raises:
            UsageError: The payload is sparse, complex or Boolean.
            WrongResult: The result differs from that of all_reduce: for integers by any difference, for floating-point numbers by
                more than rounding can explain.
        """
        if payload.layout != torch.strided or payload.is_complex() or payload.dtype == torch.bool:
            raise UsageError(
                f"a payload of {payload.dtype} ({payload.layout}) cannot be reduced by a program; "
                "expected a dense tensor of integers or real numbers"
            )
        if self._everyone is None:
            return payload
        reference = self._reference(payload) if verify else None
        buffer = self._buffer(payload)
        rows = buffer.view(self._devices, -1)
        if rows.shape[1]:
            for call in self._calls:
                perform(call, rows)
        if buffer.data_ptr() != payload.data_ptr():
            payload.detach().copy_(buffer[: payload.numel()].view_as(payload))
        if reference is not None:
            self._compare(payload, *reference)
        return payload

    def _buffer(self, payload: Tensor) -> Tensor:
        """The payload as one row, padded to a multiple of the number of devices.

        It is a view of the payload if possible.
        """
        padding = -payload.numel() % self._devices
        if not padding and payload.is_contiguous():
            return payload.detach().view(-1)
        return torch.cat([payload.detach().reshape(-1), payload.new_zeros(padding)])

    def _reference(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The all-reduced payload, and the sum of absolute values that bounds the rounding error."""
        chunk = -(-payload.numel() // self._devices)
        total = torch.zeros_like(payload, memory_format=torch.contiguous_format).view(-1)
        for number in self._chunks_at_start:
            part = slice(number * chunk, (number + 1) * chunk)
            total[part] = payload.detach().reshape(-1)[part]
        size = total.abs()
        distributed.all_reduce(total, group=self._everyone)
        if payload.is_floating_point():
            distributed.all_reduce(size, group=self._everyone)
        return total, size

    def _compare(self, payload: Tensor, expected: Tensor, size: Tensor) -> None:
        """Raise ``WrongResult`` if a chunk differs from the expected one by more than rounding.

        Floating-point elements whose sum of absolute values overflows are not compared.
        """
        chunk = -(-payload.numel() // self._devices)
        got = payload.detach().reshape(-1)
        for number in self.chunks:
            part = slice(number * chunk, (number + 1) * chunk)
            wrong = got[part] != expected[part]
            if payload.is_floating_point():
                difference = (got[part].double() - expected[part].double()).abs()
                allowed = _rounding(self._devices, payload.dtype) * size[part].double()
                wrong &= size[part].isfinite() & ~(difference <= allowed)
            if bool(wrong.any()):
                at = number * chunk + int(wrong.nonzero()[0])
                raise WrongResult(
                    f"element {at} is {got[at].item()} on rank {distributed.get_rank()}, but all_reduce gives "
                    f"{expected[at].item()}; the links or devices of this job do not compute right sums."
                )


def perform(call: Call, rows: Tensor) -> None:
    """Run one collective in place on the chunks of a payload."""
    data = _select(rows, call.chunks_in)
    if call.collective == "all-reduce":
        distributed.all_reduce(data, group=call.group)
    elif call.collective == "reduce":
        distributed.reduce(data, dst=call.root, group=call.group)
    elif call.collective == "broadcast":
        distributed.broadcast(data, src=call.root, group=call.group)
    elif call.collective == "all-gather":
        gathered = data.new_empty(len(call.chunks_out), rows.shape[1])
        _all_gather(gathered, data.contiguous(), group=call.group)
        data = gathered
    else:
        data = _reduce_scatter(data, call)
    _store(rows, call.chunks_out, data)


def _reduce_scatter(data: Tensor, call: Call) -> Tensor:
    """The share of this rank in a reduce-scatter.

    On gloo, torch's reduce_scatter is an all_reduce, which sends twice as much, so shares are exchanged and summed instead.
    """
    if distributed.get_backend(call.group) != "gloo":
        share = data.new_empty(len(call.chunks_out), data.shape[1])
        _scatter(share, data, group=call.group)
        return share
    received = torch.empty_like(data)
    distributed.all_to_all_single(received, data, group=call.group)
    return received.view(call.size, len(call.chunks_out), data.shape[1]).sum(0, dtype=data.dtype)


def _check_members(program: Program, members: Sequence[Sequence[int]], world: int) -> None:
    ranks = [rank for group in members for rank in group]
    if len(members) == 1 and len(ranks) == world != program.devices:
        raise UsageError(
            f"the program is for {program.devices} devices, but the job has {world} ranks; "
            f"start {program.devices} ranks or say which of them reduce together."
        )
    if any(len(group) != program.devices for group in members):
        raise UsageError(f"every reduction needs {program.devices} ranks, one per device of the program: {members}.")
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world for rank in ranks):
        raise UsageError(f"the ranks that reduce must be different ones of 0 .. {world - 1}, not {members}.")


def _rounding(devices: int, dtype: torch.dtype) -> float:
    """Bound on the difference between sums in different orders, relative to the sum of absolute values.

    A sum of k numbers in any order has an error of at most g = (k - 1) u / (1 - (k - 1) u) times the sum of absolute values,
    where u is half the spacing at 1. The sum of absolute values is itself computed, and may be too small by the same share.
    """
    steps = (devices - 1) * torch.finfo(dtype).eps / 2
    if steps >= 0.5:
        return float("inf")
    error = steps / (1 - steps)
    return 2 * error / (1 - error) if error < 1 else float("inf")


def _select(rows: Tensor, chunks: tuple[int, ...]) -> Tensor:
    """The rows of these chunks in order, as a view if the chunks are consecutive."""
    if chunks == tuple(range(chunks[0], chunks[0] + len(chunks))):
        return rows[chunks[0] : chunks[0] + len(chunks)]
    return rows[list(chunks)]


def _store(rows: Tensor, chunks: tuple[int, ...], data: Tensor) -> None:
    """Write chunks to the payload, unless they are views of it."""
    if data.data_ptr() != rows[chunks[0]].data_ptr():
        rows[list(chunks)] = data
