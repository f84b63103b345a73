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
    KERNEL: "it returns different bits for the same inputs",
    DATA: "it is given other values from outside of torch",
    PATH: "the runs do different operations",
}
_DRAWN = {
    "global": "it draws random numbers from torch's global generator",
    "own": "it draws from a torch.Generator of its own",
}
_NO_STEP = "No optimizer made a step: if the loop is to train, check that it does; everything is reported as of step 0"
_RACE = "; at which step that shows first is chance, so other runs may part at another"
_UNSURE = "may be chance: runs differ rarely; compare more with --runs"
_OVER = 10
"""A run that has fewer operations to go than the other by this factor is told to be almost over."""
_UNKNOWN = (
    "nothing that could be pinned made the runs agree",
    "look for threads or processes of your own that race, files that a run leaves behind or changes, an order by id() or of a "
    "set of objects, a network, and kernels that torch.use_deterministic_algorithms does not cover",
)


def report(result: Explained | Controlled, arguments: Sequence[str] = ()) -> Report:
    """All that is shown of a search, or of a comparison of ends with the search that it led to."""
    machine = result.machine
    spec = {"loop": result.ref, "runs": result.runs, "threads": machine.threads, "hash_seed": machine.hash_seed}
    if isinstance(result, Controlled):
        schema, results, lines, sections = (
            CONTROL_SCHEMA,
            _controlled(result),
            [*_control_lines(result)],
            [*_switches(result)],
        )
        searched = result.explained if result.explained and not result.explained.agreed else None
    else:
        schema, results, lines, sections, searched = EXPLAIN_SCHEMA, _explained(result), [], [], result
    if searched:
        lines += _explain_lines(searched)
        sections += _findings(searched)
    return Report(
        schema=schema,
        kicker="Why runs differ",
        title=f"Runs of {result.ref}",
        headline=lines[0],
        estimates=_rows(searched.findings if searched else ()),
        findings=tuple(lines[1:]),
        sections=tuple(sections),
        notes=tuple(_notes(searched)) if searched else (),
        data={
            "command": "noise",
            "spec": spec | {"arguments": list(arguments)},
            "seed": None,
            "seconds": result.seconds,
            "launched": result.launched,
            "store": None,
            "versions": dict(machine.versions),
            "results": results,
        },
    )


# -- words ---------------------------------------------------------------------------------------------------------------


def _explain_lines(result: Explained) -> Iterator[str]:
    """Whether runs differ and because of what, and what was compared."""
    if result.interrupted:
        yield _interrupted(result)
    elif result.agreed:
        yield "All operations of all runs gave the same bits"
    else:
        sources = [_title(f) + (" (may be chance)" if f.unsure else "") for f in result.findings]
        yield f"Runs differ because of {'; '.join(sources)}"
    yield _compared(result, f"{counted(result.operations, 'operation')} in {counted(result.steps, 'step')}")
    if result.agreed:
        yield _few(result.runs)


def _control_lines(result: Controlled) -> Iterator[str]:
    """Whether runs are reproducible, and what was compared."""
    if result.agreed:
        yield "Reproducible here as it is: all runs end in the same bits"
    else:
        yield f"Not reproducible here: runs end in different bits, first in {result.first}"
    yield f"{_compared(result, counted(result.steps, 'step'))}, {counted(result.tensors, 'tensor')} compared at the end"
    if result.agreed:
        yield from (_few(result.runs), *([] if result.steps else [_NO_STEP]))
    elif result.interrupted and result.explained is None:
        yield "Interrupted before the search for the source had a run"
    elif result.explained is not None and result.explained.agreed:
        yield "No operation differed while runs were watched: a race that is rare; compare more runs (--runs)"


def _compared(result: Explained | Controlled, what: str) -> str:
    runs, threads = counted(result.runs, "run"), counted(result.machine.threads, "thread")
    return f"{result.ref}: {runs} in fresh processes, {what}, {threads}"


def _switches(result: Controlled) -> Iterator[Section]:
    """What makes runs agree."""
    claim = "With these changes runs end in the same bits" if result.verified else "Changes that help, but not alone"
    rows = tuple(Row((SOURCES[source].advice,)) for source in result.switches)
    if rows:
        yield Section("What to change", "", (Table((Column(""),), rows, f"{claim}:", sentence=f"{claim}: {{0}}"),))


def _findings(result: Explained) -> Iterator[Section]:
    """A table for each source."""
    titles = [f"{number}. {_title(finding)}" for number, finding in enumerate(result.findings, 1)]
    columns = (Column(""), Column("", left=True))
    tables = [
        Table(columns, tuple(map(Row, _block(finding))), title, sentence=f"{title}: {{0}}: {{1}}")
        for title, finding in zip(titles, result.findings, strict=True)
    ]
    if tables:
        yield Section("What makes runs differ", "", tuple(tables))


def _title(result: Finding) -> str:
    return SOURCES[result.source].title if result.source else "an unknown source"


