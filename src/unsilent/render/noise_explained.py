"""Why runs of a loop differ, as text and as JSON (schema ``unsilent/noise-explain/1``, ``unsilent/noise-control/1``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unsilent.render.console import print_columns, print_lines
from unsilent.report.text import clean, counted, listed, seconds
from unsilent.strictjson import strict
from unsilent.studies.explaining.chance import RARE, missed
from unsilent.studies.explaining.results import Controlled, Explained, Finding, Machine, Parting, Place
from unsilent.studies.explaining.sources import DATA, KERNEL, PATH, RANDOM, SOURCES

if TYPE_CHECKING:
    from rich.console import Console

EXPLAIN_SCHEMA, CONTROL_SCHEMA = "unsilent/noise-explain/1", "unsilent/noise-control/1"
_COLUMNS = ("source", "step", "phase", "operation", "place", "kind", "pinned")
_WHY = {
    KERNEL: "it gives other bits for the same inputs",
    DATA: "it is given other values from outside of torch",
    PATH: "the runs do different operations",
}
_DRAWN = {
    "global": "it draws random numbers from torch's global generator",
    "own": "it draws from a torch.Generator of its own",
}
_NO_STEP = "No optimizer made a step: if the loop is to train, look whether it does; all is told as of step 0."
_RACE = "; at which step that shows first is chance, so other runs may part at another"
_UNSURE = "may be chance: runs differ rarely; compare more with --runs"
_OVER = 10
"""A run that has fewer operations to go than the other by this factor is told to be almost over."""
_UNKNOWN = (
    "nothing that could be pinned made the runs agree",
    "look for threads or processes of your own that race, files that a run leaves behind or changes, an order by id() or of a "
    "set of objects, a network, and kernels that torch.use_deterministic_algorithms does not cover",
)


def render_explained(found: Explained, console: Console, plain: bool) -> None:
    """One block for each source, or that there is none."""
    what = f"{counted(found.runs, 'run')} in fresh processes, {counted(found.operations, 'operation')} in "
    what += f"{counted(found.steps, 'step')}, {counted(found.machine.threads, 'thread')}"
    print_lines(console, [f"{clean(found.ref)}: {what}"], plain, "bold")
    if found.interrupted:
        print_lines(console, [_interrupted(found)], plain)
    elif found.agreed:
        print_lines(console, ["All operations of all runs gave the same bits.", _few(found.runs)], plain)
    else:
        sources = [_title(f) + (" (may be chance)" if f.unsure else "") for f in found.findings]
        print_lines(console, [f"Runs differ because of {'; '.join(sources)}."], plain)
    if plain and found.findings:
        print_columns(console, _COLUMNS, [_cells(finding) for finding in found.findings])
    for number, finding in enumerate(found.findings, 1):
        _show(number, finding, console, plain)
    notes = list(_notes(found))
    if notes and not plain:
        console.print()
    print_lines(console, notes, plain)


def render_controlled(found: Controlled, console: Console, plain: bool) -> None:
    """Whether runs are reproducible; if not, what to switch on and why."""
    what = f"{counted(found.runs, 'run')} in fresh processes, {counted(found.steps, 'step')}, "
    what += f"{counted(found.machine.threads, 'thread')}, {counted(found.tensors, 'tensor')} compared at the end"
    print_lines(console, [f"{clean(found.ref)}: {what}"], plain, "bold")
    if found.agreed:
        print_lines(console, ["Reproducible here as it is: all runs end in the same bits."], plain, "green")
        print_lines(console, [_few(found.runs), *([_NO_STEP] if not found.steps else [])], plain)
        return
    print_lines(
        console, [f"Not reproducible here: runs end in different bits, first in {clean(found.first)}."], plain, "red"
    )
    if found.switches:
        claim = "With these changes runs end in the same bits"
        if not found.verified:
            claim = "Changes that help, but not alone"
        print_lines(console, [f"{claim}:", *(f"  {SOURCES[s].advice}" for s in found.switches)], plain)
    if found.interrupted and found.explained is None:
        print_lines(console, ["Interrupted before the search for the source had a run."], plain)
    if found.explained is not None:
        if found.explained.agreed:
            text = "No operation differed while runs were watched: a race that is rare; compare more runs (--runs)."
            print_lines(console, [text], plain)
            return
        console.print() if not plain else None
        render_explained(found.explained, console, plain)


def explained_json(found: Explained) -> dict[str, Any]:
    """What ``--explain --json`` prints."""
    return _object(EXPLAIN_SCHEMA, found, _explained(found))


def controlled_json(found: Controlled) -> dict[str, Any]:
    """What ``--control --json`` prints."""
    return _object(
        CONTROL_SCHEMA,
        found,
        {
            "reproducible": found.agreed,
            "tensors": found.tensors,
            "first_different": found.first or None,
            "switches": [{"source": s, "pinned": SOURCES[s].pin, "advice": SOURCES[s].advice} for s in found.switches],
            "verified": found.verified,
            "interrupted": found.interrupted,
            "would_miss": _would_miss(found.runs) if found.agreed else None,
            "explained": _explained(found.explained) if found.explained else None,
        },
    )


def _object(schema: str, found: Explained | Controlled, results: dict[str, Any]) -> dict[str, Any]:
    machine: Machine = found.machine
    plain = strict(
        {
            "schema": schema,
            "command": "noise",
            "spec": {"loop": found.ref, "runs": found.runs, "threads": machine.threads, "hash_seed": machine.hash_seed},
            "seed": None,
            "seconds": found.seconds,
            "launched": found.launched,
            "store": None,
            "versions": dict(machine.versions),
            "results": results,
        }
    )
    assert isinstance(plain, dict)
    return plain


def _explained(found: Explained) -> dict[str, Any]:
    return {
        "agreed": found.agreed,
        "interrupted": found.interrupted,
        "unexplained": _parting(found.unexplained) if found.unexplained else None,
        "would_miss": _would_miss(found.runs) if found.agreed else None,
        "operations": found.operations,
        "steps": found.steps,
        "findings": [_finding(f) for f in found.findings],
        "sensitive_to_threads": found.sensitive and {"threads": found.threads, "parting": _parting(found.sensitive)},
        "not_pinned": dict(found.failed),
    }


def _finding(found: Finding) -> dict[str, Any]:
    source = SOURCES[found.source] if found.source else None
    return {
        "source": found.source,
        "title": source.title if source else None,
        "pinned": source.pin if source else None,
        "advice": source.advice if source else _UNKNOWN[1],
        "parting": _parting(found.parting),
        "with_it_pinned": _effect(found),
        "then_parts_at": _parting(found.after) if found.after and source else None,
        "runs": found.runs,
        "unsure": found.unsure,
        "together_with": list(found.together),
        "read_at": [{"call": r.call} | _place(r.place) for r in found.reads],
    }


def _effect(found: Finding) -> str:
    return "unknown" if found.source is None else "agree" if found.after is None else "part later"


def _parting(found: Parting) -> dict[str, Any]:
    return {
        "index": found.index,
        "step": found.step,
        "operation": found.operation,
        "phase": found.phase,
        "kind": found.kind,
        "generator": found.generator or None,
        "other_run": found.other or None,
        "operations_to_go": list(found.to_go) if found.to_go else None,
        "place": _place(found.place) if found.place else None,
        "origin": {"operation": found.origin_operation} | _place(found.origin) if found.origin else None,
    }


def _place(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "function": place.function}


def _cells(found: Finding) -> list[str]:
    parting = found.parting
    place = str(parting.origin or parting.place or "-")
    effect = _effect(found).replace(" ", "-")
    return [found.source or "unknown", str(parting.step), parting.phase, parting.operation, place, parting.kind, effect]


def _show(number: int, found: Finding, console: Console, plain: bool) -> None:
    """One finding: a title, and lines with a word before them."""
    from rich.table import Table
    from rich.text import Text

    title = f"{number}. {_title(found)}"
    if plain:
        print_lines(console, [title, *(f"   {head:6} {text}" for head, text in _block(found))], plain)
        return
    console.print()
    print_lines(console, [title], plain, "bold")
    grid = Table.grid(padding=(0, 2, 0, 0))
    for head, text in _block(found):
        grid.add_row(Text(f"   {head}", style="dim"), Text(text))
    console.print(grid)


def _title(found: Finding) -> str:
    return SOURCES[found.source].title if found.source else "an unknown source"


def _block(found: Finding) -> Iterator[tuple[str, str]]:
    """What is told of one finding, each with the word before it."""
    yield "where", where(found.parting)
    yield "what", _why(found.parting) + (_RACE if found.parting.kind == KERNEL and found.source != "memory" else "")
    if found.reads:
        yield (
            "made" if found.source == "memory" else "read",
            listed(f"{r.call} at {clean(r.place)}" for r in found.reads),
        )
    if found.source is None:
        yield "sure", _UNKNOWN[0]
        yield "do", _UNKNOWN[1]
        return
    source = SOURCES[found.source]
    pinned = source.pin
    if found.together:
        pinned += f", together with {'; '.join(SOURCES[s].pin for s in found.together)}"
    then = f"{counted(found.runs, 'run')} agree to the last bit"
    if found.after is not None:
        then = f"runs part later: {where(found.after)}"
    yield "sure", f"pinned ({pinned}), {then}"
    if found.unsure:
        yield "but", _UNSURE
    yield "do", source.advice


def where(parting: Parting) -> str:
    """``step 0, uniform at train.py:8 (train)``; of a backward operation also what it is the backward of."""
    at = f" at {clean(parting.place)} ({clean(parting.place.function)})" if parting.place else ""
    text = f"step {parting.step}, {parting.operation}{at}"
    if parting.origin is not None:
        return f"{text}, in the backward of {parting.origin_operation} at {clean(parting.origin)}"
    return text if parting.phase == "forward" else f"{text}, in the {parting.phase}"


def _why(parting: Parting) -> str:
    if parting.kind == RANDOM:
        return _DRAWN[parting.generator]
    if parting.kind != PATH or parting.to_go is None:
        return _WHY[parting.kind]
    this, other = parting.to_go
    instead = f", next {clean(parting.other)}" if parting.other else ""
    if not other:
        return f"one run is over where the other goes on: {counted(this, 'operation')} more"
    if this * _OVER <= other or other * _OVER <= this:
        few, many = sorted((this, other))
        over = f"one run is almost over ({counted(few, 'operation')} to go{instead if few == other else ''})"
        return f"{over} where the other goes on ({many:,} to go{instead if few == this else ''})"
    return f"{_WHY[PATH]}: the other does {clean(parting.other)}"


def found_line(found: Finding) -> str:
    """A finding in one line, told while the search goes on."""
    return f"found: {_title(found)}, {where(found.parting)}{' (may be chance)' if found.unsure else ''}"


def _interrupted(found: Explained) -> str:
    """What a search that was not finished has shown."""
    so_far = "; ".join(_title(f) for f in found.findings)
    text = f"Interrupted. Runs differ because of {so_far}" if so_far else "Interrupted before a source was found"
    if found.unexplained is None:
        return f"{text}; whether {'all is found' if so_far else 'runs differ'} is not known."
    return f"{text}; {'then ' if so_far else ''}they part at {where(found.unexplained)}, and why is not known yet."


def _few(runs: int) -> str:
    """How little some runs that agree can show."""
    return (
        f"{runs} runs agree: a difference that shows in one of ten runs would be missed in {100 * missed(runs):.0f} of 100 "
        "such comparisons (more runs: --runs)."
    )


def _would_miss(runs: int) -> dict[str, float]:
    return {"shows_in": RARE, "missed": missed(runs)}


def _notes(found: Explained) -> Iterator[str]:
    if found.sensitive is not None and found.threads is not None:
        yield (
            f"With {counted(found.threads, 'thread')} instead of {found.machine.threads} the bits differ from "
            f"{where(found.sensitive)}: "
            "fix the number of threads if runs on other machines are to agree."
        )
    if found.machine.hash_seed is not None:
        yield f"PYTHONHASHSEED is {clean(found.machine.hash_seed)} here, so the order of sets was the same in all runs."
    for source, why in found.failed.items():
        yield f"Not possible to pin: {SOURCES[source].title} ({clean(why)})"
    if not found.steps:
        yield _NO_STEP
    yield f"{counted(found.launched, 'run')} in {seconds(found.seconds)}; steps are counted from 0, by the updates of optimizers."
