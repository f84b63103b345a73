"""The executor that runs trials in this process, for live workload objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType

import torch

from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.runner import TrialRunner
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow
from unsilent.workloads.base import InferenceWorkload


class InlineExecutor:
    """Runs trials here. Thread count is set for the campaign and put back by ``close``."""

    def __init__(
        self, spec: CampaignSpec, workload: InferenceWorkload | None = None, observer: Observer | None = None
    ) -> None:
        self._threads = torch.get_num_threads()
        self.runner = TrialRunner(spec, workload, (observer or Silent()).loading)

    def describe(self) -> Description:
        """What the runner found."""
        return self.runner.describe()

    def run(self, trials: Iterable[TrialId]) -> Iterator[TrialRow]:
        """Run trials in the order given; the model is proven intact at the end."""
        try:
            for trial in trials:
                yield self.runner.run(trial)
        finally:
            self.runner.prove()

    def cpu_seconds(self) -> float:
        """Nothing beside the driver's own process."""
        return 0.0

    def close(self) -> None:
        """Put the thread count back."""
        torch.set_num_threads(self._threads)

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
