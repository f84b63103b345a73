"""Finds missing ranks and differing collectives of a hanging job from dumps of the flight recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from unsilent.report.shown import Shown
from unsilent.timeline.flight_recorder import DEFAULT_GROUP, Collective, Dump, Entered, Group, read_dumps


class Missing(NamedTuple):
    """Ranks that had not entered a collective while others had.

    Attributes:
        group, number: Group and number of the collective.
        ranks: The missing rank; if no dump names the members of the group, all ranks that may be missing.
        collective: Collective as the others called it; ``None`` if no dump holds it any more.
        waiting: Ranks that wait in the collective.
        left: Ranks that have left the collective: it failed there, they did not need the rank, or their dumps are later.
        waits_in: Groups in which the missing rank itself waits.
        is_certain: Whether the rank is certainly a member of the group; for several ranks, whether one of them must be.
        since: Number of the first in a run of equal collectives up to this one. The rank may have skipped any of them, as each
            is then paired with the next.
    """

    group: Group
    number: int
    ranks: tuple[int, ...]
    collective: Collective | None
    waiting: tuple[int, ...]
    left: tuple[int, ...] = ()
    waits_in: tuple[Group, ...] = ()
    is_certain: bool = True
    since: int = 0


class Different(NamedTuple):
    """A collective that ranks called differently, with each kind of call and its ranks, most ranks first.

    ``since`` is as in `Missing`.
    """

    group: Group
    number: int
    ways: tuple[tuple[Collective, tuple[int, ...]], ...]
    since: int = 0


@dataclass(frozen=True, repr=False)
class Hang(Shown):
    """The result of reading the dumps of a job that hangs.

    Attributes:
        ranks: Ranks with a dump.
        without_dump: Ranks below the highest one, or members of a group, that have none.
        knows_size: Whether a dump names the ranks of the job.
        missing: Missing ranks; those that wait in no other group come first.
        different: The first collective of each group that ranks called differently.
        other_lines: The first collective that ranks called in different lines of code, for groups with a finding.
        stuck: Groups in which ranks wait although no rank with a dump is known to be missing, with the waiting ranks.
        not_compared: Ranks that used a group of which no entry was left.
        dropped: Number of entries that the recorder no longer held, by rank.
    """

    REPORT = "unsilent.timeline.hang_report:hang_report"
    ranks: tuple[int, ...]
    without_dump: tuple[int, ...]
    knows_size: bool
    missing: tuple[Missing, ...]
    different: tuple[Different, ...]
    other_lines: tuple[Different, ...]
    stuck: dict[Group, tuple[int, ...]]
    not_compared: tuple[int, ...]
    dropped: dict[int, int]

    @property
    def verdict(self) -> str:
        """Verdict on the hang as one word.

        ``different``: collectives differ between ranks; ``missing``: a rank is missing from one; ``waiting``: ranks wait,
        and none is known to be missing; ``none``: none of these.
        """
        if self.different:
            return "different"
        if any(absence.is_certain for absence in self.missing):
            return "missing"
        return "waiting" if self.missing or self.stuck else "none"

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if a rank was missing from a collective or collectives differ, else 0."""
        return int(self.verdict in ("different", "missing"))


def find_hang(paths: Sequence[str | Path]) -> Hang:
    """The hang that the dumps in the given folders and files show.

    Raises ``UsageError`` if a dump cannot be read.
    """
    return hang_of(read_dumps(paths))


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """The hang that one or more dumps show."""
    members = {name: ranks for dump in dumps for name, ranks in dump.members.items()}
    ranks = tuple(dump.rank for dump in dumps)
    groups = sorted({group for dump in dumps for group in dump.groups})
    world = {rank for group in groups if group.description == DEFAULT_GROUP for rank in members.get(group.name, ())}
    absent = tuple(sorted((world or set(range(max(ranks)))).union(*members.values()) - set(ranks)))
    missing: list[Missing] = []
    different, stuck = [], {}
    for group in groups:
        known = members.get(group.name, frozenset(ranks if group.description == DEFAULT_GROUP else ()))
        entered = {
            dump.rank: entered_group
            for dump in dumps
            if (entered_group := _entered_collectives(dump, group, known)) is not None
        }
        first = _first_different(group, entered, _as_compared)
        of_group = list(_missing(group, entered)) or (
            [] if known else list(_perhaps_missing(group, entered, ranks, absent))
        )
        missing += [absence._replace(waits_in=_waits_in(dumps, absence.ranks, group)) for absence in of_group]
        different += [first] if first else []
        if (
            first is None
            and not of_group
            and (waiting := _where(entered, lambda entered_group: bool(entered_group.open)))
        ):
            stuck[group] = waiting
    with_finding = {absence.group for absence in missing} | {difference.group for difference in different}
    other_lines = (
        _first_different(group, {dump.rank: dump.groups[group] for dump in dumps if group in dump.groups}, _line)
        for group in sorted(with_finding)
    )
    return Hang(
        ranks, absent, bool(world), tuple(sorted(missing, key=lambda absence: bool(absence.waits_in))), tuple(different),
        tuple(difference for difference in other_lines if difference), stuck,
        tuple(dump.rank for dump in dumps if dump.has_unnamed),
        {dump.rank: dump.dropped for dump in dumps if dump.dropped},
    )  # fmt: skip


