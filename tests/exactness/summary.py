"""What a comparison found, as numbers and as a row of a table."""

from __future__ import annotations

from dataclasses import dataclass

SHOWN = 5
"""Mismatches told in full."""


@dataclass(frozen=True)
class Mismatch:
    """One batch of one trial where the two sides differ."""

    trial: int
    label: str
    where: str
    faults: tuple[str, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"trial {self.trial} ({self.label}), {self.where}: {'; '.join(self.faults)}\n"
            f"    plain:  {self.expected}\n    engine: {self.found}"
        )


@dataclass(frozen=True)
class Summary:
    """What a comparison found; ``trials`` and the counts below it are numbers of trials."""

    workload: str
    engine: str
    trials: int
    batches: int
    shared: int
    """Evaluations that were also made by calls which several trials shared."""
    rows: int
    """Trials whose stored row was compared as well."""
    changed: int
    """Output differs from golden in some bit, or something was raised."""
    nonfinite: int
    exceptions: int
    fallbacks: int | None
    """Trials in which a shortcut was begun and given up for a plain run; None where the engine does not say."""
    unrecorded: tuple[str, ...]
    """Why batches have no shortcut at all, one reason a batch."""
    corrupted: int
    """Parameter tensors hit at least once."""
    sites: int
    """Parameter tensors there are."""
    transient: int
    """Distinct sites other than parameters that were hit."""
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]

    @property
    def row(self) -> str:
        """One line of a table under `HEADER`."""
        fallbacks = "-" if self.fallbacks is None else f"{self.fallbacks}+{len(self.unrecorded)}b"
        return (
            f"{self.workload:22} {self.engine:13} {self.trials:6} {self.batches:7} {self.shared:7} {self.changed:7} "
            f"{self.nonfinite:9} {self.exceptions:10} {fallbacks:>9} {f'{self.corrupted}/{self.sites}':>9} {self.transient:9} "
            f"{len(self.mismatches):10}"
        )

    def check(self) -> Summary:
        """Raise ``AssertionError`` on any difference, and when the comparison could not have shown one."""
        told = "\n".join(map(str, self.mismatches[:SHOWN]))
        assert not self.mismatches, f"{self.workload}: {len(self.mismatches)} differences from the plain run\n{told}"
        assert self.changed, f"{self.workload}: no trial changed the output, so the comparison shows nothing"
        return self


HEADER = (
    f"{'workload':22} {'engine':13} {'trials':>6} {'batches':>7} {'shared':>7} {'changed':>7} "
    f"{'nonfinite':>9} {'exceptions':>10} {'fallbacks':>9} {'params':>9} {'transient':>9} {'mismatches':>10}"
)
