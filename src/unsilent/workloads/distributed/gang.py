"""`Gang`: the processes of a distributed training, which stay alive between requests.

Example of measuring the effect of a corrupted checkpoint under a strategy: train to a step, alter copies of the
checkpoint, resume from each, and compare with the resume from the clean checkpoint.

    with Gang("train-resnet", {"steps": "40"}, strategy="ddp", world_size=2) as gang:
        clean = gang.train_to(20, folder / "clean.pt")
        golden = gang.resume(clean, until_step=40, remember_clean=True)
        faulty = gang.resume([clean, altered], restart="after", until_step=40)

If a rank is lost, or a request takes too long, all ranks are ended, and the next request starts them again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults import Fault
from unsilent.faults.naming import parse_site
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.workloads.distributed.orders import RESTARTS, GangSettings, RankEnd, Restart, ResumeOrder, TrainOrder
from unsilent.workloads.distributed.rank_processes import GangLost, RankProcesses
from unsilent.workloads.distributed.records import End, ResumeRecord, ResumeRecordBuilder
from unsilent.workloads.distributed.strategy_names import check_strategy

if TYPE_CHECKING:
    from unsilent.workloads.trainings import Seeds


class Gang(Closing):
    """The processes of all ranks of one training under one strategy.

    Args:
        workload: Reference of a training, as `load_training` takes it, with its options and data.
        strategy: ``single``, ``ddp`` or ``fsdp2``.
        world_size: Number of ranks.
        seeds: Seeds of the training: `Seeds`, or one number for all.
        deadline: Seconds that a request may take.
        folder: Folder for files of the ranks; the caller removes it (None: a temporary folder, which ``close`` removes,
            but which stays if this process is killed).

    Raises:
        UsageError: an unknown strategy, or a training that cannot be divided among ranks.
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
        folder: Path | None = None,
    ) -> None:
        check_strategy(strategy, world_size)
        from unsilent.workloads.trainings import Seeds

        chosen = seeds if isinstance(seeds, Seeds) else Seeds.same_for_all(seeds)
        self.strategy, self.world_size, self.deadline = strategy, world_size, deadline
        self._training = workload, dict(options or {}), data, chosen
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="unsilent-gang-")
        # A new name in the caller's folder, so that files left by other ranks are not used.
        self._folder = Path(self._temporary.name if self._temporary else tempfile.mkdtemp(dir=folder)).resolve()
        self._starts = 0
        self._ranks: RankProcesses | None = None
        try:
            self._running()
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the running ranks in the order of ranks; empty after the ranks were ended."""
        return self._ranks.process_ids if self._ranks else []

    def train_to(self, step: int, path: Path) -> Path:
        """Train ``step`` steps without a fault and return the path of the full checkpoint.

        Rank 0 writes the checkpoint to ``path``. Continues from the last such call if that was for an earlier step.
        Raises `GangLost`.
        """
        self._running().ask(TrainOrder(step, _writable(path)), self.deadline)
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
        """Restart the training from a checkpoint and continue it.

        Args:
            files: One file for all ranks, or one for each rank.
            until_step: Number of steps of the whole training.
            restart: ``before``: each rank loads its file into the bare model, which is then wrapped (ddp: rank 0's
                parameters and buffers replace those of all ranks). ``after``: each rank loads its file into the wrapped
                training.
            broadcast_optimizer: Whether the optimizers from rank 0's file replace those of all ranks.
            evaluate_every: Number of steps between evaluations, besides those at the start and the end (0: only these).
            comm_faults: Faults at ``comm:`` sites, each in a step and on a rank.
            remember_clean: Whether this is the clean resume, with which later ones are compared.
            save_to: File in which rank 0 writes the full state at the end.

        Raises:
            UsageError: invalid arguments. InjectionError: a fault did not land.
        """
        paths = (files,) if isinstance(files, Path) else tuple(files)
        self._check(paths, restart, evaluate_every, comm_faults)
        paths = tuple(path.resolve() for path in paths)
        destination = None if save_to is None else _writable(save_to)
        settings = broadcast_optimizer, until_step, evaluate_every, remember_clean
        order = ResumeOrder(paths, restart, *settings, tuple(comm_faults), destination)
        ranks = self._running()
        builder, begin = ResumeRecordBuilder(self.world_size), time.monotonic()
        end: End = "finished"
        detail, ends = "", list[RankEnd]()
        try:
            ends = ranks.ask(order, self.deadline, builder.take)
            end = "loss not finite" if ends[0].has_stopped else "finished"
        except GangLost as lost:
            end, detail = lost.end, lost.detail
        return builder.record(end, detail, ends, time.monotonic() - begin)

    def close(self) -> None:
        """End the processes of all ranks."""
        if self._ranks is not None:
            self._ranks.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _check(
        self, paths: Sequence[Path], restart: str, evaluate_every: int, faults: Sequence[Fault | UnresolvedFault]
    ) -> None:
        """Raise ``UsageError`` for arguments that the ranks cannot carry out."""
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

    def _running(self) -> RankProcesses:
        """The processes of the ranks, which are started if they do not run."""
        if self._ranks is None or not self._ranks.process_ids:
            self._starts += 1
            workload, options, data, seeds = self._training
            meeting_place = self._folder / f"meet-{self._starts}"
            settings = GangSettings(
                workload, options, data, self.strategy, self.world_size, seeds, meeting_place, self._folder
            )
            self._ranks = RankProcesses(settings)
        return self._ranks


def _writable(path: Path) -> Path:
    """The absolute path of a file to write; raises ``UsageError`` if its folder does not exist."""
    if not path.resolve().parent.is_dir():
        raise UsageError(f"no folder {path.resolve().parent} to write {path.name} into; make it first")
    return path.resolve()
