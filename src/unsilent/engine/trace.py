"""A picture of a fault's effect: a faulty run compared with a golden run.

Every output of every operation is compared bit for bit.

    trace        any run that can be repeated from the same state
    trace_step   a training step: state is restored before every run, and after the last
    trace_batch  one batch of an inference workload under the faults of a trial

`unsilent.basics.fault_trace` describes the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.basics.fault_trace import (
    BEFORE_FIRST_ROW,
    FaultTrace,
    OperationDivergence,
    OutputDifference,
    TracedFault,
    TraceRow,
)
from unsilent.engine.holding import HeldTraining
from unsilent.engine.plain import PlainEngine, acting_in
from unsilent.engine.tracing.golden_and_faulty_runs import PassComparison, Run, common_prefix_length, compare
from unsilent.engine.tracing.tracer import Tracer
from unsilent.faults import Fault
from unsilent.faults.naming import SiteName, is_transient, parse_site
from unsilent.faults.receipts import AppliedFault
from unsilent.faults.unresolved_fault import UnresolvedFault
from unsilent.sites import TransientInjection
from unsilent.sites.training.step import StepInjection
from unsilent.workloads.model_fitting import Progress, no_progress

_ADDRESSED = {"outside": "fwd"}
MEMORY = 1 << 30
"""Largest number of bytes of golden outputs."""


def trace(
    model: nn.Module,
    run: Run,
    *,
    training: bool = True,
    memory: int = MEMORY,
    progress: Progress = no_progress,
    faults: Callable[[], Sequence[tuple[Fault, int | None]]] = tuple,
) -> FaultTrace:
    """Compare faulty runs with golden runs.

    Args:
        model: Model with the modules and parameters that give the names.
        run: ``run(faulty, tracer)`` runs once, always from the same state, and enters ``tracer`` inside every other
            mode, around everything to be traced.
        training: Whether the run may contain backward passes and updates; if not, names are those of an evaluation.
        memory: Bytes for golden outputs; if this is not enough, runs are repeated.
        progress: Function that is called with a line about each run.
        faults: Function that is called after the runs and returns the faults to mark in the picture, with the bits that
            each changed (None: not counted).

    Raises:
        UsageError: runs that should be the same differ (names the first operation), or the tracer was not entered.
    """
    if memory < 1:
        raise UsageError(f"memory is {memory} bytes; expected 1 or more")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            "a trace repeats the run, which is possible only in a job with one rank; start the job with one rank"
        )
    result = compare(model, run, training, memory, progress)
    rows, numbers = _rows(result)
    placed = tuple(_traced_fault(fault, bits, rows) for fault, bits in faults())
    notes = () if not result.scratch else (_scratch_note(result),)
    return FaultTrace(rows, placed, _parting(result, numbers), result.runs, notes)


def trace_step(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    step: Callable[[], Any],
    faults: Sequence[Fault | UnresolvedFault],
    *,
    stateful_objects: Sequence[Any] = (),
    memory: int = MEMORY,
    progress: Progress = no_progress,
) -> FaultTrace:
    """The spread of faults through one training step.

    Args:
        step: Function that runs one step: forward and backward passes, updates. Its result must be the same when it is
            run again from the same parameters, buffers, gradients, optimizer state, ``stateful_objects`` and random
            generators; a step that takes its batch from an iterator does not.
        faults: See `Step`.
        stateful_objects: Schedulers, scalers and other objects with a ``state_dict``.

    State is restored before every run, and after the last one. Raises the same errors as `trace` and `Step`.
    """
    state, applied_faults = HeldTraining(model, optimizers, stateful_objects), list[AppliedFault]()

    def run(faulty: bool, tracer: Tracer) -> None:
        state.restore()
        corrupted = StepInjection(model, faults if faulty else (), optimizers, whole_step=True)
        try:
            with corrupted, tracer:
                step()
        finally:
            if faulty:
                applied_faults[:] = corrupted.applied_faults

    def changed_bits() -> list[tuple[Fault, int | None]]:
        return [(hit.fault, hit.changed_bits) for hit in applied_faults]

    try:
        return trace(model, run, memory=memory, progress=progress, faults=changed_bits)
    finally:
        state.restore()


def trace_batch(
    engine: PlainEngine,
    batch: int,
    faults: Sequence[Fault],
    *,
    progress: Progress = no_progress,
) -> FaultTrace:
    """The spread of a trial's faults through the evaluation of one batch.

    The model is restored afterwards. Raises the same errors as `trace`, and ``InjectionError`` for a fault that did not
    land.
    """
    acting, missed = acting_in(batch, faults), list[str]()
    engine.check_and_prepare(acting)

    def run(faulty: bool, tracer: Tracer) -> None:
        corrupted = acting if faulty else []
        transient = [f for f in corrupted if is_transient(f.site)]
        corrupt = TransientInjection(engine.model, engine.batches[batch], transient)
        with engine.inject_parameter_faults(corrupted), corrupt, tracer:
            engine._run(corrupt.batch)
        engine._check_landed(corrupt, batch, len(transient) < len(corrupted))
        if faulty:
            missed[:] = [f"{fault.site} was not hit: {why}" for fault, why in corrupt.missed]

    result = trace(engine.model, run, training=False, progress=progress, faults=lambda: [(f, None) for f in acting])
    return FaultTrace(result.rows, result.faults, result.divergence, result.runs, (*result.notes, *missed))


def _rows(result: PassComparison) -> tuple[tuple[TraceRow, ...], list[int]]:
    """A row for each output that both runs have in common, and its number among all outputs.

    Scratch memory is left out.
    """
    numbers = [i for i in range(common_prefix_length(result.golden, result.faulty)) if i not in result.scratch]
    rows = []
    for i in numbers:
        golden, faulty = result.golden[i], result.faulty[i]
        faulty_type = ""
        if (golden.dtype, golden.shape) != (faulty.dtype, faulty.shape):
            faulty_type = f"{faulty.dtype}[{','.join(map(str, faulty.shape))}]"
        elements = int(torch.Size(golden.shape).numel())
        change = result.changes[i] if not faulty_type else OutputDifference(elements)
        rows.append(TraceRow(*golden.key, golden.dtype, golden.shape, elements, change, faulty_type))
    return tuple(rows), numbers


def _parting(result: PassComparison, numbers: Sequence[int]) -> OperationDivergence | None:
    both = common_prefix_length(result.golden, result.faulty)
    if both == len(result.golden) == len(result.faulty) and not result.error:
        return None
    golden, faulty = (seen[both].text if both < len(seen) else "" for seen in (result.golden, result.faulty))
    return OperationDivergence(len(numbers), golden, faulty, result.error)


def _scratch_note(result: PassComparison) -> str:
    names = [result.golden[i].text for i in sorted(result.scratch)]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"scratch memory is left out: it differs between golden runs, and nothing reads it: {', '.join(names[:4])}{more}"


def _traced_fault(fault: Fault, bits: int | None, rows: Sequence[TraceRow]) -> TracedFault:
    return TracedFault(fault.site, fault.describe(), _place(parse_site(fault.site), fault, rows), bits)


def _place(site: SiteName, fault: Fault, rows: Sequence[TraceRow]) -> int | None:
    """The number of the row that a fault corrupts, or None; see `TracedFault`."""
    if site.kind in ("param", "optim", "input"):
        return BEFORE_FIRST_ROW
    phase = {"fwd": "recomputed" if fault.occurrence else "fwd", "optim": "update"}.get(site.phase, "bwd")
    if site.kind == "saved":
        return next((i for i, row in enumerate(rows) if row.phase == "bwd"), None)
    step, output = fault.micro_step or 0, int(site.operand.partition(".")[2] or 0) if phase != "bwd" else None
    mine = [
        i
        for i, row in enumerate(rows)
        if (row.name, _ADDRESSED.get(row.phase, row.phase)) == (site.name, phase)
        and (phase == "update" or row.micro_step == step)
    ]
    if phase == "bwd":  # the last output of the node; sums by autograd after it have the same name
        rows_of_node = [i for i in mine if not rows[i].kernel.startswith("add.")] or mine
        return rows_of_node[-1] if rows_of_node else None
    exact = [i for i in mine if rows[i].output == output]
    return next(iter(exact or mine), None)
