"""The executor that runs trials of any kind in this process: for live workload objects, and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from unsilent.basics.closing import Closing
from unsilent.basics.errors import ProcessUnusable, UnsilentError
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.runner import WorkerJob, run_trials_in_order
from unsilent.campaigns.spec import Baseline, CampaignRow, DeferredTrial, TrialId
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.workloads.process_side_effects import forget_notes, take_notes
from unsilent.workloads.trainings.randomness import save_generator_states


class InlineExecutor(Closing):
    """Runs trials here. Threads, settings of determinism and random generators are put back by ``close``."""

    def __init__(self, job: WorkerJob, observer: Observer | None = None) -> None:
        self._watch = Stopwatch()
        self._threads, self._generators = torch.get_num_threads(), save_generator_states()
        self._held: list[CampaignRow] = []
        self._observer = observer or Observer()
        forget_notes()
        self.runner: Any = job.make_runner(
            job.spec, progress=self._observer.loading, worker_settings=job.worker_settings
        )

    def establish_baseline(self) -> Baseline:
        """The baseline of the runner."""
        baseline: Baseline = self.runner.establish_baseline()
        return baseline

    def ask_runner(self, what: str, *arguments: Any) -> Any:
        """The answer of the runner."""
        return self.runner.answer(what, *arguments)

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[CampaignRow]]:
        """Run trials in the order given; rows come together once a proof covers them."""
        held: list[CampaignRow] = []
        try:
            waiting = iter(trials)
            while chunk := list(islice(waiting, self.runner.max_trials_together)):
                for row in self._chunk(chunk):
                    held.append(row)
                    self._observer.trial(row)
                    if not self.runner.unverified_row_count:
                        ready, held = held, []
                        yield ready
            self.runner.verify_restored_state()
        except KeyboardInterrupt:
            self._held = held
            raise
        except ProcessUnusable as lost:
            what = f"trial {chunk[0]}" if len(chunk) == 1 else "a trial"
            raise UnsilentError(
                f"after {what} this process cannot run another trial ({lost}); stored results are safe: give the workload as "
                "FILE.py:NAME, so that trials run in worker processes, which can be replaced"
            ) from None
        yield held

    def _chunk(self, chunk: list[TrialId]) -> Iterator[CampaignRow]:
        """The rows of some trials; those that ran out of memory run again, alone."""
        again = []
        for row in run_trials_in_order(self.runner, chunk):
            if isinstance(row, DeferredTrial):
                again.append(row.trial)
            else:
                yield row
        for trial in again:
            yield from run_trials_in_order(self.runner, [trial], alone=True)
        for note in take_notes(self.runner.workload_name):
            self._observer.say(note)

    def wall_seconds(self, work: float) -> float:
        """The wall seconds of this much work: as long, since there are no other workers."""
        return work

    def salvage(self) -> list[CampaignRow]:
        """After an interrupt: the rows since the last proof, proven now."""
        rows, self._held = self._held, []
        if rows:
            self.runner.verify_restored_state()
        return rows

    def seconds_since_last_call(self) -> tuple[float, float]:
        """Seconds of this process since it was made, or this was last asked."""
        return self._watch.lap()

    def close(self) -> None:
        """Put back threads, settings and random generators."""
        self.runner.close()
        torch.set_num_threads(self._threads)
        self._generators()
