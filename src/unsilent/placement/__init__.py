"""Placements of parallelism axes on a hierarchical machine, and reduction programs: synthesised, costed, executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unsilent.errors import missing_name_error

if TYPE_CHECKING:
    from unsilent.placement.cost import AlphaBeta
    from unsilent.placement.ddp_hook import program_hook
    from unsilent.placement.execution import ProgramRunner
    from unsilent.placement.measure import MeasuredTable, load_sweep
    from unsilent.placement.nccl import Nccl
    from unsilent.placement.placements import Placement
    from unsilent.placement.programs import Program, Step, check
    from unsilent.placement.ranking import Ranking, Reduction, rank_placements
    from unsilent.placement.synthesis import synthesise
    from unsilent.placement.system import Level, System, load_system

_LAZY = {
    "AlphaBeta": "cost",
    "Level": "system",
    "MeasuredTable": "measure",
    "Nccl": "nccl",
    "Placement": "placements",
    "Program": "programs",
    "ProgramRunner": "execution",
    "Ranking": "ranking",
    "Reduction": "ranking",
    "Step": "programs",
    "System": "system",
    "check": "programs",
    "load_sweep": "measure",
    "load_system": "system",
    "program_hook": "ddp_hook",
    "rank_placements": "ranking",
    "synthesise": "synthesis",
}

__all__ = [
    "AlphaBeta",
    "Level",
    "MeasuredTable",
    "Nccl",
    "Placement",
    "Program",
    "ProgramRunner",
    "Ranking",
    "Reduction",
    "Step",
    "System",
    "check",
    "load_sweep",
    "load_system",
    "program_hook",
    "rank_placements",
    "synthesise",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise missing_name_error(__name__, name, __all__)
    import importlib

    return getattr(importlib.import_module(f"unsilent.placement.{_LAZY[name]}"), name)
