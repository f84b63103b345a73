"""``unsilent noise --explain`` and ``--control``: why runs of a user's loop differ, and whether they end in the same bits.

Exit codes: 0 no difference found, 1 runs differ, 2 the loop is not there, raises, does nothing or does not end.
"""

from __future__ import annotations

import json
import sys

from unsilent.errors import UsageError


def explain_loop(
    ref: str,
    *,
    control: bool = False,
    runs: int | None = None,
    steps: int | None = None,
    deadline: float | None = None,
    as_json: bool = False,
    plain: bool = False,
    quiet: bool = False,
) -> int:
    """Print what was found about a loop and return the exit code.

    Args:
        ref: ``file.py:loop``, ``package.module:loop`` or a built-in training. control: say whether runs end in the same bits,
            and explain where they do not. runs, steps, deadline: see `unsilent.studies.explaining.explain`; None: the default
            there.
    """
    from unsilent.studies import explaining
    from unsilent.studies.explaining.explain import RUNS
    from unsilent.studies.explaining.running import DEADLINE

    if not ref.strip():
        raise UsageError("no loop was named; give file.py:loop, a function without arguments that trains")
    asked = {
        "runs": RUNS if runs is None else runs,
        "steps": steps,
        "deadline": DEADLINE if deadline is None else deadline,
        "told": _silent if quiet else _told,
    }
    from rich.console import Console

    from unsilent.report import noise_explained as report

    if control:
        ended = explaining.control(ref, **asked)  # type: ignore[arg-type]
        if as_json:
            print(json.dumps(report.controlled_json(ended), indent=2))
        else:
            report.render_controlled(ended, Console(), plain)
        return 0 if ended.agreed else 1
    found = explaining.explain(ref, **asked)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps(report.explained_json(found), indent=2))
    else:
        report.render_explained(found, Console(), plain)
    return 0 if found.agreed else 1


def _told(text: str) -> None:
    """A line for each run, on a terminal or not: a search takes minutes."""
    print(f"unsilent: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    """Nobody watches."""
