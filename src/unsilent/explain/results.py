"""Records of the differences between two runs, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UserCodeLine:
    """A line of the user's own code.

    ``file`` is relative to the current folder if it is inside.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class RunDivergence:
    """The first operation that differs between two runs.

    ``index``: operations before it; ``step``: updates by optimizers that were over; ``phase``: ``forward``, ``backward`` or
    ``update``. ``place``: the line that was running; ``forward_line``: of a backward operation the line and name of the forward
    operation it belongs to. ``kind``: see `sources`; ``generator``: ``global`` or ``own`` where random numbers are drawn.
    ``other_operation``: what the other run does instead, empty where it is over or both do the same operation.
    ``operations_left``: where they do not, how many operations this run and the other still do, this one included.
    """

    index: int
    step: int
    operation: str
    phase: str
    place: UserCodeLine | None
    forward_line: UserCodeLine | None
    forward_operation: str
    kind: str
    generator: str
    other_operation: str
    operations_left: tuple[int, int] | None = None

    @property
    def site(self) -> tuple[object, ...]:
        """The place in the program, without the step."""
        return self.operation, self.phase, self.place, self.forward_line


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A place where a source was read.

    ``call`` is the function, ``place`` the user's line that called it or led to it.
    """

    call: str
    place: UserCodeLine


@dataclass(frozen=True, slots=True)
class FoundSource:
    """A source of nondeterminism, with the differences before and after it was pinned.

    ``divergence_when_pinned``: None where the runs then agree.
    ``source`` is a key of `SOURCES`; None where nothing that could be pinned helped. ``pinned_together``: it showed only when
    pinned with others. ``runs``: that were made with it pinned. ``may_be_chance``: that they agree may be chance, for runs differ
    rarely.
    """

    source: str | None
    parting: RunDivergence
    divergence_when_pinned: RunDivergence | None
    runs: int
    reads: tuple[SourceRead, ...] = ()
    pinned_together: tuple[str, ...] = ()
    may_be_chance: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Versions and settings of the machine on which the runs were made."""

    versions: Mapping[str, str]
    threads: int
    hash_seed: str | None
    """``PYTHONHASHSEED`` of the caller, None where Python chooses."""


@dataclass(frozen=True, slots=True)
class NondeterminismResult:
    """The sources of nondeterminism of a loop, in the order in which they were found.

    There are none if every operation of all runs gave the same bits.

    None if every operation of all runs gave the same bits.

    ``divergence_by_threads``: where a run with ``other_thread_count`` threads parts from the others; that is no difference
    between two runs here, but between two machines. ``pin_failures``: sources that could not be pinned, and why.
    ``interrupted``: the search was not finished; ``unexplained_divergence``: where runs with the findings pinned part
    then, None where that was not known yet; ``candidates``: sources that were being tested as its cause, together if several.
    """

    ref: str
    runs: int
    runs_launched: int
    operations: int
    steps: int
    findings: tuple[FoundSource, ...]
    machine: Machine
    seconds: float
    divergence_by_threads: RunDivergence | None = None
    other_thread_count: int | None = None
    pin_failures: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    unexplained_divergence: RunDivergence | None = None
    candidates: tuple[str, ...] = ()

    @property
    def has_no_difference(self) -> bool:
        """Whether no difference was found."""
        return not self.findings and not self.interrupted


@dataclass(frozen=True, slots=True)
class ReproducibilityResult:
    """The result of a check whether runs end in the same bits.

    If not, with the switches that make them do so.

    ``tensors``: how many were compared at the end; ``first_different_tensor``: the first that differs, empty where none
    does. ``sources_to_pin``:
    sources to pin; ``pins_verified``: whether runs with all of them ended in the same bits. ``explained``: why, where runs
    differ.
    """

    ref: str
    runs: int
    runs_launched: int
    steps: int
    tensors: int
    first_different_tensor: str
    sources_to_pin: tuple[str, ...]
    pins_verified: bool
    explained: NondeterminismResult | None
    machine: Machine
    seconds: float
    interrupted: bool = False
    """The search for switches was not finished."""

    @property
    def has_no_difference(self) -> bool:
        """Whether all runs ended in the same bits without any switches."""
        return not self.first_different_tensor
