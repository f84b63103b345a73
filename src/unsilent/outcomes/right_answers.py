"""Right answers of a model, by the labels of a workload and the decision of its judge."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Judge
from unsilent.outcomes.decision_judges import DecisionJudge, host_rows
from unsilent.outcomes.tensors import array_of


def right_answers(judge: Judge, output: Any, labels: Any, samples: int) -> NDArray[np.bool_] | None:
    """Mask of the answers in an output that labels say, bool[samples].

    None where there are no labels, or the judge decides nothing that a label could say. Raises ``UsageError`` for labels that are
    not one whole number a sample.
    """
    if labels is None or not isinstance(judge, DecisionJudge):
        return None
    rows = host_rows(judge.decision_rows(output))
    if judge.is_right(rows[:0], np.zeros(0, np.int64)) is None:
        return None
    return judge.is_right(rows, label_array(labels, samples))


def label_array(labels: Any, samples: int) -> NDArray[np.int64]:
    """The labels of a batch as int64[samples]; raises ``UsageError``."""
    array = array_of(labels)
    if array.shape != (samples,) or array.dtype.kind not in "biuf" or not np.array_equal(array, np.round(array)):
        raise UsageError(
            f"the labels of a batch are {array.dtype}{list(array.shape)}; expected a whole number for each of its "
            f"{samples} inputs"
        )
    return array.astype(np.int64)
