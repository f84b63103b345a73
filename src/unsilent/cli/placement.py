"""``unsilent placement SYSTEM``: placements of parallelism axes and reduction programs, ranked by predicted time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.options import OptionValues
from unsilent.placement.options import PlacementOptions

HELP = """Rank where the axes of parallelism are placed on a machine, and how a reduction is composed of collectives.

unsilent placement measure fits the bandwidth and latency of this job's levels.
"""
OPTION_CLASSES = (PlacementOptions,)


def placement(given: dict[str, Any], script: Sequence[str] = ()) -> int:
    """Rank, print the report, and write the page where one is asked for; ``given``: options by field."""
    from unsilent.cli.report_output import show_report
    from unsilent.placement.code import script as make_script
    from unsilent.placement.ranking import rank_placements
    from unsilent.placement.report import report
    from unsilent.placement.system import load_system

    start = time.perf_counter()
    asked = OptionValues(OPTION_CLASSES, given)
    options = asked.make_dataclass(PlacementOptions)
    check_page(options.output)
    axes, reductions = options.axis_sizes(), options.reductions()
    system = load_system(options.system)
    ranking = rank_placements(
        system, axes, reductions, options.cost_model(system), limit=options.max_steps, top=options.top
    )
    if options.code:
        best = ranking.placements[0]
        print(make_script(best.placement, reductions, [programs[0] for programs in best.programs]))
        return 0
    command = asked.command_line("placement", PlacementOptions)
    made = report(ranking, command, time.perf_counter() - start, options.top)
    show_report(made, options.output, options.as_json, options.plain)
    return 0


def check_page(page: Path | None) -> None:
    """Raise ``UsageError`` for a page that cannot be written there, before anything runs."""
    if page is not None and (not page.parent.is_dir() or page.is_dir()):
        raise UsageError(
            f"cannot write the report {page}: its folder does not exist, or a folder has that name; give another --output"
        )
