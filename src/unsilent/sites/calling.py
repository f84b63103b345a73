"""Calls of an operation with faults injected into its operands and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unsilent.basics.nested import tensors_in
from unsilent.faults import Fault
from unsilent.faults.naming import OPERANDS, SiteName
from unsilent.sites.corrupting import has_plain_memory
from unsilent.sites.landing import AxisOrder, CorruptedTensor, FaultOrDraw, Landings, axes_of
from unsilent.sites.operands import (
    PRODUCTS,
    corruptible_output,
    exchanged,
    gives_views,
    listed_operand_number,
    operands_of,
    operation_name,
    output_of,
    same_place,
    written_by,
)
from unsilent.sites.output_windows import OperandRerun, splice_outputs

OperationCall = tuple[Any, tuple[Any, ...], dict[str, Any]]


class AimedFault(NamedTuple):
    """A fault, its site, and the list entry that it corrupts in an operation on tensor lists (None: no lists)."""

    site: SiteName
    wanted: FaultOrDraw
    entry: int | None = None

    @property
    def has_output_window(self) -> bool:
        """Whether only some outputs see the fault."""
        return (self.wanted.reach if isinstance(self.wanted, Fault) else self.wanted.window) is not None


def corrupted_call(call: OperationCall, aims: Sequence[AimedFault], landings: Landings) -> Any:
    """The result of an operation with faults in its operands and outputs.

    A corrupted operand is a corrupted copy that only this operation sees; an operand that the operation writes is corrupted in
    its own memory. If only some outputs see a fault, the operation runs twice and these outputs are taken from the second run.
    """
    before = [aim for aim in aims if not aim.site.operand.startswith("out")]
    for aim in before:
        if not aim.has_output_window:
            call, _ = _with_operand(call, aim, landings)
    result = call[0](*call[1], **call[2])
    partial = [aim for aim in before if aim.has_output_window]
    for number, aim in enumerate(partial):
        _splice(call, aim, corruptible_output(*call, result), landings, number)
    for aim in aims:
        if aim.site.operand.startswith("out"):
            out = output_of(*call, result, int(aim.site.operand.partition(".")[2] or 0), aim.entry)
            if out is None:
                landings.refuse(aim.wanted, "the output cannot be corrupted, because it is a view, empty or absent")
            else:
                landings.corrupt(aim.site, aim.wanted, out, False, call_axes(call, aim.site, out.ndim))
    return result


def _splice(call: OperationCall, aim: AimedFault, golden: Tensor | None, landings: Landings, number: int) -> None:
    """Replace some elements of the golden output by those computed from a corrupted operand."""
    if why := window_refusal(call[0], aim.site, number):
        landings.refuse(aim.wanted, why)
        return
    assert golden is not None

    def again(faulty: OperationCall) -> Tensor:
        return next(tensors_in(faulty[0](*faulty[1], **faulty[2])))

    faulty, corrupted = _with_operand(call, aim, landings, (golden, again))
    if corrupted is not None and corrupted.reach is not None:
        splice_outputs(golden, again(faulty), corrupted.reach)


def window_refusal(func: Any, site: SiteName, number: int) -> str:
    """Why a fault cannot be limited to some outputs; empty if it can.

    ``number``: number of earlier faults of this kind in the same call.
    """
    if operation_name(func) not in PRODUCTS or site.operand not in OPERANDS[1:3]:
        return (
            "a window is possible only for the inputs of a matrix product or convolution, which have operand registers"
        )
    return "only one fault per operation can have a window" if number else ""


def call_axes(call: OperationCall, site: SiteName, ndim: int) -> AxisOrder:
    """The order of axes of a call's tensors, for faults at a site."""
    transposed = operation_name(call[0]) == "convolution" and len(call[1]) > 6 and bool(call[1][6])
    return axes_of(call[0], site, ndim, transposed)


def _with_operand(
    call: OperationCall,
    aim: AimedFault,
    landings: Landings,
    use: tuple[Tensor, Callable[[OperationCall], Tensor]] | None = None,
) -> tuple[OperationCall, CorruptedTensor | None]:
    """The call with a corrupted operand, or the unchanged call if the fault does not fit."""
    func, args, kwargs = call
    number, tensors = listed_operand_number(func, args, aim.site.operand, aim.entry), operands_of(args, kwargs)
    if number is None or number >= len(tensors):
        landings.refuse(aim.wanted, f"the operation has no {aim.site.operand} tensor operand")
        return call, None
    if gives_views(func):
        landings.refuse(
            aim.wanted, "the operation returns a view of its operand, so this operand has no memory of its own"
        )
        return call, None
    old, place = tensors[number], number
    in_place = any(
        has_plain_memory(t) and has_plain_memory(old) and same_place(old, t) for t in written_by(func, args, kwargs)
    )

    def swapped(new: Tensor) -> OperationCall:
        return (func, *exchanged((args, kwargs), place, new))

    operand_rerun = None
    if use is not None:
        golden, again = use
        operand_rerun = OperandRerun(golden, lambda new: again(swapped(new)))
    corrupted = landings.corrupt(
        aim.site, aim.wanted, old, not in_place, call_axes(call, aim.site, old.ndim), operand_rerun
    )
    return (call if corrupted is None or in_place else swapped(corrupted.tensor)), corrupted
