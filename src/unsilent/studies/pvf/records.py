"""What a study found, as plain immutable records: everything a report shows comes from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def at_flips(flips: int | None) -> str:
    """`` at 8 flips``, to stand behind a name; nothing where the fault model says how many there are."""
    return "" if flips is None else f" at {flips} flip{'s' if flips != 1 else ''}"


@dataclass(frozen=True, slots=True)
class PvfRow:
    """One estimate: PVF of one target at one number of flips."""

    target: str
    level: str
    """``model``, ``component``, ``layer``, ``tensor`` or ``bit``."""
    parent: str
    """The component a layer or tensor, the layer a bit belongs to; ``""`` for model and component."""
    flips: int | None
    """Faults drawn per trial; None where the fault model itself says how many (a rate, a run, a count)."""
    estimate: float | None
    """PVF; None when no trial struck this target."""
    low: float
    high: float
    confidence: float
    n: int
    """Independent trials (faults) behind the estimate."""
    unit: str
    """``sample`` or ``batch``: what one incorrect output is counted on."""
    units: int
    """Samples (or batches) judged over all trials."""
    masked: int
    benign: int
    sdc: int
    due: int
    """Counts of units; PVF counts sdc + due. In a row over several targets they are plain sums, not weighted by share."""
    due_kinds: Mapping[str, int]
    """The due count split into nonfinite, exception, crash, hang."""
    elements: int
    bits: int
    method: str
    """How estimate and interval were made, in a few words."""
    silent_share: float | None
    """Share of the incorrect outputs that are silent, weighted like the estimate; None without incorrect outputs."""
    incorrect_trials: int = 0
    """Trials in which at least one output was incorrect: how many faults decide this row."""
    joint_low: float = 0.0
    joint_high: float = 1.0
    """Limits that hold together for all rows of this level and number of flips (Bonferroni): for saying that two differ."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """Share of the units by outcome (masked, benign, sdc and the due kinds), every stratum weighted by its share of the law."""
    width_share: float = 1.0
    """Share of the bits that belong to elements of the commonest width: a FIT from PVF x bits needs them all alike."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """PVF by layer and bit position over the trials that flipped one bit of one dtype; None where no trial fell."""

    dtype: str
    layers: tuple[str, ...]
    bits: tuple[int, ...]
    fields: Mapping[int, str]
    """Bit position -> ``sign``, ``exponent`` or ``mantissa``; of an integer ``sign`` or ``value``."""
    estimate: tuple[tuple[float | None, ...], ...]
    n: tuple[tuple[int, ...], ...]

    @property
    def trials(self) -> int:
        """Trials in all cells."""
        return sum(map(sum, self.n))


@dataclass(frozen=True, slots=True)
class LookupRow:
    """PVF of one class of embedding rows: a fault acts only when its row is looked up."""

    heat: str
    """``hot`` (the busiest rows that take half of all look-ups), ``warm`` (the other rows looked up), ``cold`` (never)."""
    rows: int
    lookups: int
    share_of_elements: float
    estimate: float | None
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, repr=False)
class PvfResult:
    """A whole study, ready to be shown, exported or asserted on."""

    workload: str
    info: Mapping[str, Any]
    fault: str
    at: str
    per: str
    law: str
    unit: str
    judge: str
    seed: int
    confidence: float
    spec: Mapping[str, Any]
    """The whole campaign spec as JSON values."""
    command: str
    """The exact command that reproduces this."""
    store: str
    campaign: str
    """Campaign hash."""
    samples: int
    batches: int
    trials_done: int
    trials_planned: int
    seconds: float
    cpu_seconds: float
    golden_seconds: float
    """Time of one fault-free evaluation of all batches."""
    versions: Mapping[str, str]
    device: str
    dtype: str
    """What ``--dtype`` asked, else the commonest dtype of the parameters; of values of a run every dtype struck."""
    threads: int
    rows: tuple[PvfRow, ...]
    heat_maps: tuple[HeatMap, ...]
    """One for each dtype that single flips fell on, the dtype with most elements first."""
    lookups: tuple[LookupRow, ...]
    notes: tuple[str, ...] = field(default=())
    """Sentences a reader must see: what limits these numbers."""
    short: tuple[str, ...] = ()
    """Sentences on rows that were not allowed enough trials for the precision that was asked."""
    transient: bool = False
    """Whether values of one evaluation were struck (operations, inputs, caches) rather than parameters."""

    @property
    def measure(self) -> str:
        """What an estimate is called: PVF speaks of parameters alone."""
        return "P(incorrect)" if self.transient else "PVF"

    def __str__(self) -> str:
        lines = [
            f"{self.measure} of {self.workload}: {self.trials_done} trials, {self.fault} at {self.at}, per {self.unit}"
        ]
        for row in (r for r in self.rows if r.level in ("model", "component")):
            limits = "exact" if row.estimate == row.low == row.high else f"[{row.low:.3g}, {row.high:.3g}]"
            value = "no trial" if row.estimate is None else f"{row.estimate:.3g} {limits}"
            lines.append(f"  {row.target}{'' if row.flips is None else f' x{row.flips}'}: {value}, n {row.n}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<PvfResult {self.workload!r}, {self.trials_done} trials, {len(self.rows)} rows; print() shows it>"
