"""Search for the sources that make two runs of a loop differ, by pinning one after the other.

Runs in new processes are compared operation by operation. The first difference shows which sources are likely. Each is pinned in
turn; a source that makes the runs agree, or differ later, is a finding and stays pinned. This is repeated until the runs agree or
nothing helps. If no source helps alone, all are pinned together, and superfluous ones are left out. Results that could be chance
are tested again, with and without the pin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from unsilent.basics.errors import UsageError
from unsilent.explain.operation_records import find_divergence, source_read_locations
from unsilent.explain.results import (
    FoundSource,
    NondeterminismResult,
    RunDivergence,
    SourceRead,
    UserCodeLine,
)
from unsilent.explain.running import DEADLINE, Launcher, Notify, Run, check_limits
from unsilent.explain.sources import DATA, KERNEL, PATH, SOURCES, candidates

# Runs are compared with the first of their set. The probabilities here assume independent comparisons; those of one
# set are only approximately independent.

RARE_DIFFERENCE_SHARE = 0.1
"""Share of runs with a difference for which the chance of missing it is reported if all runs agree."""
DIFFERING_SETS_NEEDED = 2
"""Number of times that runs must differ again before a guess is reported as found, as a single time could be chance."""
_CHANCE = 0.03


def probability_of_missing(runs: int, share: float = RARE_DIFFERENCE_SHARE) -> float:
    """Probability that all runs agree although a given share of runs has a difference.

    The difference then shows in none of these runs, or in all.

    >>> round(probability_of_missing(3), 2)
    0.73
    """
    return float((1 - share) ** runs + share**runs)


def probability_of_chance_agreement(plain: int, pinned: int) -> float:
    """Probability that ``pinned`` comparisons all agree by chance.

    Given are ``plain`` comparisons without the pin, of which the last and one other differed. This is the posterior predictive
    with a uniform prior on the share of differing runs, which a pin without effect does not change.

    >>> round(probability_of_chance_agreement(2, 6), 3)
    0.012
    """
    less, more = plain - 1, plain - 1 + pinned
    return less * (less + 1) * (less + 2) / (more * (more + 1) * (more + 2))


def agreeing_runs_needed(plain: int) -> int:
    """Number of agreeing comparisons from which on chance is unlikely (3 %).

    It is 4, 7, 9, ... for ``plain`` of 2, 3, 4, ...
    """
    return next(pinned for pinned in count() if probability_of_chance_agreement(plain, pinned) < _CHANCE)


RUNS = 3
"""Default number of compared runs, as two runs may agree by chance if few random numbers are drawn."""
_READS = 5
"""Number of lines that are shown for a source."""
_GUESSED = (DATA, PATH)
"""Kinds of differences that do not show their source by themselves."""
_PLAIN_SETS, _PINNED_SETS = 3, 5
"""Maximum number of sets of runs to distinguish a guess from chance: without the pin, until two differ, and with it."""
_NO_WORK = 2
"""Number of operations up to which a loop counts as doing nothing."""
Pins = frozenset[str]
Shown = Callable[[FoundSource], None]


def explain_run_differences(
    ref: str,
    *,
    runs: int = RUNS,
    steps: int | None = None,
    deadline: float = DEADLINE,
    arguments: Sequence[str] = (),
    notify: Notify = lambda text: None,
    on_finding: Shown = lambda finding: None,
) -> NondeterminismResult:
    """Find the sources that make runs of ``ref`` differ.

    Args:
        ref: ``file.py:loop`` or ``package.module:loop``, a function without arguments or a training workload.
        runs: Number of runs that are compared.
        steps: Number of optimizer updates after which a run is ended.
        deadline: Time limit of a run in seconds.
        arguments: Arguments of the user's script, its ``sys.argv[1:]``.
        notify: Called with a line about every run, and from time to time during the run.
        on_finding: Called with every finding as soon as it is made.

    Ctrl-C after the first run ends the search: the findings so far are returned, marked as ``interrupted``.

    Raises:
        UsageError: arguments are wrong, nothing has that name, or a run does not end. UserCodeError: the loop raises an error.
    """
    check(runs, steps, deadline)
    begun = time.perf_counter()
    with Launcher(ref, steps, deadline, notify, arguments) as launcher:
        return NondeterminismSearch(launcher, runs, on_finding).find_sources(ref, begun)


def check(runs: int, steps: int | None, deadline: float) -> None:
    """Raise ``UsageError`` for a number of runs, steps or seconds that is too small."""
    if runs < 2:
        raise UsageError(f"--runs is {runs}; expected at least 2, because runs are compared with each other")
    check_limits(steps, deadline)


class NondeterminismSearch:
    """The search for the sources of one loop."""

    def __init__(self, launcher: Launcher, runs: int, shown: Shown = lambda finding: None) -> None:
        self._launcher, self._runs, self._on_finding = launcher, runs, shown
        self._findings: list[FoundSource] = []
        self._pins: Pins = frozenset()
        self._open: RunDivergence | None = None
        """First difference of runs with all findings pinned."""
        self._candidates: Pins = frozenset()
        """Sources that are being tested as the cause of this difference."""
        self._sensitive: RunDivergence | None = None
        self._unpinned: Run | None = None
        """First run of all."""
        self._first: Run | None = None
        """First run of the latest condition; its records are kept."""
        self._touched: set[str] = set()
        self._failed: dict[str, str] = {}

    def find_sources(self, ref: str, begun: float) -> NondeterminismResult:
        """Search for all sources, and test whether the number of threads matters."""
        interrupted = False
        try:
            self._search()
        except KeyboardInterrupt:
            if self._unpinned is None:  # nothing is known
                raise
            interrupted = True
        first = self._unpinned
        assert first is not None
        return NondeterminismResult(
            ref,
            self._runs,
            self._launcher.launched,
            first["operations"],
            first["steps"],
            tuple(self._findings),
            self._launcher.machine,
            time.perf_counter() - begun,
            self._sensitive,
            _other_threads(first) if self._sensitive else None,
            self._failed,
            interrupted,
            self._open if interrupted else None,
            tuple(source for source in SOURCES if source in self._candidates) if interrupted else (),
        )

    def _search(self) -> None:
        self._open = self._parting(frozenset())
        assert self._unpinned is not None
        if self._open is None:
            _check_work(self._unpinned)
        while self._open is not None:
            result = self._single_source(self._pins, self._open) or self._together(self._pins, self._open)
            for finding in result or [FoundSource(None, self._open, self._open, self._runs)]:
                self._findings.append(finding)
                self._on_finding(finding)
            if not result:
                return
            self._pins |= {f.source for f in result if f.source}
            self._open, self._candidates = result[-1].divergence_when_pinned, frozenset()
        # With another number of threads, objects have other addresses even if addresses are pinned.
        threads = _other_threads(self._unpinned)
        if threads != self._unpinned["threads"] and not {"threads", "addresses"} & self._pins:
            self._sensitive = self._with_threads(self._pins, threads)

    def without_superfluous_pin(self, pins: Pins) -> Pins:
        """The pins without ``kernels`` if runs agree without it.

        One thread makes most kernels deterministic.
        """
        if {"kernels", "threads"} <= pins and self._parting(pins - {"kernels"}) is None:
            return pins - {"kernels"}
        return pins

    def _parting(self, pins: Pins, earliest: int | None = None) -> RunDivergence | None:
        """The earliest difference between runs with these sources pinned, or None.

        No further runs are made after a difference at or before operation ``earliest``.
        """
        return self._compare_runs(pins, earliest)[0]

    def _compare_runs(self, pins: Pins, earliest: int | None = None) -> tuple[RunDivergence | None, int]:
        """The result of `_parting`, and the number of runs that were compared with the first."""
        if self._first is not None:
            self._launcher.delete_records(self._first)
        first = self._first = self._launcher.run(pins, 0)
        self._unpinned = self._unpinned or first
        self._touched |= set(first["touched"])
        best: RunDivergence | None = None
        for number in range(1, self._runs):
            later_run = self._launcher.run(pins, number)
            self._touched |= set(later_run["touched"])
            parting = find_divergence(self._launcher.folder, first, later_run)
            self._launcher.delete_records(later_run)
            if parting is not None and (best is None or parting.index < best.index):
                best = parting
            if best is not None and (earliest is None or best.index <= earliest):
                return best, number
        return best, self._runs - 1

    def _difference_with_source_pinned(
        self, source: str, pins: Pins, parting: RunDivergence
    ) -> tuple[bool, RunDivergence | None]:
        """Whether pinning one more source removes or delays the difference, and the new difference.

        If the source is only guessed, all runs are made twice: values of a source with few possible values may agree by chance.
        """
        earliest: RunDivergence | None = None
        for _ in range(self._times(parting)):
            try:
                after = self._parting(pins | {source}, parting.index)
            except UsageError as error:  # a program may fail when a source is pinned
                self._failed[source] = str(error)
                return False, None
            if not is_later_divergence(parting, after):
                return False, after
            earliest = min((p for p in (earliest, after) if p), key=lambda p: p.index, default=None)
        return True, earliest

    @staticmethod
    def _times(parting: RunDivergence) -> int:
        return 2 if parting.kind in _GUESSED else 1

    def _single_source(self, pins: Pins, parting: RunDivergence) -> list[FoundSource]:
        """The first source that removes or delays the difference on its own, in a list, or none."""
        assert self._first is not None
        reads = source_read_locations(self._first)
        for source in candidates(parting.kind, parting.generator, self._touched):
            if source not in pins and source not in self._failed:
                self._candidates = frozenset({source})
                helped, after = self._difference_with_source_pinned(source, pins, parting)
                if not helped:
                    continue
                finding = FoundSource(source, parting, after, self._runs * self._times(parting), _reads(reads, source))
                if result := self._confirmed_findings([finding], pins):
                    return result
        return []

    def _confirmed_findings(self, findings: list[FoundSource], pins: Pins) -> list[FoundSource]:
        """The findings if they are not due to chance, otherwise none.

        They are marked as unsure if chance cannot be ruled out.

        Runs without the pins are repeated until they differ twice, as runs that differ rarely agree by chance, pinned or not. The
        rarer the difference, the more pinned runs have to agree. An operation that returned or drew different bits for the same
        inputs is not a guess.
        """
        parting, after, runs = findings[0].parting, findings[0].divergence_when_pinned, findings[0].runs
        if parting.kind not in _GUESSED:
            return findings
        # If all agreed, any difference counts; otherwise one that is not later than before.
        latest = None if after is None else parting.index
        parted, compared = self._until_parted(pins, latest)
        if not parted and after is not None:  # without the pin they differ later as well
            return []
        # A set of runs has one comparison fewer than runs.
        agreed, each = runs - runs // self._runs, self._runs - 1
        most = agreed + _PINNED_SETS * each
        enough = agreeing_runs_needed(compared) if parted == DIFFERING_SETS_NEEDED else most + 1
        # At least once more; only once if more cannot decide it.
        goal = enough if enough <= most else agreed + each
        pinned = pins | {f.source for f in findings if f.source}
        while True:
            helped, then = self._pinned_all(pinned, parting)
            if not helped:
                return []
            agreed, runs = agreed + each, runs + self._runs
            late = latest is None and then is not None  # the pin was not sufficient; the rest is rare
            after = min((p for p in (after, then) if p), key=lambda p: p.index, default=None)
            if agreed >= goal or late:
                return [
                    replace(f, divergence_when_pinned=after, runs=runs, may_be_chance=late or agreed < enough)
                    for f in findings
                ]

    def _until_parted(self, pins: Pins, latest: int | None) -> tuple[int, int]:
        """Compare sets of runs until `DIFFERING_SETS_NEEDED` of them differ.

        Only differences at or before operation ``latest`` count.

        Returns:
            Number of sets that differed, and number of comparisons that were made.
        """
        parted = compared_sets = 0
        for _ in range(_PLAIN_SETS):
            result, compared = self._compare_runs(pins, latest)
            compared_sets += compared
            parted += result is not None and (latest is None or result.index <= latest)
            if parted == DIFFERING_SETS_NEEDED:
                break
        return parted, compared_sets

    def _together(self, pins: Pins, parting: RunDivergence) -> list[FoundSource]:
        """Sources that remove or delay the difference only if pinned together."""
        pins_left = frozenset(SOURCES) - self._failed.keys()
        self._candidates = pins_left - pins
        helped, after = self._pinned_all(pins_left, parting)
        if not helped:
            return []
        assert self._first is not None
        reads = source_read_locations(self._first)
        groups = self._groups(pins_left - pins)
        while groups:
            out = groups.pop(0)
            helps_less, then = self._pinned_all(pins_left - set(out), parting)
            if helps_less:
                pins_left, after = pins_left - set(out), then
                self._candidates = pins_left - pins
            elif len(out) > 1:
                groups[:0] = [out[: len(out) // 2], out[len(out) // 2 :]]
        ordered = sorted(pins_left - pins, key=list(SOURCES).index)
        together = [
            FoundSource(s, parting, after, self._runs, _reads(reads, s), tuple(k for k in ordered if k != s))
            for s in ordered
        ]
        return self._confirmed_findings(together, pins) if together else []

    def _groups(self, pins: Pins) -> list[list[str]]:
        """Groups of pins to try to leave out, in order.

        First all sources that were never read, then each half of the rest, unlikely ones first.
        """
        likely = [key for key in candidates(DATA, "", self._touched) if key in pins]
        groups = [[key for key in pins if key not in likely], likely[::-1][: len(likely) // 2]]
        return [g for g in (*groups, likely[::-1][len(likely) // 2 :]) if g]

    def _pinned_all(self, pins: Pins, parting: RunDivergence) -> tuple[bool, RunDivergence | None]:
        try:
            after = self._parting(pins, parting.index)
        except UsageError:
            return False, None
        return is_later_divergence(parting, after), after

    def _with_threads(self, pins: Pins, threads: int) -> RunDivergence | None:
        """The first difference between runs with this number of threads and the program's own, or None."""
        assert self._first is not None
        try:
            run = self._launcher.run(pins, 0, threads=threads)
        except UsageError:
            return None
        return find_divergence(self._launcher.folder, self._first, run)


