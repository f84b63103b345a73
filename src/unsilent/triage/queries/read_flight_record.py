"""Query for ranks that did not enter a collective or called another one, from flight recorder dumps."""

from __future__ import annotations

from unsilent.report.text import listed
from unsilent.timeline.hang import Hang, hang_of
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find ranks that called different collectives, or else ranks that are missing from one."""
    dumps, missing = bundle.dumps()
    if not dumps:
        text = "no dump of the flight recorder can be read; unsilent triage collect adds those of a job, in JSON"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    hang = hang_of(list(dumps.values()))
    text = hang.report().headline
    damaged = bool(missing)
    if without := [rank for rank in range(bundle.incident.world_size) if rank not in dumps]:
        missing += (f"no dump can be read of: {listed(f'rank {rank}' for rank in without)}",)
    if hang.verdict == "none":
        outcome = Outcome.NOTHING if len(dumps) > 1 else Outcome.UNANSWERED
        return Finding(outcome=outcome, text=text, missing=missing)
    if hang.verdict == "different":
        ranks = _unlike(hang)
        kind = FindingKind.UNLIKE_COLLECTIVES
        return placed(text, ranks, "which of them is right is not known", kind=kind, missing=missing)
    certain = [absence for absence in hang.missing if absence.is_certain]
    first = [absence for absence in certain if not absence.waits_in] or certain
    if first:
        ranks = sorted({rank for absence in first for rank in absence.ranks})
        return placed(text, ranks, "at least one of them is missing", kind=FindingKind.ABSENT_RANK, missing=missing)
    absent = sorted({rank for absence in hang.missing for rank in absence.ranks}) or without
    # A process writes no dump if it has ended or no dump was requested.
    is_telling = not damaged and len(absent) <= len(dumps)
    return Finding(
        outcome=Outcome.DIFFERS, text=text, kind=FindingKind.ABSENT_RANK, ranks=tuple(absent) if is_telling else (),
        missing=missing,
    )  # fmt: skip


def _unlike(hang: Hang) -> list[int]:
    """The only rank that called another collective than the others, or else all ranks."""
    (_, most), *others = hang.different[0].ways
    rest = [rank for _, ranks in others for rank in ranks]
    return rest if len(others) == 1 and len(rest) == 1 < len(most) else sorted([*most, *rest])
