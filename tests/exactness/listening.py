"""Listening to the engine under test: raw outputs of trials that run together, shortcuts given up, choices taken away.

This alone knows anything of the engine beyond its contract, and fails loudly where that has changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from exactness.oracle import Answer, Row, answer, row
from unsilent.engine.plain import acting_in
from unsilent.faults import Fault


def insist(engine: Any) -> None:
    """Take away the engine's choice by measured time between a shortcut and a plain run: here the shortcut is on trial."""
    if type(engine).__name__ != "CachedEngine":
        return
    for name in ("prefers_plain", "is_plain_run_due"):
        assert callable(getattr(engine.ledger, name, None)), (
            f"ledger.{name} is gone; find what chooses the plain run now"
        )
        setattr(engine.ledger, name, lambda *args: False)


class Packs:
    """Runs several trials by one call of ``trials`` and listens to the raw outputs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answers: dict[tuple[int, int], Answer] = {}
        self.rows: dict[int, Row] = {}
        self.shared = 0

    def run(self, numbers: Sequence[int], faults: Sequence[Sequence[Fault]]) -> None:
        """Run the trials of these numbers together."""
        engine, coming = self._engine, iter(numbers)
        trial, evaluate = engine.trial, engine._evaluate
        current = -1

        def one_trial(acting: Sequence[Fault], samples: Any = None) -> Any:
            nonlocal current
            current = next(coming)
            return trial(acting, samples)

        def one_batch(batch: int, acting: Sequence[Fault]) -> Any:
            self.shared += batch in getattr(engine, "_ready", ())
            output, raised = None, None
            try:
                output = evaluate(batch, acting)
            except BaseException as error:
                raised = error
            self.answers[current, batch] = answer(lambda: _again(output, raised))
            return _again(output, raised)

        engine.trial, engine._evaluate = one_trial, one_batch
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes = list(engine.trials([faults[n] for n in numbers]))
        finally:
            del engine.trial, engine._evaluate
        for n in numbers:
            acting = [b for b in range(len(engine.batches)) if acting_in(b, faults[n])]
            assert all((n, b) in self.answers for b in acting), "trials() does not come by _evaluate; listen elsewhere"
        self.rows |= {n: row(outcome) for n, outcome in zip(numbers, outcomes, strict=True)}


def _again(output: Any, raised: BaseException | None) -> Any:
    """Give or raise what was given or raised."""
    if raised is not None:
        raise raised
    return output


class Fallbacks:
    """Counts trials during which the engine's own count of abandoned shortcuts (``diverged``) went up; it may have none."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before = self._read()
        self.count: int | None = None if self._before is None else 0

    def _read(self) -> int | None:
        said = getattr(self._engine, "diverged", None)
        return said if isinstance(said, int) else None

    def note(self, trial: int) -> None:
        """To be called after each trial."""
        now = self._read()
        if now is not None and self.count is not None:
            self.count += now != self._before
            self._before = now
