"""``unsilent placement SYSTEM``: rank placements of parallelism axes and reductions by predicted time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Request
from unsilent.cli.paths import check_writable
from unsilent.command import EXPLAIN, Command, DisplayOptions, PageOptions
from unsilent.placement.options import MeasureOptions, PlacementOptions
from unsilent.report.model import Report

if TYPE_CHECKING:
    from unsilent.placement.ranking import Reduction


def placement(request: Request) -> Report | int:
    """Rank where to place the axes of parallelism on a machine, and of which collectives to compose a reduction.

    Ranks by predicted time and runs nothing. To measure bandwidth and latency instead of assuming them, run unsilent placement
    measure.
    """
    from unsilent.placement.loading import load_system
    from unsilent.placement.ranking import rank_placements
    from unsilent.placement.report import report
    from unsilent.placement.report import script as make_script

    start = time.perf_counter()
    options = request[PlacementOptions]
    if options.code and (request[DisplayOptions].as_json or request[PageOptions].output):
        raise UsageError("--code prints Python and nothing else; leave out --json and --output, or --code")
    axes, reductions = options.axis_sizes(), options.reductions()
    system = load_system(options.system)
    model = options.cost_model(system)
    ranking = rank_placements(system, axes, reductions, model, limit=options.max_steps, top=options.top)
    if options.code:
        best = ranking.placements[0]
        print(make_script(best.placement, reductions, [programs[0] for programs in best.programs]))
        return 0
    command = request.command_line("placement", PlacementOptions)
    notes = range_notes(options, reductions)
    return report(ranking, command, time.perf_counter() - start, options.top, notes)


def range_notes(options: PlacementOptions, reductions: Sequence[Reduction]) -> list[str]:
    """A note for each payload that is larger than all measured ones."""
    if not options.system.endswith(".json"):
        return []
    from unsilent.basics.sizes import human_bytes
    from unsilent.placement.measure import load_sweep

    largest = max(row.payload for row in load_sweep(options.system).rows)
    return [
        f"the time for {human_bytes(round(reduction.payload))} is extrapolated: the largest payload that was measured is "
        f"{human_bytes(largest)}"
        for reduction in reductions
        if reduction.payload > largest
    ]


def measure(request: Request) -> int:
    """Measure the collectives of this job on every grouping of its ranks, and fit bandwidth and latency of the machine's levels.

    Under torchrun, the ranks of that job are measured; otherwise, as many processes are started on this computer. Prints the
    description of the machine as TOML.
    """
    from unsilent.placement.measure import fitted_system, measure_here
    from unsilent.placement.system import system_toml

    options = request[MeasureOptions]
    check_writable(options.output)
    levels = options.level_counts()
    sweep = measure_here(tuple(levels.values()), tuple(levels), options.payloads(), options.repeats)
    if sweep is None:
        return 0
    if options.output is not None:
        try:
            sweep.save(options.output)
        except OSError as error:
            problem = f"cannot write the sweep {options.output}: {error.strerror}"
            raise UsageError(f"{problem}; give another --output") from None
    print(system_toml(fitted_system(sweep)), end="")
    return 0


COMMAND = Command(
    "placement", EXPLAIN, "unsilent placement a100:4 --axes data=16,tensor=4 --reduce data", (PlacementOptions,),
    placement, has_report=True,
)  # fmt: skip
MEASURE_COMMAND = Command(
    "placement measure", EXPLAIN, "unsilent placement measure --levels node=1,gpu=4 -o sweep.json", (MeasureOptions,),
    measure,
)  # fmt: skip
