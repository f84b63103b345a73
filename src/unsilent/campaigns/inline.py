"""The executor that runs trials in this process, for live workload objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from types import TracebackType

import torch

from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.runner import TrialRunner
from unsilent.campaigns.spec import CampaignSpec, Description, Json, Means, RunAlone, TrialId, TrialRow
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.errors import ProcessUnusable, UnsilentError
from unsilent.workloads.base import InferenceWorkload
from unsilent.workloads.process import take_notes


class InlineExecutor:
    """Runs trials here. Thread count is set for the campaign and put back by ``close``."""

    def __init__(
        self,
        spec: CampaignSpec,
        workload: InferenceWorkload | None = None,
        observer: Observer | None = None,
        means: Means | None = None,
    ) -> None:
        self._watch = Stopwatch()
        self._threads = torch.get_num_threads()
        self._held: list[TrialRow] = []
        self._release = getattr(workload, "release", None)
        self._observer = observer or Silent()
        self.runner = TrialRunner(spec, workload, self._observer.loading, means)

    def describe(self) -> Description:
        """What the runner found."""
        return self.runner.describe()

    def explain(self) -> Json:
        """What the runner's engine does."""
        return self.runner.explain()

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[TrialRow]]:
        """Run trials in the order given; rows come together once a proof covers them."""
        held: list[TrialRow] = []
        try:
            waiting = iter(trials)
            while chunk := list(islice(waiting, self.runner.pack)):
                for row in self._chunk(chunk):
                    held.append(row)
                    if not self.runner.unproven:
                        ready, held = held, []
                        yield ready
            self.runner.prove()
        except KeyboardInterrupt:
            self._held = held
            raise
        except ProcessUnusable as lost:
            what = f"trial {chunk[0]}" if len(chunk) == 1 else "a trial"
            raise UnsilentError(
                f"after {what} this process can run no other ({lost}); what was stored is safe: name the workload as "
                "FILE.py:NAME, so that trials run in worker processes, which are replaced"
            ) from None
        yield held

    def _chunk(self, chunk: list[TrialId]) -> Iterator[TrialRow]:
        """The rows of some trials; those that ran out of memory run again, alone."""
        again = []
        for row in self.runner.run_all(chunk):
            if isinstance(row, RunAlone):
                again.append(row.trial)
            else:
                yield row
        yield from map(self.runner.run, again)
        for note in take_notes(self.runner.workload.name):
            self._observer.say(note)

    def salvage(self) -> list[TrialRow]:
        """After an interrupt: the rows since the last proof, proven now."""
        rows, self._held = self._held, []
        if rows:
            self.runner.prove()
        return rows

    def spent(self) -> tuple[float, float]:
        """Seconds of this process since it was made, or this was last asked."""
        return self._watch.lap()

    def close(self) -> None:
        """Put the thread count and the model's training mode back."""
        torch.set_num_threads(self._threads)
        if self._release is not None:
            self._release()

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
