"""A trace of one step of a replica: inputs and outputs of every operation, for comparing two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.stored_values import DamagedRecordError, dump_stored_json, parse_record
from unsilent.replicas.spec import Replica
from unsilent.replicas.switches import Switches

STEP, UNORDERED = "step:", "unordered-step:"
"""Prefixes of the targets of step traces; the step and the switches follow, as in ``step:12:within``."""


class StepTraceId(NamedTuple):
    """The identity of a step trace: the run and the step, from 0.

    ``unordered``: whether the hashes ignore the order of elements.
    """

    replica: Replica
    step: int
    unordered: bool = False

    def __str__(self) -> str:
        return f"{self.replica} at step {self.step}"

    @property
    def switches(self) -> Switches:
        """Switches of the replica that the trace belongs to."""
        return self.replica.switches

    @property
    def trial(self) -> TrialId:
        """The trial under which the trace is stored."""
        prefix = UNORDERED if self.unordered else STEP
        return TrialId(f"{prefix}{self.step}:{self.replica.switches}", None, self.replica.number)


def replica_or_step_trace(trial: TrialId) -> Replica | StepTraceId:
    """The run or the step trace that a trial stores.

    Raises ``UsageError`` or ``ValueError`` if it stores neither.
    """
    for prefix in (STEP, UNORDERED):
        if trial.target.startswith(prefix):
            step, _, switches = trial.target.removeprefix(prefix).partition(":")
            return StepTraceId(Replica(Switches.parse(switches), trial.k), int(step), prefix == UNORDERED)
    return Replica(Switches.parse(trial.target), trial.k)


class Operation(NamedTuple):
    """An operation of a traced step.

    Attributes:
        name: Name in faults, for example ``conv1#convolution.0``; equal to ``kernel`` if it has no such name.
        kernel: Function of torch that ran.
        phase: ``fwd``, ``bwd`` or ``update``; empty if the operation has no name in faults.
        is_random: Whether the operation draws random numbers.
        only_moves_data: Whether its outputs only contain elements of its inputs, without any computation.
        input_hashes, output_hashes: Hashes of the input and output tensors.
    """

    name: str
    kernel: str
    phase: str
    is_random: bool
    only_moves_data: bool
    input_hashes: tuple[int, ...]
    output_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The trace of a step: hashes of parameters and buffers before and after it, and its operations in order.

    ``note``: reason why the step could not be traced; all other fields are empty then.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    operations: Sequence[Operation] = ()
    note: str = ""

    def text(self) -> str:
        """The trace as JSON."""
        return dump_stored_json(asdict(self))


def read_step_trace(text: str) -> StepTrace:
    """A trace parsed from JSON; raises ``DamagedRecordError``."""
    trace = parse_record(StepTrace, text, "step trace")
    if len(trace.before) != len(trace.after):
        raise DamagedRecordError("a step trace has different numbers of tensors before and after the step")
    return trace
