"""What is found out about two runs: plain records, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's own code; ``file`` is relative to the current folder where it is in there."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first operation that differs between two runs.

    ``index``: operations before it; ``step``: updates by optimizers that were over; ``phase``: ``forward``, ``backward`` or
    ``update``. ``place``: the line that was running; ``origin``: of a backward operation the line and name of the forward
    operation it belongs to. ``kind``: see `sources`; ``generator``: ``global`` or ``own`` where random numbers are drawn.
    ``other``: what the other run does instead, empty where it is over or both do the same operation. ``to_go``: where they do
    not, how many operations this run and the other still do, this one included.
    """

    index: int
    step: int
    operation: str
    phase: str
    place: Place | None
    origin: Place | None
    origin_operation: str
    kind: str
    generator: str
    other: str
    to_go: tuple[int, int] | None = None

    @property
    def site(self) -> tuple[object, ...]:
        """Where in the program, whatever the step."""
        return self.operation, self.phase, self.place, self.origin


@dataclass(frozen=True, slots=True)
class Read:
    """Where a source was read: ``call`` is the function, ``place`` the user's line that called it or led to it."""

    call: str
    place: Place


@dataclass(frozen=True, slots=True)
class Finding:
    """One source: where runs part because of it, and what happened when it was pinned (``after``: None where they then agree).

    ``source`` is a key of `SOURCES`; None where nothing that could be pinned helped. ``together``: it showed only when
    pinned with others. ``runs``: that were made with it pinned. ``unsure``: that they agree may be chance, for runs differ
    rarely.
    """

    source: str | None
    parting: Parting
    after: Parting | None
    runs: int
    reads: tuple[Read, ...] = ()
    together: tuple[str, ...] = ()
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What the runs ran on."""

    versions: Mapping[str, str]
    threads: int
    hash_seed: str | None
    """``PYTHONHASHSEED`` of the caller, None where Python chooses."""


@dataclass(frozen=True, slots=True)
class Explained:
    """All sources in the order in which they were found; none: every operation of all runs gave the same bits.

    ``sensitive``: where a run with ``threads`` threads parts from the others; that is no difference between two runs here, but
    between two machines. ``failed``: sources that could not be pinned, and why. ``interrupted``: the search was not finished;
    ``unexplained``: where runs with the findings pinned part then, None where that was not known yet.
    """

    ref: str
    runs: int
    launched: int
    operations: int
    steps: int
    findings: tuple[Finding, ...]
    machine: Machine
    seconds: float
    sensitive: Parting | None = None
    threads: int | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False
    unexplained: Parting | None = None

    @property
    def agreed(self) -> bool:
        """Whether no difference was found."""
        return not self.findings and not self.interrupted


@dataclass(frozen=True, slots=True)
class Controlled:
    """Whether runs end in the same bits as they are; if not, the switches that make them.

    ``tensors``: how many were compared at the end; ``first``: the first that differs, empty where none does. ``switches``:
    sources to pin; ``verified``: whether runs with all of them ended in the same bits. ``explained``: why, where runs
    differ.
    """

    ref: str
    runs: int
    launched: int
    steps: int
    tensors: int
    first: str
    switches: tuple[str, ...]
    verified: bool
    explained: Explained | None
    machine: Machine
    seconds: float
    interrupted: bool = False
    """The search for switches was not finished."""

    @property
    def agreed(self) -> bool:
        """Whether all runs ended in the same bits as they are."""
        return not self.first
