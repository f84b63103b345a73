"""Replicas as a kind of campaign: how their rows are stored and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import LazyFunction
from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import DamagedRecordError, parse_record
from unsilent.replicas.spec import (
    MOST_REPLICAS,
    MOST_STEPS,
    WEIGHT_BYTES,
    Replica,
    ReplicaBaseline,
    ReplicaRow,
    ReplicaSpec,
)
from unsilent.replicas.step_trace import StepTrace, StepTraceId, read_step_trace, replica_or_step_trace
from unsilent.replicas.switches import Switches
from unsilent.workloads.zoo import TRAININGS

Replicas = Kind[ReplicaSpec, ReplicaBaseline, ReplicaRow]
ASKED = "asked"
"""Name of the records of requested replicas; the last record is valid."""
MOST_NUMBER = 2**31
WIDTHS = {"": 0, "float32": 4, "float64": 8}
"""Bytes of a weight by its dtype; the empty dtype means that no weights are stored."""
_BITS, _HASH = re.compile(r"([0-9a-f]{2})*"), re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request for replicas: sets of switches as text, and the number of replicas of each set that varies."""

    variants: tuple[str, ...]
    replicas: int


def read_replica_request(text: str, spec: ReplicaSpec, baseline: ReplicaBaseline) -> ReplicaRequest:
    """A request parsed from a stored record; raises ``DamagedRecordError``."""
    request = parse_record(ReplicaRequest, text, "record of requested replicas")
    try:
        known = [str(Switches.parse(name)) for name in request.variants]
    except (UsageError, ValueError):
        known = []
    if tuple(known) != request.variants or not known or not 1 <= request.replicas <= MOST_REPLICAS:
        raise DamagedRecordError(
            "its record of requested replicas has unknown switches or an invalid number of replicas"
        )
    return request


def check_spec(spec: ReplicaSpec) -> None:
    """Raise ``DamagedRecordError`` for impossible numbers."""
    if spec.every < 1 or (spec.steps is not None and spec.steps < 1):
        raise DamagedRecordError("its spec has an invalid number of steps or of steps between hashes")


