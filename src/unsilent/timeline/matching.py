"""Matches collectives of different ranks by the numbers in the trace, or else by their order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from unsilent.report.text import count_text

_SHOWN = 3


class RankCollective(NamedTuple):
    """One rank's part in a collective.

    Attributes:
        operation: Index of the operation.
        rank: Rank that took part.
        group: Group of ranks.
        step: Step in which the collective was launched; -1: outside of steps.
        name: Name of the operation.
        size: Bytes on this rank; -1: unknown.
        sequence: Number within the group; ``None`` if the trace has none.
        communication: Number of the communication; ``None`` if the trace has none.
    """

    operation: int
    rank: int
    group: str
    step: int
    name: str
    size: int
    sequence: int | None = None
    communication: int | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """Name and size of the collective, which must be equal on all ranks."""
        return self.name, self.size


class Matching(NamedTuple):
    """The number of each operation's collective, and notes for the reader."""

    numbers: dict[int, int]
    notes: tuple[str, ...]


def match_collectives(taken: Sequence[RankCollective], members: Mapping[str, Sequence[int]]) -> Matching:
    """Give operations of the same collective the same number.

    Args:
        taken: Collectives on all ranks, each rank's in order.
        members: Recorded ranks of each group.
    """
    by_group: dict[str, dict[int, list[RankCollective]]] = {}
    for collective in taken:
        by_group.setdefault(collective.group, {}).setdefault(collective.rank, []).append(collective)
    numbers: dict[int, int] = {}
    notes, count = [], 0
    for group, ranks in by_group.items():
        lists = {rank: ranks.get(rank, []) for rank in members[group]}
        matched = _by_number(lists) or _by_order(lists)
        for together in matched:
            numbers.update((collective.operation, count) for collective in together)
            count += 1
        notes += _note_on_unmatched(group, lists, matched, numbers)
    return Matching(numbers, tuple(notes))


def _by_number(lists: Mapping[int, list[RankCollective]]) -> list[list[RankCollective]]:
    """Collectives of all ranks matched by the numbers in the trace, or nothing if the numbers are unreliable.

    In some traces numbers occur twice, are missing, or are counted over all groups of a process.
    """
    for attribute in ("communication", "sequence"):
        rows = {
            rank: {getattr(collective, attribute): collective for collective in collectives}
            for rank, collectives in lists.items()
        }
        if any(None in row or len(row) != len(lists[rank]) or not row for rank, row in rows.items()):
            continue
        if attribute == "sequence" and any(max(row) - min(row) + 1 != len(row) for row in rows.values()):
            continue
        first, *others = rows.values()
        common = [key for key in first if all(key in row for row in others)]
        if common and all(row[key].kind == first[key].kind for row in others for key in common):
            return [[row[key] for row in rows.values()] for key in common]
    return []


def _by_order(lists: Mapping[int, list[RankCollective]]) -> list[list[RankCollective]]:
    """Collectives matched by their order in each step, up to the first that differs in name or size."""
    steps: dict[int, dict[int, list[RankCollective]]] = defaultdict(lambda: {rank: [] for rank in lists})
    for rank, collectives in lists.items():
        for collective in collectives:
            steps[collective.step][rank].append(collective)
    matched = []
    for step, ranks in steps.items():
        if (
            step < 0
            and len({tuple(collective.kind for collective in collectives) for collectives in ranks.values()}) > 1
        ):
            continue  # ranks may have begun to record at different collectives
        first, *others = _in_one_order(list(ranks.values()))
        for together in zip(first, *others, strict=False):
            if len({collective.kind for collective in together}) > 1:
                break
            matched.append(list(together))
    return matched


def _in_one_order(lists: Sequence[Sequence[RankCollective]]) -> list[list[RankCollective]]:
    """The collectives of each rank, in the order of the first rank if only their order differs.

    gloo begins two collectives at once, and either may be recorded first.
    """
    first = [collective.kind for collective in lists[0]]
    result = []
    for collectives in lists:
        if sorted(collective.kind for collective in collectives) != sorted(first):
            result.append(list(collectives))
            continue
        of_kind = defaultdict[tuple[str, int], list[RankCollective]](list)
        for collective in reversed(collectives):
            of_kind[collective.kind].append(collective)
        result.append([of_kind[kind].pop() for kind in first])
    return result


def _note_on_unmatched(
    group: str, lists: Mapping[int, list[RankCollective]], matched: Sequence[object], numbers: Mapping[int, Hashable]
) -> list[str]:
    """A note on collectives in complete steps that were not matched, or nothing if there are none."""
    left = [
        collective
        for collectives in lists.values()
        for collective in collectives
        if collective.operation not in numbers
    ]
    in_steps = [collective for collective in left if collective.step >= 0]
    if not in_steps:
        return []
    kinds = Counter(map(_kind_text, in_steps))
    more = f" and {len(kinds) - _SHOWN} other kinds" if len(kinds) > _SHOWN else ""
    kinds_text = ", ".join(f"{text} ({number:,})" for text, number in kinds.most_common(_SHOWN))
    where = f" of group {group}" if group else ""
    return [
        f"{count_text(len(in_steps), 'collective')}{where} in complete steps differ between ranks and were not matched: "
        f"{kinds_text}{more}; {len(matched):,} were matched"
    ]


def _kind_text(collective: RankCollective) -> str:
    size = count_text(collective.size, "byte") if collective.size >= 0 else "unknown size"
    return f"{collective.name} of {size} on rank {collective.rank}"
