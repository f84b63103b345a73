"""What kind of fault an alarm was, decided on evidence, and what follows from it: a code, an exit code, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["transient", "device", "checkpoint", "numerics", "benign", "data", "undetermined"]
UNDETERMINED_EXIT_CODE, CONFIRMED_EXIT_CODE, SOFTWARE_EXIT_CODE = 16, 17, 1
"""Exit codes: as in Megatron-LM's rerun machine, and that of a failure that another device would have as well."""


@dataclass(frozen=True, kw_only=True)
class FaultVerdict:
    """What kind of fault an alarm was.

    Attributes:
        kind: ``transient``, ``device``, ``checkpoint``, ``numerics`` (the dtype overflows or is too coarse), ``benign`` (an
            unusual batch, a change of regime), ``data`` (or software), or ``undetermined``.
        step, rank, host, device: Of the alarm; rank -1 where no rank is named.
        code: Stable, of the table of fault codes, such as ``UNSILENT-T01``.
        level: ``minor`` or ``major``.
        action: What to do, in words.
        reason: What it rests on, in one sentence.
        exit_code: Of a job that stops on it; 0 where it may go on.
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
