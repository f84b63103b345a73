"""Records of how a fault spreads through a run. They do not need torch, so the command line can show them.

One row is one output of one operation, in execution order. Operations that only return a view or uninitialised memory have no
row. Numbers compare the faulty run with its golden twin:

    changed    elements whose bits differ (0 and -0 do, two NaNs with the same bits do not)
    relative   largest |faulty - golden| / |golden|, in float64, over changed elements with a finite golden value other than 0
               and a finite faulty one; None if there is no such element
    from_zero  changed elements that are 0 in the golden run and finite and not 0 in the faulty one; they have no ratio
    absolute   largest |faulty - golden| over changed elements that are finite in both; None if there is no such element
    nonfinite  elements that are NaN or infinite in the faulty run and finite in the golden one

``relative`` and ``absolute`` are None for integers and booleans, and at most the largest float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "unsilent/trace/2"
PHASES = ("fwd", "recomputed", "bwd", "outside", "update")
"""Phases of a row. ``outside``: operations outside the model after a backward pass, for example gradient clipping; their
addresses have the phase ``fwd``."""
BEFORE_FIRST_ROW = -1
"""Row number of a fault that exists before the first operation runs."""


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Number and size of the differences in one output of an operation."""

    changed: int = 0
    relative: float | None = None
    absolute: float | None = None
    from_zero: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Row of a trace: one output of one operation.

    ``name``: name of the operation; in the backward pass, name of the forward operation whose node runs it; in the update, name
    with the updated parameter. ``kernel``: in the backward pass, the operation that the node runs (``convolution_backward.0``),
    or ``accumulated`` for the gradient of a parameter after a backward pass has added to it; otherwise empty. ``output``: number
    of the output. ``faulty_type``: dtype and shape in the faulty run if they differ; then all elements count as changed.
    """

    name: str
    kernel: str
    phase: str
    micro_step: int
    output: int
    dtype: str
    shape: tuple[int, ...]
    elements: int
    change: OutputDifference = OutputDifference()
    faulty_type: str = ""

    @property
    def share(self) -> float:
        """Share of the elements that changed, 0 to 1."""
        return self.change.changed / self.elements

    @property
    def label(self) -> str:
        """The label of the row, such as ``fc1#addmm.0`` or ``bn#native_batch_norm.0/out.1``."""
        kernel = f" > {self.kernel}" if self.kernel else ""
        return self.name + kernel + (f"/out.{self.output}" if self.output else "")

    @property
    def dtype_and_shape(self) -> str:
        """Dtype and shape as one word: ``float32[8,16]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class TracedFault:
    """A fault of a traced run.

    ``row``: number of the corrupted row (`BEFORE_FIRST_ROW`: memory before the first row); None if it is unknown.
    ``bits``: number of bits that the fault changed; None if they were not counted.

    A fault in a gradient corrupts the result of the last backward kernel after it is recorded, so the row itself stays golden.
    """

    site: str
    text: str
    row: int | None
    bits: int | None = None


@dataclass(frozen=True, slots=True)
class OperationDivergence:
    """The first row in which the golden and the faulty run execute different operations.

    ``golden`` and ``faulty`` name the operations; ``faulty`` is empty if that run ended.

    ``error``: error that the faulty run raised. Rows from this point on are not compared and are left out.
    """

    row: int
    golden: str
    faulty: str
    error: str = ""

    @property
    def text(self) -> str:
        """The divergence as one sentence without a full stop."""
        if self.error:
            where = f"before {self.golden}" if self.golden else "after the last operation"
            return f"the faulty run raised {self.error}, {where}"
        golden, faulty = self.golden or "no operation", self.faulty or "no operation"
        return f"the runs diverge: the golden run continues with {golden}, the faulty run with {faulty}"


@dataclass(frozen=True, slots=True)
class FaultTrace:
    """A faulty run compared with its golden twin, output by output.

    ``runs``: number of golden and faulty runs. ``notes``: remarks for the reader.
    """

    rows: tuple[TraceRow, ...]
    faults: tuple[TracedFault, ...] = ()
    divergence: OperationDivergence | None = None
    runs: int = 0
    notes: tuple[str, ...] = ()

    @property
    def changed_rows(self) -> Iterator[int]:
        """Indices of the rows that differ, in order."""
        return (i for i, row in enumerate(self.rows) if row.change.changed)

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values under a ``schema``; each row includes its differences and its share."""
        rows = [asdict(row) for row in self.rows]
        return {
            "schema": SCHEMA,
            "runs": self.runs,
            "faults": [asdict(fault) for fault in self.faults],
            "parting": None if self.divergence is None else asdict(self.divergence) | {"text": self.divergence.text},
            "rows": [
                {**fields.pop("change"), **fields, "shape": list(row.shape), "share": row.share}
                for row, fields in zip(self.rows, rows, strict=True)
            ],
            "notes": list(self.notes),
        }