def _block(result: Finding) -> Iterator[tuple[str, str]]:
    """What is told of one finding, each with the word before it."""
    yield "where", where(result.parting)
    yield "what", _why(result.parting) + (_RACE if result.parting.kind == KERNEL and result.source != "memory" else "")
    if result.reads:
        word = "made" if result.source == "memory" else "read"
        yield word, listed(f"{r.call} at {r.place}" for r in result.reads)
    if result.source is None:
        yield from zip(("sure", "do"), _UNKNOWN, strict=True)
        return
    pinned = SOURCES[result.source].pin
    if result.together:
        pinned += f", together with {'; '.join(SOURCES[s].pin for s in result.together)}"
    then = f"{counted(result.runs, 'run')} agree to the last bit"
    if result.after is not None:
        then = f"runs part later: {where(result.after)}"
    yield "sure", f"pinned ({pinned}), {then}"
    if result.unsure:
        yield "but", _UNSURE
    yield "do", SOURCES[result.source].advice


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
        return f"one run has ended where the other continues: {counted(this, 'operation')} more"
    if this * _OVER <= other or other * _OVER <= this:
        few, many = sorted((this, other))
        over = f"one run is almost over ({counted(few, 'operation')} to go{instead if few == other else ''})"
        return f"{over} where the other continues ({many:,} to go{instead if few == this else ''})"
    return f"{_WHY[PATH]}: the other does {parting.other}"


def found_line(result: Finding) -> str:
    """A finding in one line, told while the search goes on."""
    return clean(f"found: {_title(result)}, {where(result.parting)}{' (may be chance)' if result.unsure else ''}")


def _interrupted(result: Explained) -> str:
    """What a search that was not finished has shown."""
    so_far = "; ".join(_title(f) for f in result.findings)
    text = f"Interrupted. Runs differ because of {so_far}" if so_far else "Interrupted before a source was found"
    if result.unexplained is None:
        return f"{text}; whether {'all is result' if so_far else 'runs differ'} is not known"
    return f"{text}; {'then ' if so_far else ''}they part at {where(result.unexplained)}, and why is not known yet"


def _few(runs: int) -> str:
    """How little some runs that agree can show."""
    return (
        f"{runs} runs agree: a difference that shows in one of ten runs would be missed in {100 * missed(runs):.0f} of 100 "
        "such comparisons (more runs: --runs)"
    )


def _notes(result: Explained) -> Iterator[str]:
    if result.sensitive is not None and result.threads is not None:
        yield (
            f"With {counted(result.threads, 'thread')} instead of {result.machine.threads} the bits differ from "
            f"{where(result.sensitive)}: fix the number of threads if runs on other machines are to agree"
        )
    if result.machine.hash_seed is not None:
        yield f"PYTHONHASHSEED is {result.machine.hash_seed} here, so the order of sets was the same in all runs"
    yield from (f"Not possible to pin: {SOURCES[source].title} ({why})" for source, why in result.failed.items())
    if not result.steps:
        yield _NO_STEP
    yield f"{counted(result.launched, 'run')} in {seconds(result.seconds)}; steps are counted from 0, by optimizer updates"


# -- for machines --------------------------------------------------------------------------------------------------------


def _rows(findings: Sequence[Finding]) -> Table:
    """One row for each source; no table where there is none."""
    rows = []
    for result in findings:
        parting = result.parting
        place = str(parting.origin or parting.place or "-")
        words = (result.source or "unknown", parting.step, parting.phase, parting.operation, place, parting.kind)
        rows.append(Row((*words, _effect(result).replace(" ", "-"))))
    return Table(tuple(map(Column, COLUMNS)) if rows else (), tuple(rows))


def _explained(result: Explained) -> dict[str, Any]:
    return {
        "agreed": result.agreed,
        "interrupted": result.interrupted,
        "unexplained": _parting(result.unexplained),
        "would_miss": _would_miss(result),
        "operations": result.operations,
        "steps": result.steps,
        "findings": [_finding(f) for f in result.findings],
        "sensitive_to_threads": result.sensitive and {"threads": result.threads, "parting": _parting(result.sensitive)},
        "not_pinned": dict(result.failed),
    }


def _controlled(result: Controlled) -> dict[str, Any]:
    return {
        "reproducible": result.agreed,
        "tensors": result.tensors,
        "first_different": result.first or None,
        "switches": [{"source": s, "pinned": SOURCES[s].pin, "advice": SOURCES[s].advice} for s in result.switches],
        "verified": result.verified,
        "interrupted": result.interrupted,
        "would_miss": _would_miss(result),
        "explained": result.explained and _explained(result.explained),
    }


def _would_miss(result: Explained | Controlled) -> dict[str, float] | None:
    return {"shows_in": RARE, "missed": missed(result.runs)} if result.agreed else None


def _finding(result: Finding) -> dict[str, Any]:
    source = SOURCES[result.source] if result.source else None
    return {
        "source": result.source,
        "title": source and source.title,
        "pinned": source and source.pin,
        "advice": source.advice if source else _UNKNOWN[1],
        "parting": _parting(result.parting),
        "with_it_pinned": _effect(result),
        "then_parts_at": _parting(result.after if source else None),
        "runs": result.runs,
        "unsure": result.unsure,
        "together_with": list(result.together),
        "read_at": [{"call": read.call, **asdict(read.place)} for read in result.reads],
    }


def _effect(result: Finding) -> str:
    return "unknown" if result.source is None else "agree" if result.after is None else "part later"


def _parting(result: Parting | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {name: getattr(result, name) for name in ("index", "step", "operation", "phase", "kind")} | {
        "generator": result.generator or None,
        "other_run": result.other or None,
        "operations_to_go": result.to_go,
        "place": result.place and asdict(result.place),
        "origin": result.origin and {"operation": result.origin_operation, **asdict(result.origin)},
    }