def _entered_collectives(dump: Dump, group: Group, members: frozenset[int]) -> Entered | None:
    """Collectives of a group that a rank entered, or None if they are unknown or the rank is not a member."""
    is_known = dump.rank in members and not dump.dropped and not dump.has_unnamed
    return dump.groups.get(group, Entered() if is_known else None)


def _where(entered: Mapping[int, Entered], holds: Callable[[Entered], bool]) -> tuple[int, ...]:
    return tuple(rank for rank, entered_group in entered.items() if holds(entered_group))


def _missing(group: Group, entered: Mapping[int, Entered]) -> Iterator[Missing]:
    """Ranks that wait in no collective of the group, although others entered later collectives."""
    most = max(entered_group.last for entered_group in entered.values())
    for rank, of_rank in entered.items():
        if of_rank.open or of_rank.last >= most:
            continue
        number = of_rank.last + 1
        calls = {
            caller: entered_group.collectives[number]
            for caller, entered_group in entered.items()
            if number in entered_group.collectives
        }
        waiting = tuple(caller for caller in calls if number in entered[caller].open)
        left = tuple(caller for caller in calls if caller not in waiting)
        call = next(iter(calls.values()), None)
        since = _since(of_rank, number, [call] if call else [])
        yield Missing(group, number, (rank,), call, waiting, left, since=since)


def _since(of_rank: Entered, number: int, calls: Iterable[Collective]) -> int:
    """Number of the first of consecutive equal collectives before ``number``.

    The collectives are compared with ``calls``; without an equal one, the result is ``number``.
    """
    result = number
    for call in calls:
        first = number
        while (before := of_rank.collectives.get(first - 1)) and (_as_compared(before), _line(before)) == (
            _as_compared(call), _line(call)
        ):  # fmt: skip
            first -= 1
        result = min(result, first)
    return result


def _perhaps_missing(
    group: Group, entered: Mapping[int, Entered], ranks: Iterable[int], absent: tuple[int, ...]
) -> Iterator[Missing]:
    """Ranks without an entry that may be missing from a group in which no rank left the first collective.

    No rank can leave a collective before all members have entered it, so a rank without an entry may be a member that is
    missing.
    """
    candidates = tuple(rank for rank in ranks if rank not in entered)
    if candidates and all(1 in entered_group.open for entered_group in entered.values()):
        collective = next(iter(entered.values())).collectives[1]
        is_certain = len(entered) == 1 and not absent  # a group has two members or more
        yield Missing(group, 1, candidates, collective, tuple(entered), is_certain=is_certain)


def _waits_in(dumps: Iterable[Dump], ranks: tuple[int, ...], group: Group) -> tuple[Group, ...]:
    """Other groups in which a single missing rank waits; nothing for several ranks."""
    return tuple(
        sorted(
            other_group
            for dump in dumps
            if (dump.rank,) == ranks
            for other_group, entered_group in dump.groups.items()
            if other_group != group and entered_group.open
        )
    )


def _first_different(
    group: Group, entered: Mapping[int, Entered], key: Callable[[Collective], Any]
) -> Different | None:
    """The first collective for which ``key`` gives different results on different ranks.

    Ranks for which ``key`` returns ``None`` are not compared.
    """
    for number in sorted({number for entered_group in entered.values() for number in entered_group.collectives}):
        ways: dict[Any, tuple[Collective, list[int]]] = {}
        for rank, entered_group in entered.items():
            if (call := entered_group.collectives.get(number)) is not None and (way := key(call)) is not None:
                ways.setdefault(way, (call, []))[1].append(rank)
        if len(ways) > 1:
            ordered = sorted(ways.values(), key=lambda way: -len(way[1]))
            since = _since(next(iter(entered.values())), number, [call for call, _ in ordered])
            return Different(group, number, tuple((call, tuple(ranks)) for call, ranks in ordered), since)
    return None


def _line(call: Collective) -> tuple[str, int] | None:
    return (call.file, call.line) if call.file else None


def _as_compared(call: Collective) -> tuple[Any, ...]:
    """The properties of a call that must be equal on all ranks: operation, types and number of elements.

    The shapes may differ.
    """
    shapes = common_shapes(call)
    return call.operation, call.dtypes if shapes is not None else (), shapes and sum(map(prod, shapes))


def common_shapes(call: Collective) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the tensors that have equally many elements on all ranks, or None for an all-to-all."""
    name = call.operation.replace("_", "")
    if "alltoall" in name:
        return None
    is_total = "allgather" in name or ("scatter" in name and "reduce" not in name)
    return call.received if is_total else call.sent
