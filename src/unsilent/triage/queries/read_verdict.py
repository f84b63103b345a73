"""Query for the kind of fault that the monitor found, where it executed the step again."""

from __future__ import annotations

from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The recorded fault verdict. One that is undetermined answers nothing."""
    verdict = bundle.incident.fault_verdict
    if verdict is None:
        text = "no fault verdict is recorded; the monitor gives one with --on-alarm replay"
        return Finding(outcome=Outcome.UNANSWERED, text=text)
    if verdict.kind == "undetermined":
        return Finding(outcome=Outcome.UNANSWERED, text=f"the recorded fault verdict is undetermined: {verdict.reason}")
    is_placed = verdict.rank >= 0
    return Finding(
        outcome=Outcome.LOCALISED if is_placed else Outcome.DIFFERS,
        text=": ".join(filter(None, (verdict.code, verdict.reason or verdict.kind))),
        kind=FindingKind[verdict.kind.upper()], ranks=(verdict.rank,) if is_placed else (),
        tensor=bundle.incident.tensor, step=verdict.step,
    )  # fmt: skip
