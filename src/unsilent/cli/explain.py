"""``unsilent explain LOOP``: find out why runs of a training loop differ, and the cost of determinism.

Exit codes: 0 no difference found, or costs measured, 1 runs differ, 2 the loop does not exist, raises an exception, does
nothing or does not end, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, PRECISION_PANEL, WORKLOAD_PANEL, Option, Request
from unsilent.cli.paths import check_writable
from unsilent.command import EXPLAIN, Command, DisplayOptions, PageOptions, ProgressOptions

NO_LOOP = (
    "no training loop was named; give file.py:loop, where loop is a function without arguments that trains a model"
)
INTERRUPTED = 130


@dataclass(frozen=True)
class ExplainOptions:
    """Options of ``unsilent explain``.

    Attributes:
        runs, steps, deadline: See `explain_run_differences`; ``None`` for the default there.
    """

    loop: Annotated[str | None, Option(
        "The training loop: file.py:loop, package.module:loop or a built-in training. Arguments after -- are its script's.",
        WORKLOAD_PANEL, missing_error=NO_LOOP)] = None  # fmt: skip
    check_only: Annotated[bool, Option(
        "Compare only the bits with which runs end; search for the cause only if they differ.",
        WORKLOAD_PANEL)] = False  # fmt: skip
    cost: Annotated[bool, Option(
        "Search for nothing; time steps with each source of variation pinned in turn, within the same runs.",
        WORKLOAD_PANEL)] = False  # fmt: skip
    runs: Annotated[int | None, Option(
        "Number of runs that are compared or timed.", PRECISION_PANEL, default_text="3")] = None  # fmt: skip
    steps: Annotated[int | None, Option(
        "Optimizer updates after which a run is ended.", WORKLOAD_PANEL,
        default_text="as many as the loop makes; with --cost, as many as are timed")
    ] = None  # fmt: skip
    deadline: Annotated[float | None, Option(
        "Seconds that one run may take.", EXECUTION_PANEL, default_text="600")] = None  # fmt: skip


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before ``--`` and the words after it."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), tuple(words[at + 1 :])


def explain(request: Request) -> int:
    """Find out whether runs of a training loop end with the same bits, and if not, what makes them differ.

    Runs the loop several times, unchanged, and then with one source of variation after the other pinned (made the same in every
    run). --cost measures what determinism costs: the time of steps with each source pinned.
    """
    from unsilent.cli.report_output import show_report
    from unsilent.explain import check_reproducibility, explain_run_differences, measure_step_costs
    from unsilent.explain.report import finding_summary_line, report

    options, display, quiet = request[ExplainOptions], request[DisplayOptions], request[ProgressOptions].quiet
    if not options.loop or not options.loop.strip():
        raise UsageError(NO_LOOP)
    if options.cost and options.check_only:
        raise UsageError("--cost times steps and --check-only compares runs; give one of them")
    page, notify = request[PageOptions].output, _silent if quiet else _notify
    check_writable(page)
    if options.cost:
        costs = measure_step_costs(options.loop, **_limits(options), arguments=request.script, notify=notify)
        show_report(costs.report(), page, display.as_json, display.plain)
        return 0
    search = check_reproducibility if options.check_only else explain_run_differences
    explained = search(
        options.loop,
        **_limits(options),
        arguments=request.script,
        notify=notify,
        on_finding=lambda finding: notify(finding_summary_line(finding)),
    )
    show_report(report(explained, request.script), page, display.as_json, display.plain)
    return INTERRUPTED if explained.interrupted else 0 if explained.has_no_difference else 1


def _limits(options: ExplainOptions) -> dict[str, Any]:
    """The limits that the user set, by name."""
    limits = {"runs": options.runs, "steps": options.steps, "deadline": options.deadline}
    return {name: value for name, value in limits.items() if value is not None}


def _notify(text: str) -> None:
    """Print a line on stderr about the progress of the search."""
    print(f"unsilent: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    """Ignore a progress message."""


COMMAND = Command(
    "explain", EXPLAIN, "unsilent explain train.py:main",
    (ExplainOptions, PageOptions, DisplayOptions, ProgressOptions), explain, split_script=split_at_dashes,
)  # fmt: skip
