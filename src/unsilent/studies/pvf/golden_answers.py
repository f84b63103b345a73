"""Determines which fault-free answers are right, or their scores."""

from __future__ import annotations

import math

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.engine.plain import PlainEngine
from unsilent.outcomes.decision_judges import Threshold, right_answers
from unsilent.report.text import count_text
from unsilent.studies.pvf.spec import GoldenScores
from unsilent.workloads.base import InferenceWorkload, labels_of


def golden_scores(engine: PlainEngine) -> GoldenScores | None:
    """The scores of the golden outputs; None if the workload has no score."""
    score = engine.score
    if score is None:
        return None
    values = np.concatenate(engine.golden_scores)
    least, most = float(values.min()), float(values.max())
    mean = min(max(math.fsum(values) / len(values), least), most)
    return GoldenScores(escape_unprintable(score.name), score.lowest, score.highest, mean, least, most)


def right_answers_text(engine: PlainEngine, workload: InferenceWorkload, notes: list[str]) -> str:
    """Which golden answers match their labels, as a text of 0 and 1; see `PvfBaseline.right_answers`.

    A note is added to ``notes`` if the labels do not fit.
    """
    labels = None if engine.score else labels_of(workload)
    if labels is None or (isinstance(engine.judge, Threshold) and engine.judge.tolerance > 0):
        return ""  # with a tolerance, an answer may become wrong and still count as unchanged
    if len(labels) != len(engine.golden):
        notes.append(
            f"The accuracy lost is not computed, because there are labels of {count_text(len(labels), 'batch')}, but "
            f"{count_text(len(engine.golden), 'batch')} of inputs: give labels batch by batch."
        )
        return ""
    try:
        batches = zip(engine.golden, labels, engine.samples, strict=True)
        parts = [right_answers(engine.judge, output, truth, samples) for output, truth, samples in batches]
    except UsageError as error:
        notes.append(f"The accuracy lost is not computed, because {error}.")
        return ""
    known = [part for part in parts if part is not None]
    return "".join(str(int(right)) for part in known for right in part) if len(known) == len(parts) else ""
