"""Python to paste into a training script: the device mesh of a placement, and its reduction program, ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unsilent.placement.placements import Placement
from unsilent.placement.ranking import RankedProgram, Reduction


def script(
    placement: Placement, reductions: Sequence[Reduction], programs: Sequence[RankedProgram], device_type: str = "cuda"
) -> str:
    """The mesh and, for each reduction over more than one device, its program and what runs it."""
    parts = [placement.mesh_code(device_type)]
    for reduction, program in zip(reductions, programs, strict=True):
        if program.steps:
            parts.append(reduction_code(placement, reduction, program))
    return "\n\n".join(parts)


def reduction_code(placement: Placement, reduction: Reduction, ranked: RankedProgram) -> str:
    """What makes ``reduce_AXES``, which reduces a tensor in place; needs ``mesh``."""
    name = "_".join(axis if axis.isidentifier() else f"axis{placement.axes.index(axis)}" for axis in reduction.axes)
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
reduce_{name} = ProgramRunner(program, {reduction.goal!r}, members).run"""
