"""``unsilent placement SYSTEM``: placements of parallelism axes and reduction programs, ranked by predicted time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from unsilent.errors import UsageError
from unsilent.options import OptionValues, options_of
from unsilent.placement.options import MeasureOptions, PlacementOptions
from unsilent.placement.ranking import Reduction

HELP = """Rank where the axes of parallelism are placed on a machine, and how a reduction is composed of collectives.

unsilent placement measure fits the bandwidth and latency of this job's levels.
"""
MEASURE_HELP = """Measure the collectives of this job on every grouping of its ranks, and fit the levels of the machine.

Under torchrun it measures that job, else processes that are started here. Prints the description of the machine as TOML.
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
    model = options.cost_model(system)
    ranking = rank_placements(system, axes, reductions, model, limit=options.max_steps, top=options.top)
    if options.code:
        best = ranking.placements[0]
        print(make_script(best.placement, reductions, [programs[0] for programs in best.programs]))
        return 0
    command = asked.command_line("placement", PlacementOptions)
    made = report(ranking, command, time.perf_counter() - start, options.top, range_notes(options, reductions))
    show_report(made, options.output, options.as_json, options.plain)
    return 0


def range_notes(options: PlacementOptions, reductions: Sequence[Reduction]) -> list[str]:
    """A note for each payload beyond those that were measured."""
    if not options.system.endswith(".json"):
        return []
    from unsilent.placement.measure import load_sweep
    from unsilent.sizes import human_bytes

    largest = max(row.payload for row in load_sweep(options.system).rows)
    return [
        f"{human_bytes(round(one.payload))} is extrapolated: the largest payload that was measured is {human_bytes(largest)}"
        for one in reductions
        if one.payload > largest
    ]


def check_page(page: Path | None) -> None:
    """Raise ``UsageError`` for a page that cannot be written there, before anything runs."""
    if page is not None and (not page.parent.is_dir() or page.is_dir()):
        raise UsageError(
            f"cannot write {page}: its folder does not exist, or a folder has that name; give another --output"
        )


def make_measure_app(**settings: Any) -> typer.Typer:
    """``unsilent placement measure`` as a command of its own."""
    from unsilent.cli.typer_options import Panels, make_typer_function

    app = typer.Typer(**settings)
    app.command("measure", short_help=MEASURE_HELP.partition("\n")[0], cls=Panels)(
        make_typer_function(options_of(MeasureOptions), measure, MEASURE_HELP)
    )
    return app


def measure(given: dict[str, Any], script: Sequence[str] = ()) -> int:
    """Measure, write the sweep, and print the fitted machine as TOML or JSON."""
    from unsilent.placement.measure import fitted_system, measure_here
    from unsilent.placement.system import system_toml

    options = OptionValues((MeasureOptions,), given).make_dataclass(MeasureOptions)
    check_page(options.output)
    levels = options.level_counts()
    sweep = measure_here(tuple(levels.values()), tuple(levels), options.payloads(), options.repeats)
    if sweep is None:
        return 0
    if options.output is not None:
        try:
            sweep.save(options.output)
        except OSError as error:
            raise UsageError(
                f"cannot write the sweep {options.output}: {error.strerror}; give another --output"
            ) from None
    print(system_toml(fitted_system(sweep)), end="")
    return 0
