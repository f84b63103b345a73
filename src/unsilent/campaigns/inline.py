"""The executor that runs trials in this process, for live workload objects and for tests."""

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
    """Runs trials in this process.

    ``close`` restores threads, settings of determinism and random generators.
    """

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
        """Load the workload and return the baseline of the campaign."""
        baseline: Baseline = self.runner.establish_baseline()
        return baseline

    def ask_runner(self, what: str, *arguments: Any) -> Any:
        """Ask the runner a question and return its answer."""
        return self.runner.answer(what, *arguments)

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[CampaignRow]]:
        """Run trials in the given order and yield lists of rows that are verified."""
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
        """The rows of some trials.

        Trials that ran out of memory run again, alone.
        """
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
        """The seconds given as ``work``, since this process is the only worker."""
        return work

    def salvage(self) -> list[CampaignRow]:
        """After an interrupt: the finished rows not yet yielded, verified now."""
        rows, self._held = self._held, []
        if rows:
            self.runner.verify_restored_state()
        return rows

    def seconds_since_last_call(self) -> tuple[float, float]:
        """Wall and CPU seconds of this process since the previous call.

        The first call counts from construction.
        """
        return self._watch.lap()

    def close(self) -> None:
        """Restore threads, settings of determinism and random generators."""
        self.runner.close()
        torch.set_num_threads(self._threads)
        self._generators()
