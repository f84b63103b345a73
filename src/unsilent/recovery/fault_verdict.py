"""Verdict on the kind of fault behind an alarm: a fault code, an exit code and advice, derived from evidence.

The verdict follows from executions of the step of the alarm. If they differ on one device, the device is faulty. If they give
other values than the first time, the fault is transient. If they raise the alarm again, the change that removes it shows the
cause (another device, the checkpoint before, float64); if no change does, the cause is the data or the program, or the alarm was
raised on correct values. If the executions do not decide between causes, the kind is undetermined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unsilent.recovery import fault_codes as codes
from unsilent.recovery.evidence import EARLIER_CHECKPOINT, LIVE, NEIGHBOUR, SAME_DEVICE, Evidence, Execution
from unsilent.recovery.fault_codes import UNDETERMINED_EXIT_CODE, FaultCode, FaultKind

SOON_AFTER_LOAD = 100
"""Number of steps after the load of a checkpoint in which an alarm may come from the loaded state."""
CONFIDENCE = 0.95
ROUNDING = 1e-3
"""Largest difference, as a share of a tensor's largest magnitude, that rounding in another order may cause."""
FLOAT64 = "float64"
Decision = tuple[FaultCode, str]


@dataclass(frozen=True, kw_only=True)
class FaultVerdict:
    """Verdict on the kind of fault behind an alarm.

    Attributes:
        kind: ``transient``, ``device``, ``checkpoint``, ``numerics`` (the dtype overflows or is too coarse), ``benign`` (an
            unusual batch, a change of regime), ``data`` (or software), or ``undetermined``.
        step, rank, host, device: Values from the alarm; rank is -1 if no rank is named.
        code: Stable code from the table of fault codes, such as ``UNSILENT-T01``.
        level: ``minor`` or ``major``.
        action: Advice in words.
        reason: Evidence for it, in one sentence.
        exit_code: Exit code of a job that stops on it; 0 if the job may continue.
    """

    kind: FaultKind
    step: int
    rank: int
    host: str = ""
    device: str = ""
    code: str = ""
    level: str = "minor"
    action: str = ""
    reason: str = ""
    exit_code: int = UNDETERMINED_EXIT_CODE


def judge(evidence: Evidence) -> FaultVerdict:
    """The verdict on the kind of fault that the evidence supports."""
    code, reason = _with_earlier_incidents(evidence, *_of_executions(evidence))
    if code.kind == "device" and evidence.rank < 0:
        code, reason = codes.CONTRADICTION, f"{reason}; which rank it is remains undetermined"
    return FaultVerdict(
        kind=code.kind, step=evidence.step, rank=evidence.rank, host=evidence.host, device=evidence.device, code=code.code,
        level=code.level, action=code.action, reason=reason, exit_code=code.exit_code,
    )  # fmt: skip


def fault_share_bound(clean: int) -> float:
    """Upper bound, at 95 % confidence, on the share of faulty executions after ``clean`` ones without a fault.

    It solves (1 - bound) ** clean = 0.05, which is about 3 / ``clean``, and is rounded up to two digits.
    """
    exact = -math.expm1(math.log1p(-CONFIDENCE) / clean)
    unit = 10.0 ** (math.floor(math.log10(exact)) - 1)
    return math.ceil(exact / unit) * unit


def is_decided(results: Sequence[tuple[str, bool]]) -> bool:
    """Whether more executions on the same device could not change the verdict.

    This is true if one has an alarm, or if at least two results agree and another differs.

    Args:
        results: Digest of each execution, and whether it has the alarm.
    """
    counts = Counter(digest for digest, _ in results)
    return any(has_alarm for _, has_alarm in results) or (len(counts) > 1 and max(counts.values()) > 1)


def _of_executions(evidence: Evidence) -> Decision:
    """The decision from the evidence about this alarm alone."""
    same = _select(evidence, SAME_DEVICE)
    if not same:
        problem = evidence.problem or "the step was not executed again"
        if evidence.batch_problem:
            return codes.DATA_BATCH, f"{evidence.batch_problem}; {problem}"
        return codes.NOT_EXECUTED, problem
    wide = _select(evidence, SAME_DEVICE, dtype=FLOAT64)
    if evidence.tolerance == 0 and any(execution.is_equal is False for execution in wide):
        return codes.DEVICE_OPERATION, (
            "an operation that the device computed twice from the same inputs had two results"
        )
    is_exact = evidence.tolerance == 0 and all(execution.digest for execution in same)
    groups = Counter(_key_of_results(execution, is_exact) for execution in same)
    if len(groups) > 1:
        return _of_varying(evidence, same, max(groups.values()), len(groups))
    if same[0].has_alarm:
        return _of_repeated(evidence, same)
    return _of_clean(evidence, same)


