"""Queries for the monitor's own findings: its fault verdict, and changed or differing parameters."""

from __future__ import annotations

from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.report.text import count_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed


def read_verdict(bundle: Bundle, blanks: Blanks) -> Finding:
    """The recorded fault verdict; an undetermined one counts as no answer."""
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


def compare_parameters(bundle: Bundle, blanks: Blanks) -> Finding:
    """The first alarm on changed bits of parameters, or on parameters that differ between ranks.

    Alarms of several ranks in one step count as one.
    """
    incident = bundle.incident
    _, missing = bundle.parts()
    first, last = blanks.steps or (0, 2**62)
    alarms = [
        alarm for alarm in bundle.alarms() if alarm.feature in (FINGERPRINT, REPLICAS) and first <= alarm.step <= last
    ]
    if not alarms:
        if (
            not incident.settings
            or incident.settings.get("fingerprint") == "off"
            or (incident.world_size > 1 and missing and not incident.alarms)
        ):
            text = "no monitor took fingerprints, or the alarms of no rank can be read"
            return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
        text = "no recorded alarm says that parameters changed between steps (fingerprints) or differ between ranks"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    begin = alarms[0]
    alike = [alarm for alarm in alarms if (alarm.step, alarm.feature) == (begin.step, begin.feature)]
    if begin.feature == FINGERPRINT:
        ranks, kind = sorted({alarm.rank for alarm in alike}), FindingKind.CHANGED_BITS
    else:
        ranks, kind = sorted({rank for alarm in alike for rank in alarm.ranks}), FindingKind.UNLIKE_PARAMETERS
    text = begin.summary.partition(": ")[2]
    more = f"{count_text(len(ranks), 'rank')} have it, not one alone"
    return placed(text, ranks, more, kind=kind, tensor=begin.tensor, step=begin.step, missing=missing)
