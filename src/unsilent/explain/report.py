"""The report on why runs of a loop differ, or on whether they are reproducible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unsilent.basics.strictjson import fields_by_name
from unsilent.explain.results import FoundSource, NondeterminismResult, ReproducibilityResult, RunDivergence
from unsilent.explain.source_search import RARE_DIFFERENCE_SHARE, probability_of_missing
from unsilent.explain.sources import DATA, KERNEL, PATH, RANDOM, SOURCES
from unsilent.report.model import Column, Report, Section, Table, TableRow
from unsilent.report.text import count_text, duration_text, escape_unprintable, listed

EXPLAIN_SCHEMA, CONTROL_SCHEMA = "unsilent/noise-explain/2", "unsilent/noise-control/2"
COLUMNS = (
    Column("source", of=lambda row: row.source or "unknown"), Column("step", of="parting.step"),
    Column("phase", of="parting.phase"), Column("operation", of="parting.operation"),
    Column("place", of=lambda row: str(row.parting.forward_line or row.parting.place or "-")),
    Column("kind", of="parting.kind"), Column("pinned", of=lambda row: _effect(row)),
)  # fmt: skip
_WHY = {
    KERNEL: "it returns different bits for the same inputs",
    DATA: "it receives different values from outside torch",
    PATH: "the runs execute different operations",
}
_DRAWN = {
    "global": "it draws random numbers from torch's global generator",
    "own": "it draws random numbers from its own torch.Generator",
}
_NO_STEP = "No optimizer made a step, so everything is reported as step 0; if the loop should train, check that it does"
_RACE = "; the step at which runs first differ is random, so other runs may first differ at another step"
_UNSURE = "may be chance, because runs differ rarely; compare more runs with --runs"
_OVER = 10
"""A run is called almost over if the other run has at least this many times as many operations left."""
_UNKNOWN = (
    "pinning each known source did not make the runs agree",
    "look for races between your own threads or processes, files that a run leaves behind or changes, an order that depends on "
    "id() or on a set of objects, network access, and kernels that torch.use_deterministic_algorithms does not cover",
)


def report(result: NondeterminismResult | ReproducibilityResult, arguments: Sequence[str] = ()) -> Report:
    """Report on a search for sources, or on a check of reproducibility."""
    machine = result.machine
    spec = {"loop": result.ref, "runs": result.runs, "threads": machine.threads, "hash_seed": machine.hash_seed}
    if isinstance(result, ReproducibilityResult):
        schema, lines, sections = CONTROL_SCHEMA, [*_control_lines(result)], [*_switches(result)]
        searched = result.explained if result.explained and not result.explained.has_no_difference else None
    else:
        schema, lines, sections, searched = EXPLAIN_SCHEMA, [], [], result
    named = [finding.source for finding in searched.findings] if searched else []
    would_miss = None
    if result.has_no_difference:
        would_miss = {"shows_in": RARE_DIFFERENCE_SHARE, "missed": probability_of_missing(result.runs)}
    if searched:
        lines += _explain_lines(searched)
        sections += _findings(searched)
    return Report(
        schema=schema,
        report_type="Why runs differ",
        title=f"Runs of {result.ref}",
        headline=lines[0],
        estimates=Table.of(searched.findings, COLUMNS) if searched and searched.findings else Table((), ()),
        findings=tuple(lines[1:]),
        sections=tuple(sections),
        notes=tuple(_notes(searched)) if searched else (),
        further_json={
            "command": "explain",
            "spec": spec | {"arguments": list(arguments)},
            "seed": None,
            "seconds": result.seconds,
            "launched": result.runs_launched,
            "store": None,
            "versions": dict(machine.versions),
            "results": {
                **fields_by_name(result),
                "has_no_difference": result.has_no_difference,
                "would_miss": would_miss,
                "sources": {name: SOURCES[name] for name in named if name},
            },
        },
    )


# -- words ---------------------------------------------------------------------------------------------------------------


def _explain_lines(result: NondeterminismResult) -> Iterator[str]:
    """Lines that say whether runs differ, which sources cause it, and what was compared."""
    if result.interrupted:
        yield _interruption_text(result)
    elif result.has_no_difference:
        yield "All operations returned the same bits in all runs"
    else:
        sources = [_title(f) + (" (may be chance)" if f.may_be_chance else "") for f in result.findings]
        yield f"Runs differ because of {'; '.join(sources)}"
    yield _comparison_text(
        result, f"{count_text(result.operations, 'operation')} in {count_text(result.steps, 'step')}"
    )
    if result.has_no_difference:
        yield _few(result.runs)


def _control_lines(result: ReproducibilityResult) -> Iterator[str]:
    """Lines that say whether runs are reproducible, and what was compared."""
    if result.has_no_difference:
        yield f"On this machine, {count_text(result.runs, 'run')} without any change ended with the same bits"
    else:
        yield (
            "Not reproducible on this machine: runs ended with different bits; the first tensor that differs is "
            f"{result.first_different_tensor}"
        )
    made = f"{count_text(result.steps, 'step')}, {count_text(result.tensors, 'tensor')} compared at the end"
    yield _comparison_text(result, made)
    if result.has_no_difference:
        yield from (_few(result.runs), *([] if result.steps else [_NO_STEP]))
    elif result.interrupted and result.explained is None:
        yield "Interrupted before the search for the source began"
    elif result.explained is not None and result.explained.has_no_difference:
        yield "No operation differed while operations were logged, so the cause may be a rare race; compare more runs (--runs)"


def _comparison_text(result: NondeterminismResult | ReproducibilityResult, made: str) -> str:
    runs, threads = count_text(result.runs, "run"), count_text(result.machine.threads, "thread")
    return f"{result.ref}: {runs} in fresh processes; each: {made}, {threads}"


def _switches(result: ReproducibilityResult) -> Iterator[Section]:
    """Sections on the switches that make runs agree."""
    claim = "Changes that help but do not suffice"
    if result.pins_verified:
        claim = "With these changes runs end with the same bits"
    elif result.interrupted:
        claim = "Changes that help; whether they suffice was not tested"
    if result.sources_to_pin:
        advice = (Column("", of=lambda source: SOURCES[source].advice),)
        table = Table.of(result.sources_to_pin, advice, f"{claim}:", plain_line_format=f"{claim}: {{0}}")
        yield Section("What to change", "", (table,))


def _findings(result: NondeterminismResult) -> Iterator[Section]:
    """Section of the report with a table for each source."""
    columns = (Column(""), Column("", left_aligned=True))
    tables = []
    for number, finding in enumerate(result.findings, 1):
        title, rows = f"{number}. {_title(finding)}", tuple(map(TableRow, _block(finding)))
        tables.append(Table(columns, rows, title, plain_line_format=f"{title}: {{0}}: {{1}}"))
    if tables:
        yield Section("What makes runs differ", "", tuple(tables))


def _title(result: FoundSource) -> str:
    return SOURCES[result.source].title if result.source else "an unknown source"


def _block(result: FoundSource) -> Iterator[tuple[str, str]]:
    """The facts of one finding, as pairs of a label and a text."""
    yield "where", divergence_location_text(result.parting)
    yield "why", _why(result.parting) + (_RACE if result.parting.kind == KERNEL and result.source != "memory" else "")
    if result.reads:
        word = "made" if result.source == "memory" else "read"
        yield word, listed(f"{r.call} at {r.place}" for r in result.reads)
    if result.source is None:
        yield from zip(("evidence", "fix"), _UNKNOWN, strict=True)
        return
    pinned = SOURCES[result.source].pin
    if result.pinned_together:
        pinned += f", together with {'; '.join(SOURCES[s].pin for s in result.pinned_together)}"
    then = f"{count_text(result.runs, 'run')} agree to the last bit"
    if result.divergence_when_pinned is not None:
        then = f"runs diverge later: {divergence_location_text(result.divergence_when_pinned)}"
    yield "evidence", f"with this source pinned ({pinned}), {then}"
    if result.may_be_chance:
        yield "caution", _UNSURE
    yield "fix", SOURCES[result.source].advice


def divergence_location_text(parting: RunDivergence) -> str:
    """Place of a difference, such as ``step 0, uniform at train.py:8 (train)``.

    A backward operation has its forward operation added.
    """
    at = f" at {parting.place} ({parting.place.function})" if parting.place else ""
    text = f"step {parting.step}, {parting.operation}{at}"
    if parting.forward_line is not None:
        return f"{text}, in the backward of {parting.forward_operation} at {parting.forward_line}"
    return text if parting.phase == "forward" else f"{text}, in the {parting.phase}"


def _why(parting: RunDivergence) -> str:
    if parting.kind == RANDOM:
        return _DRAWN[parting.generator]
    if parting.kind != PATH or parting.operations_left is None:
        return _WHY[parting.kind]
    this, other_left = parting.operations_left
    instead = f", next {parting.other_operation}" if parting.other_operation else ""
    if not other_left:
        return f"one run has ended; the other continues with {count_text(this, 'operation')} more"
    if this * _OVER <= other_left or other_left * _OVER <= this:
        few, many = sorted((this, other_left))
        over = f"one run is almost over ({count_text(few, 'operation')} left{instead if few == other_left else ''})"
        return f"{over} while the other continues ({many:,} left{instead if few == this else ''})"
    return f"{_WHY[PATH]}: the other run executes {parting.other_operation}"


def finding_summary_line(result: FoundSource) -> str:
    """A finding in one line, shown while the search goes on."""
    chance = " (may be chance)" if result.may_be_chance else ""
    return escape_unprintable(f"found: {_title(result)}, {divergence_location_text(result.parting)}{chance}")


def _interruption_text(result: NondeterminismResult) -> str:
    """Sentence on a search that was interrupted."""
    so_far = "; ".join(_title(f) for f in result.findings)
    text = f"Interrupted. Runs differ because of {so_far}" if so_far else "Interrupted before a source was found"
    if result.unexplained_divergence is None:
        return f"{text}; whether {'there are other sources' if so_far else 'runs differ'} is not known"
    return (
        f"{text}; {'with these pinned, ' if so_far else ''}runs first differ at "
        f"{divergence_location_text(result.unexplained_divergence)}, and the cause of that is not known yet"
        f"{_tested_sources_text(result)}"
    )


def _tested_sources_text(result: NondeterminismResult) -> str:
    """Sentence on the sources that were being tested when a search was interrupted."""
    if not result.candidates:
        return ""
    together = " together" if len(result.candidates) > 1 else ""
    return f"; when interrupted, the search was testing {listed(SOURCES[s].title for s in result.candidates)}{together}"


def _few(runs: int) -> str:
    """Sentence on how little the agreement of so few runs proves."""
    return (
        f"{runs} runs agree; a difference that occurs in one run of ten would be missed with a probability of "
        f"{100 * probability_of_missing(runs):.0f} % (raise --runs to lower it)"
    )


def _notes(result: NondeterminismResult) -> Iterator[str]:
    if result.divergence_by_threads is not None and result.other_thread_count is not None:
        yield (
            f"With {count_text(result.other_thread_count, 'thread')} instead of {result.machine.threads} the values "
            f"differ, first at {divergence_location_text(result.divergence_by_threads)}: fix the number of threads if runs "
            "on different machines must agree"
        )
    if result.machine.hash_seed is not None:
        yield f"PYTHONHASHSEED is set to {result.machine.hash_seed}, so the order of sets was the same in all runs"
    yield from (f"Could not be pinned: {SOURCES[source].title} ({why})" for source, why in result.pin_failures.items())
    if not result.steps:
        yield _NO_STEP
    runs = count_text(result.runs_launched, "run")
    yield f"{runs} in all, in {duration_text(result.seconds)}; steps are optimizer updates, counted from 0"


def _effect(result: FoundSource) -> str:
    """Phrase on the effect of pinning a source."""
    return "unknown" if result.source is None else "agree" if result.divergence_when_pinned is None else "part-later"