def _of_varying(evidence: Evidence, same: Sequence[Execution], most_alike: int, results: int) -> Decision:
    """The decision for executions on the same device that gave different results."""
    count, near, is_rounding = len(same), _select(evidence, NEIGHBOUR), evidence.apart <= ROUNDING
    have_all_alarm = all(execution.has_alarm for execution in same)
    if have_all_alarm and is_rounding:
        return _of_repeated(evidence, same)
    if len({execution.has_alarm for execution in same}) == 1 and is_rounding:
        return codes.CONTRADICTION, (
            f"{count} executions of the step{_here(evidence)} came to {results} results without the alarm, which differ by no "
            f"more than {100 * ROUNDING:g} % of the largest magnitude of a tensor: the step is not deterministic, or the device "
            "computes wrongly"
        )
    if most_alike >= 2:
        return codes.DEVICE_VARIES, (
            f"of {count} executions of the step{_here(evidence)}, {most_alike} came to {_alike(evidence)}, and "
            f"{count - most_alike} did not"
        )
    if have_all_alarm and near and not any(execution.has_alarm for execution in near):
        return _of_repeated(evidence, same)
    return codes.CONTRADICTION, (
        f"{count} executions of the step{_here(evidence)} came to {results} results, no two alike: the device computes wrongly, "
        "or the step is not deterministic"
    )


def _of_clean(evidence: Evidence, same: Sequence[Execution]) -> Decision:
    """The decision for executions on the same device that agree and have no alarm."""
    if any(execution.is_equal for execution in same):
        return codes.CONTRADICTION, (
            "executed again, the step came to the same bits as the first time, but without the alarm"
        )
    if len(same) < 2:
        return codes.NOT_EXECUTED, (
            "the step was executed again once, without the alarm; two executions are compared at least"
        )
    if any(execution.has_alarm for execution in _select(evidence, NEIGHBOUR)):
        return codes.CONTRADICTION, (
            f"{len(same)} executions of the step{_here(evidence)} had no alarm, but one on that of another rank had"
        )
    clean = len(same) * evidence.steps_per_execution
    return codes.TRANSIENT, (
        f"{len(same)} executions of the step{_here(evidence)} came to {_alike(evidence)}, without the alarm and unlike the first "
        f"time: none of {clean} repeated steps was faulty, so that less than {100 * fault_share_bound(clean):.2g} % of such "
        "steps are (95 % confidence)"
    )


def _of_repeated(evidence: Evidence, same: Sequence[Execution]) -> Decision:
    """The decision for executions on the same device that all have the alarm."""
    count, together = len(same), min(len(execution.ranks) for execution in same) if evidence.rank < 0 else 0
    again = f"the alarm came again in {count} of {count} executions"
    again += f", in {together} ranks at once" if together > 1 else _here(evidence)
    near = _select(evidence, NEIGHBOUR)
    if near and not any(execution.has_alarm for execution in near):
        return codes.DEVICE_REPEATED, f"{again}, and not on that of {_neighbour(evidence, near[0])}"
    if evidence.batch_problem:
        return codes.DATA_BATCH, f"{again}; {evidence.batch_problem}"
    if near:
        again += f", and on that of {_neighbour(evidence, near[0])}"
    is_soon = evidence.steps_since_load is not None and evidence.steps_since_load <= SOON_AFTER_LOAD
    older = _select(evidence, SAME_DEVICE, EARLIER_CHECKPOINT)
    if is_soon and older and not any(execution.has_alarm for execution in older):
        return codes.CHECKPOINT, (
            f"{again}, in step {evidence.steps_since_load} after a checkpoint was loaded, and not in the step executed from the "
            "checkpoint before"
        )
    is_elsewhere = bool(near) or (together > 1 and all(execution.is_finite for execution in evidence.executions))
    return _of_float64(evidence, again, is_elsewhere, is_checkpoint_known=not is_soon or bool(older))


