"""Placements of parallelism axes on a hierarchical machine, and reduction programs: synthesised, costed, executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.placement.cost import AlphaBeta
    from unsilent.placement.ddp_hook import program_hook
    from unsilent.placement.execution import ProgramRunner
    from unsilent.placement.loading import load_system
    from unsilent.placement.measure import MeasuredTable, load_sweep
    from unsilent.placement.nccl import Nccl
    from unsilent.placement.placements import Placement
    from unsilent.placement.programs import Program, Step, check
    from unsilent.placement.ranking import Ranking, Reduction, rank_placements
    from unsilent.placement.synthesis import synthesise
    from unsilent.placement.system import Level, System

_LAZY = {
    "AlphaBeta": "unsilent.placement.cost",
    "Level": "unsilent.placement.system",
    "MeasuredTable": "unsilent.placement.measure",
    "Nccl": "unsilent.placement.nccl",
    "Placement": "unsilent.placement.placements",
    "Program": "unsilent.placement.programs",
    "ProgramRunner": "unsilent.placement.execution",
    "Ranking": "unsilent.placement.ranking",
    "Reduction": "unsilent.placement.ranking",
    "Step": "unsilent.placement.programs",
    "System": "unsilent.placement.system",
    "check": "unsilent.placement.programs",
    "load_sweep": "unsilent.placement.measure",
    "load_system": "unsilent.placement.loading",
    "program_hook": "unsilent.placement.ddp_hook",
    "rank_placements": "unsilent.placement.ranking",
    "synthesise": "unsilent.placement.synthesis",
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


__getattr__ = lazy_names(__name__, _LAZY, __all__)
