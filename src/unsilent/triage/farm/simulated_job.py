"""A small training of several ranks in one process, in which a cause of an incident can be planted.

Every step is begun, computed and applied separately, so that a monitor can read state and gradients in between.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from unsilent.checkpoints.manifest import manifest_path, read_manifest
from unsilent.checkpoints.verified_saving import verified_save
from unsilent.checkpoints.writing import write_safetensors
from unsilent.events.incident_folder import SavedCheckpoint
from unsilent.incidents.planted_job import RATE
from unsilent.incidents.planted_workloads import Classifier, draw_batch
from unsilent.triage.farm.causes import CAUSES, Point, Replica, flip_exponent
from unsilent.triage.farm.planned import PlannedIncident

CHECKPOINT_INTERVAL = 20
LOADED, OLDER = 40, 20
"""Steps of the checkpoint that a restarted job loads, and of the one before it."""


def starts_again(planned: PlannedIncident) -> bool:
    """Whether all ranks load a checkpoint in the step of the cause.

    Some healthy jobs do so too, so that a restart does not reveal the cause.
    """
    return planned.family in ("checkpoint", "configuration") or (planned.kind == "nothing" and planned.draws[0] < 0.5)


class SimulatedJob:
    """A simulated training of several ranks.

    Args:
        planned: Cause that is planted in the job, unless ``is_twin``.
        folder: Folder for checkpoints.

    Attributes:
        step: Current step.
        replicas: Replica of each rank.
        saved: Checkpoints saved so far.
        has_failed_to_save: Whether the disk was full.
    """

    def __init__(self, planned: PlannedIncident, is_twin: bool, folder: Path) -> None:
        self.planned, self.step, self._folder = planned, -1, folder
        self._cause = None if is_twin else CAUSES.get((planned.family, planned.kind))
        self._is_twin = is_twin
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(planned.seed)
            model = Classifier(planned.workload, is_narrow=False)
        self.replicas = []
        for rank in range(planned.world_size):
            rank_model = copy.deepcopy(model)
            optimizer = torch.optim.Adam(rank_model.parameters(), lr=RATE, foreach=True)
            self.replicas.append(Replica(rank, rank_model, optimizer))
        self.saved: list[SavedCheckpoint] = []
        self.has_failed_to_save = False

    def begin(self) -> None:
        """Begin the next step: save and load checkpoints, and apply causes that act between steps."""
        self.step += 1
        is_special = self.step == self.planned.step
        is_due = self.step > 0 and self.step % CHECKPOINT_INTERVAL == 0
        if is_due or (self.planned.family == "disk" and is_special):
            self._save()
        if is_special and starts_again(self.planned):
            self._start_again()
        for replica in self.replicas:
            replica.is_zeroing = replica.is_updating = True
            self._apply(Point.BETWEEN_STEPS, replica)

    def compute(self) -> None:
        """Compute loss and gradients of each rank's own batch."""
        for replica in self.replicas:
            replica.batch = draw_batch(self.planned.seed, self.step, replica.rank)
            self._apply(Point.BATCH, replica)
            if replica.is_zeroing:
                replica.optimizer.zero_grad()
            loss = replica.model(replica.batch)
            loss.backward()
            replica.loss = float(loss.detach())
            self._apply(Point.GRADIENT, replica)

    @torch.no_grad()
    def update(self) -> None:
        """Average the gradients of all ranks, and let the optimizer of each rank step."""
        for replica in self.replicas:
            replica.sent = [gradient.clone() for gradient in replica.gradients]
            self._apply(Point.SENT, replica)
        means = [torch.stack(parts).mean(0) for parts in zip(*(replica.sent for replica in self.replicas), strict=True)]
        for replica in self.replicas:
            torch._foreach_copy_(replica.gradients, means)
            self._apply(Point.RECEIVED, replica)
            if replica.is_updating:
                replica.optimizer.step()
            self._apply(Point.UPDATED, replica)

    def _apply(self, point: Point, replica: Replica) -> None:
        cause, planned = self._cause, self.planned
        if cause is None or cause.point is not point or planned.rank not in (-1, replica.rank):
            return
        if self.step == planned.step or (cause.lasts and self.step > planned.step):
            cause.apply(replica, planned, self.step)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step}.safetensors"

    def _save(self) -> None:
        """Save a checkpoint of rank 0, and truncate it if the cause is a full disk."""
        path = self._path(self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(verified_save(self.replicas[0].saved_state(), path, step=self.step))
        self.saved.append(SavedCheckpoint(
            path=f"{path.parent.name}/{path.name}", step=self.step, time=0.0,
            manifest=f"{path.parent.name}/{manifest_path(path).name}",
            files={name or path.name: entry.xxh3_128 for name, entry in manifest.files.items()},
        ))  # fmt: skip
        if self.planned.family == "disk" and not self._is_twin and self.step == self.planned.step:
            with path.open("r+b") as file:
                file.truncate(int(path.stat().st_size * self.planned.draws[2]))
            self.has_failed_to_save = True

    def _start_again(self) -> None:
        """Let all ranks load the newest checkpoint.

        Depending on the cause, the checkpoint is damaged, or one rank loads an older one.
        """
        from safetensors.torch import load_file

        planned, path = self.planned, self._path(LOADED)
        state = load_file(path)
        if planned.kind == "damaged for all" and not self._is_twin:
            names = sorted(name for name in state if name.startswith("model."))
            flip_exponent(state[names[int(planned.draws[0] * len(names))]], planned)
            write_safetensors(state, path)
        older: dict[str, Tensor] = load_file(self._path(OLDER))
        for replica in self.replicas:
            is_stale = planned.kind == "stale on one rank" and replica.rank == planned.rank and not self._is_twin
            replica.load(older if is_stale else state)
