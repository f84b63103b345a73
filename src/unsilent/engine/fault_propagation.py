"""The values and operations on a tape that faults reach, computed for many faults without executing anything.

A set of faults is a Python integer, bit ``i`` for fault ``i``: a set operation on thousands of faults then costs less
than a microsecond, and the tape is walked once for all of them. The results are upper bounds: a fault whose effect dies
out on the way reaches less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unsilent.engine.tape import Tape

Bits = int
"""A set of numbers as a bit mask."""
BLOCK = 1 << 20
"""Number of bits that are processed at once."""


class PropagationStart(NamedTuple):
    """The operations and values on a tape at which a fault starts.

    These are operations that are re-executed in any case, and values that differ from the beginning.
    """

    nodes: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class FaultPropagation:
    """The faults that reach each operation and each value of a tape, as bit sets.

    ``ran``: the operation is re-executed. ``dirty``: the value may differ. ``needed``: the value is golden and a
    re-executed operation reads it. ``may_end_at``: after the value is computed, no other value that is still read
    differs, so that comparing it with golden could end the trial.
    """

    ran: list[Bits]
    dirty: list[Bits]
    needed: list[Bits]
    may_end_at: list[Bits]


def propagate_faults(tape: Tape, sources: Sequence[PropagationStart]) -> FaultPropagation:
    """Find the operations and values on a tape that each fault reaches."""
    forced: dict[int, Bits] = {}
    values = len(tape.values)
    result = FaultPropagation([], [0] * values, [0] * values, [0] * values)
    for number, source in enumerate(sources):
        for index in source.nodes:
            forced[index] = forced.get(index, 0) | 1 << number
        for value in source.values:
            result.dirty[value] |= 1 << number
            result.needed[value] |= 1 << number  # a copy of the value is corrupted
    live: set[int] = {v for s in sources for v in s.values if tape.values[v].producer is None}
    for node in tape.nodes:
        reads = node.values
        bits = forced.get(node.index, 0)
        for value in reads:
            bits |= result.dirty[value]
        result.ran.append(bits)
        live -= {v for v in reads if tape.values[v].readers[-1] == node.index and not tape.values[v].output}
        for value in reads if bits else ():
            result.needed[value] |= bits & ~result.dirty[value]
        _make(tape, result, node.new_values, bits, live)
    return result


def _make(tape: Tape, result: FaultPropagation, values: Iterable[int], bits: Bits, live: set[int]) -> None:
    """Store which faults reach the values of an operation.

    ``live``: earlier values that differ for some fault and are still read.
    """
    busy = 0
    for value in live if bits else ():
        busy |= result.dirty[value]
    for value in values:
        entry = tape.values[value]
        result.dirty[value] |= bits
        if result.dirty[value] and (entry.readers or entry.output):
            result.may_end_at[value] = bits & ~busy
            live.add(value)


def costs(tape: Tape) -> NDArray[np.float64]:
    """Seconds of each operation, float64[nodes]; all ones if they were not measured."""
    array = np.array([node.seconds for node in tape.nodes])
    return array if array.sum() > 0 else np.ones(len(tape.nodes))


def set_weights(sets: Sequence[Bits], weights: ArrayLike) -> NDArray[np.float64]:
    """The sum of the weights of the members of each set, float64[sets]."""
    heavy = np.asarray(weights, np.float64)
    numbers: dict[Bits, int] = {}
    places = [numbers.setdefault(s, len(numbers)) for s in sets]
    distinct, sums = list(numbers), np.zeros(len(numbers))
    # The weight of each byte at each place is looked up, which is an eighth of the work of unpacking bits.
    eights = np.pad(heavy, (0, -heavy.size % 8)).reshape(-1, 8)
    worth = (eights @ np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").T).ravel()
    first = np.arange(len(eights)) * 256
    for part in _blocks(len(distinct), heavy.size):
        sums[part] = worth[first + _sets_as_bits(distinct[part], heavy.size)].sum(1)
    return sums[places]


def _sets_as_bits(sets: Sequence[Bits], members: int) -> NDArray[np.uint8]:
    width = (members + 7) // 8
    return np.frombuffer(b"".join(s.to_bytes(width, "little") for s in sets), np.uint8).reshape(len(sets), width)


def _blocks(sets: int, members: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, members))
    return (slice(start, start + step) for start in range(0, sets, step))
