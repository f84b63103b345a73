"""The report of ``unsilent placement``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count, product
from math import prod
from typing import Any

from unsilent.basics.sizes import human_bytes
from unsilent.placement.drawing import MOST_DEVICES, bandwidth_text, hierarchy_figure
from unsilent.placement.placements import Placement
from unsilent.placement.ranking import RankedPlacement, RankedProgram, RankedStep, Ranking, Reduction
from unsilent.report.model import Column, Getter, Plot, Report, Section, Table, TableRow, TextBlock
from unsilent.report.text import count_text, duration_text


def script(
    placement: Placement, reductions: Sequence[Reduction], programs: Sequence[RankedProgram], device_type: str = "cuda"
) -> str:
    """Python code that makes the mesh and runs the program of each reduction.

    Reductions over one device are left out.
    """
    parts, names = [placement.mesh_code(device_type)], set[str]()
    for reduction, program in zip(reductions, programs, strict=True):
        if program.steps:
            name = _new_name(placement, reduction, names)
            names.add(name)
            parts.append(reduction_code(placement, reduction, program, name))
    return "\n\n".join(parts)


def _new_name(placement: Placement, reduction: Reduction, taken: Collection[str]) -> str:
    """Unused function name such as ``reduce_AXES``, with a number if that name is taken."""
    axes = (axis if axis.isidentifier() else f"axis{placement.axes.index(axis)}" for axis in reduction.axes)
    name = "_".join(["reduce", *axes])
    return next(candidate for candidate in chain([name], (f"{name}_{n}" for n in count(2))) if candidate not in taken)


def reduction_code(placement: Placement, reduction: Reduction, ranked: RankedProgram, name: str) -> str:
    """Python code of a function that reduces a tensor in place.

    It needs the variable ``mesh``.
    """
    at = [placement.axes.index(axis) for axis in reduction.axes]
    devices = prod(placement.sizes[i] for i in at)
    lines = "\n".join(f"    {step.statement!r}," for step in ranked.steps)
    return f"""from unsilent.placement import Program, ProgramRunner
from unsilent.placement.synthesis import Grouping, Statement

