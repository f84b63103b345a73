"""What a fault costs, by component and layer, and why shortcuts are off: read off the tapes, nothing is run.

A fault re-executes at most what its tape says can depend on it. Batches without a tape run plainly: all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.engine.memory import plan_memory, remade
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


class Known(NamedTuple):
    """The tape of a batch, and which golden values are held."""

    tape: Tape
    kept: Collection[int]


def explain(engine: PlainEngine, targets: Sequence[Target], workload: str | None = None) -> Explanation:
    """Describe what an engine does for faults in ``targets``.

    Args:
        engine: any; one without ``replayers`` runs everything plainly. targets: of any level; elements weigh the same.
        workload: what the campaign calls it; default the name that the workload has itself.
    """
    if any(r.step is not None for t in targets for r in t.regions):
        engine.prepare_for_runs()
    replayers: Sequence[Any] = getattr(engine, "replayers", ()) or [None] * len(engine.batches)
    tapes = [None if r is None else Known(r.tape, r.kept.keys()) for r in replayers]
    known = [t.tape for t in tapes if t is not None]
    rows = tuple(_rows(engine, targets, tapes))
    said = getattr(engine, "setup_seconds", None)
    return Explanation(
        workload=workload or engine.workload.name,
        engine="plain" if type(engine) is PlainEngine else "auto",
        batches=len(engine.batches),
        recorded=len(known),
        operations=sum(_operations(t) for t in known),
        golden_seconds=engine.golden_seconds,
        setup_seconds=None if said is None else float(said),
        remade=rows[-1].remade if rows else 0.0,
        rows=rows,
        holding=_holding(engine, targets, tapes, rows),
        shortcuts=tuple(_shortcuts(engine, len(known))),
        reasons=tuple(Reason(b, str(w)) for b, w in sorted(dict(getattr(engine, "reasons", {})).items())),
        notes=tuple(map(str, getattr(engine, "notes", ()))),
    )


def _operations(tape: Tape) -> int:
    return sum(n.func is not None for n in tape.nodes)


def _rows(engine: PlainEngine, targets: Sequence[Target], tapes: Sequence[Known | None]) -> Iterable[Work]:
    """Components, each followed by its layers, and the model last."""
    regions = {id(r): (t.component, r) for t in targets for r in t.regions}  # the targets of a tensor's bits share it
    spent = _spent(engine, {_struck(r) for _, r in regions.values()}, tapes)
    components: dict[str, dict[str, list[Region]]] = {}
    for component, region in regions.values():
        components.setdefault(component, {}).setdefault(parse_site(region.site).layer, []).append(region)
    groups: list[tuple[str, str, str, list[Region]]] = []
    for component, layers in components.items():
        groups.append((component, "component", "", [r for members in layers.values() for r in members]))
        groups += [(layer, "layer", component, members) for layer, members in layers.items()]
    groups.append((MODEL, "model", "", [r for _, r in regions.values()]))
    every = sum(r.size for _, r in regions.values())
    for name, level, parent, members in groups:
        elements = sum(r.size for r in members)
        # In expectation over the elements.
        ran, again, plain = sum((r.size * spent[_struck(r)] for r in members), start=np.zeros((3, 2)))
        operations, seconds, remade = (
            float(a / b) if b else 0.0
            for a, b in ((ran[0], plain[0]), (ran[1] + again[1], plain[1]), (again[1], plain[1]))
        )
        yield Work(name, level, parent, elements, elements / every if every else 0.0, operations, seconds, remade)


def _struck(region: Region) -> Struck:
    return Struck(region.site, region.step, region.occurrence)


def _spent(
    engine: PlainEngine, struck: Iterable[Struck], tapes: Sequence[Known | None]
) -> dict[Struck, NDArray[np.float64]]:
    """For each tensor, what depends on a fault in it, what golden values take that are made again for it, and a plain run.

    Returns float64[3, 2], columns operations and seconds.
    """
    full = np.array([[0.0, 0.0] if t is None else [_operations(t.tape), costs(t.tape).sum()] for t in tapes])
    known = np.array([t is not None for t in tapes])
    # What is not on a tape is taken to be as long as what is.
    full[~known] = full[known].mean(0) if known.any() else (1.0, engine.golden_seconds / max(1, len(tapes)))
    found = {s: np.zeros((3, 2)) for s in struck}
    for step, batch in enumerate(tapes):
        here = [s for s in found if s.step is None or s.step == step]
        ran, again = np.tile(full[step], (len(here), 1)), np.zeros((len(here), 2))
        if batch is not None:
            tape = batch.tape
            sources = [source_of(tape, engine.parameters, s) for s in here]
            placed = [i for i, source in enumerate(sources) if source is not None]
            weights = np.stack([[n.func is not None for n in tape.nodes], costs(tape)], axis=1)
            reached = reach(tape, [s for s in sources if s is not None])
            ran[placed] = per_member(reached.ran, weights, len(placed))
            again[placed] = per_member(remade(tape, reached.needed, batch.kept), weights, len(placed))
        for tensor, executed, made in zip(here, ran, again, strict=True):
            found[tensor] += np.stack([executed, made, full[step]])
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


def _holding(
    engine: PlainEngine, targets: Sequence[Target], tapes: Sequence[Known | None], rows: Sequence[Work]
) -> Holding:
    used = [t for t in tapes if t is not None]
    best = plan_memory([t.tape for t in used], LARGEST)
    held = best.minimum + sum(t.tape.values[v].nbytes for t in used for v in t.kept)
    sharers, enough = getattr(engine, "sharers", 1), None
    if held < best.wanted and any(row.remade for row in rows):
        keeps = iter(best.keep)
        all_held = [None if t is None else Known(t.tape, next(keeps)) for t in tapes]
        if not any(row.remade for row in _rows(engine, targets, all_held)):
            enough = best.wanted * sharers
    return Holding(getattr(engine, "memory", None), held, best.minimum, best.wanted, sharers, enough)


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
