"""Records of the differences between two runs, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UserCodeLine:
    """A line of the user's own code.

    ``file`` is relative to the current folder if it is inside that folder.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class RunDivergence:
    """The first operation that differs between two runs.

    ``index``: number of operations before it; ``step``: number of completed optimizer updates; ``phase``: ``forward``,
    ``backward`` or ``update``. ``place``: the running line; ``forward_line``: for a backward operation, line and name of its
    forward operation. ``kind``: see `sources`; ``generator``: ``global`` or ``own`` if random numbers are drawn.
    ``other_operation``: operation of the other run, empty if that run is over or both execute the same operation.
    ``operations_left``: if they do not, numbers of operations that this run and the other have left, including this one.
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

    ``divergence_when_pinned``: ``None`` if the runs then agree. ``source``: a key of `SOURCES`; ``None`` if pinning did not help.
    ``pinned_together``: other sources that had to be pinned with it. ``runs``: number of runs with it pinned. ``may_be_chance``:
    whether their agreement may be chance, because runs differ rarely.
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
    """``PYTHONHASHSEED`` of the caller; ``None`` if Python chooses."""


@dataclass(frozen=True, slots=True)
class NondeterminismResult:
    """The sources of nondeterminism of a loop, in the order in which they were found.

    There are none if every operation of all runs gave the same bits.

    ``divergence_by_threads``: first difference of a run with ``other_thread_count`` threads from the others; it is not a
    difference between runs here, but between machines. ``pin_failures``: sources that could not be pinned, and why.
    ``interrupted``: whether the search was ended early; ``unexplained_divergence``: first difference of runs with the findings
    pinned at that time, ``None`` if not known yet; ``candidates``: sources that were being tested as its cause, together if
    several.
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

    If they do not, it includes the switches that make them do so.

    ``tensors``: number of tensors compared at the end; ``first_different_tensor``: name of the first that differs, empty if none
    does. ``pins_verified``: whether runs with all ``sources_to_pin`` pinned ended in the same bits. ``explained``: the reasons if
    runs differ.
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
    """Whether the search for switches was ended early."""

    @property
    def has_no_difference(self) -> bool:
        """Whether all runs ended in the same bits without any switches."""
        return not self.first_different_tensor
