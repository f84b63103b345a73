"""What the monitor watched, and whether ranks had the same settings of their optimizers."""

from __future__ import annotations

from unsilent.report.text import listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome

WATCHED = ("preset", "rule", "rules", "fingerprint", "sampling", "on_alarm", "mode", "watch")


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Settings of optimizers that differ between ranks; else what they are, and what was watched."""
    states, missing = bundle.states()
    groups = {
        rank: {name: value for name, value in state.values.items() if "/groups/" in name}
        for rank, state in states.items()
    }
    names = dict.fromkeys(name for one in groups.values() for name in one)
    unlike = [name for name in names if len({repr(one.get(name)) for one in groups.values()}) > 1]
    if unlike:
        values = "; ".join(f"rank {rank}: {one.get(unlike[0])!r}" for rank, one in list(groups.items())[:8])
        text = f"settings of optimizers differ between ranks: {listed(unlike, 3)} ({values})"
        return Finding(
            outcome=Outcome.DIFFERS, text=text, kind=FindingKind.SETTINGS, tensor=unlike[0], step=bundle.incident.step,
            missing=missing,
        )  # fmt: skip
    watched = {name: bundle.incident.settings[name] for name in WATCHED if name in bundle.incident.settings}
    rates = {
        name.removeprefix("optimizers/"): value
        for name, value in next(iter(groups.values()), {}).items()
        if name.endswith("/lr")
    }
    shown = listed((f"{name} {value}" for name, value in (watched | rates).items()), 12) or "nothing"
    numbers = {name: float(value) for name, value in rates.items() if isinstance(value, float)}
    if len(groups) < 2:
        text = f"settings of optimizers of {len(groups)} ranks can be read, and two are compared; recorded is {shown}"
        return Finding(outcome=Outcome.UNANSWERED, text=text, numbers=numbers, missing=missing)
    text = (
        f"settings of optimizers are the same in {len(groups)} ranks; whether they are meant was not looked at: {shown}"
    )
    return Finding(outcome=Outcome.NOTHING, text=text, numbers=numbers, missing=missing)
