"""The order in which a replay computes operations, as chains of operations and levels of chains.

A chain is an operation and the following ones that wait only for the one before them. A level consists of all chains that can
start once those of earlier levels have ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.timeline.job import Job, Operations

Indices = NDArray[np.int64]


class Level(NamedTuple):
    """Chains that can start once those of earlier levels have ended.

    Indices count chains in the order of the replay.

    Attributes:
        first, last: Number of the first chain that starts, and of the first chain of the next level.
        sources: Chains that the chains of this level depend on, concatenated; empty in the first level.
        source_begins: Index in ``sources`` at which the sources of each chain begin.
        behind: Indices in ``sources`` of dependencies on a later operation of a chain instead of its first one.
        behind_first: Index in the schedule's ``sources_behind`` at which these operations begin.
        members: Members of the collectives whose last member starts in this level.
        member_begins: Index in ``members`` at which the members of each collective begin.
        which: Number of each member's collective, counted within this level.
    """

    first: int
    last: int
    sources: Indices
    source_begins: Indices
    behind: Indices
    behind_first: int
    members: Indices
    member_begins: Indices
    which: Indices


class Schedule(NamedTuple):
    """The order of a replay, computed once per job.

    Attributes:
        heads: The first operation of each chain, in the order of the replay.
        followers: The other operations, one chain after the other.
        counts: Number of followers of each chain.
        sources_behind: Indices in ``followers`` of the operations that a chain depends on, one level after the other.
        levels: Levels of chains.
    """

    heads: Indices
    followers: Indices
    counts: Indices
    sources_behind: Indices
    levels: list[Level]


def make_schedule(job: Job) -> Schedule:
    """The order in which a job is replayed.

    Raises ``UsageError`` if operations wait for each other.
    """
    operations, n = job.operations, len(job.operations)
    members, member_begins, collective = _collectives(operations)
    head, depth = _chains(job, collective)
    heads = np.flatnonzero(depth == 0)
    number = np.empty(n, np.int64)  # of its chain
    number[heads] = np.arange(len(heads))
    number = number[head]
    leads = np.flatnonzero(depth[job.edges.target] == 0)
    source, target = number[job.edges.source[leads]], number[job.edges.target[leads]]
    order, started, completed = _levels(job, source, target, collective[heads], number[members], member_begins, heads)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    followers = np.flatnonzero(depth)
    followers = followers[np.lexsort((depth[followers], position[number[followers]]))]
    place = np.full(n, -1, np.int64)
    place[followers] = np.arange(len(followers))
    by_target = np.argsort(position[target], kind="stable")
    at, sources = position[target][by_target], position[source][by_target]
    behind = place[job.edges.source[leads]][by_target]
    levels = _with_positions(
        started, completed, sources, _begins(at, len(order)), behind >= 0, position[number[members]], member_begins
    )
    counts = np.bincount(position[number[followers]], minlength=len(order))
    return Schedule(heads[order], followers, counts, behind[behind >= 0], levels)


def _with_positions(
    started: list[Indices], completed: list[Indices], sources: Indices, source_begins: Indices, is_behind: NDArray[np.bool_],
    members: Indices, member_begins: Indices,
) -> list[Level]:  # fmt: skip
    """The levels of a replay, with chains numbered in the order of the replay."""
    before = np.concatenate([[0], np.cumsum(is_behind)])
    levels, first = [], 0
    for chains, full in zip(started, completed, strict=True):
        last = first + len(chains)
        low, high = source_begins[first], source_begins[last]
        sizes = member_begins[full + 1] - member_begins[full]
        levels.append(Level(
            first, last, sources[low:high], source_begins[first:last] - low, np.flatnonzero(is_behind[low:high]),
            int(before[low]), members[_ranges(member_begins, full)], np.cumsum(sizes) - sizes,
            np.repeat(np.arange(len(full)), sizes),
        ))  # fmt: skip
        first = last
    return levels


def _chains(job: Job, collective: Indices) -> tuple[Indices, Indices]:
    """The first operation of each operation's chain, and the operation's position in the chain.

    A member of a collective is a chain of its own. Raises ``UsageError`` if operations of a chain wait for each other.
    """
    n, edges = len(collective), job.edges
    waits_for = np.bincount(edges.target, minlength=n)
    may_follow = (waits_for[edges.target] == 1) & (collective[edges.target] < 0) & (collective[edges.source] < 0)
    source, target = edges.source[may_follow], edges.target[may_follow]
    source, first = np.unique(source, return_index=True)  # an operation has at most one that continues its chain
    head = np.arange(n)
    head[target[first]] = source
    depth = (head != np.arange(n)).astype(np.int64)
    for _ in range(n.bit_length()):
        further = head[head]
        if np.array_equal(further, head):
            break
        depth += depth[head]
        head = further
    if np.any(is_stuck := depth[head] > 0):
        raise _cycle(job, is_stuck)
    return head, depth


def _levels(
    job: Job, source: Indices, target: Indices, collective: Indices, members: Indices, member_begins: Indices, heads: Indices
) -> tuple[Indices, list[Indices], list[Indices]]:  # fmt: skip
    """The order of chains, the chains of each level, and the collectives that are complete in each level.

    A collective is complete in the level in which its last member starts.

    Args:
        job: The job to sort.
        source, target: Chains of the edges between chains.
        collective: Number of each chain's collective, -1: none.
        members: Chains that are members, in the order of collectives; ``member_begins``: where those of each begin.
        heads: The first operation of each chain.
    """
    n = len(collective)
    targets, out_begins = target[np.argsort(source, kind="stable")], _begins(source, n)
    waits_for = np.bincount(target, minlength=n)
    unstarted = np.diff(member_begins)
    started: list[Indices] = []
    completed: list[Indices] = []
    ready = np.flatnonzero(waits_for == 0)
    stamp = np.empty(n, np.int64)
    while len(ready):
        is_member = collective[ready] >= 0
        begun = collective[ready[is_member]]
        np.subtract.at(unstarted, begun, 1)
        full = _distinct(begun[unstarted[begun] == 0], stamp)
        started.append(ready)
        completed.append(full)
        ended = np.concatenate([ready[~is_member], members[_ranges(member_begins, full)]])
        following = targets[_ranges(out_begins, ended)]
        np.subtract.at(waits_for, following, 1)
        ready = _distinct(following[waits_for[following] == 0], stamp)
    order = np.concatenate(started) if started else np.zeros(0, np.int64)
    if len(order) < n or np.any(unstarted):
        stuck = (waits_for > 0) | (np.append(unstarted, 0)[collective] > 0)  # -1 finds the 0
        raise _cycle(job, np.isin(np.arange(len(job.operations)), heads[stuck]))
    return order, started, completed


def _collectives(operations: Operations) -> tuple[Indices, Indices, Indices]:
    """Members ordered by collective, the start of each collective's members, and each operation's collective.

    The collective is -1 for operations outside of collectives.

    Only collectives of several recorded ranks count, as a single member waits for nothing.
    """
    numbers, of, sizes = np.unique(operations.collective, return_inverse=True, return_counts=True)
    members = np.flatnonzero((operations.collective >= 0) & (sizes[of] > 1))
    numbers, of = np.unique(operations.collective[members], return_inverse=True)
    collective = np.full(len(operations), -1, np.int64)
    collective[members] = of
    return members[np.argsort(of, kind="stable")], _begins(of, len(numbers)), collective


def _begins(keys: NDArray[np.signedinteger], count: int) -> Indices:
    """The position of each key's first element among sorted ``keys``, followed by the total count."""
    return np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))])


def _ranges(begins: Indices, of: Indices) -> Indices:
    """All indices from ``begins[i]`` to below ``begins[i + 1]``, for each i in ``of``."""
    if len(of) < 2:  # most levels of a job with few ranks have one operation
        return np.arange(begins[of[0]], begins[of[0] + 1]) if len(of) else np.zeros(0, np.int64)
    sizes = begins[of + 1] - begins[of]
    return np.repeat(begins[of] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _distinct(values: Indices, stamp: Indices) -> Indices:
    """The distinct values; ``stamp`` is scratch space with room for the largest value."""
    if len(values) < 2:
        return values
    number = np.arange(len(values))
    stamp[values] = number
    return np.asarray(values[stamp[values] == number])


def _cycle(job: Job, stuck: NDArray[np.bool_]) -> UsageError:
    first = int(np.flatnonzero(stuck)[0])
    name = escape_unprintable(job.operations.names[job.operations.name[first]])[:60]
    return UsageError(
        f"{int(stuck.sum()):,} operations wait for each other, such as {name} of rank {job.operations.rank[first]}; expected "
        "dependencies without a cycle; check that the trace is complete"
    )
