"""Classification of two outputs by a judge: one outcome per sample (see `Outcome`).

Order of precedence: bit-identical -> masked; a non-finite value in that sample, but not in golden -> due, whatever the
decision; judged incorrect -> sdc; else benign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Judge, JudgeVerdict, Outcome
from unsilent.outcomes.decision_judges import DecisionJudge, host_rows
from unsilent.outcomes.judges import to_verdict
from unsilent.outcomes.tensors import leaves, samples_that_differ, samples_with_nonfinite


class BatchOutcome(NamedTuple):
    """Outcomes of a batch: ``codes`` uint8[n], one `Outcome` per sample; ``severity`` float64[n], 0 if masked.

    ``scores``: if the workload has a score, the scores of the faulty output, float64[n]; NaN or None if they do not
    matter.
    """

    codes: NDArray[np.uint8]
    severity: NDArray[np.float64]
    scores: NDArray[np.float64] | None = None

    def only(self, samples: NDArray[np.int64]) -> BatchOutcome:
        """The outcomes of these samples, with all other samples marked as not evaluated."""
        rest = same_outcome_for_all(Outcome.SPARED, len(self.codes))
        rest.codes[samples], rest.severity[samples] = self.codes[samples], self.severity[samples]
        return rest._replace(scores=self.scores)


def sample_count(judge: Judge, golden: Any, batch: Any) -> int:
    """Number of samples a judge sees in a batch; raises ``UsageError`` if it rejects the golden output."""
    verdict = _verdict_of_judge(judge, golden, golden, batch)
    if not len(verdict.incorrect):
        raise UsageError("a batch has no samples; leave empty batches out")
    if verdict.incorrect.any():
        raise UsageError(
            f"{judge!r} rejects {int(verdict.incorrect.sum())} golden samples when they are compared with themselves; "
            "a judge must accept the golden output"
        )
    return len(verdict.incorrect)


def _verdict_of_judge(judge: Judge, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
    """The verdict of a judge, converted from any form that `to_verdict` accepts."""
    return to_verdict(judge, judge(golden, faulty, batch))


def same_outcome_for_all(outcome: Outcome, samples: int) -> BatchOutcome:
    """A batch outcome in which every sample has the same outcome, such as a crash or hang."""
    return BatchOutcome(np.full(samples, outcome, np.uint8), np.full(samples, np.inf if outcome.incorrect else 0.0))


def classify(judge: Judge, golden: Any, faulty: Any, batch: Any, samples: int) -> BatchOutcome:
    """Outcome and severity of each sample in one batch."""
    if has_one_result_a_sample(golden, samples) and has_one_result_a_sample(faulty, samples):
        each = [changed_and_nonfinite(g, f, 1) for g, f in zip(golden, faulty, strict=True)]
        changed, nonfinite = (np.concatenate([pair[i].cpu().numpy() for pair in each]) for i in (0, 1))
    else:
        changed, nonfinite = (flags.cpu().numpy() for flags in changed_and_nonfinite(golden, faulty, samples))
    judged = changed & ~nonfinite
    if not judged.any():  # nothing left to judge, and a judge need not handle NaN
        return outcome_of_samples(changed, nonfinite, None)
    same_shapes = [t.shape for t in leaves(golden)] == [t.shape for t in leaves(faulty)]
    try:
        if isinstance(judge, DecisionJudge) and same_shapes:
            verdict = judge.compare(*(host_rows(judge.decision_rows(x)) for x in (golden, faulty)))
        else:
            verdict = _verdict_of_judge(judge, golden, faulty, batch)
    except Exception:
        if same_shapes:
            raise
        return same_outcome_for_all(Outcome.SDC, samples)  # an answer with another shape is a different answer
    if len(verdict.incorrect) != samples:
        return same_outcome_for_all(Outcome.SDC, samples)
    return outcome_of_samples(changed, nonfinite, JudgeVerdict(verdict.incorrect[judged], verdict.severity[judged]))


def outcome_of_samples(
    changed: NDArray[np.bool_], nonfinite: NDArray[np.bool_], verdict: JudgeVerdict | None
) -> BatchOutcome:
    """The batch outcome from masks of changed samples and of samples with new NaN or infinity, bool[n] both.

    ``verdict``: the verdict on the samples that changed and are finite, in order; None if there are no such samples.
    """
    codes, severity = np.zeros(len(changed), np.uint8), np.zeros(len(changed))
    if verdict is not None:
        judged = changed & ~nonfinite
        codes[judged] = np.where(verdict.incorrect, Outcome.SDC, Outcome.BENIGN)
        severity[judged] = verdict.severity
    codes[nonfinite], severity[nonfinite] = Outcome.NONFINITE, np.inf
    return BatchOutcome(codes, severity)


def has_one_result_a_sample(output: Any, samples: int) -> bool:
    """Whether an output is a list with one dict per sample, as detection models return it."""
    return isinstance(output, list) and len(output) == samples and all(isinstance(o, Mapping) for o in output)


def has_nonfinite_values(output: Any) -> bool:
    """Whether any tensor of an output holds NaN or infinity."""
    return any(bool(samples_with_nonfinite(tensor, 1).any()) for tensor in leaves(output))


def changed_and_nonfinite(
    golden_output: Any, faulty_output: Any, samples: int, wait: bool = True
) -> tuple[Tensor, Tensor]:
    """Masks of the samples that changed, and of those with new NaN or infinity, bool[samples] both.

    ``wait=False``: everything stays on the device of the outputs, and the CPU does not wait for it. All outputs must be
    on one device.
    """
    golden, faulty = list(leaves(golden_output)), list(leaves(faulty_output))
    place = faulty[0].device if faulty and not wait else torch.device("cpu")
    if len(golden) != len(faulty):
        changed = torch.ones(samples, dtype=torch.bool, device=place)
    else:
        changed = torch.zeros(samples, dtype=torch.bool, device=place)
        for g, f in zip(golden, faulty, strict=True):
            changed = changed | samples_that_differ(g, f, samples).to(place)
    nonfinite = torch.zeros(samples, dtype=torch.bool, device=place)
    if not wait or bool(changed.any()):
        for f in faulty:
            nonfinite = nonfinite | samples_with_nonfinite(f, samples, wait).to(place)
    return changed, nonfinite & changed
