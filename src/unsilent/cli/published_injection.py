"""``unsilent replay FILE.csv``: a published injection run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def is_injection_csv(path: Path) -> bool:
    """Whether a file is taken for a published injection rather than for a store."""
    return path.suffix.lower() == ".csv"


def replay_injection_csv(
    file: Path,
    output: Path | None = None,
    *,
    as_json: bool = False,
    plain: bool = False,
    quiet: bool = False,
    **asked: Any,
) -> int:
    """Replay a published injection, write its log and show the result; ``asked``: see `injection_replay.replay_injection`."""
    from unsilent.cli.progress import make_observer
    from unsilent.cli.trace_output import show_trace, trace_path
    from unsilent.faults.isca23_injections import read_injection
    from unsilent.studies.injection_replay import replay_injection
    from unsilent.studies.propagation_report import report

    injection = read_injection(file)
    with make_observer(quiet=quiet, plain=plain) as observer:
        done = replay_injection(injection, **asked, progress=observer.loading)
    page = None if done.trace is None else trace_path(file, "", output)
    if as_json:
        print(json.dumps(done.to_json() | ({} if page is None else {"report": str(page)}), indent=2))
    else:
        print(f"{done}\n\n{'# ' if plain else ''}Log: {done.log}")
    if done.trace is not None and page is not None:
        facts = (("injection", injection.name), ("layer", injection.target_layer), ("weights", done.weights))
        show_trace(report(done.trace, f"how the fault of {injection.name} spreads", facts), page, as_json, plain)
    return 0
