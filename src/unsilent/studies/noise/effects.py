"""Which switch alone changes bits here: one run with it beside the clean twin. What cannot be tried is said, never left out."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.replicas import SWITCHES, Replica, ReplicaStore, Switches, Trained
from unsilent.replicas.spec import same
from unsilent.replicas.switches import RACING
from unsilent.studies.noise.records import Effect

RACES = 3
"""Runs after which a race that did not show is said not to have shown."""


def impossible(switches: Switches, trained: Trained) -> str:
    """Why one of these switches cannot be tried in this training here; empty where all can."""
    for name, _ in switches.settings:
        switch = SWITCHES[name]
        if switch.cuda and trained.device != "cuda":
            return f"{name} needs a CUDA device, and this training runs on {trained.device}"
        if switch.draws and trained.streams is not None and name not in trained.streams:
            return f"this training draws nothing for {name}"
        if name == "layout" and not trained.layouts:
            return "this training has no weight with four dimensions and more than one input channel"
        for library in ("onednn", "mkl"):
            if name.startswith(library) and trained.machine.get(library) == "False":
                return f"this torch was built without {library}"
    return ""


def probes(part: Switches, trained: Trained) -> Iterator[Replica]:
    """The runs that show what one switch does."""
    if impossible(part, trained):
        return
    racing = _racing(part)
    for number in range(RACES if racing else 1):
        yield Replica(part, number)
    if racing and part.threads > 1:
        yield Replica(_threads(part), 0)


def effect(part: Switches, trained: Trained, store: ReplicaStore) -> Effect:
    """What was seen of it; the probes must be stored."""
    name = part.settings[0][0]
    told = (str(part), SWITCHES[name].kind, SWITCHES[name].text)
    if why := impossible(part, trained):
        return Effect(*told, None, why)
    twin = store.twin()
    rows = list(store.of(part, RACES if _racing(part) else 1))
    changed = not same(rows[0], twin)
    if not _racing(part):
        return Effect(*told, changed, "changes the bits" if changed else "gives the same bits as the clean twin")
    if any(not same(row, rows[0]) for row in rows):
        return Effect(*told, True, f"makes runs of the same seeds differ ({RACES} runs)")
    if part.threads > 1:
        alike = same(rows[0], next(store.of(_threads(part), 1)))
        other = "the same bits as" if alike else "other bits than"
        return Effect(*told, changed, f"ends in {other} {_threads(part)}; no operation raced in {RACES} runs")
    return Effect(*told, changed, f"runs of the same seeds agreed ({RACES} runs)")


def _racing(part: Switches) -> bool:
    return part.settings[0][0] in RACING


def _threads(part: Switches) -> Switches:
    return Switches((("threads", str(part.threads)),))
