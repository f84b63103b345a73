"""Runs a small training with a planted anomaly, until the monitor gives a verdict on its first alarm."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.events.event_kinds import AlarmExplained, Event
from unsilent.faults import Fault
from unsilent.incidents.plant import PlantedIncident
from unsilent.incidents.planted_workloads import CLASSES, Batch, Classifier, draw_batch
from unsilent.monitor import Monitor, MonitorStop
from unsilent.monitor.incident_writer import training_state
from unsilent.recovery.tensor_files import host_copy
from unsilent.sites import corrupt
from unsilent.sites.faulty_device import FaultyDevice, element_fault, resolved_fault

MOST_STEPS, SOON = 400, 20
"""Most steps without an alarm after the anomaly began: for a device that fails intermittently, and for other kinds."""
CHECKPOINT_INTERVAL = 10
RATE = 2e-3
RULE = "robust-z:early=20"
"""The monitor's default rule, but with limits that become narrow earlier, for trainings as short as these."""
NEVER = 2**31
"""Number of a step that no training reaches."""
TOP_EXPONENT_BIT = 1
"""Number of the highest bit of an exponent, counted from the sign."""


class PlantedJob:
    """The training of one rank, in which an anomaly is planted."""

    def __init__(self, incident: PlantedIncident, rank: int) -> None:
        self._incident, self._rank = incident, rank
        torch.manual_seed(incident.seed)
        self.model = Classifier(incident.workload, incident.kind == "numerics")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        self.called: nn.Module = DistributedDataParallel(self.model) if incident.world_size > 1 else self.model
        self._is_here = rank == incident.rank
        self.device = FaultyDevice(self._device_fault, incident.probability, seed=incident.seed)
        self.device.is_on = False

    def step(self, batch: Batch, rate: float) -> None:
        """Train one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        self.called(batch).backward()
        self.optimizer.step()

    def begin(self, step: int) -> Batch:
        """Begin a step: turn on a planted device fault, and return the batch, changed if planned."""
        incident = self._incident
        batch = draw_batch(incident.seed, step, self._rank)
        if step < incident.step:
            return batch
        is_first = step == incident.step
        if incident.kind in ("transient", "device") and self._is_here and is_first:
            self._turn_on_fault()
        if incident.kind in ("data", "numerics", "benign") and self._is_here and is_first:
            return changed_batch(batch, incident)
        return batch

    def _turn_on_fault(self) -> None:
        """Let the device compute one operation wrongly from now on, either once or repeatedly."""
        seen = sorted(self.device.seen.items())
        (self.device.only, times) = seen[int(self._incident.draws[0] * len(seen))]
        per_step = max(round(times / self._incident.step), 1)
        self.device.probability = 1 - (1 - self._incident.probability) ** (1 / per_step)
        self.device.hits_left = 1 if self._incident.kind == "transient" else None
        self.device.is_on = True

    def _device_fault(self, output: Tensor) -> Fault:
        if output.dtype == torch.float64 and not self._incident.seen_in_float64:
            return resolved_fault(output, "xor", np.zeros(0, np.int64), np.zeros(0, np.uint64))
        if self._incident.variety == "one element":
            elements = np.array([int(self._incident.draws[1] * output.numel())])
        else:
            elements = np.arange(int(self._incident.draws[1] * 8), output.numel(), 8)
        return element_fault(output, "or", elements, TOP_EXPONENT_BIT)

    def load_damaged(self) -> None:
        """Load the current state with one flipped bit, as a damaged checkpoint would."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        name = list(state)[int(self._incident.draws[0] * len(state))]
        element = np.array([int(self._incident.draws[1] * state[name].numel())])
        corrupt(state[name], element_fault(state[name], "xor", element, TOP_EXPONENT_BIT))
        self.model.load_state_dict(state)

    def keep_checkpoint(self) -> None:
        """Save the state as the checkpoint before the damaged one."""
        self._checkpoint = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load_checkpoint(self) -> None:
        """Load the saved state."""
        model, optimizer = self._checkpoint
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))


def changed_batch(batch: Batch, incident: PlantedIncident) -> Batch:
    """The batch with the change that the incident plans."""
    images, labels = batch.images.clone(), (batch.labels + 1 + int(incident.draws[0] * (CLASSES - 1))) % CLASSES
    images.view(-1)[int(incident.draws[1] * images.numel())] = float("nan")
    return {
        "NaN": batch._replace(images=images),
        "exchanged labels": batch._replace(labels=labels),
        "inputs times 1e6": batch._replace(images=batch.images * 1e6),
        "large weights": batch._replace(weights=batch.weights * 100),
        "overflow": batch._replace(offset=torch.tensor(20.0)),
        "learning rate": batch,
        "loss scale": batch._replace(scale=torch.tensor(2.0**24)),
    }[incident.variety]


def run_planted(
    incident: PlantedIncident, rank: int = 0, has_anomaly: bool = True, noticed: int | None = None, **options: Any
) -> AlarmExplained | None:
    """Run a training with a planted anomaly, and return the verdict on its first alarm.

    Every rank of ``world_size`` calls it.

    Args:
        has_anomaly: Whether the anomaly is planted. Otherwise the same training runs without it.
        noticed: Step that is recorded as an incident if there was no alarm before.
        options: Options of the monitor.
    """
    job = PlantedJob(incident if has_anomaly else replace(incident, step=NEVER), rank)
    explained: list[AlarmExplained] = []
    options = {"on_alarm": "replay", "sampling": "fixed:1", "rule": (RULE,)} | options

    def take(event: Event) -> None:
        if isinstance(event, AlarmExplained):
            explained.append(event)

    context = job.device if incident.kind in ("transient", "device") else nullcontext()
    with context, suppress(MonitorStop), Monitor(job.called, job.optimizer, sinks=[take], **options) as monitor:
        if incident.kind == "checkpoint":
            monitor.load_earlier = job.load_checkpoint
        count = incident.step + (MOST_STEPS if incident.kind == "device" and noticed is None else SOON)
        for step in range(count if noticed is None else noticed + 1):
            if incident.kind == "checkpoint" and step == incident.step - CHECKPOINT_INTERVAL:
                job.keep_checkpoint()
            if incident.kind == "checkpoint" and step == incident.step and has_anomaly:
                job.load_damaged()
            has_rate = has_anomaly and incident.variety == "learning rate" and step >= incident.step
            rate, batch = RATE * 1000 if has_rate else RATE, job.begin(step)
            state = host_copy(training_state(job.model, [job.optimizer])) if step == noticed else None
            monitor.step(job.step, batch, rate)
            if step == noticed:
                monitor.record_incident(step, state, (batch, rate))
            if explained:
                break
    return explained[0] if explained else None
