"""Evidence about a step with an alarm: results of executing it again, and the history of its job and device."""

from __future__ import annotations

from dataclasses import dataclass

SAME_DEVICE, NEIGHBOUR = "same device", "neighbour"
"""Places where the state and batch of the rank with the alarm are executed again: its own device, or another rank's."""
LIVE, EARLIER_CHECKPOINT = "live", "earlier checkpoint"
"""Start state of an execution: the state of the job, or of the checkpoint before the one that was loaded last."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One repeated execution of the step with the alarm, which does not change the training.

    Attributes:
        place: `SAME_DEVICE` or `NEIGHBOUR`.
        rank: Rank whose device executed it.
        start: `LIVE` or `EARLIER_CHECKPOINT`.
        dtype: ``float64`` if every operation was computed in it; empty: as in the training.
        is_equal: Whether its bits equal those of the step with the alarm (within the tolerance if there is one). None: not
            compared, for example after another start. In ``float64``: whether every operation, computed a second time in its own
            dtype from the same inputs, gave the same bits.
        has_alarm: Whether the alarm came again.
        ranks: Ranks with the alarm, each with its own batch, in values from before any reduction; empty if values that ranks
            share had a finding in the same step. Only known for executions on the same device.
        is_finite: Whether parameters, gradients and moments are finite at its end.
        digest: Digest of all resulting tensors, which depends on the positions of elements; empty if there is none.
        overflowed: The first operation with finite inputs whose result is not finite, or far from the one in float64; empty if
            there is none.
    """

    place: str
    rank: int
    start: str = LIVE
    dtype: str = ""
    is_equal: bool | None = None
    has_alarm: bool
    ranks: tuple[int, ...] = ()
    is_finite: bool = True
    digest: str = ""
    overflowed: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All facts that a verdict on an alarm is based on.

    Attributes:
        step: Step of the alarm.
        rank: Rank that is suspected; -1: undetermined.
        host, device: Host and device of that rank.
        feature, tensor: Feature and tensor of the alarm; feature ``fingerprint``: bits changed between two steps.
        world_size: Number of ranks.
        executions: Executions in their order.
        steps_per_execution: Number of steps in each execution: the step of the alarm, and the steps before it since a kept state.
        problem: Reason why the step could not be executed again; empty if it could.
        no_neighbour: Reason why no execution of another rank is evidence; empty if one is.
        is_neighbour_checked: Whether that other rank is known to compute the same from a batch as the batch's own rank: loss and
            gradients agreed before the alarm.
        apart: Distance between executions on the same device: the largest difference of an element, relative to the largest
            magnitude of its tensor; infinite if a value is not finite in only one of them.
        tolerance: Relative difference between clean executions of this step; 0: they have the same bits.
        steps_since_load: Number of steps since the last load of a checkpoint, including the step of the alarm; None if none was
            loaded.
        batch_problem: Problem of the batch itself, in words (elements that are not finite, labels out of range); empty if none
            was found.
        strikes: Number of earlier incidents, across jobs, in which the fault was in this device, or transient on it.
        strikes_in_step: Number of earlier incidents on this device in the same step whose kind is undetermined.
        strikes_elsewhere: Number of earlier incidents on other devices in the same step.
    """

    step: int
    rank: int
    host: str = ""
    device: str = ""
    feature: str
    tensor: str = ""
    world_size: int = 1
    executions: tuple[Execution, ...] = ()
    steps_per_execution: int = 1
    problem: str = ""
    no_neighbour: str = ""
    is_neighbour_checked: bool = False
    apart: float = 0.0
    tolerance: float = 0.0
    steps_since_load: int | None = None
    batch_problem: str = ""
    strikes: int = 0
    strikes_in_step: int = 0
    strikes_elsewhere: int = 0