def _other_threads(run: Run) -> int:
    """Number of threads for a test whether the number of threads matters."""
    return (os.cpu_count() or 1) if run["threads"] == 1 else 1


def _check_work(run: Run) -> None:
    """Raise ``UsageError`` for a loop that does no work, because all its runs would agree."""
    if not run["steps"] and not run["called"] and run["own"] <= _NO_WORK:
        raise UsageError(
            "the loop runs no torch operation that could differ: no module was called and no optimizer made a step; "
            "give a loop that trains"
        )


def is_later_divergence(before: RunDivergence, after: RunDivergence | None) -> bool:
    """Whether runs now agree, or differ later than before.

    A race may have the same outcome for a while: if one operation returns different bits for the same inputs, a later occurrence
    at the same place does not count.
    """
    if after is None:
        return True
    raced = before.kind == KERNEL and after.kind == KERNEL and before.site == after.site
    return after.index > before.index and not raced


def _reads(known: dict[str, list[tuple[bool, str, UserCodeLine]]], source: str) -> tuple[SourceRead, ...]:
    """Places where a source was read.

    These are the user's lines that read it themselves, or else those that led to it.
    """
    value = known.get(source, [])
    lines = [(call, place) for direct, call, place in value if direct] or [(call, place) for _, call, place in value]
    return tuple(SourceRead(call, place) for call, place in lines[:_READS])
