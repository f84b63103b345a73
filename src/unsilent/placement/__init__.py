"""Placement of parallelism axes on a hierarchical machine, and reduction programs: synthesis, cost, execution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.basics.lazy_module import lazy_names

if TYPE_CHECKING:
    from unsilent.placement.cost import AlphaBeta as AlphaBeta
    from unsilent.placement.ddp_hook import program_hook as program_hook
    from unsilent.placement.execution import ProgramRunner as ProgramRunner
    from unsilent.placement.loading import load_system as load_system
    from unsilent.placement.measure import MeasuredTable as MeasuredTable
    from unsilent.placement.measure import load_sweep as load_sweep
    from unsilent.placement.nccl import Nccl as Nccl
    from unsilent.placement.placements import Placement as Placement
    from unsilent.placement.programs import Program as Program
    from unsilent.placement.programs import Step as Step
    from unsilent.placement.programs import check as check
    from unsilent.placement.ranking import Ranking as Ranking
    from unsilent.placement.ranking import Reduction as Reduction
    from unsilent.placement.ranking import rank_placements as rank_placements
    from unsilent.placement.synthesis import synthesise as synthesise
    from unsilent.placement.system import Level as Level
    from unsilent.placement.system import System as System

_LAZY = {
    "unsilent.placement.cost": ("AlphaBeta",),
    "unsilent.placement.ddp_hook": ("program_hook",),
    "unsilent.placement.execution": ("ProgramRunner",),
    "unsilent.placement.loading": ("load_system",),
    "unsilent.placement.measure": ("MeasuredTable", "load_sweep"),
    "unsilent.placement.nccl": ("Nccl",),
    "unsilent.placement.placements": ("Placement",),
    "unsilent.placement.programs": ("Program", "Step", "check"),
    "unsilent.placement.ranking": ("Ranking", "Reduction", "rank_placements"),
    "unsilent.placement.synthesis": ("synthesise",),
    "unsilent.placement.system": ("Level", "System"),
}
__getattr__, __all__ = lazy_names(__name__, _LAZY)
