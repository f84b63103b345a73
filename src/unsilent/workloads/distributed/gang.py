"""`Gang`: the processes of a distributed training, kept alive from one request to the next.

To learn how a strategy copes with a corrupted checkpoint: train to a step, alter copies of the checkpoint, resume from each,
and compare with the resume from the clean one.

    with Gang("train-resnet", {"steps": "40"}, strategy="ddp", world_size=2) as gang:
        clean = gang.train_to(20, folder / "clean.pt")
        golden = gang.resume(clean, until_step=40, remember_clean=True)
        faulty = gang.resume([clean, altered], restart="after", until_step=40)

Ranks find each other through a file and talk over the loopback interface. They end with this process. Where one is lost, or an
order takes too long, all are ended, and the next request starts them again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.child_processes import end_child, start_child
from unsilent.closing import Closing
from unsilent.errors import UnsilentError, UsageError, unknown_name_error
from unsilent.faults import Fault
from unsilent.faults.naming import parse_site
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.workloads.distributed.orders import (
    RESTARTS,
    GangSettings,
    RankEnd,
    Restart,
    ResumeOrder,
    TrainOrder,
    check_strategy,
)
from unsilent.workloads.distributed.records import End, ResumeRecord, ResumeRecordBuilder

if TYPE_CHECKING:
    from unsilent.workloads.trainings import Seeds

START_SECONDS = 300.0
SETTLE_SECONDS = 0.5
"""For other ranks to report once one has failed: an error that a lost rank led to is not the cause."""
EXIT_SECONDS = 5.0
"""For a rank whose connection is closed to end."""
ANSWERS = ("ready", "trained", "ended")
"""Kinds of messages that end what a rank was asked for."""
Take = Callable[[int, str, Any], None]


class GangLost(UnsilentError):
    """The ranks could not end an order; they are ended, and the next request starts them again.

    Attributes:
        end: How, as in a `ResumeRecord`.
        detail: Which rank, and why.
    """

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(f"{end}: {detail}")
        self.end, self.detail = end, detail


@dataclass(frozen=True)
class RankProcess:
    """A running rank."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection


