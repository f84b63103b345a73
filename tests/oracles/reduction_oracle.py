"""Reduction programs the slow and obvious way: Boolean arrays, coordinates, loops. Shares no code with the product."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise, product

import numpy as np

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "reduce", "broadcast")


def start(k, goal):
    """bool[device, chunk, contribution]."""
    state = np.zeros((k, k, k), bool)
    for d in range(k):
        if goal == "all-gather":
            state[d, d, :] = True
        else:
            state[d, :, d] = True
    return state


def at_goal(state, goal):
    k = len(state)
    if goal != "reduce-scatter":
        return bool(state.all())
    owners = []
    for d in range(k):
        held = [c for c in range(k) if state[d, c].any()]
        if len(held) != 1 or not state[d, held[0]].all():
            return False
        owners += held
    return sorted(owners) == list(range(k))


def collective(name, group, state):
    """The states of a group after a collective; None where it is invalid."""
    parts = [state[d] for d in group]
    held = [[c for c in range(len(state)) if part[c].any()] for part in parts]
    if name == "broadcast":
        root = parts[0]
        if not root.any() or any((part & ~root).any() for part in parts) or all((part == root).all() for part in parts):
            return None
        return [root.copy() for _ in parts]
    if any(not rows for rows in held):
        return None
    union = np.any(parts, axis=0)
    if name == "all-gather":
        if len({len(rows) for rows in held}) > 1 or any(set(a) & set(b) for a, b in combinations(held, 2)):
            return None
        return [union.copy() for _ in parts]
    if any(rows != held[0] for rows in held) or any((a & b).any() for a, b in combinations(parts, 2)):
        return None
    if name == "all-reduce":
        return [union.copy() for _ in parts]
    if name == "reduce":
        return [union] + [np.zeros_like(union) for _ in parts[1:]]
    if len(held[0]) % len(group):
        return None
    each = len(held[0]) // len(group)
    result = []
    for number in range(len(group)):
        own = np.zeros_like(union)
        for c in held[0][number * each : (number + 1) * each]:
            own[c] = union[c]
        result.append(own)
    return result


def all_groupings(hierarchy):
    """Sets of groups by slice level and form, from the coordinates of the devices; singletons left out."""
    places = list(product(*(range(size) for size in hierarchy)))
    number = {place: at for at, place in enumerate(places)}
    found = set()
    for level in range(len(hierarchy) + 1):
        inside, depth = {}, len(hierarchy)
        for place in places:
            inside.setdefault(place[:level], []).append(number[place])
        found.add(tuple(sorted(map(tuple, inside.values()))))
        for ancestor in range(level):
            parallel = {}
            for place in places:
                parallel.setdefault((place[:ancestor], place[level:]), []).append(number[place])
            found.add(tuple(sorted(map(tuple, parallel.values()))))
            first = [groups for (_, rest), groups in parallel.items() if rest == (0,) * (depth - level)]
            found.add(tuple(sorted(map(tuple, first))))
    return [groups for groups in found if len(groups[0]) > 1]


def all_programs(hierarchy, goal, limit):
    """Every valid program that reaches the goal and not before its last step, none of whose steps changes nothing."""
    k = int(np.prod(hierarchy))
    statements = [(name, groups) for name in COLLECTIVES for groups in all_groupings(hierarchy)]
    memory = {}

    def after(state):
        key = state.tobytes()
        if key not in memory:
            memory[key] = []
            for statement in statements:
                new = state.copy()
                for group in statement[1]:
                    parts = collective(statement[0], group, state)
                    if parts is None:
                        break
                    for d, part in zip(group, parts, strict=True):
                        new[d] = part
                else:
                    if (new != state).any():
                        memory[key].append((statement, new))
        return memory[key]

    found = []

    def walk(state, path):
        if at_goal(state, goal):
            found.append(path)
        elif len(path) < limit:
            for statement, new in after(state):
                walk(new, (*path, statement))

    walk(start(k, goal), ())
    return found


def matrices(sizes, counts):
    """All matrices of positive whole numbers with these products of rows and columns, by trying all."""
    cells = [list(range(1, min(p, h) + 1)) for p in sizes for h in counts]
    shape = (len(sizes), len(counts))
    for flat in product(*cells):
        matrix = np.array(flat).reshape(shape)
        if (matrix.prod(axis=1) == sizes).all() and (matrix.prod(axis=0) == counts).all():
            yield tuple(map(tuple, matrix.tolist()))


def ring_loads(counts, shared, groups, volumes=None, closed=True):
    """Per level what passes the most loaded link, of rings (chains) in ascending order, hop by hop: flows, or their volumes."""
    inside = [int(np.prod(counts[at + 1 :])) for at in range(len(counts))]
    sharing = [s or i for s, i in zip(shared, inside, strict=True)]
    out, into = [Counter() for _ in counts], [Counter() for _ in counts]
    for group, volume in zip(groups, volumes or [1] * len(groups), strict=True):
        for a, b in zip(group, [*group[1:], group[0]], strict=True) if closed else pairwise(group):
            for at in range(len(counts)):
                if a // inside[at] != b // inside[at]:
                    out[at][a // sharing[at]] += volume
                    into[at][b // sharing[at]] += volume
    return [max([0, *o.values(), *i.values()]) for o, i in zip(out, into, strict=True)]


def program_seconds(counts, bandwidths, steps, payload):
    """Time of a program over all devices without latency: each group moves the chunks that its devices hold."""
    k = int(np.prod(counts))
    state, total = start(k, "all-reduce"), 0.0
    for name, groups in steps:
        after = state.copy()
        for group in groups:
            for d, part in zip(group, collective(name, group, state), strict=True):
                after[d] = part
        of = after if name == "all-gather" else state
        n = len(groups[0])
        hop = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": (n - 1) / n, "all-gather": (n - 1) / n}.get(name, 1.0)
        volumes = [hop * payload * of[group[0]].any(axis=1).sum() / k for group in groups]
        closed = name not in ("reduce", "broadcast")
        loads = ring_loads(counts, [0] * len(counts), groups, volumes, closed)
        total += max(load / bandwidth for load, bandwidth in zip(loads, bandwidths, strict=True))
        state = after
    return total
