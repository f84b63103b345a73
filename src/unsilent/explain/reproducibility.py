"""Check that all runs of a loop end in the same bits; if not, find the switches that achieve it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from unsilent.basics.errors import UsageError
from unsilent.explain.results import ReproducibilityResult
from unsilent.explain.running import DEADLINE, Launcher, Notify, Run
from unsilent.explain.source_search import RUNS, NondeterminismSearch, Pins, Shown, check


def check_reproducibility(
    ref: str,
    *,
    runs: int = RUNS,
    steps: int | None = None,
    deadline: float = DEADLINE,
    arguments: Sequence[str] = (),
    notify: Notify = lambda text: None,
    on_finding: Shown = lambda finding: None,
) -> ReproducibilityResult:
    """Check whether runs of a loop end in the same bits, and find switches that make them do so.

    Arguments and errors are those of `explain_run_differences`. After Ctrl-C the result so far is returned if runs are known to
    differ.

    Runs are not watched: nothing intervenes between the program and torch. Only if they differ, the sources are searched for,
    superfluous ones are left out, and the rest is tested on runs that are not watched.
    """
    check(runs, steps, deadline)
    begun = time.perf_counter()
    with Launcher(ref, steps, deadline, notify, arguments) as launcher:
        ends, first = _ends(launcher, frozenset(), runs)
        explained, switches, verified, interrupted = None, frozenset[str](), not first, False
        try:
            if first:
                search = NondeterminismSearch(launcher, runs, on_finding)
                explained = search.find_sources(ref, begun)
                interrupted = explained.interrupted
                switches = frozenset(f.source for f in explained.findings if f.source)
                if switches and not interrupted and all(f.source for f in explained.findings):
                    switches = search.without_superfluous_pin(switches)
                    verified = not _ends(launcher, switches, runs)[1]
        except KeyboardInterrupt:
            interrupted = True
        ordered = tuple(f.source for f in explained.findings if f.source in switches) if explained else ()
        return ReproducibilityResult(
            ref,
            runs,
            launcher.launched,
            ends["steps"],
            len(ends["final"]),
            first,
            tuple(s for s in ordered if s),
            verified,
            explained,
            launcher.machine,
            time.perf_counter() - begun,
            interrupted,
        )


def _ends(launcher: Launcher, pins: Pins, runs: int) -> tuple[Run, str]:
    """Report of the first run, and the name of the first tensor with other bits in a later run, or an empty text."""
    # New memory can only be set to zero if operations are watched.
    watched = "memory" in pins
    first_run = launcher.run(pins, 0, log_operations=watched, hash_final_state=True)
    launcher.delete_records(first_run)
    if not first_run["final"]:
        raise UsageError(
            "the loop called no module, used no optimizer and returned no tensor, so there is nothing to compare; "
            "return the trained model or its tensors from the loop"
        )
    for number in range(1, runs):
        later_run = launcher.run(pins, number, log_operations=watched, hash_final_state=True)
        launcher.delete_records(later_run)
        if first := _first_unequal(first_run["final"], later_run["final"]):
            return first_run, first
    return first_run, ""


def _first_unequal(left: Sequence[Sequence[object]], right: Sequence[Sequence[object]]) -> str:
    for a, b in zip(left, right, strict=False):
        if list(a) != list(b):
            return str(a[0])
    if len(left) != len(right):
        longer = left if len(left) > len(right) else right
        return str(longer[min(len(left), len(right))][0])
    return ""
