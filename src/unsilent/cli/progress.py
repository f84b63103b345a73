"""Progress displays of a running campaign: a bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from unsilent.campaigns.observer import Observer
from unsilent.report.text import count_text, number_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from unsilent.campaigns.spec import TrialId

LINE_SECONDS = 10.0


class Display(Observer):
    """A base class of progress displays, which shows nothing.

    A subclass shows progress during a ``with`` block.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def trial(self, row: object) -> None: ...

    def worker_lost(self, trial: TrialId, why: str) -> None:
        self.say(f"trial {trial}: its worker {why}")


def make_observer(*, quiet: bool, plain: bool, noun: str = "trial") -> Display:
    """The progress display for these settings: none, lines or a live bar, on stderr.

    ``noun`` is the name of the counted things.
    """
    if quiet:
        return Display()
    return LineDisplay(noun) if plain or not sys.stderr.isatty() else BarDisplay(noun)


class LineDisplay(Display):
    """A progress display that prints a line on stderr at each start and every ten seconds."""

    def __init__(self, noun: str) -> None:
        self._noun, self._description = noun, ""
        self._last_line_time = self._began = time.monotonic()
        self._done = self._before = self._total = 0

    def loading(self, description: str, done: float, total: float) -> None:
        if description != self._description:
            print(description, file=sys.stderr)
        self._description = description

    def planned(self, done: int, total: int) -> None:
        self._done = self._before = done
        self._total = total
        self._last_line_time = self._began = time.monotonic()
        print(count_text(total, self._noun) + (f", {done:,} of them already stored" if done else ""), file=sys.stderr)

    def say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)

    def trial(self, row: object) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last_line_time >= LINE_SECONDS and self._done > self._before:
            self._last_line_time = now
            rate = (self._done - self._before) / (now - self._began)
            left = (self._total - self._done) / rate
            done = f"{self._done:,}/{self._total:,} {self._noun}s"
            print(f"{done}, {number_text(rate)}/s, {left:.0f} s left", file=sys.stderr)


class BarDisplay(Display):
    """A progress display with a live bar, the rate and the time left."""

    def __init__(self, noun: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._noun = noun
        self._loading: TaskID | None = None
        self._trials: TaskID | None = None

    def __enter__(self) -> Self:
        self._loading = self._progress.add_task("loading the workload", total=None, rate="")
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def loading(self, description: str, done: float, total: float) -> None:
        if self._loading is None:
            self._loading = self._progress.add_task(description, rate="")
        self._progress.update(self._loading, description=description, completed=round(done), total=round(total))

    def planned(self, done: int, total: int) -> None:
        if self._loading is not None:
            self._progress.remove_task(self._loading)
            self._loading = None
        if self._trials is not None:
            self._progress.remove_task(self._trials)
        self._trials = self._progress.add_task(f"{self._noun}s", completed=done, total=total, rate="")

    def say(self, sentence: str) -> None:
        self._progress.console.print(sentence, markup=False)

    def trial(self, row: object) -> None:
        assert self._trials is not None
        task = self._progress.tasks[-1]
        self._progress.update(self._trials, advance=1, rate=f"{number_text(task.speed)}/s" if task.speed else "")