class Gang(Closing):
    """The ranks of one training under one strategy.

    Args:
        workload: Reference of a training, as `load_training` takes it, with its options and data.
        strategy: ``single``, ``ddp`` or ``fsdp2``.
        world_size: Number of ranks.
        seeds: Of the training: `Seeds`, or one number for all.
        deadline: Seconds that a request may take.

    Raises:
        UsageError: an unknown strategy, or a training that cannot be shared by ranks.
    """

    def __init__(
        self,
        workload: str,
        options: Mapping[str, str] | None = None,
        *,
        data: str | None = None,
        strategy: str = "ddp",
        world_size: int = 2,
        seeds: int | Seeds = 0,
        deadline: float = 600.0,
    ) -> None:
        check_strategy(strategy, world_size)
        from unsilent.workloads.trainings import Seeds

        chosen = seeds if isinstance(seeds, Seeds) else Seeds.same_for_all(seeds)
        self.strategy, self.world_size, self.deadline = strategy, world_size, deadline
        self._training = workload, dict(options or {}), data, chosen
        self._folder = tempfile.TemporaryDirectory(prefix="unsilent-gang-")
        self._starts = 0
        self._ranks: list[RankProcess] = []
        try:
            self._running()
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that run, in their order; empty after they were ended."""
        return [rank.process.pid for rank in self._ranks]

    def train_to(self, step: int, path: Path) -> Path:
        """The full checkpoint after ``step`` steps without a fault, written to ``path`` by rank 0.

        Goes on from the last such call where that was for an earlier step. Raises `GangLost`.
        """
        self._ask(TrainOrder(step, _writable(path)))
        return path

    def resume(
        self,
        files: Path | Sequence[Path],
        *,
        until_step: int,
        restart: Restart = "before",
        broadcast_optimizer: bool = False,
        evaluate_every: int = 0,
        comm_faults: Sequence[Fault | UnresolvedFault] = (),
        remember_clean: bool = False,
        save_to: Path | None = None,
    ) -> ResumeRecord:
        """Restart from a checkpoint and train on.

        Args:
            files: One for all ranks, or one for each.
            until_step: Of the whole training.
            restart: ``before``: each rank loads its file into the bare model, which is then wrapped (ddp: rank 0's
                parameters and buffers replace those of all). ``after``: into the wrapped training.
            broadcast_optimizer: Rank 0's optimizers, as its file has them, replace those of all.
            evaluate_every: Steps; at the start and the end is always evaluated (0: only there).
            comm_faults: Faults at ``comm:`` sites, each in a step and on a rank.
            remember_clean: This is the clean resume, which later ones are compared with.
            save_to: Where rank 0 writes the full state at the end.

        Raises:
            UsageError: an order that makes no sense. InjectionError: a fault did not land.
        """
        paths = (files,) if isinstance(files, Path) else tuple(files)
        self._check(paths, restart, evaluate_every, comm_faults)
        order = ResumeOrder(
            tuple(path.resolve() for path in paths),
            restart,
            broadcast_optimizer,
            until_step,
            evaluate_every,
            remember_clean,
            tuple(comm_faults),
            None if save_to is None else _writable(save_to),
        )
        self._running()
        builder, begin = ResumeRecordBuilder(self.world_size), time.monotonic()
        end: End = "finished"
        detail, ends = "", list[RankEnd]()
        try:
            ends = self._ask(order, builder.take)
            end = "loss not finite" if ends[0].has_stopped else "finished"
        except GangLost as lost:
            end, detail = lost.end, lost.detail
        return builder.record(end, detail, ends, time.monotonic() - begin)

    def close(self) -> None:
        """End the ranks."""
        self._end()
        self._folder.cleanup()

    def _check(
        self, paths: Sequence[Path], restart: str, evaluate_every: int, faults: Sequence[Fault | UnresolvedFault]
    ) -> None:
        """Raise ``UsageError`` for what no rank can do."""
        if len(paths) not in (1, self.world_size):
            raise UsageError(f"{len(paths)} files for {self.world_size} ranks; give one for all, or one for each")
        for path in paths:
            if not path.is_file():
                raise UsageError(f"no checkpoint {path}; give a file that train_to wrote, or an altered copy of one")
        if restart not in RESTARTS:
            raise unknown_name_error("restart", restart, RESTARTS)
        if evaluate_every < 0:
            raise UsageError(
                f"evaluate_every is {evaluate_every}; expected a number of steps, or 0 for start and end alone"
            )
        for fault in faults:
            if parse_site(fault.site).kind != "comm":
                raise UsageError(
                    f"{fault.site} is not the payload of a collective; expected a site like comm:all_reduce.0/in"
                )
            if not 0 <= fault.rank < self.world_size:
                raise UsageError(f"{fault.site} is for rank {fault.rank}; expected 0 to {self.world_size - 1}")

    # -- processes -------------------------------------------------------------------------------------------------

    def _running(self) -> None:
        """Start the ranks where there are none."""
        if self._ranks:
            return
        self._starts += 1
        folder = Path(self._folder.name)
        workload, options, data, seeds = self._training
        settings = GangSettings(
            workload, options, data, self.strategy, self.world_size, seeds, folder / f"meet-{self._starts}", folder
        )
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
        for number in range(self.world_size):
            started = start_child("unsilent.workloads.distributed.rank", environment)
            self._ranks.append(RankProcess(number, *started))
            self._ranks[-1].connection.send(("start", settings, number))
        self._gather(lambda *_: None, START_SECONDS)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.connection.close()  # all at once, so that they end at the same time
        for rank in self._ranks:
            end_child(rank.process, rank.connection)
        self._ranks = []

    def _ask(self, order: TrainOrder | ResumeOrder, take: Take = lambda *_: None) -> list[Any]:
        """The answers of all ranks; ``take`` gets what they send before."""
        self._running()
        for rank in self._ranks:
            try:
                rank.connection.send(order)
            except OSError:
                pass  # it is gone, which is found out below
        return self._gather(take, self.deadline)

    def _gather(self, take: Take, seconds: float) -> list[Any]:
        """The answers; where one does not come, all ranks are ended and it is raised why."""
        limit = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        troubles: dict[int, tuple[str, Any]] = {}
        try:
            while len(answers) + len(troubles) < self.world_size:
                left = limit - time.monotonic()
                if left <= 0:
                    break
                for rank in self._ready([*answers, *troubles], min(left, 0.5)):
                    kind, value = self._receive(rank)
                    if kind in ANSWERS:
                        answers[rank.number] = value
                    elif kind in ("lost", "raised", "failed"):
                        troubles[rank.number] = kind, value
                        limit = min(limit, time.monotonic() + SETTLE_SECONDS)
                    else:
                        take(rank.number, kind, value)
            if len(answers) < self.world_size:
                raise _cause(troubles, seconds)
        except BaseException:
            self._end()
            raise
        return [answers[number] for number in range(self.world_size)]

    def _ready(self, done: Sequence[int], seconds: float) -> list[RankProcess]:
        """Ranks with a message, and those that are dead."""
        waiting = [rank for rank in self._ranks if rank.number not in done]
        ready = wait([rank.connection for rank in waiting], seconds)
        # Children of a rank may hold its socket open after it died.
        return [rank for rank in waiting if rank.connection in ready or rank.process.poll() is not None]

    def _receive(self, rank: RankProcess) -> tuple[str, Any]:
        """A message of a rank; ``lost`` where it is gone."""
        try:
            if rank.connection.poll():
                message: tuple[str, Any] = rank.connection.recv()
                return message
        except (EOFError, OSError):
            pass  # its end of the socket is closed
        try:
            code = rank.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "lost", "closed its connection"
        return "lost", f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _cause(troubles: Mapping[int, tuple[str, Any]], seconds: float) -> UnsilentError:
    """Why ranks did not answer: a lost one before an error that it led to, then the lowest rank."""
    for wanted in ("lost", "failed", "raised"):
        for number in sorted(troubles):
            kind, value = troubles[number]
            if kind != wanted:
                continue
            if kind == "failed":
                assert isinstance(value, UnsilentError)
                return value
            return GangLost("rank lost" if kind == "lost" else "raised", f"rank {number}: {value}")
    return GangLost("deadline", f"no answer after {seconds:g} s")


def _writable(path: Path) -> Path:
    """The path as ranks can use it; raises ``UsageError`` where its folder is not there."""
    if not path.resolve().parent.is_dir():
        raise UsageError(f"no folder {path.resolve().parent} to write {path.name} into; make it first")
    return path.resolve()
