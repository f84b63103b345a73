"""Replays operations the obvious way: one after the other, each as soon as all that it waits for is known."""

from __future__ import annotations

from collections.abc import Sequence


def replay(
    predecessors: Sequence[Sequence[int]],
    collective: Sequence[int],
    durations: Sequence[float],
    gaps: Sequence[float],
    release: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Start and end of each operation.

    Args:
        predecessors: Of each operation.
        collective: Number of each operation's collective; -1: none.
        durations: Of each operation; of one in a collective the time from the latest start of its members to its own end.
        gaps: From the latest end of the predecessors to the start.
        release: When an operation without predecessors may begin.
    """
    n = len(durations)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    while len(ends) < n:
        before = len(starts) + len(ends)
        for i in range(n):
            if i not in starts and all(p in ends for p in predecessors[i]):
                latest = max(ends[p] for p in predecessors[i]) if predecessors[i] else release[i]
                starts[i] = latest + gaps[i]
        for i in range(n):
            members = [j for j in range(n) if j == i or (collective[i] >= 0 and collective[j] == collective[i])]
            if i not in ends and all(m in starts for m in members):
                ends[i] = max(starts[m] for m in members) + durations[i]
        if len(starts) + len(ends) == before:
            raise ValueError("a cycle")
    return [starts[i] for i in range(n)], [ends[i] for i in range(n)]
