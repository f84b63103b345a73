"""Reduction programs and their meaning: the contributions to each chunk that a device holds after each step.

The payload of ``k`` reducing devices is cut into ``k`` chunks. The state of one device gives, for each chunk, the devices whose
contributions are summed in its copy: a Boolean matrix of chunks by contributions. A collective may only be used if it neither
counts a contribution twice nor loses one, so a program that reaches the goal computes the right sum for any payload.

======================  ==================================================================  =========================
collective of a group   precondition                                                        effect
======================  ==================================================================  =========================
all-reduce              all hold the same chunks; contributions to a chunk are disjoint      all hold the sums
reduce-scatter          as all-reduce; the group's size divides the number of chunks held    each keeps its share
all-gather              all hold equally many chunks, and no two hold the same one           all hold all chunks
reduce                  as all-reduce                                                       the first holds the sums
broadcast               the first holds all that the others hold; some hold less             all hold the first's data
======================  ==================================================================  =========================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unsilent.basics.errors import UsageError, unknown_name_error

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "reduce", "broadcast")
GOALS = ("all-reduce", "reduce-scatter", "all-gather")

State = tuple[int, ...]
"""One integer per device: bit ``chunk * k + contribution`` is set if the device's copy of the chunk contains that
contribution."""


@dataclass(frozen=True)
class Step:
    """One collective, run by all its groups at the same time.

    Attributes:
        collective: One of `COLLECTIVES`.
        groups: Disjoint groups of at least two ranks of the reducing devices. The first rank of a group is the root of
            a reduce or broadcast; the order of a group decides which share each rank keeps of a reduce-scatter.

    Raises:
        UsageError: The collective is unknown, or the groups are not disjoint groups of at least two ranks.
    """

    collective: str
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise unknown_name_error("collective", self.collective, COLLECTIVES)
        ranks = [rank for group in self.groups for rank in group]
        if odd := [rank for rank in ranks if not isinstance(rank, int)]:
            raise UsageError(f"rank {odd[0]!r} of the {self.collective} is no whole number.")
        if not self.groups or min(map(len, self.groups)) < 2:
            raise UsageError(f"the {self.collective} over {self.groups} needs groups of at least two ranks.")
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"the groups of the {self.collective} share a rank: {self.groups}; make them disjoint.")

    def __str__(self) -> str:
        return f"{self.collective} " + " ".join("{" + ",".join(map(str, group)) + "}" for group in self.groups)


@dataclass(frozen=True)
class Program:
    """A sequence of steps that reduce over ``devices`` devices.

    ``str`` gives text, and ``repr`` gives Python code that creates the program.

    Raises:
        UsageError: There is no device, or a step names a rank outside ``0 .. devices - 1``.
    """

    devices: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.devices, int) or self.devices < 1:
            raise UsageError(f"a program needs at least one device, not {self.devices}.")
        for step in self.steps:
            outside = [rank for group in step.groups for rank in group if not 0 <= rank < self.devices]
            if outside:
                raise UsageError(f"rank {outside[0]} of “{step}” is not one of the {self.devices} devices.")

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or "nothing to do"


def initial_state(k: int, goal: str = "all-reduce") -> State:
    """State of ``k`` devices before a program.

    Each device holds its own contribution to every chunk, or one finished chunk for all-gather.

    Raises:
        UsageError: The goal is unknown.
    """
    if goal not in GOALS:
        raise unknown_name_error("goal", goal, GOALS)
    if goal == "all-gather":
        return tuple(((1 << k) - 1) << (device * k) for device in range(k))
    column = sum(1 << (chunk * k) for chunk in range(k))
    return tuple(column << device for device in range(k))


def apply(step: Step, state: State, idle_broadcast: bool = False) -> State:
    """The state after a step.

    Args:
        step: Step to apply.
        state: State before the step, of every device.
        idle_broadcast: Accepts a broadcast that changes nothing in some group.

    Raises:
        UsageError: The step counts a contribution twice, loses data, works on nothing, or cannot be divided.
    """
    result = try_apply(step, state, idle_broadcast)
    if isinstance(result, str):
        raise UsageError(f"“{step}” is not valid here: {result}.")
    return result


def try_apply(step: Step, state: State, idle_broadcast: bool = False) -> State | str:
    """The state after a step, or the reason why the step is invalid.

    Most steps that a synthesis tries are invalid.
    """
    after = list(state)
    for group in step.groups:
        held = [state[rank] for rank in group]
        reason = _objection(step.collective, group, held, len(state), idle_broadcast)
        if reason is not None:
            return reason
        for rank, value in zip(group, _effect(step.collective, held, len(state)), strict=True):
            after[rank] = value
    return tuple(after)


def states(program: Program, goal: str = "all-reduce") -> Iterator[State]:
    """All states of a program: the initial one, and the one after each step.

    Raises:
        UsageError: See `apply`.
    """
    state = initial_state(program.devices, goal)
    yield state
    for step in program.steps:
        state = apply(step, state)
        yield state


def check(program: Program, goal: str = "all-reduce") -> None:
    """Raise ``UsageError`` unless a program reaches its goal.

    Raises:
        UsageError: A step is invalid, or the final state is not the goal; the message names lost or superfluous data.
    """
    *_, final = states(program, goal)
    reason = shortfall(final, goal)
    if reason is not None:
        raise UsageError(f"the program “{program}” is not a valid {goal}: {reason}.")


def reached(state: State, goal: str = "all-reduce") -> bool:
    """Whether a state fulfils the goal.

    After an all-reduce or all-gather every device holds every chunk with all contributions. After a reduce-scatter
    every device holds one chunk with all contributions, and no two hold the same one (not necessarily the chunk whose
    number is the device's).
    """
    k = len(state)
    full = (1 << (k * k)) - 1
    if goal != "reduce-scatter":
        return all(value == full for value in state)
    row = (1 << k) - 1
    return set(state) == {row << (chunk * k) for chunk in range(k)}


def shortfall(state: State, goal: str = "all-reduce") -> str | None:
    """Description of how a state misses the goal, or None if it is the goal."""
    if reached(state, goal):
        return None
    k = len(state)
    for device, value in enumerate(state):
        held = held_chunks(value, k)
        if not held:
            return f"data is lost: device {device} ends with nothing"
        for chunk in held if goal == "reduce-scatter" else range(k):
            missing = [contributor for contributor in range(k) if not value >> (chunk * k + contributor) & 1]
            if missing:
                return f"data is lost: chunk {chunk} of device {device} lacks the contribution of device {missing[0]}"
    return "the devices do not end with one chunk each, all different"


@lru_cache(maxsize=1 << 16)
def held_chunks(value: int, k: int) -> tuple[int, ...]:
    """Numbers of the chunks that a device with this state holds."""
    row = (1 << k) - 1
    return tuple(chunk for chunk in range(k) if value >> (chunk * k) & row)


def _objection(
    collective: str, group: tuple[int, ...], held: Sequence[int], k: int, idle_broadcast: bool
) -> str | None:
    """Reason why a group may not run the collective, or None if it may."""
    chunks = [held_chunks(value, k) for value in held]
    if collective == "broadcast":
        return _broadcast_objection(group, held, idle_broadcast)
    if not all(chunks):
        return f"device {group[chunks.index(())]} of group {group} holds nothing (empty)"
    if collective == "all-gather":
        if len(set(map(len, chunks))) > 1:
            return f"the devices of group {group} hold different numbers of chunks, {', '.join(map(str, map(len, chunks)))}"
        if len({chunk for chunks_of_device in chunks for chunk in chunks_of_device}) < sum(map(len, chunks)):
            return f"two devices of group {group} hold the same chunk, so that one copy would be lost data"
        return None
    if len(set(chunks)) > 1:
        return f"the devices of group {group} hold different chunks, so that a sum would lose data"
    union = 0
    for rank, value in zip(group, held, strict=True):
        if union & value:
            source = _lowest(union & value) % k
            return f"double counting: device {rank} of group {group} brings the contribution of device {source} again"
        union |= value
    if collective == "reduce-scatter" and len(chunks[0]) % len(group):
        return f"the {len(chunks[0])} chunks held by group {group} are not divisible by its {len(group)} devices"
    return None


def _broadcast_objection(group: tuple[int, ...], held: Sequence[int], idle_broadcast: bool) -> str | None:
    root = held[0]
    if not root:
        return f"device {group[0]}, the root of group {group}, holds nothing (empty)"
    for rank, value in zip(group, held, strict=True):
        if value & ~root:
            return f"lost data: device {rank} of group {group} holds what the root {group[0]} does not"
    if not idle_broadcast and all(value == root for value in held):
        return f"the broadcast changes nothing in group {group}"
    return None


def _effect(collective: str, held: Sequence[int], k: int) -> list[int]:
    """States of the devices of one group after a valid collective."""
    if collective == "broadcast":
        return [held[0]] * len(held)
    union = 0
    for value in held:
        union |= value
    if collective == "reduce":
        return [union] + [0] * (len(held) - 1)
    if collective == "reduce-scatter":
        return [union & _rows(share, k) for share in shares(held_chunks(held[0], k), len(held))]
    return [union] * len(held)


def shares(chunks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """The chunks that each of ``size`` ranks keeps in a reduce-scatter: consecutive runs in group order."""
    each = len(chunks) // size
    return [chunks[each * index : each * (index + 1)] for index in range(size)]


def _rows(chunks: tuple[int, ...], k: int) -> int:
    row = (1 << k) - 1
    return sum(row << (chunk * k) for chunk in chunks)


def _lowest(value: int) -> int:
    """The position of the lowest bit that is set."""
    return (value & -value).bit_length() - 1
