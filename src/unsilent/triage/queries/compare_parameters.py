"""Whether parameters changed between two steps, or differ between ranks, as the monitor's fingerprints say."""

from __future__ import annotations

from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.report.text import count_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The first alarm of a fingerprint; those of several ranks in one step are one."""
    incident = bundle.incident
    _, missing = bundle.parts()
    first, last = blanks.steps or (0, 2**62)
    alarms = [one for one in bundle.alarms() if one.feature in (FINGERPRINT, REPLICAS) and first <= one.step <= last]
    if not alarms:
        if (
            not incident.settings
            or incident.settings.get("fingerprint") == "off"
            or (incident.world_size > 1 and missing and not incident.alarms)
        ):
            text = "no monitor took fingerprints, or the alarms of no rank can be read"
            return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
        text = "of the recorded alarms, none is of a fingerprint or of parameters that differ between ranks"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    begin = alarms[0]
    alike = [one for one in alarms if (one.step, one.feature) == (begin.step, begin.feature)]
    if begin.feature == FINGERPRINT:
        ranks, kind = sorted({one.rank for one in alike}), FindingKind.CHANGED_BITS
    else:
        ranks, kind = (
            sorted({rank for one in alike for rank in one.ranks}),
            FindingKind.UNLIKE_PARAMETERS,
        )
    text = begin.summary.partition(": ")[2]
    more = f"{count_text(len(ranks), 'rank')} and not one"
    return placed(text, ranks, more, kind=kind, tensor=begin.tensor, step=begin.step, missing=missing)
