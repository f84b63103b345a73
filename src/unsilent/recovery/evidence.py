"""Evidence about a step with an alarm: results of executing it again, and the history of its job and device."""

from __future__ import annotations

from dataclasses import dataclass

SAME_DEVICE, NEIGHBOUR = "same device", "neighbour"
"""Places where the state and the batch of the rank with the alarm are executed again: its own device, or another rank's."""
LIVE, EARLIER_CHECKPOINT = "live", "earlier checkpoint"
"""The state that an execution begins with: that of the job, or of the checkpoint before the one that was loaded last."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One repeated execution of the step with the alarm, which does not change the training.

    Attributes:
        place: `SAME_DEVICE` or `NEIGHBOUR`.
        rank: Rank whose device executed it.
        start: `LIVE` or `EARLIER_CHECKPOINT`.
        dtype: ``float64`` where every operation was computed in it; empty: as in the training.
        is_equal: Whether it came to the bits of the step with the alarm (within the tolerance where there is one); None: not
            compared, as after another start. In ``float64``: whether every operation of the step's own dtype, computed a second
            time from the same inputs, came to the same bits.
        has_alarm: Whether the alarm came again.
        ranks: Ranks in which it did, each with its own batch, in values from before any reduction; empty where what ranks
            share had a finding in the same step. Only known of executions on the same device.
        is_finite: Whether parameters, gradients and moments are finite at its end.
        digest: Digest of all tensors that it came to, in which the place of an element counts; empty where there is none.
        overflowed: The first operation with a result that is not finite, or far from that in float64, and finite inputs; empty
            where there is none.
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
        host, device: Of that rank.
        feature, tensor: In which the alarm was found; feature ``fingerprint``: bits changed between two steps.
        world_size: Number of ranks.
        executions: Executions in the order in which they were made.
        steps_per_execution: Steps that each of them consists of: the step of the alarm, and those that lead there from a state
            that was kept.
        problem: Why the step could not be executed again, in words; empty where it could.
        no_neighbour: Why no execution of another rank is evidence, in words; empty where one is.
        is_neighbour_checked: Whether that rank is known to compute from a batch what the rank of the batch does: before the alarm
            it did, in loss and gradients.
        apart: Distance of executions on the same device: the largest difference of an element, relative to the largest
            magnitude of its tensor; infinite where a value of one alone is not finite.
        tolerance: Relative difference that clean executions of this step had among each other; 0: they have the same bits.
        steps_since_load: Steps since the last load of a checkpoint, that of the alarm among them; None where nothing was loaded.
        batch_problem: Problem of the batch by itself, in words (elements that are not finite, labels out of range);
            empty: nothing that was looked for.
        strikes: Earlier incidents, over jobs, in which the fault was in this device, or transient on it.
        strikes_in_step: Earlier incidents on this device in the same step whose kind is undetermined.
        strikes_elsewhere: Earlier incidents on other devices in the same step.
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
