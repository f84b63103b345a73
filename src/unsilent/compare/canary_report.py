"""The result of a check of canaries, with its report."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import escape_unprintable, upper_bound_text


@dataclass(frozen=True, slots=True)
class CanaryDifference:
    """The difference between a canary's stored answer and the present one.

    Attributes:
        number: Number from 1, in the order of the file.
        changed: Whether its answer counts as changed by the requested comparison.
        bits_differ: Whether any bit of its answer differs.
        largest: Largest difference of a value of its answer; infinite for NaN.
        relative: Largest difference in a tensor of its answer, relative to the largest magnitude stored for this tensor.
    """

    number: int
    changed: bool
    bits_differ: bool
    largest: float
    relative: float

    @property
    def answer(self) -> str:
        """Description of the difference."""
        return "changed" if self.changed else "other bits, not counted" if self.bits_differ else "same bits"


@dataclass(frozen=True, repr=False)
class CanaryCheck(Shown):
    """The result of a check of a model against canaries.

    Attributes:
        model: Name of the model.
        workload: Workload that the canaries were made from.
        choice: How the canaries were chosen.
        comparison: ``bits``, ``labels`` or a tolerance.
        rows: Result for every canary.
        weights_are_the_same: Whether the model's weights have the original bits; ``None`` if they cannot be read.
    """

    model: str
    workload: str
    choice: str
    comparison: str
    rows: tuple[CanaryDifference, ...]
    weights_are_the_same: bool | None

    @property
    def changed(self) -> int:
        """Number of canaries whose answer has changed."""
        return sum(row.changed for row in self.rows)

    @property
    def exit_code(self) -> int:
        """Exit code of the check: 1 if the model has changed."""
        return int(self.changed > 0)

    def report(self) -> Report:
        """Report with a row for each canary."""
        columns = (
            Column.count("canary", "number"),
            Column("answer"),
            Column("largest difference", "number", digits=".3g", of="largest"),
            Column("relative difference", "number", digits=".3g", of="relative"),
        )
        table = Table.of(self.rows, columns, is_emphasised=lambda row: row.changed)
        weights = {None: "not compared", True: "same bits as stored", False: "differ from the stored ones"}
        name, by = escape_unprintable(self.model), self._by
        return Report(
            "unsilent/canaries-check/1", "canaries check", f"Canaries of {escape_unprintable(self.workload)}",
            self._headline(name, by), table,
            findings=tuple(self._findings()),
            sections=(Section("Canaries", "Each stored input was answered again.", (table,)),),
            facts=(("Model", name), ("Choice of inputs", self.choice), ("Compared", by),
                   ("Weights", weights[self.weights_are_the_same])),
            notes=("relative difference: the difference divided by the largest magnitude stored for the same tensor and input",),
            further_json={"changed": self.changed, "canaries": len(self.rows), "weights_are_the_same": self.weights_are_the_same},
        )  # fmt: skip

    @property
    def _by(self) -> str:
        return _BY.get(self.comparison, f"with tolerance {self.comparison}")

    def _headline(self, name: str, by: str) -> str:
        count = len(self.rows)
        if self.changed:
            canaries = "1 canary" if count == 1 else f"{count:,} canaries"
            return f"{name} answers {self.changed:,} of {canaries} differently, compared {by}"
        noun = "the canary" if count == 1 else f"the {count:,} canaries"
        return f"{name} answers {noun} as stored, compared {by}; a change that they do not show is not ruled out"

    def _findings(self) -> list[str]:
        findings = []
        if self.changed and self.weights_are_the_same:
            findings.append(
                "The weights have the stored bits, so the device, the software or the code of the model computes differently."
            )
        differing = [row for row in self.rows if row.bits_differ]
        if not self.changed and self.weights_are_the_same is False:
            evidence = f"no answer counts as changed, compared {self._by}" if differing else SAME_BITS
            findings.append(f"The weights differ from those that the canaries were made with, but {evidence}.")
        if not self.changed and differing:
            most = max(row.relative for row in differing)
            by = f", by at most {upper_bound_text(most)} of the largest magnitude in the same tensor"
            count = f"{len(differing):,} of {len(self.rows):,} answers"
            findings.append(f"{count} have other bits{by if isfinite(most) else ''}")
        return findings


SAME_BITS = "every answer has the stored bits"
_BY = {"bits": "bit for bit", "labels": "by label"}
