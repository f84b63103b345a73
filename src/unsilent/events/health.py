"""Health of the device of a rank, as events change it."""

from __future__ import annotations

from unsilent.events.event_kinds import Alarm, Event, StepSummary, Verdict

OK, WARNING = "ok", "warning"


def health_after(health: str, event: Event) -> str:
    """The health of the device of the event's rank: `WARNING` after an alarm, or a verdict that suspects this rank."""
    if isinstance(event, StepSummary):
        return event.health
    raised = isinstance(event, Alarm) and event.level == "alarm"
    suspected = isinstance(event, Verdict) and event.suspect == event.rank
    return WARNING if raised or suspected else health
