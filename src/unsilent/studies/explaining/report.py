"""The report of why runs of a loop differ (schema ``unsilent/noise-explain/1``, ``unsilent/noise-control/1``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unsilent.report.model import Column, Report, Row, Section, Table
from unsilent.report.text import clean, counted, listed, seconds
from unsilent.studies.explaining.chance import RARE, missed
from unsilent.studies.explaining.results import Controlled, Explained, Finding, Parting
from unsilent.studies.explaining.sources import DATA, KERNEL, PATH, RANDOM, SOURCES

EXPLAIN_SCHEMA, CONTROL_SCHEMA = "unsilent/noise-explain/1", "unsilent/noise-control/1"
COLUMNS = ("source", "step", "phase", "operation", "place", "kind", "pinned")
_WHY = {
    KERNEL: "it gives other bits for the same inputs",
    DATA: "it is given other values from outside of torch",
    PATH: "the runs do different operations",
}
_DRAWN = {
    "global": "it draws random numbers from torch's global generator",
    "own": "it draws from a torch.Generator of its own",
}
_NO_STEP = "No optimizer made a step: if the loop is to train, look whether it does; all is told as of step 0"
_RACE = "; at which step that shows first is chance, so other runs may part at another"
_UNSURE = "may be chance: runs differ rarely; compare more with --runs"
_OVER = 10
"""A run that has fewer operations to go than the other by this factor is told to be almost over."""
_UNKNOWN = (
    "nothing that could be pinned made the runs agree",
    "look for threads or processes of your own that race, files that a run leaves behind or changes, an order by id() or of a "
    "set of objects, a network, and kernels that torch.use_deterministic_algorithms does not cover",
)


def report(found: Explained | Controlled, arguments: Sequence[str] = ()) -> Report:
    """All that is shown of a search, or of a comparison of ends with the search that it led to."""
    machine = found.machine
    spec = {"loop": found.ref, "runs": found.runs, "threads": machine.threads, "hash_seed": machine.hash_seed}
    if isinstance(found, Controlled):
        schema, results, lines, sections = (
            CONTROL_SCHEMA,
            _controlled(found),
            [*_control_lines(found)],
            [*_switches(found)],
        )
        searched = found.explained if found.explained and not found.explained.agreed else None
    else:
        schema, results, lines, sections, searched = EXPLAIN_SCHEMA, _explained(found), [], [], found
    if searched:
        lines += _explain_lines(searched)
        sections += _findings(searched)
    return Report(
        schema=schema,
        kicker="Why runs differ",
        title=f"Runs of {found.ref}",
        headline=lines[0],
        estimates=_rows(searched.findings if searched else ()),
        findings=tuple(lines[1:]),
        sections=tuple(sections),
        notes=tuple(_notes(searched)) if searched else (),
        data={
            "command": "noise",
            "spec": spec | {"arguments": list(arguments)},
            "seed": None,
            "seconds": found.seconds,
            "launched": found.launched,
            "store": None,
            "versions": dict(machine.versions),
            "results": results,
        },
    )


# -- words ---------------------------------------------------------------------------------------------------------------


def _explain_lines(found: Explained) -> Iterator[str]:
    """Whether runs differ and because of what, and what was compared."""
    if found.interrupted:
        yield _interrupted(found)
    elif found.agreed:
        yield "All operations of all runs gave the same bits"
    else:
        sources = [_title(f) + (" (may be chance)" if f.unsure else "") for f in found.findings]
        yield f"Runs differ because of {'; '.join(sources)}"
    yield _compared(found, f"{counted(found.operations, 'operation')} in {counted(found.steps, 'step')}")
    if found.agreed:
        yield _few(found.runs)


def _control_lines(found: Controlled) -> Iterator[str]:
    """Whether runs are reproducible, and what was compared."""
    if found.agreed:
        yield "Reproducible here as it is: all runs end in the same bits"
    else:
        yield f"Not reproducible here: runs end in different bits, first in {found.first}"
    yield f"{_compared(found, counted(found.steps, 'step'))}, {counted(found.tensors, 'tensor')} compared at the end"
    if found.agreed:
        yield from (_few(found.runs), *([] if found.steps else [_NO_STEP]))
    elif found.interrupted and found.explained is None:
        yield "Interrupted before the search for the source had a run"
    elif found.explained is not None and found.explained.agreed:
        yield "No operation differed while runs were watched: a race that is rare; compare more runs (--runs)"


def _compared(found: Explained | Controlled, what: str) -> str:
    runs, threads = counted(found.runs, "run"), counted(found.machine.threads, "thread")
    return f"{found.ref}: {runs} in fresh processes, {what}, {threads}"


def _switches(found: Controlled) -> Iterator[Section]:
    """What makes runs agree."""
    claim = "With these changes runs end in the same bits" if found.verified else "Changes that help, but not alone"
    rows = tuple(Row((SOURCES[source].advice,)) for source in found.switches)
    if rows:
        yield Section("What to change", "", (Table((Column(""),), rows, f"{claim}:", sentence=f"{claim}: {{0}}"),))


def _findings(found: Explained) -> Iterator[Section]:
    """A table for each source."""
    titles = [f"{number}. {_title(finding)}" for number, finding in enumerate(found.findings, 1)]
    columns = (Column(""), Column("", left=True))
    tables = [
        Table(columns, tuple(map(Row, _block(finding))), title, sentence=f"{title}: {{0}}: {{1}}")
        for title, finding in zip(titles, found.findings, strict=True)
    ]
    if tables:
        yield Section("What makes runs differ", "", tuple(tables))


def _title(found: Finding) -> str:
    return SOURCES[found.source].title if found.source else "an unknown source"


def _block(found: Finding) -> Iterator[tuple[str, str]]:
    """What is told of one finding, each with the word before it."""
    yield "where", where(found.parting)
    yield "what", _why(found.parting) + (_RACE if found.parting.kind == KERNEL and found.source != "memory" else "")
    if found.reads:
        word = "made" if found.source == "memory" else "read"
        yield word, listed(f"{r.call} at {r.place}" for r in found.reads)
    if found.source is None:
        yield from zip(("sure", "do"), _UNKNOWN, strict=True)
        return
    pinned = SOURCES[found.source].pin
    if found.together:
        pinned += f", together with {'; '.join(SOURCES[s].pin for s in found.together)}"
    then = f"{counted(found.runs, 'run')} agree to the last bit"
    if found.after is not None:
        then = f"runs part later: {where(found.after)}"
    yield "sure", f"pinned ({pinned}), {then}"
    if found.unsure:
        yield "but", _UNSURE
    yield "do", SOURCES[found.source].advice


def where(parting: Parting) -> str:
    """``step 0, uniform at train.py:8 (train)``; of a backward operation also what it is the backward of."""
    at = f" at {parting.place} ({parting.place.function})" if parting.place else ""
    text = f"step {parting.step}, {parting.operation}{at}"
    if parting.origin is not None:
        return f"{text}, in the backward of {parting.origin_operation} at {parting.origin}"
    return text if parting.phase == "forward" else f"{text}, in the {parting.phase}"


def _why(parting: Parting) -> str:
    if parting.kind == RANDOM:
        return _DRAWN[parting.generator]
    if parting.kind != PATH or parting.to_go is None:
        return _WHY[parting.kind]
    this, other = parting.to_go
    instead = f", next {parting.other}" if parting.other else ""
    if not other:
        return f"one run is over where the other goes on: {counted(this, 'operation')} more"
    if this * _OVER <= other or other * _OVER <= this:
        few, many = sorted((this, other))
        over = f"one run is almost over ({counted(few, 'operation')} to go{instead if few == other else ''})"
        return f"{over} where the other goes on ({many:,} to go{instead if few == this else ''})"
    return f"{_WHY[PATH]}: the other does {parting.other}"


def found_line(found: Finding) -> str:
    """A finding in one line, told while the search goes on."""
    return clean(f"found: {_title(found)}, {where(found.parting)}{' (may be chance)' if found.unsure else ''}")


def _interrupted(found: Explained) -> str:
    """What a search that was not finished has shown."""
    so_far = "; ".join(_title(f) for f in found.findings)
    text = f"Interrupted. Runs differ because of {so_far}" if so_far else "Interrupted before a source was found"
    if found.unexplained is None:
        return f"{text}; whether {'all is found' if so_far else 'runs differ'} is not known"
    return f"{text}; {'then ' if so_far else ''}they part at {where(found.unexplained)}, and why is not known yet"


def _few(runs: int) -> str:
    """How little some runs that agree can show."""
    return (
        f"{runs} runs agree: a difference that shows in one of ten runs would be missed in {100 * missed(runs):.0f} of 100 "
        "such comparisons (more runs: --runs)"
    )


def _notes(found: Explained) -> Iterator[str]:
    if found.sensitive is not None and found.threads is not None:
        yield (
            f"With {counted(found.threads, 'thread')} instead of {found.machine.threads} the bits differ from "
            f"{where(found.sensitive)}: fix the number of threads if runs on other machines are to agree"
        )
    if found.machine.hash_seed is not None:
        yield f"PYTHONHASHSEED is {found.machine.hash_seed} here, so the order of sets was the same in all runs"
    yield from (f"Not possible to pin: {SOURCES[source].title} ({why})" for source, why in found.failed.items())
    if not found.steps:
        yield _NO_STEP
    yield f"{counted(found.launched, 'run')} in {seconds(found.seconds)}; steps are counted from 0, by the updates of optimizers"


# -- for machines --------------------------------------------------------------------------------------------------------


def _rows(findings: Sequence[Finding]) -> Table:
    """One row for each source; no table where there is none."""
    rows = []
    for found in findings:
        parting = found.parting
        place = str(parting.origin or parting.place or "-")
        words = (found.source or "unknown", parting.step, parting.phase, parting.operation, place, parting.kind)
        rows.append(Row((*words, _effect(found).replace(" ", "-"))))
    return Table(tuple(map(Column, COLUMNS)) if rows else (), tuple(rows))


def _explained(found: Explained) -> dict[str, Any]:
    return {
        "agreed": found.agreed,
        "interrupted": found.interrupted,
        "unexplained": _parting(found.unexplained),
        "would_miss": _would_miss(found),
        "operations": found.operations,
        "steps": found.steps,
        "findings": [_finding(f) for f in found.findings],
        "sensitive_to_threads": found.sensitive and {"threads": found.threads, "parting": _parting(found.sensitive)},
        "not_pinned": dict(found.failed),
    }


def _controlled(found: Controlled) -> dict[str, Any]:
    return {
        "reproducible": found.agreed,
        "tensors": found.tensors,
        "first_different": found.first or None,
        "switches": [{"source": s, "pinned": SOURCES[s].pin, "advice": SOURCES[s].advice} for s in found.switches],
        "verified": found.verified,
        "interrupted": found.interrupted,
        "would_miss": _would_miss(found),
        "explained": found.explained and _explained(found.explained),
    }


def _would_miss(found: Explained | Controlled) -> dict[str, float] | None:
    return {"shows_in": RARE, "missed": missed(found.runs)} if found.agreed else None


def _finding(found: Finding) -> dict[str, Any]:
    source = SOURCES[found.source] if found.source else None
    return {
        "source": found.source,
        "title": source and source.title,
        "pinned": source and source.pin,
        "advice": source.advice if source else _UNKNOWN[1],
        "parting": _parting(found.parting),
        "with_it_pinned": _effect(found),
        "then_parts_at": _parting(found.after if source else None),
        "runs": found.runs,
        "unsure": found.unsure,
        "together_with": list(found.together),
        "read_at": [{"call": read.call, **asdict(read.place)} for read in found.reads],
    }


def _effect(found: Finding) -> str:
    return "unknown" if found.source is None else "agree" if found.after is None else "part later"


def _parting(found: Parting | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: getattr(found, name) for name in ("index", "step", "operation", "phase", "kind")} | {
        "generator": found.generator or None,
        "other_run": found.other or None,
        "operations_to_go": found.to_go,
        "place": found.place and asdict(found.place),
        "origin": found.origin and {"operation": found.origin_operation, **asdict(found.origin)},
    }
