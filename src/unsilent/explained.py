"""What an engine says about its own work: records without torch, so that the command line can show them.

``share`` columns are expectations over the sampling law per element, before any fault dies out: a trial costs at most
that on average, and less where it ends early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "unsilent/explain/1"
LEVELS = ("component", "layer", "model")


@dataclass(frozen=True, slots=True)
class Work:
    """What faults in one group of elements make the engine run again.

    ``share``: of all faults that fall here. ``operations``, ``seconds``: shares of the operations and of the CPU time of a
    plain run of the batches that such a fault acts in. ``remade``: the part of ``seconds`` that goes into golden values
    which are not held.
    """

    name: str
    level: str
    parent: str
    elements: int
    share: float
    operations: float
    seconds: float
    remade: float = 0.0


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of golden values: announced for all workers (None: nobody said), held, held whatever is announced, useful.

    ``sharers``: workers; all but ``announced`` and ``enough`` is of one of them. ``enough``: bytes to announce with which
    nothing is made again, None where that is so already or where no number does it.
    """

    announced: int | None
    held: int
    minimum: int
    wanted: int
    sharers: int = 1
    enough: int | None = None


@dataclass(frozen=True, slots=True)
class Shortcut:
    """One way to spare work; ``why`` says why it is off, or how far it goes."""

    name: str
    on: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a batch runs plainly."""

    batch: int
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything, for one workload under one engine.

    ``recorded``: batches on tapes, ``operations``: of these tapes together. ``remade``: share of a plain run's CPU time that a
    trial spends on golden values that are not held; it is part of what the rows say. ``setup_seconds``: CPU time of recording
    and checking, where known.
    """

    workload: str
    engine: str
    batches: int
    recorded: int
    operations: int
    golden_seconds: float
    setup_seconds: float | None
    remade: float
    rows: tuple[Work, ...]
    holding: Holding
    shortcuts: tuple[Shortcut, ...]
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values under ``schema``."""
        return {"schema": SCHEMA} | {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Explanation:
        """Take back what `to_json` gave; raises ``ValueError`` for another schema."""
        fields = dict(value)
        if (schema := fields.pop("schema", None)) != SCHEMA:
            raise ValueError(f"expected {SCHEMA}, found {schema!r}")
        fields["rows"] = tuple(Work(**row) for row in fields["rows"])
        fields["holding"] = Holding(**fields["holding"])
        fields["shortcuts"] = tuple(Shortcut(**s) for s in fields["shortcuts"])
        fields["reasons"] = tuple(Reason(**r) for r in fields["reasons"])
        fields["notes"] = tuple(fields["notes"])
        return cls(**fields)