hierarchy = {ranked.hierarchy!r}
statements = [
{lines}
]
program = Program({devices}, tuple(statement.step(hierarchy) for statement in statements))
members = mesh.mesh.movedim({at!r}, {list(range(-len(at), 0))!r}).reshape(-1, {devices}).sort().values.tolist()
# {reduction.goal} of {human_bytes(round(reduction.payload))} over {", ".join(reduction.axes)}
{name} = ProgramRunner(program, {reduction.goal!r}, members).run"""


METHOD = (
    "Placements are all parallelism matrices: axes in rows, levels of the machine in columns. Programs are all valid "
    "sequences of collectives over slices of the levels that a reduction spans, up to the length limit. "
    "The predicted time of a step is that of its most loaded link, when all groups of the placement reduce at the same time; "
    "the time of a program is the sum over its steps. Where groups of a step have payloads of different sizes, each is charged "
    "with its own, but in the measured model with the largest. The prediction is a ranking, not a measurement."
)


def report(
    ranking: Ranking, command: str = "", seconds: float | None = None, top: int = 10, notes: Sequence[str] = ()
) -> Report:
    """Report on a ranking.

    ``seconds``: duration of the whole command in seconds; ``notes``: further notes.
    """
    best = ranking.placements[0]
    taken = ranking.search_seconds if seconds is None else seconds
    return Report(
        "unsilent/placement/2", "placement", f"Placements on {ranking.system.name}", _headline(ranking),
        _predictions(ranking, top),
        numbers=(
            ("devices", f"{ranking.system.devices:,}", " x ".join(map(str, ranking.system.counts))),
            ("placements", f"{len(ranking.placements):,}", ""),
            ("pairs of placement and program", f"{ranking.candidates:,}", ""),
            ("search time", duration_text(ranking.search_seconds), ""),
        ),
        findings=tuple(_findings(ranking)),
        sections=tuple(_sections(ranking, best, top)),
        facts=(
            ("machine", f"{ranking.system.name}: {ranking.system.source}"),
            ("cost model", ranking.model),
            ("longest program", count_text(ranking.limit, "step")),
            ("time of the search", f"{duration_text(ranking.search_seconds)} of {duration_text(taken)}"),
        ),
        notes=(*_notes(ranking), *notes),
        repeat_command=command,
        method=METHOD,
        further_json=_further(ranking, taken, top),
    )  # fmt: skip


def reduction_text(reduction: Reduction) -> str:
    """Description of a reduction, such as ``all-reduce of 2 GiB over data``."""
    times = f", {reduction.weight:g} times" if reduction.weight != 1 else ""
    return f"{reduction.goal} of {human_bytes(round(reduction.payload))} over {', '.join(reduction.axes)}{times}"


def _headline(ranking: Ranking) -> str:
    best, worst = ranking.placements[0], ranking.placements[-1]
    what = "; ".join(map(reduction_text, ranking.reductions))
    rank = "fastest" if len(ranking.placements) > 1 else "only"
    text = (
        f"{what}: by prediction, the {rank} placement is {best.placement} ({_spread(ranking, best.placement)}) "
        f"with {duration_text(best.seconds)}"
    )
    if len(ranking.placements) > 1 and best.seconds:
        ratio = worst.seconds / best.seconds
        text += f"; the slowest of {len(ranking.placements):,} placements takes {ratio:.3g} times as long"
    return text + "."


def _spread(ranking: Ranking, placement: Placement) -> str:
    """How many components of each level an axis extends over, such as ``data over 4 nodes x 2 gpus``."""
    names = [level.name for level in ranking.system.levels]
    parts = []
    for axis, row in zip(placement.axes, placement.matrix, strict=True):
        factors = (count_text(factor, name) for factor, name in zip(row, names, strict=True) if factor > 1)
        parts.append(f"{axis} over {' x '.join(factors) or '1 device'}")
    return ", ".join(parts)


def _findings(ranking: Ranking) -> Iterator[str]:
    named = [("fastest", ranking.placements[0])]
    if len(ranking.placements) > 1:
        named.append(("slowest", ranking.placements[-1]))
    for name, placement in named:
        for reduction, programs in zip(ranking.reductions, placement.programs, strict=True):
            ranked = programs[0]
            over = f"reduction over {', '.join(reduction.axes)}"
            if ranked.bottleneck is None:
                yield f"{name} placement {placement.placement}, {over}: nothing to reduce"
                continue
            gain = f" ({ranked.ratio:.3g} times as fast as a single {reduction.goal})" if len(ranked.steps) > 1 else ""
            yield (
                f"{name} placement {placement.placement}, {over}: {ranked.text(ranking.system)}{gain}; "
                f"{explanation(ranking, ranked, ranked.bottleneck)}"
            )


def explanation(ranking: Ranking, ranked: RankedProgram, step: RankedStep) -> str:
    """Sentence on the link that determines the time of a step, and the groups that share it."""
    level = ranking.system.levels[step.cost.level]
    groups = count_text(step.cost.flows, "group")
    text = (
        f"{groups} {'share' if step.cost.flows > 1 else 'uses'} the link out of each {level.name} "
        f"({bandwidth_text(level.bandwidth)})"
    )
    if len(ranked.steps) == 1:
        return text
    number, share = ranked.steps.index(step) + 1, 100 * step.cost.seconds / ranked.seconds
    what = f"{step.statement.collective} of {human_bytes(round(step.payload))}"
    return f"in its slowest step (step {number}: {what}, {share:.0f} % of the time), {text}"


def _notes(ranking: Ranking) -> Iterator[str]:
    yield (
        "flat: a single collective over all devices that reduce together, on the same placement; flat / best and flat / this: "
        "its time divided by that of the best programs, or of the program in this row (above 1: flat is slower)"
    )
    yield "predicted: time of communication alone; its overlap with computation is not modelled"
    counted = {axis for reduction in ranking.reductions for axis in reduction.axes}
    if others := [axis for axis in ranking.axes if axis not in counted]:
        yield f"no reduction is over {', '.join(others)}: communication over it is not counted, and does not affect the order"
    levels = ", ".join(level.name for level in ranking.system.levels)
    yield (
        f"a placement is a matrix with a row for each axis ({', '.join(ranking.axes)}) and a column for each level of the "
        f"machine ({levels}); an entry says over how many components of the level the axis extends"
    )
    yield f"bandwidth and latency: {ranking.system.source}"


# -- tables --------------------------------------------------------------------------------------------------------------


def _sections(ranking: Ranking, best: RankedPlacement, top: int) -> Iterator[Section]:
    lead = "Every placement with the best program of each reduction."
    yield Section("Placements", lead, (_placement_table(ranking, top),))
    for number, (reduction, programs) in enumerate(zip(ranking.reductions, best.programs, strict=True)):
        yield Section(
            f"Programs: {reduction_text(reduction)}",
            f"The fastest programs on placement {best.placement}, and the steps of the first one.",
            (_program_table(ranking, reduction, programs), _step_table(ranking, programs[0])),
        )
        yield Section(
            f"Machine: {', '.join(reduction.axes)}",
            f"Devices of one colour reduce together (colours repeat after seven groups); each shows its coordinates on the "
            f"axes {', '.join(best.placement.axes)}.",
            (Plot(
                f"hierarchy{number}", f"Hierarchy of {ranking.system.name} with placement {best.placement}",
                hierarchy_figure(ranking.system, best.placement, reduction),
            ),),
        )  # fmt: skip
    tables: list[Table] = [_level_table(ranking)]
    if ranking.system.devices <= MOST_DEVICES:
        tables.append(_grid_table(best))
    yield Section("Levels", "What the prediction assumes, and where each coordinate lies.", tuple(tables))
    lines = tuple((None, f"`{line}`") for line in _script(ranking, best).split("\n") if line)
    yield Section("Code", "Mesh and programs of the fastest placement, for torch.", (TextBlock(lines),))


def _placement_table(ranking: Ranking, top: int) -> Table:
    best, system = ranking.placements[0], ranking.system
    axes = [", ".join(reduction.axes) for reduction in ranking.reductions]
    several = len(axes) > 1
    columns = (
        Column("placement", of=lambda placement: str(placement.placement)), _time("predicted"),
        _ratio("flat / best", lambda placement: placement.flat_seconds / placement.seconds if placement.seconds else 1.0),
        *(Column.text(f"program, {name}", _of_best(i, lambda p: p.text(system))) for i, name in enumerate(axes)),
        *(_time(f"time, {name}", _of_best(i, lambda p: p.seconds), 1) for i, name in enumerate(axes) if several),
        *(Column.text(f"link of the slowest step{', ' + name if several else ''}", _of_best(i, lambda p: _link(ranking, p)), 2)
          for i, name in enumerate(axes)),
    )  # fmt: skip
    return Table.of(
        ranking.placements, columns, is_emphasised=lambda placement: placement is best, terminal_rows=top, sortable=True
    )


def _of_best(number: int, cell: Getter) -> Getter:
    """Function that returns a table cell for the best program of a reduction."""
    return lambda placement: cell(placement.programs[number][0])


def _time(name: str, of: Getter | str = "seconds", priority: int = 0) -> Column:
    return Column(name, "number", digits=duration_text, of=of, priority=priority)


def _ratio(name: str, of: Getter | str) -> Column:
    return Column(name, "number", digits=".3g", of=of)


def _link(ranking: Ranking, ranked: RankedProgram) -> str:
    step = ranked.bottleneck
    if step is None:
        return "none"
    return f"{ranking.system.levels[step.cost.level].name}, {count_text(step.cost.flows, 'group')}"


def _program_table(ranking: Ranking, reduction: Reduction, programs: tuple[RankedProgram, ...]) -> Table:
    columns = (
        Column.text("program", lambda p: p.text(ranking.system)), _time("predicted"), _ratio("flat / this", "ratio"),
        Column.text("link of the slowest step", lambda p: _link(ranking, p), 1),
    )  # fmt: skip
    return Table.of(programs, columns, f"fastest programs over {', '.join(reduction.axes)}")


def _step_table(ranking: Ranking, ranked: RankedProgram) -> Table:
    columns = (
        Column.text("step", lambda row: row[0]),
        Column("bytes per group", "number", digits=lambda size: human_bytes(round(size)), of=lambda row: row[1].payload),
        _time("predicted", lambda row: row[1].cost.seconds),
        Column.text("link", lambda row: ranking.system.levels[row[1].cost.level].name),
        Column.count("groups on it", lambda row: row[1].cost.flows), Column("algorithm", priority=1,
               of=lambda row: row[1].cost.algorithm),
    )  # fmt: skip
    rows = zip(ranked.text(ranking.system).split("; "), ranked.steps, strict=False)
    return Table.of(rows, columns, "steps of the fastest program", terminal_rows=0)


def _level_table(ranking: Ranking) -> Table:
    system = ranking.system
    columns = (
        Column("level", of=lambda row: row[1].name), Column.count("count", lambda row: row[1].count),
        Column("bandwidth of a link", "number", digits=bandwidth_text, of=lambda row: row[1].bandwidth),
        _time("latency", lambda row: row[1].latency), Column.count("devices on a link", lambda row: system.sharing(row[0])),
        Column.text("kind", lambda row: row[1].link),
    )  # fmt: skip
    return Table.of(enumerate(system.levels), columns, "machine")


def _grid_table(best: RankedPlacement) -> Table:
    grid, axes = best.placement.grid(), best.placement.axes
    places = (Column.count(f"{axes[-1]} {at}") for at in range(grid.shape[-1]))
    columns = (Column(" ".join(axes[:-1]) or "device"), *places)
    rows = (
        TableRow((" ".join(map(str, place)), *map(int, grid[place])))
        for place in product(*(range(size) for size in grid.shape[:-1]))
    )
    return Table(columns, tuple(rows), f"devices of placement {best.placement}", terminal_rows=16)


def _predictions(ranking: Ranking, top: int) -> Table:
    """The machine-readable table of predictions."""
    columns = (
        Column.count("rank"), Column("placement"), Column("reduction", of=lambda row: ",".join(row["reduction"].axes)),
        Column("program", of=lambda row: row["best"].text(ranking.system)),
        _time("seconds", lambda row: row["best"].seconds), _time("flat_seconds", lambda row: row["best"].flat_seconds),
    )  # fmt: skip
    rows = (
        {"rank": rank, "placement": str(placement.placement), "reduction": reduction, "best": programs[0]}
        for rank, placement in enumerate(ranking.placements[:top], 1)
        for reduction, programs in zip(ranking.reductions, placement.programs, strict=True)
    )
    return Table.of(rows, columns)


# -- JSON ----------------------------------------------------------------------------------------------------------------


def _further(ranking: Ranking, seconds: float, top: int) -> dict[str, Any]:
    """Further fields of the JSON report: the ranking, and the results of each placement."""
    names = ("search_seconds", "system", "axes", "reductions", "model", "limit", "candidates")
    rows = [
        {**vars(placement), "rank": rank, "python": _script(ranking, placement),
         "programs": [[{**vars(p), "program": p.text(ranking.system), "ratio": p.ratio} for p in ps]
                      for ps in placement.programs]}
        for rank, placement in enumerate(ranking.placements[:top], 1)
    ]  # fmt: skip
    further = {name: getattr(ranking, name) for name in names}
    return {**further, "seconds": seconds, "placements": len(ranking.placements), "results": rows}


def _script(ranking: Ranking, placement: RankedPlacement) -> str:
    return script(placement.placement, ranking.reductions, [programs[0] for programs in placement.programs])
