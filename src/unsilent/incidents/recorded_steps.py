"""Executes the recorded step of an incident again, from the state and the batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.engine.device_placement import place, resolve_device
from unsilent.events.incident_folder import (
    BATCH_FILE,
    RANK_FILE,
    STATE_FILE,
    Incident,
    read_incident,
    read_rank_part,
)
from unsilent.recovery.digests import state_tensors
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.fault_codes import NOT_EXECUTED
from unsilent.recovery.neighbour_check import Findings
from unsilent.recovery.own_step import OwnStep, own_code
from unsilent.recovery.rank_link import RankLink
from unsilent.recovery.step_replay import IterationStart, StepReplay, execute
from unsilent.recovery.tensor_files import read_tensors
from unsilent.report.text import listed
from unsilent.workloads.trainings.randomness import isolated_randomness, seed_globals


class RecordedSteps:
    """Recorded steps of an incident, in the form that `recovery.step_replay` executes.

    Args:
        step: Model and optimizer, whose state is replaced, and the function that is called with each batch.
        state: Recorded state with which the first iteration begins.
        batches: Batches of the iterations.
        path: File of the state, for error messages.
    """

    def __init__(self, step: OwnStep, state: Any, batches: Any, path: Path) -> None:
        try:
            (optimizer,) = dict(state)["optimizers"]
            self._state = {"model": dict(state["model"]), "optimizer": optimizer}
            step.check_fit(self._state, str(path))
            step.restore(self._state)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise UsageError(
                f"{path} has no state of a model and one optimizer; give the folder of an incident"
            ) from None
        if not isinstance(batches, list) or not batches:
            raise UsageError(f"{path.with_name(BATCH_FILE)} has no list of batches; give the folder of an incident")
        self.model, self._step, self._batches, self.problem = step.model, step, batches, ""

    def go_back(self) -> None:
        """Restore the recorded state."""
        self._step.restore(self._state)

    def starts(self) -> Sequence[IterationStart]:
        """The recorded batches, each with random generators seeded by 0.

        The states of generators are not recorded.
        """
        return [IterationStart(batch, lambda: seed_globals(0)) for batch in self._batches]

    def run(self, batch: Any) -> None:
        """Run the step on a batch."""
        self._step.batch = batch
        self._step.run()

    def end_iteration(self) -> None:
        """Do nothing, because no monitor judges the iteration."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the model and the optimizer by name."""
        return state_tensors(self.model, [self._step.optimizer])

    def batches(self) -> Sequence[Any]:
        """The recorded batches."""
        return self._batches

    def portable(self) -> Any:
        """Raise ``UsageError``, because there is no other rank."""
        raise UsageError("a recorded step is executed by one rank alone")

    def starts_of(self, portable: Any) -> Sequence[IterationStart]:
        """Raise ``UsageError``, because there is no other rank."""
        raise UsageError("a recorded step is executed by one rank alone")


def replay_incident(folder: Path, code: str, device: str = "auto", rank: int | None = None) -> Evidence:
    """Execute a recorded step several times, and return evidence from comparing the executions.

    Args:
        folder: Folder of an incident, or of a job with one incident.
        code: ``file.py:name`` of a function that returns step, model and optimizer.
        device: Device that executes it.
        rank: Rank whose part is executed; ``None``: the suspect, or the only rank if none is suspected.

    Raises:
        UsageError: There is no such folder, a part of it is missing or belongs to another model, or the code is not found or
            raises an exception.
    """
    incident = read_incident(folder)
    rank = _chosen_rank(incident, incident.suspect if rank is None else rank)
    path, device = incident.folder / f"rank{rank}" / STATE_FILE, resolve_device(device)
    _check_recorded(incident, rank)
    state, batches = read_tensors(path), read_tensors(path.with_name(BATCH_FILE))
    with isolated_randomness():
        function, model, optimizer = own_code(code)
        own_step = OwnStep(function, model.to(device), optimizer, None, code)
        steps = RecordedSteps(own_step, state, place(batches, device, None), path)
        for batch in execute(steps):
            steps.run(batch)
        replay = StepReplay(steps, lambda: _findings(steps), RankLink(), 0)
        for batch in replay.run():
            steps.run(batch)
    return Evidence(
        step=incident.step, rank=rank, device=device, feature="elements that are not finite", executions=tuple(replay.executions),
        problem=replay.problem, apart=replay.apart, tolerance=replay.tolerance, batch_problem=replay.batch_problem,
    )  # fmt: skip


def _findings(steps: RecordedSteps) -> Findings:
    """Findings of the only rank: whether all tensors are finite."""
    numbers: Iterator[Tensor] = (tensor for tensor in steps.tensors().values() if tensor.is_floating_point())
    is_finite = all(bool(torch.isfinite(tensor).all()) for tensor in numbers)
    return Findings(frozenset(() if is_finite else (0,)), True, 0, np.zeros((0, 0)), np.zeros((0, 0)))


def _check_recorded(incident: Incident, rank: int) -> None:
    """Raise ``UsageError``, with the reason if known, if a rank's state or batch was not recorded."""
    part_folder = incident.folder / f"rank{rank}"
    missing = [name for name in (STATE_FILE, BATCH_FILE) if not (part_folder / name).exists()]
    if not missing:
        return
    verdict = incident.fault_verdict
    reasons = read_rank_part(incident.folder, rank).problems if (part_folder / RANK_FILE).exists() else ()
    if not reasons and verdict is not None and verdict.code == NOT_EXECUTED.code:
        reasons = (verdict.reason,)
    if not reasons and incident.settings.get("incident") == "small":
        reasons = ("--incident was small",)
    raise UsageError(
        f"the {missing[0].partition('.')[0]} of this incident was not recorded: "
        f"{'; '.join(reasons) or f'{RANK_FILE} does not say why'}; give an incident of a loop that can be executed again, "
        "recorded with --incident full"
    )


def _chosen_rank(incident: Incident, rank: int) -> int:
    """The given rank, or the only recorded one for -1.

    Raises ``UsageError`` if that rank has no part.
    """
    known = incident.ranks
    if rank in known:
        return rank
    if rank < 0 and len(known) == 1:
        return known[0]
    reason = "no rank is suspected" if rank < 0 else f"{incident.folder} has no part of rank {rank}"
    raise UsageError(f"{reason}; it has those of ranks {listed(map(str, known), 8) or 'none'}: choose one with --rank")
