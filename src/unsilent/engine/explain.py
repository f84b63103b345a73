"""What a fault costs, by component and layer, and why shortcuts are off: read off the tapes, nothing is run.

A fault re-executes at most what its tape says can depend on it. Batches without a tape run plainly: all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.engine.memory import plan_memory, remake_seconds
from unsilent.engine.plain import PlainEngine
from unsilent.engine.reach import Source, costs, per_member, reach, readers_of
from unsilent.engine.tape import Tape
from unsilent.engine.values import Window
from unsilent.explained import Explanation as Explanation
from unsilent.explained import Holding, Reason, Shortcut, Work
from unsilent.faults import Region
from unsilent.faults.naming import SiteName, parse_site
from unsilent.sites import Parameters
from unsilent.sites.targets import Target
from unsilent.sizes import LARGEST

MODEL = "model"
OPTIONAL = {"early exit": "early_exit", "partial kernels": "partial_kernels", "stacking": "stacking"}
"""Shortcuts beside recording, and the attribute of an engine that says whether they are on: True, or the reason why not."""


class Struck(NamedTuple):
    """A tensor that faults fall on; ``step``, ``occurrence``: when, where it is there for a moment only."""

    site: str
    step: int | None
    occurrence: int | None


def explain(engine: PlainEngine, targets: Sequence[Target]) -> Explanation:
    """Describe what an engine does for faults in ``targets``.

    Args:
        engine: any; one without ``replayers`` runs everything plainly. targets: of any level; elements weigh the same.
    """
    replayers: Sequence[Any] = getattr(engine, "replayers", ()) or [None] * len(engine.batches)
    tapes: list[Tape | None] = [None if r is None else r.tape for r in replayers]
    known = [t for t in tapes if t is not None]
    total = sum(float(costs(t).sum()) for t in known)
    again = sum(remake_seconds(r.tape, r.kept.keys()) for r in replayers if r is not None)
    said = getattr(engine, "setup_seconds", None)
    return Explanation(
        workload=engine.workload.name,
        engine="plain" if type(engine) is PlainEngine else "auto",
        batches=len(tapes),
        recorded=len(known),
        operations=sum(_operations(t) for t in known),
        golden_seconds=engine.golden_seconds,
        setup_seconds=None if said is None else float(said),
        remade=again / total if total else 0.0,
        rows=tuple(_rows(engine, targets, tapes)),
        holding=_holding(engine, replayers),
        shortcuts=tuple(_shortcuts(engine, len(known))),
        reasons=tuple(Reason(b, str(w)) for b, w in sorted(dict(getattr(engine, "reasons", {})).items())),
        notes=tuple(map(str, getattr(engine, "notes", ()))),
    )


def _operations(tape: Tape) -> int:
    return sum(n.func is not None for n in tape.nodes)


def _rows(engine: PlainEngine, targets: Sequence[Target], tapes: Sequence[Tape | None]) -> Iterable[Work]:
    """Components, their layers, and the model."""
    regions = {id(r): (t.component, r) for t in targets for r in t.regions}  # the targets of a tensor's bits share it
    spent = _spent(engine, {_struck(r) for _, r in regions.values()}, tapes)
    groups: dict[tuple[str, str, str], list[Region]] = {}
    for component, region in regions.values():
        layer = parse_site(region.site).layer
        for key in (("component", component, ""), ("layer", layer, component), ("model", MODEL, "")):
            groups.setdefault(key, []).append(region)
    every = sum(r.size for _, r in regions.values())
    for (level, name, parent), members in groups.items():
        elements = sum(r.size for r in members)
        # Operations run and seconds, of trials and of plain runs, in expectation over the elements.
        work = sum((r.size * spent[_struck(r)] for r in members), start=np.zeros((2, 2)))
        ran, plain = work.tolist()
        shares = [a / b if b else 0.0 for a, b in zip(ran, plain, strict=True)]
        yield Work(name, level, parent, elements, elements / every if every else 0.0, *shares)


def _struck(region: Region) -> Struck:
    return Struck(region.site, region.step, region.occurrence)


def _spent(
    engine: PlainEngine, struck: Iterable[Struck], tapes: Sequence[Tape | None]
) -> dict[Struck, NDArray[np.float64]]:
    """For each tensor, what a fault in it runs and what a plain run takes: float64[2, 2], columns operations and seconds."""
    full = np.array([[0.0, 0.0] if t is None else [_operations(t), costs(t).sum()] for t in tapes])
    known = np.array([t is not None for t in tapes])
    # What is not on a tape is taken to be as long as what is.
    full[~known] = full[known].mean(0) if known.any() else (1.0, engine.golden_seconds / max(1, len(tapes)))
    found = {s: np.zeros((2, 2)) for s in struck}
    for step, tape in enumerate(tapes):
        here = [s for s in found if s.step is None or s.step == step]
        ran = np.tile(full[step], (len(here), 1))
        if tape is not None:
            sources = [source_of(tape, engine.parameters, s) for s in here]
            placed = [i for i, source in enumerate(sources) if source is not None]
            weights = np.stack([[n.func is not None for n in tape.nodes], costs(tape)], axis=1)
            closure = reach(tape, [s for s in sources if s is not None]).ran
            ran[placed] = per_member(closure, weights, len(placed))
        for tensor, executed in zip(here, ran, strict=True):
            found[tensor] += np.stack([executed, full[step]])
    return found


def source_of(tape: Tape, parameters: Parameters, struck: Struck) -> Source | None:
    """Where faults in a tensor enter a tape; None: the tape has no such place, so that the trial is run plainly."""
    site: SiteName = parse_site(struck.site)
    if site.kind == "param":
        known = parameters.sites.get(site.name)
        return None if known is None else Source(nodes=readers_of(tape, known.memory.tensor))
    if site.kind == "op":
        index = tape.by_name.get(site.name)
        if index is None or site.operand != "out":
            return None if index is None else Source(nodes=(index,))
        out = next((w for w in tape.nodes[index].results if isinstance(w, Window)), None)
        return None if out is None else Source(values=(out.value,))
    key = f"{site.name}/{site.operand}", struck.occurrence or 0
    entry = tape.caches.get(key) if site.kind == "kv" else tape.inputs.get(site.name)
    if entry is None:
        return None
    return Source(nodes=tuple(r for r in tape.values[entry.window.value].readers if r >= entry.position))


def _holding(engine: PlainEngine, replayers: Sequence[Any]) -> Holding:
    used = [r for r in replayers if r is not None]
    best = plan_memory([r.tape for r in used], LARGEST)
    held = best.minimum + sum(r.tape.values[v].nbytes for r in used for v in r.kept)
    return Holding(getattr(engine, "memory", None), held, best.minimum, best.wanted)


def _shortcuts(engine: PlainEngine, recorded: int) -> Iterable[Shortcut]:
    if not hasattr(engine, "replayers"):
        yield from (Shortcut(name, False, "the plain engine has no shortcuts") for name in ("recording", *OPTIONAL))
        return
    left = len(engine.batches) - recorded
    yield Shortcut("recording", recorded > 0, f"{left} of {len(engine.batches)} batches run plainly" if left else "")
    for name, attribute in OPTIONAL.items():
        said = getattr(engine, attribute, name == "early exit")
        if not recorded:
            yield Shortcut(name, False, "needs a recorded batch")
        elif isinstance(said, str):
            yield Shortcut(name, False, said)
        else:
            yield Shortcut(name, bool(said), "" if said else "this engine does not use it")
