"""Trials with faults in parameters that are evaluated on some samples of a batch, many in one pass over a tape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unsilent.basics.errors import InjectionError, ProcessUnusable
from unsilent.engine.fault_entries import trial_entry_of
from unsilent.engine.plain import TrialOutcome
from unsilent.engine.sampled_walk import SampledEntry, SampledWalk
from unsilent.engine.tape_replay import Replayer, assemble_output
from unsilent.faults import Fault
from unsilent.outcomes import judges_samples_apart
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.classify import BatchOutcome, classify, same_outcome_for_all
from unsilent.outcomes.tensors import leaves, samples_that_differ

if TYPE_CHECKING:
    from unsilent.engine.cached import CachedEngine

MOST_SAMPLES = 0.5
"""Share of a batch above which evaluating the whole batch is cheaper than evaluating rows."""
MOST_TOGETHER = 512
"""Largest number of trials that are given to the engine at a time."""
ROWS_OF_A_BATCH = 64
"""Desired number of trials per batch among them; with fewer, the overhead of a pass over the tape dominates."""
ROW_BYTES = 64 << 20
"""Limit in bytes for the largest value of a tape over all samples that are evaluated together."""


class SampledTrial(NamedTuple):
    """A trial with faults in parameters, and the samples of the batch that count, int64[n]."""

    faults: Sequence[Fault]
    samples: NDArray[np.int64]


def group_size(engine: CachedEngine) -> int:
    """The best number of sampled trials to run together."""
    if not judges_samples_apart(engine.judge):
        return 1
    return min(MOST_TOGETHER, ROWS_OF_A_BATCH * len(engine.batches))


def outcomes_together(engine: CachedEngine, many: Sequence[SampledTrial | None]) -> dict[int, TrialOutcome]:
    """Outcomes of the trials that could be evaluated on single samples, by trial number.

    The other trials have to be evaluated on the whole batch.
    """
    if not judges_samples_apart(engine.judge):
        return {}
    by_batch: dict[int, list[tuple[int, SampledTrial]]] = {}
    for number, trial in enumerate(many):
        batch = trial.faults[0].step if trial is not None and trial.faults else None
        if trial is not None and batch is not None and len(trial.samples) <= MOST_SAMPLES * engine.samples[batch]:
            by_batch.setdefault(batch, []).append((number, trial))
    result: dict[int, TrialOutcome] = {}
    for batch, numbered in by_batch.items():
        replayer = engine.replayers[batch]
        if replayer is None or replayer.row_plan.batch != engine.samples[batch]:
            continue
        for chunk in _chunks(numbered, replayer):
            outcomes = _batch_outcomes(engine, batch, [trial for _, trial in chunk])
            for (number, _), outcome in zip(chunk, outcomes, strict=True):
                if outcome is not None:
                    result[number] = _of_all_batches(engine, batch, outcome)
    return result


def _chunks(
    numbered: Sequence[tuple[int, SampledTrial]], replayer: Replayer
) -> Iterator[list[tuple[int, SampledTrial]]]:
    """The trials of one batch in groups whose samples take little memory."""
    most = max(1, ROW_BYTES * replayer.row_plan.batch // max(replayer.largest, 1))
    chunk: list[tuple[int, SampledTrial]] = []
    rows = 0
    for number, trial in numbered:
        if chunk and rows + len(trial.samples) > most:
            yield chunk
            chunk, rows = [], 0
        chunk.append((number, trial))
        rows += len(trial.samples)
    if chunk:
        yield chunk


def _of_all_batches(engine: CachedEngine, batch: int, outcome: BatchOutcome) -> TrialOutcome:
    return TrialOutcome(tuple(outcome if i == batch else engine.spared_outcome(i) for i in range(len(engine.batches))))


def _batch_outcomes(engine: CachedEngine, batch: int, trials: Sequence[SampledTrial]) -> list[BatchOutcome | None]:
    """The outcome of each trial on one batch, or None if it has to be evaluated on the whole batch."""
    try:
        walk, outputs = walk_together(engine, batch, trials)
        masked = same_outcome_for_all(Outcome.MASKED, engine.samples[batch])
        result = [masked.only(trial.samples) for trial in trials]
        if engine.score is not None:
            result = [outcome._replace(scores=np.full(len(outcome.codes), np.nan)) for outcome in result]
        for tags, output in outputs:
            judged = classify(engine.judge, engine.golden[batch], output, engine.batches[batch], engine.samples[batch])
            judged = engine.with_scores(batch, output, judged)
            for trial, sample in tags:
                result[trial].codes[sample] = judged.codes[sample]
                result[trial].severity[sample] = judged.severity[sample]
                if judged.scores is not None and (scores := result[trial].scores) is not None:
                    scores[sample] = judged.scores[sample]
    except (InjectionError, ProcessUnusable, KeyboardInterrupt):
        raise
    except Exception:  # one trial raised in an operation or the judge: bisect to evaluate the others
        if len(trials) == 1:
            return [None]
        middle = len(trials) // 2
        return _batch_outcomes(engine, batch, trials[:middle]) + _batch_outcomes(engine, batch, trials[middle:])
    finally:
        engine.replayers[batch].drop_recomputed()  # type: ignore[union-attr]
    company, samples = [t.faults for t in trials], [t.samples for t in trials]
    for place, outcome in enumerate(result):
        if place not in walk.lost:
            changed = bool(outcome.codes[samples[place]].any())
            engine.validation_samples.add(batch, company, place, changed, samples)
    return [None if place in walk.lost else outcome for place, outcome in enumerate(result)]


def walk_together(
    engine: CachedEngine, batch: int, trials: Sequence[SampledTrial]
) -> tuple[SampledWalk, list[tuple[list[tuple[int, int]], Any]]]:
    """Evaluate trials in one pass over the tape and return the pass and its outputs.

    Each output comes with the trials and samples whose results it contains.
    """
    replayer = engine.replayers[batch]
    assert replayer is not None
    entries = []
    for trial in trials:
        start = trial_entry_of(replayer.tape, engine.parameters, trial.faults)
        inject = partial(engine.parameters.inject, trial.faults)
        entries.append(
            SampledEntry(start.corrupted, start.offsets, start.dirty, samples=trial.samples.tolist(), inject=inject)
        )
    with torch.no_grad():
        walk = SampledWalk(replayer, entries)
        return walk, [(tags, assemble_output(replayer, dirty)) for tags, dirty in walk.outputs()]


def gives_plain_bits(engine: CachedEngine, batch: int, trials: Sequence[SampledTrial], place: int, plain: Any) -> bool:
    """Whether a trial gives the bits of a plain output for its samples when it runs together with others."""
    walk, outputs = walk_together(engine, batch, trials)
    if place in walk.lost:
        return False
    for sample in trials[place].samples.tolist():
        ours = next((output for tags, output in outputs if (place, sample) in tags), engine.golden[batch])
        ones, twos = list(leaves(ours)), list(leaves(plain))
        count = engine.samples[batch]
        if len(ones) != len(twos) or any(
            bool(samples_that_differ(a, b, count)[sample]) for a, b in zip(ones, twos, strict=True)
        ):
            return False
        if not engine.scores_alike(batch, sample, ours, plain):
            return False
    return True
