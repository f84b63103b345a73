"""Replicas as campaigns: how they are stored, and what is checked of a store before it is believed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.reading import Damaged, parsed
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError
from unsilent.replicas.spec import WEIGHT_BYTES, Replica, ReplicaBaseline, ReplicaRow, ReplicaSpec
from unsilent.replicas.step_trace import StepTrace, StepTraceId, asked_by, read_step_trace
from unsilent.replicas.switches import Switches
from unsilent.workloads.zoo import TRAININGS

Replicas = Kind[ReplicaSpec, ReplicaBaseline, ReplicaRow]
ASKED = "asked"
"""The name of records of which replicas were asked for; the last one holds."""
MOST_STEPS = 10**7
MOST_NUMBER = 2**31
WIDTHS = {"": 0, "float32": 4, "float64": 8}
"""Bytes of a weight by its dtype; no weights are kept without one."""
_BITS, _HASH = re.compile(r"([0-9a-f]{2})*"), re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class AskedFor:
    """Which replicas somebody asked for: sets of switches as text, and how many of each that varies."""

    variants: tuple[str, ...]
    replicas: int


def read_asked(text: str, spec: ReplicaSpec, baseline: ReplicaBaseline) -> AskedFor:
    """Such a record; raises ``Damaged``."""
    asked = parsed(AskedFor, text, "record of what was asked")
    try:
        known = [str(Switches.parse(name)) for name in asked.variants]
    except (UsageError, ValueError):
        known = []
    if tuple(known) != asked.variants or not known or not 1 <= asked.replicas < MOST_NUMBER:
        raise Damaged("its record of what was asked names unknown switches")
    return asked


def check_spec(spec: ReplicaSpec) -> None:
    """Raise ``Damaged`` for impossible numbers."""
    if spec.every < 1 or (spec.steps is not None and spec.steps < 1):
        raise Damaged("its spec has an impossible number of steps")


def check_trained(baseline: ReplicaBaseline) -> None:
    """Raise ``Damaged`` for impossible numbers and groups."""
    known = math.isfinite(baseline.run_seconds) and baseline.run_seconds >= 0 and baseline.parameters >= 0
    if not 1 <= baseline.hashes <= baseline.steps <= MOST_STEPS or not known or not baseline.labels:
        raise Damaged("its description has impossible numbers")
    if not all(-(2**63) <= label < 2**63 for label in baseline.labels):
        raise Damaged("its description has impossible labels")
    size = 2 * -(-len(baseline.labels) // 8)
    if not all(len(bits) == size and _BITS.fullmatch(bits) for bits in baseline.groups.values()):
        raise Damaged("its description has a group of other samples")


def has(trial: TrialId, spec: ReplicaSpec, targets: frozenset[str]) -> bool:
    """Whether a trial is a run, or a look at one, with switches that there are."""
    try:
        return trial.k < MOST_NUMBER and asked_by(trial).trial == trial
    except (UsageError, ValueError):
        return False


def is_replica(trial: TrialId) -> bool:
    """Whether it is a run, not a look at one."""
    return isinstance(asked_by(trial), Replica)


def shapes(baseline: ReplicaBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Arrays are as long as the training says; those of a look are empty. Raises ``Damaged``."""
    if values["dtype"] not in WIDTHS:
        raise Damaged("has weights of an impossible dtype")
    if not is_replica(values["trial"]):
        return dict.fromkeys(("losses", "hashes", "predictions", "weights"), 0)
    return {
        "losses": baseline.steps,
        "hashes": baseline.hashes,
        "predictions": len(baseline.labels),
        "weights": baseline.parameters * WIDTHS[values["dtype"]],
    }


def check_row(row: ReplicaRow, baseline: ReplicaBaseline) -> None:
    """Raise ``Damaged`` where a text of a row is not what a run or a look leaves."""
    asked = asked_by(row.trial)
    if isinstance(asked, StepTraceId):
        read_step_trace(row.seen)
        if asked.step >= baseline.steps:
            raise Damaged("is at no step of its training")
        if (row.finals, row.metrics, row.dtype, row.notes) != ("[]", "{}", "", "[]"):
            raise Damaged("is a step trace with the end of a run")
        return
    if row.seen:
        raise Damaged("is a run with a step trace")
    finals = parsed(list[tuple[str, str]], row.finals, "final state")
    if not all(_HASH.fullmatch(value) for _, value in finals):
        raise Damaged("has a hash of its final state that is none")
    parsed(dict[str, float], row.metrics, "metrics")
    parsed(list[str], row.notes, "notes")


REPLICAS: Replicas = Kind(
    name="noise",
    application=0x556E7372,  # "Unsr"
    version=5,
    spec=ReplicaSpec,
    baseline=ReplicaBaseline,
    row=ReplicaRow,
    longest=TEXT_BYTES + WEIGHT_BYTES,
    check_spec=check_spec,
    check_baseline=check_trained,
    check_row=check_row,
    shapes=shapes,
    has=has,
    planned=is_replica,
    records={ASKED: read_asked},
    builtin={"workload": TRAININGS},
    fixed=("labels", "groups", "steps", "parameters"),
    store=lambda *given, **more: ReplicaStore(*given, **more),
    subject=lambda store: str(store.description.name),
)
"""Without what a study makes of them."""


class ReplicaStore(Store[ReplicaSpec, ReplicaBaseline, ReplicaRow]):
    """An open store of replicas of one training."""

    kind = REPLICAS

    def note_asked(self, asked: AskedFor) -> None:
        """Remember what was asked for, where that is new."""
        if self.records(ASKED)[-1:] != [asked]:
            self.add_record(ASKED, asdict(asked))

    def replicas(self) -> set[Replica]:
        """All runs that are stored."""
        return {asked for asked in map(asked_by, self.done()) if isinstance(asked, Replica)}

    def of(self, switches: Switches, count: int = MOST_NUMBER, *, weights: bool = False) -> Iterator[ReplicaRow]:
        """The first ``count`` stored runs with these switches, by number; their weights only where they are asked for."""
        rows = self.rows(target=str(switches), without=() if weights else ("weights",))
        return (row for row in islice(rows, count) if row.trial.k < count)

    def twin(self) -> ReplicaRow:
        """The clean twin; raises ``UsageError`` where it was not run."""
        value = next(self.of(Switches(), 1), None)
        if value is None:
            raise UsageError(f"{self.path} has no clean twin of {self.description.name}; run its replicas first")
        return value

    def whole(self, replica: Replica) -> ReplicaRow:
        """One run with its weights; raises ``UsageError`` where it was not run."""
        result = self.find(replica.trial)
        if result is None:
            raise UsageError(f"replica {replica} is not stored; run it first")
        return result

    def seen(self, look: StepTraceId) -> StepTrace | None:
        """What was seen of one step; None where nobody looked."""
        result = self.find(look.trial)
        return None if result is None else read_step_trace(result.seen)
