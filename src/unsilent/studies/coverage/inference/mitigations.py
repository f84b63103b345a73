"""Applies each mitigation of the ladder of `unsilent.protection.protect` alone to a changed answer.

    rerun         runs the call again: a fault in an operation is gone, a fault in weights remains
    repair        repairs weights by checksums and parity, then runs the call again
    golden        restores weights from a copy, then runs the call again
    clamp, zero   runs the call again and clamps values to the range of clean samples, or sets values outside of it to 0
    clamp-in-run, zero-in-run
                  limits values in the faulty run itself, where a fault in an operation remains; `protect` has no such rung

The rung ``layer`` (a layer runs again from its inputs) needs no trial: it gives the golden answer if the first alarm is in the
layer whose own operation was corrupted. Otherwise it changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
from unsilent.protection.recovery_ladder import WeightRepair, limit_to_range
from unsilent.protection.weight_integrity import WeightIntegrity
from unsilent.studies.coverage.inference.spec import (
    CLAMP,
    CLAMP_IN_RUN,
    GOLDEN,
    REPAIR,
    RERUN,
    RUNGS,
    ZERO,
    ZERO_IN_RUN,
)

IN_RUN = {CLAMP_IN_RUN: CLAMP, ZERO_IN_RUN: ZERO}
"""Rungs that change the faulty run itself -> rungs with the same limits in a second run."""


class Tried(NamedTuple):
    """The result of one mitigation.

    Attributes:
        codes: Codes of the outcomes, uint8[samples].
        seconds: CPU time in seconds.
    """

    codes: NDArray[np.uint8]
    seconds: float


class Mitigations:
    """Applies all mitigations to the faults of one workload.

    Args:
        engine: Engine of the workload, with correct weights.
        batches: Clean batches from which the ranges of layers are measured.
        run: Function that evaluates a batch.
    """

    def __init__(self, engine: PlainEngine, batches: Iterable[Any], run: Callable[[Any, Any], Any]) -> None:
        self._engine = engine
        self.integrity = WeightIntegrity(engine.model)
        self._weights = WeightRepair(engine.model, has_parity=True, has_copy=True, integrity=self.integrity)
        self._ranges: dict[str, tuple[float, float]] = {}
        self._limited: dict[tuple[str, int], Tried] = {}
        with LayerWatch(engine.model) as watch, torch.no_grad():
            for batch in batches:
                with watch.listening(self._note_layer):  # each batch is one call; its later passes have other names
                    run(engine.model, batch)

    def _note_layer(self, layer: LayerRun) -> None:
        low, high = (float(bound) for bound in layer.output.aminmax())
        known = self._ranges.get(layer.name, (low, high))
        self._ranges[layer.name] = min(low, known[0]), max(high, known[1])

    def try_all(
        self, batch: int, faults: Sequence[Fault], changed: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
        """Apply every mitigation to the faults of one batch.

        Returns whether each changed answer is golden again, uint8[rungs, changed], and CPU seconds, float64[rungs].
        """
        stays = tuple(fault for fault in faults if not is_transient(fault.site))
        tried: dict[str, Tried] = {}
        for rung in RUNGS:
            if rung in IN_RUN and len(stays) == len(faults):
                tried[rung] = tried[IN_RUN[rung]]  # the same run: the faults remain in a second run
            elif rung in (CLAMP, ZERO) and not stays:
                tried[rung] = self._limited_golden(rung, batch)
            else:
                with self._engine.inject_parameter_faults(faults):
                    tried[rung] = self._try(rung, batch, faults if rung in IN_RUN else stays, changed)
        result = np.array([(attempt.codes < Outcome.SDC)[changed] for attempt in tried.values()], np.uint8)
        return result, np.array([attempt.seconds for attempt in tried.values()])

    def _limited_golden(self, rung: str, batch: int) -> Tried:
        """The fault-free run of a batch with limited activations, cached by batch."""
        if (rung, batch) not in self._limited:
            self._limited[rung, batch] = self._try(rung, batch, (), np.zeros(0, np.bool_))
        return self._limited[rung, batch]

    def _try(self, rung: str, batch: int, faults: Sequence[Fault], changed: NDArray[np.bool_]) -> Tried:
        """Apply one mitigation; faults in weights are already injected.

        A run whose bits are known is skipped: a run without faults is golden (`PlainEngine.check_intact` proves this), and a
        second run in which all faults are in weights equals the first run.
        """
        engine, begun = self._engine, time.process_time()
        samples, again = engine.samples[batch], engine.batch_seconds[batch]
        if rung == REPAIR:
            self._weights.repair()
        elif rung == GOLDEN:
            self._weights.restore()
        elif rung == RERUN and faults:
            return Tried(np.where(changed, Outcome.SDC, Outcome.MASKED).astype(np.uint8), again)
        if rung in (REPAIR, GOLDEN, RERUN):
            spent = time.process_time() - begun
            if not faults or engine.parameters.hash() == engine.weights_hash:
                return Tried(np.full(samples, Outcome.MASKED, np.uint8), spent + again)
        codes = self._codes(rung, batch, faults)
        return Tried(codes, time.process_time() - begun)

    def _codes(self, rung: str, batch: int, faults: Sequence[Fault]) -> NDArray[np.uint8]:
        """Outcome codes of one run, uint8[samples], with limited activations if the mitigation limits them."""
        engine, limits = self._engine, IN_RUN.get(rung, rung)
        try:
            if limits in (CLAMP, ZERO):
                with LayerWatch(engine.model) as watch, watch.listening(self._limit(limits)):
                    output = PlainEngine._evaluate(engine, batch, faults)
            else:
                output = PlainEngine._evaluate(engine, batch, faults)
            return classify(
                engine.judge, engine.golden[batch], output, engine.batches[batch], engine.samples[batch]
            ).codes
        except Exception:  # the model raises on such values, so there is no answer
            return np.full(engine.samples[batch], Outcome.EXCEPTION, np.uint8)

    def _limit(self, rung: str) -> Callable[[LayerRun], Tensor | None]:
        def limit(layer: LayerRun) -> Tensor | None:
            if layer.name not in self._ranges:
                return None
            return limit_to_range(layer.output, *self._ranges[layer.name], to_zero=rung == ZERO)

        return limit
