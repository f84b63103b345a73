"""Python to paste into a training script: the device mesh of a placement, and its reduction program, ready to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, count
from math import prod

from unsilent.basics.sizes import human_bytes
from unsilent.placement.placements import Placement
from unsilent.placement.ranking import RankedProgram, Reduction


def script(
    placement: Placement, reductions: Sequence[Reduction], programs: Sequence[RankedProgram], device_type: str = "cuda"
) -> str:
    """The mesh and, for each reduction over more than one device, its program and what runs it."""
    parts, names = [placement.mesh_code(device_type)], set[str]()
    for reduction, program in zip(reductions, programs, strict=True):
        if program.steps:
            name = _new_name(placement, reduction, names)
            names.add(name)
            parts.append(reduction_code(placement, reduction, program, name))
    return "\n\n".join(parts)


def _new_name(placement: Placement, reduction: Reduction, taken: Collection[str]) -> str:
    """``reduce_AXES``, with a number where another reduction has that name already."""
    axes = (axis if axis.isidentifier() else f"axis{placement.axes.index(axis)}" for axis in reduction.axes)
    name = "_".join(["reduce", *axes])
    return next(candidate for candidate in chain([name], (f"{name}_{n}" for n in count(2))) if candidate not in taken)


def reduction_code(placement: Placement, reduction: Reduction, ranked: RankedProgram, name: str) -> str:
    """Code of a function of this name, which reduces a tensor in place; needs ``mesh``."""
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