def _of_float64(evidence: Evidence, again: str, is_elsewhere: bool, is_checkpoint_known: bool) -> Decision:
    """The decision on a repeated alarm, based on an execution in float64."""
    wide = _select(evidence, SAME_DEVICE, dtype=FLOAT64)
    overflowed = next((execution.overflowed for execution in wide if execution.overflowed), "")
    if not is_checkpoint_known and (overflowed or any(not execution.is_finite for execution in wide)):
        return codes.NO_OTHER_CHECKPOINT, f"{again}, in step {evidence.steps_since_load} after a checkpoint was loaded"
    if overflowed and not any(execution.has_alarm for execution in wide):
        return codes.NUMERICS, (
            f"{again}; {overflowed} is the first operation that overflows in its dtype and not in float64"
        )
    if wide and is_elsewhere and not any(execution.has_alarm for execution in wide):
        return codes.NUMERICS, f"{again}, and not in float64; no operation is known to overflow"
    if not is_elsewhere:
        return codes.NO_OTHER_DEVICE, (
            f"{again}; {_why_nowhere_else(evidence)}, so that a device that always fails alike is not told from the data"
        )
    if not wide:
        return codes.NO_OTHER_DEVICE, f"{again}; it was not executed in float64"
    if not all(execution.is_finite for execution in wide):
        return codes.DATA_EVERYWHERE, (
            f"{again}, with parameters, gradients or moments that are not finite; no operation is known to overflow"
        )
    untried = "" if is_checkpoint_known else "; the checkpoint before the one that was loaded lately was not tried"
    return codes.BENIGN, (
        f"{again}; parameters, gradients and moments are finite, and nothing points to a fault of the device{untried}"
    )


def _with_earlier_incidents(evidence: Evidence, code: FaultCode, reason: str) -> Decision:
    """The decision after considering earlier incidents of the device and of the step."""
    if code.kind == "transient" and evidence.strikes and evidence.rank >= 0:
        return codes.DEVICE_STRIKES, f"{reason}; this device had {_incidents(evidence.strikes)} before"
    if (code.kind == "undetermined" or code is codes.DEVICE_REPEATED) and evidence.strikes_elsewhere:
        return codes.DATA_ELSEWHERE, (
            f"{reason}; step {evidence.step} of the training had {_incidents(evidence.strikes_elsewhere)} on another device in "
            "an earlier run"
        )
    if code.kind == "undetermined" and evidence.strikes_in_step:
        return codes.UNDETERMINED_AGAIN, (
            f"{reason}; so it was before, in the same step of the training ({evidence.step}) on the same device; nothing is "
            "confirmed for the device"
        )
    return code, reason


def _select(evidence: Evidence, place: str, start: str = LIVE, dtype: str = "") -> list[Execution]:
    wanted = (place, start, dtype)
    return [each for each in evidence.executions if (each.place, each.start, each.dtype) == wanted]


def _key_of_results(execution: Execution, is_exact: bool) -> tuple[str, bool, bool | None]:
    """A key that is equal for executions with matching results."""
    return execution.digest if is_exact else "", execution.has_alarm, execution.is_equal


def _alike(evidence: Evidence) -> str:
    if evidence.tolerance == 0:
        return "the same bits"
    return f"the same values within {evidence.tolerance:.2g} of each other"


def _here(evidence: Evidence) -> str:
    return " on this device" if evidence.rank >= 0 else ""


def _neighbour(evidence: Evidence, near: Execution) -> str:
    """Text that names the neighbour rank, and the check that its execution is comparable."""
    text = f"rank {near.rank} with the same state and batch"
    checked = " (checked in a step before the alarm: loss and gradients within 1 %)"
    return text + checked if evidence.is_neighbour_checked else text


def _why_nowhere_else(evidence: Evidence) -> str:
    if evidence.world_size == 1:
        return "there is one rank"
    if evidence.rank < 0:
        return "no rank is suspected, and sums over ranks were not checked"
    return evidence.no_neighbour or "no other rank executed it"


def _incidents(count: int) -> str:
    return "one incident" if count == 1 else f"{count} incidents"
