"""``unsilent noise --explain`` and ``--control``: why runs of a user's loop differ, and whether they end in the same bits.

Exit codes: 0 no difference found, 1 runs differ, 2 the loop is not there, raises, does nothing or does not end, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from unsilent.errors import UsageError


def explain_loop(
    ref: str,
    *,
    control: bool = False,
    runs: int | None = None,
    steps: int | None = None,
    deadline: float | None = None,
    arguments: Sequence[str] = (),
    as_json: bool = False,
    plain: bool = False,
    quiet: bool = False,
) -> int:
    """Print what was found about a loop and return the exit code.

    Args:
        ref: ``file.py:loop``, ``package.module:loop`` or a built-in training.
        control: Say whether runs end in the same bits, and explain where they do not.
        runs, steps, deadline, arguments: See `explain_run_differences`; None: the default there.
    """
    from unsilent.cli.main import INTERRUPTED
    from unsilent.cli.report_output import show_report
    from unsilent.studies import nondeterminism
    from unsilent.studies.nondeterminism.report import finding_summary_line, report
    from unsilent.studies.nondeterminism.running import DEADLINE
    from unsilent.studies.nondeterminism.source_search import RUNS

    if not ref.strip():
        raise UsageError(
            "no training loop was named; give file.py:loop, where loop is a function without arguments that trains a model"
        )
    asked: dict[str, Any] = {
        "runs": RUNS if runs is None else runs,
        "steps": steps,
        "deadline": DEADLINE if deadline is None else deadline,
        "arguments": tuple(arguments),
        "notify": _silent if quiet else _notify,
        "on_finding": lambda finding: None if quiet else _notify(finding_summary_line(finding)),
    }
    search = nondeterminism.check_reproducibility if control else nondeterminism.explain_run_differences
    explained = search(ref, **asked)
    show_report(report(explained, arguments), None, as_json, plain)
    return INTERRUPTED if explained.interrupted else 0 if explained.has_no_difference else 1


def _notify(text: str) -> None:
    """A line for each run and finding, on a terminal or not: a search takes minutes."""
    print(f"unsilent: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    """Nobody watches."""
