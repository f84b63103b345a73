"""Finds the operation that makes two runs diverge: the first whose different result reaches the weights.

A different result of an operation may have no effect: for example, only the report reads the mean of a loss. So the step in which
the weights diverge is searched backwards, from the weights that differ, along values that differ. The earliest operation on this
path is reported: it gives different outputs for equal inputs, reads different values that no operation of the step computed, or
runs in only one of the two runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from unsilent.replicas import ReplicaRow, ReplicaStore, StepTrace, StepTraceId
from unsilent.replicas.step_trace import Operation
from unsilent.statistics.replica_spread import first_differing_index
from unsilent.studies.noise.records import DivergingOperation

START, DATA, MOVED, RANDOM, DEALT, KERNEL, PATH = "start", "data", "moved", "random", "dealt", "kernel", "path"
_PHASES = {"fwd": "forward", "bwd": "backward", "update": "update", "recomputed": "recomputed forward"}


def earliest_divergence(rows: Sequence[ReplicaRow], twin: ReplicaRow) -> StepTraceId | None:
    """The step and replica of the earliest divergence from the twin; None if no replica diverges."""
    result = [(first_differing_index(twin.hashes.tolist(), row.hashes.tolist()), row.replica) for row in rows]
    looks = (StepTraceId(replica, step, "within" in replica.switches) for step, replica in result if step is not None)
    return min(looks, key=lambda look: look.step, default=None)


def stored_diverging_operation(
    rows: Sequence[ReplicaRow], twin: ReplicaRow, store: ReplicaStore
) -> DivergingOperation | None:
    """The operation at which the earliest of these replicas diverges.

    The result is ``None`` if its steps were not traced or the operation cannot be found.
    """
    look = earliest_divergence(rows, twin)
    if look is None:
        return None
    seen, trace = store.find_step_trace(look._replace(replica=twin.replica)), store.find_step_trace(look)
    return (
        None if seen is None or trace is None else find_diverging_operation(seen, trace, str(look.replica), look.step)
    )


def find_diverging_operation(twin: StepTrace, trace: StepTrace, replica: str, step: int) -> DivergingOperation | None:
    """The operation at which two traces of one step diverge; None if it cannot be found."""
    if not (twin.operations and trace.operations):
        return None
    if list(twin.before) != list(trace.before):
        return DivergingOperation(replica, step, START)
    pairs = _paired_operations(twin.operations, trace.operations)
    weights = {b for a, b in zip(twin.after, trace.after, strict=False) if a != b}
    source = _source(pairs, weights) or _source(pairs, None)
    return None if source is None else DivergingOperation(replica, step, *source)


def _paired_operations(
    twin: Sequence[Operation], replica: Sequence[Operation]
) -> list[tuple[Operation | None, Operation]]:
    """Each operation of ``replica``, paired with the matching operation of ``twin`` or with None."""
    keys = [[_operation_text(op) for op in run] for run in (twin, replica)]
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    mapping: dict[int, Operation] = {}
    for a, b, size in matcher.get_matching_blocks():
        mapping.update((b + i, twin[a + i]) for i in range(size))
    return [(mapping.get(i), op) for i, op in enumerate(replica)]


def _source(
    pairs: Sequence[tuple[Operation | None, Operation]], needed: set[int] | None
) -> tuple[str, str, str, str] | None:
    """The first operation with a different result that the ``needed`` values derive from.

    The result is its kind, kernel, module and phase. ``needed`` is ``None`` if every value counts.
    """
    known = {value for op, _ in pairs if op is not None for value in (*op.input_hashes, *op.output_hashes)}
    computed, drawn = {value for _, op in pairs for value in op.output_hashes}, _drawn([op for _, op in pairs])
    result = None
    for twin, op in reversed(pairs):
        new, read = (
            _other(getattr(twin, what), getattr(op, what)) if twin else {*getattr(op, what)} - known
            for what in ("output_hashes", "input_hashes")
        )
        if not (new if needed is None else new & needed):
            continue
        if needed is not None:
            needed = needed | read
        if twin is None or not read or read - computed:
            dealt = bool(drawn.intersection(op.input_hashes))
            result = (_kind_of_divergence(twin, op, bool(read), dealt), *_operation_text(op))
    return result


def _other(twin: Sequence[int], mine: Sequence[int]) -> set[int]:
    return {b for a, b in zip(twin, mine, strict=False) if a != b}


def _drawn(operations: Sequence[Operation]) -> set[int]:
    """Hashes of values that are random numbers or derive from random numbers only, like a dropout mask."""
    members: set[int] = set()
    for op in operations:
        if op.is_random or (op.input_hashes and members.issuperset(op.input_hashes)):
            members.update(op.output_hashes)
    return members


def _kind_of_divergence(twin: Operation | None, op: Operation, read: bool, dealt: bool) -> str:
    if twin is None:
        return PATH
    if read:
        return DATA
    return RANDOM if op.is_random else MOVED if op.only_moves_data else DEALT if dealt else KERNEL


def _operation_text(operation: Operation) -> tuple[str, str, str]:
    """The kernel, module and phase of an operation."""
    module = operation.name.partition("#")[0] if "#" in operation.name else ""
    return operation.kernel, module, _PHASES.get(operation.phase, "")
