"""Interfaces of judges, and the outcomes of a sample.

A judge compares the output of a faulty run with the golden output of the same batch, never with a label: PVF asks whether
the fault changed the answer, not whether the answer was right. Judges are small frozen dataclasses whose ``repr``
re-creates them; that text is part of a campaign's identity.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from unsilent.basics.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


LOG_LIKELIHOOD = "log-likelihood per token"
"""Name of a score in nats; reports show the ratio of perplexities for it as well."""


class Outcome(IntEnum):
    """Outcome of a sample in a trial; the numbers are the codes in the store."""

    MASKED = 0
    """Output bit-identical to the golden output."""
    BENIGN = 1
    """Output differs, decision the same."""
    SDC = 2
    """Decision differs and every value is finite: silent data corruption."""
    NONFINITE = 3
    """NaN or infinity in this sample's output, but not in the golden output: detectable."""
    EXCEPTION = 4
    """The run raised: detectable."""
    CRASH = 5
    """The process running the trial died: detectable."""
    HANG = 6
    """The trial passed its deadline: detectable."""
    SPARED = 7
    """The sample was not evaluated, or no fault of the trial acted in its batch: counted nowhere."""

    @property
    def due(self) -> bool:
        """Whether the error is detected (or detectable) without a dedicated detector."""
        return Outcome.NONFINITE <= self <= Outcome.HANG

    @property
    def incorrect(self) -> bool:
        """Whether it counts as an incorrect output in PVF = D / N, silent or loud."""
        return Outcome.SDC <= self <= Outcome.HANG


def incorrect(codes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each outcome code counts as an incorrect output; same shape."""
    return np.asarray((codes >= Outcome.SDC) & (codes <= Outcome.HANG))


class JudgeVerdict(NamedTuple):
    """Verdict of a judge on a batch: ``incorrect`` bool[n], ``severity`` float64[n] (the judge's own unit, 0 = same)."""

    incorrect: NDArray[np.bool_]
    severity: NDArray[np.float64]


@runtime_checkable
class Judge(Protocol):
    """Decides for each sample whether a faulty output is incorrect compared with the golden one."""

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        """Judge the faulty output of a batch; raises ``UsageError`` if the outputs do not fit the judge."""
        ...
