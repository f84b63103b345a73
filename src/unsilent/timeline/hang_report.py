"""The report of ``unsilent timeline hang``: missing ranks and differing collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from unsilent.basics.strictjson import fields_by_name
from unsilent.report.model import Column, Report, Table
from unsilent.report.text import count_text, listed
from unsilent.timeline.flight_recorder import Collective
from unsilent.timeline.hang import Hang, Missing, common_shapes

METHOD = (
    "The entries of each process group are compared by their sequence number. A rank is missing from a collective if it was in "
    "none of the group when its dump was written, and had entered fewer than another rank. Two ranks called different "
    "collectives if operations, element types or numbers of elements differ under one number; of an all-to-all, numbers and "
    "types may differ."
)
MOST_FINDINGS = 12


def hang_report(result: Hang) -> Report:
    """Report on the dumps of a job that hangs."""
    sentences = list(_sentences(result))
    if not sentences or len(result.ranks) == 1:
        sentences.insert(0, _nothing(result))
    findings = sentences[1 : MOST_FINDINGS + 1]
    if more := len(sentences) - 1 - len(findings):
        findings.append(f"{count_text(more, 'more finding')} in the JSON object (`--json`)")
    rows = [("differs", difference, ranks, call) for difference in result.different for call, ranks in difference.ways]
    rows += [("missing", absence, absence.ranks, absence.collective) for absence in result.missing]  # type: ignore[misc]
    heads = (
        Column.text("what", lambda row: row[0]), Column.text("group", lambda row: row[1].group.label),
        Column.count("number", lambda row: row[1].number), Column.text("ranks", lambda row: _numbers(row[2])),
        Column.text("collective", lambda row: row[3] and _call(row[3])),
    )  # fmt: skip
    return Report(
        "unsilent/timeline-hang/2", "timeline-hang", "Collectives of a job by its flight recorders",
        sentences[0][:1].upper() + sentences[0][1:], Table.of(rows, heads), findings=tuple(findings),
        facts=(("dumps", f"{count_text(len(result.ranks), 'rank')}: {_numbers(result.ranks)}"),),
        notes=tuple(_notes(result)), method=METHOD, further_json={"results": {
            **fields_by_name(result, "stuck"), "verdict": result.verdict,
            "stuck": [{"group": group, "waiting": ranks} for group, ranks in result.stuck.items()],
        }},
    )  # fmt: skip


def _nothing(result: Hang) -> str:
    if len(result.ranks) == 1:
        return f"This is the dump of rank {result.ranks[0]} alone, which cannot say what other ranks entered"
    count = count_text(len(result.ranks), "rank")
    return f"Of {count} with a dump, none waits in a collective or is known to be missing from one"


def _sentences(result: Hang) -> Iterator[str]:
    for difference in result.different:
        ways = "; ".join(f"{_call(call)} on {_ranks(ranks)}" for call, ranks in difference.ways)
        skipped = f"; one of the equal collectives {difference.since:,} to {difference.number:,} may have been skipped"
        yield (
            f"collective {difference.number:,} of group {difference.group.label} differs between ranks: {ways}"
            f"{skipped if difference.since < difference.number else ''}"
        )
    yield from map(_missing_text, result.missing)
    for difference in result.other_lines:
        ways = ", ".join(f"{_ranks(ranks)} at {_site(call)}" for call, ranks in difference.ways)
        yield (
            f"collective {difference.number:,} of group {difference.group.label} is the first that was called from different "
            f"lines: {ways}; a rank may have skipped one there"
        )
    for group, waiting in result.stuck.items():
        absent = f", and {_ranks(result.without_dump, 'has')} no dump" if result.without_dump else ""
        yield f"{_ranks(waiting, 'waits')} in group {group.label}; no rank with a dump is known to be missing from it{absent}"


def _missing_text(absence: Missing) -> str:
    called = f"collective {absence.number:,} of group {absence.group.label}"
    called += f" ({_call(absence.collective)})" if absence.collective else ""
    if absence.is_certain and len(absence.ranks) == 1:
        text = f"{_ranks(absence.ranks)} had not entered {called} when its dump was written"
    elif absence.is_certain:
        text = f"at least one of {_ranks(absence.ranks)} had not entered {called}"
    else:
        group = absence.group.label
        they = "it" if len(absence.ranks) == 1 else "they"
        text = (
            f"{_ranks(absence.ranks, 'has')} no entry of group {group}: {they} may be missing from it, or not belong to it, "
            "which no dump shows"
        )
    if 0 < absence.since < absence.number:
        text += (
            f", or skipped an earlier one: collectives {absence.since:,} to {absence.number:,} are equal, so dumps do not show "
            "which"
        )
    if absence.waiting:
        text += f"; {_ranks(absence.waiting, 'waits')} in {'it' if absence.is_certain else called}"
    if absence.left:
        text += (
            f"; {_ranks(absence.left, 'has')} left it: the collective failed there or did not wait for "
            f"{_ranks(absence.ranks)}, or the dump is later"
        )
    if absence.waits_in:
        text += f"; {_ranks(absence.ranks)} itself waits in group {listed(group.label for group in absence.waits_in)}"
    return text


def _notes(result: Hang) -> Iterator[str]:
    if result.without_dump:
        yield f"there is no dump of {_ranks(result.without_dump)}: what was entered there is not known"
    if not result.knows_size:
        yield f"no dump says how many ranks the job has: a rank above {max(result.ranks)} would not be noticed"
    if result.dropped:
        dropped = listed((f"{count:,} of rank {rank}" for rank, count in result.dropped.items()), 4)
        yield f"the first entries were dropped from full recorders and not compared: {dropped}"
    if result.not_compared:
        yield f"{_ranks(result.not_compared, 'uses')} a group of which no entry is left; it was not compared"
    waits = "; a rank that is missing from a collective may be waiting for one, and dumps of gloo do not hold them"
    yield f"messages between two ranks (send, recv) are not compared{waits if result.missing else ''}"
    yield "a dump shows only what a rank had entered when it was written; if the job goes on, a later dump shows more"


def _call(call: Collective) -> str:
    """Text on a call, like ``all_reduce of 4x3 Float at train.py:12``."""
    shapes = common_shapes(call) or call.sent or call.received
    sizes = listed(("x".join(map(str, shape)) or "1" for shape in shapes), 3)
    types = listed(dict.fromkeys(call.dtypes), 3)
    return call.operation + (f" of {sizes} {types}" if sizes else "") + (f" at {_site(call)}" if call.file else "")


def _site(call: Collective) -> str:
    return f"{PurePath(call.file).name}:{call.line}"


def _numbers(ranks: Sequence[int]) -> str:
    return listed(map(str, ranks))


def _ranks(ranks: Sequence[int], verb: str = "") -> str:
    """Text that names ranks, with a verb if one is given, like ``rank 1 waits`` or ``ranks 1, 2 wait``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}".rstrip()
    return f"ranks {_numbers(ranks)} {'have' if verb == 'has' else verb.removesuffix('s')}".rstrip()
