"""What the report of a ranking says of its prediction."""

from __future__ import annotations

from unsilent.placement.ranking import Reduction, plans, rank_placements
from unsilent.placement.report import report
from unsilent.placement.system import Level, System
from unsilent.report.model import Table


def test_the_report_says_what_is_not_modelled():
    system = System("two", (Level("node", 2, 1e9, 0.0), Level("gpu", 2, 1e10, 0.0)))
    shown = report(rank_placements(system, {"data": 4}, [Reduction(("data",), 1e6)]))
    assert any("overlap with computation is not modelled" in note for note in shown.notes)
    assert "each is charged with its own" in shown.method


def test_one_placement_is_not_called_the_fastest():
    system = System("one", (Level("node", 2, 1e9, 0.0), Level("gpu", 2, 1e10, 0.0)))
    shown = report(rank_placements(system, {"data": 4, "pipe": 1}, [Reduction(("data",), 1e6)]))
    assert "the only placement is [[2 2] [1 1]] (data over 2 nodes x 2 gpus, pipe over 1 device) with" in shown.headline
    assert any("no reduction is over pipe" in note for note in shown.notes)


def test_programs_of_each_reduction_are_named_by_its_axes():
    system = System("two", (Level("node", 2, 1e9, 0.0), Level("gpu", 2, 1e10, 0.0)))
    reductions = [Reduction(("data",), 1e6), Reduction(("tensor",), 1e6)]
    shown = report(rank_placements(system, {"data": 2, "tensor": 2}, reductions))
    titles = [part.title for section in shown.sections for part in section.parts if isinstance(part, Table)]
    assert {"fastest programs over data", "fastest programs over tensor"} <= set(titles)


def test_programs_whose_groups_have_different_payloads():
    """The numbers of docs/concepts/placement.md."""
    counts = {}
    for depth in (2, 3):
        found = plans(depth, "all-reduce", 5)
        mixed = [number for number, (_, divisors) in enumerate(found.steps) if len(set(divisors)) > 1]
        counts[depth] = sum(bool(set(row.tolist()) & set(mixed)) for row in found.table), len(found.table)
    assert counts == {2: (0, 93), 3: (27, 1635)}