def check_baseline(baseline: ReplicaBaseline) -> None:
    """Raise ``DamagedRecordError`` for impossible numbers and groups."""
    known = math.isfinite(baseline.run_seconds) and baseline.run_seconds >= 0 and baseline.parameters >= 0
    if not 1 <= baseline.hash_count <= baseline.steps <= MOST_STEPS or not known or not baseline.labels:
        raise DamagedRecordError("its description has invalid numbers")
    if not all(-(2**63) <= label < 2**63 for label in baseline.labels):
        raise DamagedRecordError("its description has invalid labels")
    size = 2 * -(-len(baseline.labels) // 8)
    if not all(len(bits) == size and _BITS.fullmatch(bits) for bits in baseline.groups.values()):
        raise DamagedRecordError("its description has a group that does not fit its samples")


def is_run_or_step_trace(trial: TrialId, spec: ReplicaSpec, targets: frozenset[str]) -> bool:
    """Whether a trial is a valid run or a trace of one of its steps."""
    try:
        return trial.k < MOST_NUMBER and replica_or_step_trace(trial).trial == trial
    except (UsageError, ValueError):
        return False


def is_replica(trial: TrialId) -> bool:
    """Whether a trial is a run, not a trace of one of its steps."""
    return isinstance(replica_or_step_trace(trial), Replica)


def shapes(baseline: ReplicaBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """The shapes of the arrays of a row, which are empty for a step trace.

    Raises ``DamagedRecordError`` for an unknown dtype.
    """
    if values["dtype"] not in WIDTHS:
        raise DamagedRecordError("its weights have an unknown dtype")
    if not is_replica(values["trial"]):
        return dict.fromkeys(("losses", "hashes", "predictions", "weights"), 0)
    return {
        "losses": baseline.steps,
        "hashes": baseline.hash_count,
        "predictions": len(baseline.labels),
        "weights": baseline.parameters * WIDTHS[values["dtype"]],
    }


def check_row(row: ReplicaRow, baseline: ReplicaBaseline) -> None:
    """Raise ``DamagedRecordError`` unless all texts of a row are valid for a run or a step trace."""
    requested = replica_or_step_trace(row.trial)
    if isinstance(requested, StepTraceId):
        read_step_trace(row.step_trace_json)
        if requested.step >= baseline.steps:
            raise DamagedRecordError("traces a step that its training does not have")
        if (row.final_hashes, row.metrics, row.dtype, row.notes) != ("[]", "{}", "", "[]"):
            raise DamagedRecordError("is a step trace, but has results of a whole run")
        return
    if row.step_trace_json:
        raise DamagedRecordError("is a whole run, but has a step trace")
    finals = parse_record(list[tuple[str, str]], row.final_hashes, "final state")
    if not all(_HASH.fullmatch(value) for _, value in finals):
        raise DamagedRecordError("has an invalid hash of its final state")
    parse_record(dict[str, float], row.metrics, "metrics")
    parse_record(list[str], row.notes, "notes")


REPLICAS: Replicas = Kind(
    name="noise",
    application_id=0x556E7372,  # "Unsr"
    schema_version=7,
    spec=ReplicaSpec,
    baseline=ReplicaBaseline,
    row=ReplicaRow,
    runner=LazyFunction("unsilent.replicas.runner:ReplicaRunner"),
    max_cell_bytes=TEXT_BYTES + WEIGHT_BYTES,
    check_spec=check_spec,
    check_baseline=check_baseline,
    check_row=check_row,
    shapes=shapes,
    accepts_trial=is_run_or_step_trace,
    is_planned_trial=is_replica,
    record_readers={ASKED: read_replica_request},
    builtin_values={"workload": TRAININGS},
    shared_baseline_fields=("labels", "groups", "steps", "parameters"),
    store_class=lambda *arguments, **more: ReplicaStore(*arguments, **more),
)
"""The kind of campaign, without the analysis that a study adds."""


class ReplicaStore(Store[ReplicaSpec, ReplicaBaseline, ReplicaRow]):
    """An open store of replicas of one training."""

    kind = REPLICAS

    def record_request(self, request: ReplicaRequest) -> None:
        """Store a request for replicas, unless it equals the last one."""
        if self.records(ASKED)[-1:] != [request]:
            self.add_record(ASKED, asdict(request))

    def replicas(self) -> set[Replica]:
        """All runs that are stored."""
        return {stored for stored in map(replica_or_step_trace, self.stored_trial_ids()) if isinstance(stored, Replica)}

    def runs_with_switches(
        self, switches: Switches, count: int = MOST_NUMBER, *, weights: bool = False
    ) -> Iterator[ReplicaRow]:
        """The first ``count`` stored runs with these switches, ordered by number.

        ``weights``: whether to read their weights.
        """
        rows = self.rows(target=str(switches), omit_arrays=() if weights else ("weights",))
        return (row for row in islice(rows, count) if row.trial.k < count)

    def clean_twin(self) -> ReplicaRow:
        """The row of the clean twin; raises ``UsageError`` if it was not run."""
        value = next(self.runs_with_switches(Switches(), 1), None)
        if value is None:
            raise UsageError(
                f"{self.path} has no clean twin (fault-free reference run) of {self.baseline.name}; run its replicas first"
            )
        return value

    def row_with_weights(self, replica: Replica) -> ReplicaRow:
        """The row of a replica with its weights; raises ``UsageError`` if it was not run."""
        result = self.find_row(replica.trial)
        if result is None:
            raise UsageError(f"replica {replica} is not stored; run it first")
        return result

    def find_step_trace(self, look: StepTraceId) -> StepTrace | None:
        """The stored trace of a step; None if it was not recorded."""
        result = self.find_row(look.trial)
        return None if result is None else read_step_trace(result.step_trace_json)
