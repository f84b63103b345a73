"""Records of one resume with the measurements of all ranks.

They are built message by message, so an interrupted run has a record too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unsilent.faults.receipts import AppliedFault
from unsilent.workloads.distributed.orders import Ints, Payload, RankEnd, RankPart, ResumeStart

Floats = npt.NDArray[np.float64]
End = Literal["finished", "loss not finite", "raised", "rank lost", "deadline"]


@dataclass(frozen=True, eq=False)
class ResumeRecord:
    """The record of one resume.

    An interrupted run is recorded up to the last evaluation that all ranks reached.

    Attributes:
        end: The way in which the resume ended; ``loss not finite``: on any rank, in the last step of ``losses``.
        detail: Rank and error if the resume neither finished nor ended with a loss that is not finite.
        start_step: Number of steps done in the checkpoint.
        losses: float64[ranks, steps], loss of each step on the rank's own rows.
        metrics: Name of a metric -> float64[ranks, steps].
        evaluated_at: int64[evaluations], number of steps done; the first evaluation is right after the restart.
        held_out: ``loss`` and metrics of rank 0's model on the held-out data -> float64[evaluations].
        tensors: Names of the model's floating-point parameters, then of such buffers.
        parameter_count: How many of the names are parameters.
        elements: int64[ranks, tensors], number of elements that a rank holds (fsdp2: its part).
        nonfinite: int64[ranks, evaluations, tensors], number of elements that are NaN or infinite.
        extreme: int64[ranks, evaluations, tensors], number of finite elements of a magnitude above 1e6.
        changed: int64[ranks, evaluations, tensors], number of elements with other bits than in the clean resume (-1:
            unknown).
        hashes: For each rank, xxh3-128 of its final full state by part: ``parameters``, ``buffers``, ``optimizers``,
            ``all``; empty if the run did not end by itself.
        applied_faults: Faults that landed in collectives.
        collectives: Site, dtype and shape of the payloads that rank 0 sends in the last step; only for the clean
            resume.
        seconds: Seconds from the order to the last answer, without the start of the ranks.
    """

    end: End
    detail: str
    start_step: int
    losses: Floats
    metrics: Mapping[str, Floats]
    evaluated_at: Ints
    held_out: Mapping[str, Floats]
    tensors: tuple[str, ...]
    parameter_count: int
    elements: Ints
    nonfinite: Ints
    extreme: Ints
    changed: Ints
    hashes: tuple[Mapping[str, str], ...]
    applied_faults: tuple[AppliedFault, ...]
    collectives: tuple[Payload, ...]
    seconds: float

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that have tensors, in the order of their first tensor."""
        return tuple(dict.fromkeys(map(_layer, self.tensors)))

    def by_layer(self, counts: Ints) -> Ints:
        """Sums of counts over the tensors of each layer: int64[…, tensors] -> int64[…, layers]."""
        owners = np.array([_layer(name) for name in self.tensors])
        return np.stack([counts[..., owners == layer].sum(-1) for layer in self.layers], -1)

    def parameter_elements(self) -> Ints:
        """Number of parameter elements that each rank holds, int64[ranks, tensors]; 0 for buffers."""
        return np.where(np.arange(len(self.tensors)) < self.parameter_count, self.elements, 0)

    def changed_parameters(self) -> Ints:
        """Number of parameter elements that differ from the clean resume, int64[ranks, evaluations, layers].

        -1 if unknown.
        """
        counts = self.by_layer(np.where(np.arange(len(self.tensors)) < self.parameter_count, self.changed, 0))
        return np.where((self.changed < 0).any(-1, keepdims=True), -1, counts)


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0]


class ResumeRecordBuilder:
    """Builds the record of a resume from the messages of the ranks."""

    def __init__(self, ranks: int) -> None:
        self._starts: list[ResumeStart | None] = [None] * ranks
        self._parts: list[list[RankPart]] = [[] for _ in range(ranks)]

    def take(self, rank: int, kind: str, value: Any) -> None:
        """Add a message of a rank to the record."""
        if kind == "began":
            self._starts[rank] = value
        else:
            self._parts[rank].append(value)

    def record(self, end: End, detail: str, ends: Sequence[RankEnd], seconds: float) -> ResumeRecord:
        """The record of all messages that were received."""
        starts = [start for start in self._starts if start is not None]
        whole = len(starts) == len(self._starts)
        count = min(map(len, self._parts)) if whole else 0
        parts = [every[:count] for every in self._parts]
        first = starts[0] if starts else ResumeStart(0, (), 0, np.zeros(0, np.int64))
        shape = (len(parts), count, len(first.tensors))
        losses = [[loss for part in every for loss in part.losses] for every in parts]
        metrics = [[metric for part in every for metric in part.metrics] for every in parts]
        names = list(metrics[0][0]) if metrics[0] else []
        held_out = [part.held_out for part in parts[0]]

        def counts(of: Callable[[RankPart], Ints]) -> Ints:
            return np.array([[of(part) for part in every] for every in parts], np.int64).reshape(shape)

        return ResumeRecord(
            end=end,
            detail=detail,
            start_step=first.step,
            losses=np.array(losses, np.float64),
            metrics={name: np.array([[m[name] for m in every] for every in metrics], np.float64) for name in names},
            evaluated_at=np.array([part.step for part in parts[0]], np.int64),
            held_out={n: np.array([h[n] for h in held_out], np.float64) for n in (held_out[0] if held_out else ())},
            tensors=first.tensors,
            parameter_count=first.parameter_count,
            elements=np.array([s.elements for s in starts], np.int64).reshape(len(starts), len(first.tensors)),
            nonfinite=counts(lambda part: part.nonfinite),
            extreme=counts(lambda part: part.extreme),
            changed=counts(lambda part: part.changed),
            hashes=tuple(e.hashes for e in ends),
            applied_faults=tuple(fault for e in ends for fault in e.applied_faults),
            collectives=ends[0].collectives if ends else (),
            seconds=seconds,
        )
