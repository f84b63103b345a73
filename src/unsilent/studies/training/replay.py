"""One trial of a training, run again alone: the class it ends in, its losses, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from unsilent.campaigns import replay
from unsilent.campaigns.replay import Replay
from unsilent.campaigns.spec import TrialId
from unsilent.outcomes.training import Thresholds
from unsilent.report.text import counted
from unsilent.studies.training.judging import Judge
from unsilent.studies.training.kind import TrainingStore, stored_floors
from unsilent.studies.training.spec import GUARDED, MADE, TrainingRow


def replay_trial(
    store: TrainingStore, trial: TrialId, given: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> Replay[TrainingRow]:
    """Run a stored trial again; see `unsilent.campaigns.replay.replay_trial`. What ran under the guard has no class."""
    found, floors = replay.replay_trial(store, trial, given, options), stored_floors(store)
    if floors is None or trial.target.startswith(GUARDED):
        return found
    return described(found, Judge(store.description, floors, Thresholds()))


def described(found: Replay[TrainingRow], judge: Judge, tried: int = 0) -> Replay[TrainingRow]:
    """The replay with its class, and what was injected; ``tried``: faults made by hand until one ended in that class."""
    row, by_hand = found.stored, found.stored.trial.target.startswith(MADE)
    curve = judge.curve(row, judge.judge(row))
    others = f", after {tried - 1} others that ended in another class" if tried else ""
    losses = ", ".join("not finite" if x is None else f"{x:.3g}" for x in curve.losses[:6])
    test = "not reached" if curve.test is None else f"{100 * curve.test:.2f} %"
    told = (
        f"{curve.outcome} ({f'made by hand{others}' if by_hand else 'from the campaign'})",
        f"{curve.told}: wrote up to {row.written:.3g} where {row.usual:.3g} was the largest",
        f"losses from that step on: {losses} …; held-out accuracy at the end: {test}",
        f"ended: {row.reason}, after {counted(row.ran, 'step')}{f' ({row.error})' if row.error else ''}",
    )
    data = {"class": curve.outcome, "made_by_hand": by_hand, "tried": tried, "golden": list(curve.golden)}
    return replace(found, told=told, data=data)
