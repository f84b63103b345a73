"""A closer look at one step of a replica: what every operation of it reads and gives, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from unsilent.campaigns.reading import Allowance, Damaged
from unsilent.replicas.reading import MOST_SAMPLES, read_json
from unsilent.replicas.spec import Replica
from unsilent.replicas.switches import Switches

T = TypeVar("T")


class Look(NamedTuple):
    """At a step (from 0) of a run; ``unordered``: by hashes that do not depend on the order of elements."""

    replica: Replica
    step: int
    unordered: bool = False

    @property
    def switches(self) -> Switches:
        """Those of the run."""
        return self.replica.switches

    @property
    def number(self) -> int:
        """That of the run."""
        return self.replica.number

    def __str__(self) -> str:
        return f"{self.replica} at step {self.step}"


class Operation(NamedTuple):
    """One operation of a step.

    Attributes:
        name: as faults name it, ``conv1#convolution.0`` (what ran, without a module, where it has no name). kernel: what ran.
        phase: ``fwd``, ``bwd``, ``update``, empty where it has no name. draws: it draws random numbers. moves: it computes
        nothing, but takes elements of what it reads. reads, gives: hashes of tensors.
    """

    name: str
    kernel: str
    phase: str
    draws: bool
    moves: bool
    reads: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """What was seen: hashes of parameters and buffers before and after the step, and its operations in order.

    ``note``: why it cannot be told; then there are no operations.
    """

    before: Sequence[int] = ()
    after: Sequence[int] = ()
    operations: Sequence[Operation] = ()
    note: str = ""

    def json(self) -> list[Any]:
        """As plain lists."""
        return [list(self.before), list(self.after), [list(one) for one in self.operations], self.note]


def read_look(blob: Any, allowance: Allowance) -> Looked:
    """The inverse of `Looked.json`, compressed; raises ``Damaged``."""
    try:
        found = read_json(allowance.unpack(blob, MOST_SAMPLES).decode(), list, "a look")
        before, after, operations, note = found
        looked = Looked(_numbers(before), _numbers(after), [_operation(one) for one in operations], _typed(note, str))
    except (ValueError, TypeError):
        raise Damaged("what was seen of a step cannot be read") from None
    if len(looked.before) != len(looked.after):
        raise Damaged("what was seen of a step does not have as many tensors after it as before")
    return looked


def _operation(found: Any) -> Operation:
    name, kernel, phase, draws, moves, reads, gives = _typed(found, list)
    texts = [_typed(one, str) for one in (name, kernel, phase)]
    return Operation(
        texts[0], texts[1], texts[2], _typed(draws, bool), _typed(moves, bool), _numbers(reads), _numbers(gives)
    )


def _numbers(found: Any) -> tuple[int, ...]:
    if any(isinstance(one, bool) for one in _typed(found, list)):
        raise TypeError("a hash is no number")
    return tuple(_typed(one, int) for one in found)


def _typed(found: Any, kind: type[T]) -> T:
    if not isinstance(found, kind):
        raise TypeError(f"{kind.__name__} expected")
    return found
