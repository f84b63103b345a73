"""What brings a changed answer back to that of golden, each rung of the ladder of `unsilent.protection.protect` alone.

    clamp, zero   the same faulty pass, with values outside of the range of clean samples limited to it, or set to 0
    rerun         the call again: a fault in an operation is gone, one in weights is still there
    repair        weights by checksums and parity, then the call again
    golden        weights from a copy, then the call again

The rung ``layer`` (a layer runs again from its inputs) needs no trial: it gives the answer of golden where the first alarm is in
the very layer whose own operation was corrupted, and else changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.engine import PlainEngine
from unsilent.faults import Fault
from unsilent.faults.naming import is_transient
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.classify import classify
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.protection.recovery_ladder import WeightRepair, limited
from unsilent.protection.weight_integrity import WeightIntegrity
from unsilent.studies.coverage.inference.spec import CLAMP, GOLDEN, REPAIR, RERUN, RUNGS, ZERO


class Mitigations:
    """Tries all rungs on the faults of one workload.

    Args:
        engine: Of the workload; its weights are right now.
        batches: Clean ones, by which the ranges of layers are known.
        run: One evaluation of a batch.
    """

    def __init__(self, engine: PlainEngine, batches: Iterable[Any], run: Callable[[Any, Any], Any]) -> None:
        self._engine = engine
        self.integrity = WeightIntegrity(engine.model)
        self._weights = WeightRepair(engine.model, has_parity=True, has_copy=True, integrity=self.integrity)
        self._ranges: dict[str, tuple[float, float]] = {}
        with LayerWatch(engine.model) as watch, torch.no_grad():
            for batch in batches:
                with watch.listening(self._note):  # each batch is a call, whose later passes have names of their own
                    run(engine.model, batch)

    def _note(self, layer: LayerRun) -> None:
        low, high = (float(one) for one in layer.output.aminmax())
        known = self._ranges.get(layer.name, (low, high))
        self._ranges[layer.name] = min(low, known[0]), max(high, known[1])

    def try_all(
        self, batch: int, faults: Sequence[Fault], changed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """Whether each changed answer is golden again, uint8[rungs, changed], and CPU seconds, float64[rungs]."""
        result, seconds = np.zeros((len(RUNGS), int(changed.sum())), np.uint8), np.zeros(len(RUNGS))
        for number, rung in enumerate(RUNGS):
            begun = time.process_time()
            with self._engine.inject_parameter_faults(faults):
                codes = self._outcomes(rung, batch, faults)
            seconds[number] = time.process_time() - begun
            result[number] = (codes < Outcome.SDC)[changed]
        return result, seconds

    def _outcomes(self, rung: str, batch: int, faults: Sequence[Fault]) -> NDArray[np.uint8]:
        """Outcome codes of all samples, uint8[samples]; faults of weights are in place."""
        engine, left = self._engine, [fault for fault in faults if not is_transient(fault.site)]
        try:
            if rung in (CLAMP, ZERO):
                with LayerWatch(engine.model) as watch, watch.listening(self._limit(rung)):
                    output = PlainEngine._evaluate(engine, batch, faults)
            else:
                if rung == REPAIR:
                    self._weights.repair()
                elif rung == GOLDEN:
                    self._weights.restore()
                else:
                    assert rung == RERUN
                output = PlainEngine._evaluate(engine, batch, left)
            return classify(
                engine.judge, engine.golden[batch], output, engine.batches[batch], engine.samples[batch]
            ).codes
        except Exception:  # the model raises on such values: no answer
            return np.full(engine.samples[batch], Outcome.EXCEPTION, np.uint8)

    def _limit(self, rung: str) -> Callable[[LayerRun], Tensor | None]:
        def limit(layer: LayerRun) -> Tensor | None:
            if layer.name not in self._ranges:
                return None
            return limited(layer.output, *self._ranges[layer.name], to_zero=rung == ZERO)

        return limit
