"""A fault with a known site whose elements are drawn once the shape of the tensor is known.

A fault acts in one step, from a first to a last step, or always (a permanent fault); see `faults_in_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults.codecs import codec
from unsilent.faults.hardware.output_window import OutputWindow
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.naming import parse_site
from unsilent.faults.population import Region
from unsilent.faults.record import Fault
from unsilent.faults.sampling import Ints

FASTEST = ("channels", "positions")
_REACH = int.from_bytes(b"reach")
"""Key of the random stream from which the affected outputs are drawn."""


@dataclass(frozen=True)
class UnresolvedFault:
    """A fault whose elements are not drawn yet; ``seed`` determines the elements and values.

    ``model`` may be given as its text. ``index``: the elements that may be corrupted, as in an address (``3,5``; None: all).
    ``micro_step``, ``occurrence``, ``rank``, ``first_step`` and ``last_step`` mean the same as in a `Fault`.
    ``window``: the outputs that see the corrupted operand (None: all that use it). ``held``: the dtype in which the hardware
    holds the value. ``fastest``: the axis that varies fastest along a run, either ``channels`` (the last axis) or
    ``positions`` (all other axes). Raises ``UsageError`` for an unknown dtype, for a window if the site is not an operand of an
    operation, and for steps that contradict each other.
    """

    site: str
    model: FaultModel
    seed: int = 0
    index: str | None = None
    law: str = "per-element"
    rank: int = 0
    step: int | None = None
    micro_step: int | None = None
    occurrence: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    window: OutputWindow | None = None
    held: str | None = None
    fastest: str = "channels"

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            object.__setattr__(self, "model", fault_model(self.model))
        if self.step is not None and (self.first_step, self.last_step) != (None, None):
            raise UsageError(f"step={self.step} already selects one step; leave out first_step and last_step")
        if self.last_step is not None and self.last_step < (self.first_step or 0):
            raise UsageError(f"last_step={self.last_step} is before first_step={self.first_step or 0}")
        if self.held is not None:
            codec(self.held)
        if self.fastest not in FASTEST:
            raise unknown_name_error("fastest axis", self.fastest, FASTEST)
        if self.window is not None:
            kind, _, _, operand = parse_site(self.site)
            if kind != "op" or operand.startswith("out"):
                raise UsageError(
                    f"{self.site!r} has a window; only the operands first, second and third of an op: site can have one"
                )

    def resolve_for_tensor(
        self, dtype: str, shape: tuple[int, ...], elements: Ints | None = None, axes: Sequence[int] | None = None
    ) -> tuple[Fault, ...]:
        """Draw the fault's elements in a tensor like this; empty if a rate hits no element.

        ``elements``: elements that may be corrupted (None: all). ``axes``: the order of the tensor's axes that runs follow,
        slowest first, with the channels last (None: C order, or the order of ``elements``). Raises ``UsageError`` if the tensor
        cannot have the requested corruption.
        """
        if self.fastest == "positions" and shape:
            *other_axes, channels = range(len(shape)) if axes is None else axes
            axes = channels, *other_axes
        held = None if self.held == dtype else self.held
        order = None if axes is None else tuple(axes)
        region = Region(self.site, held or dtype, shape, elements, self.step, self.occurrence, order)
        result = self.model.draw([region], np.random.default_rng(self.seed), self.law)
        moment = {k: getattr(self, k) for k in ("rank", "micro_step", "first_step", "last_step")}
        return tuple(replace(fault, dtype=dtype, held=held, **moment) for fault in result)

    def affected_outputs(self, dependents: npt.NDArray[np.bool_], channel_axis: int) -> Ints | None:
        """The outputs that see the corrupted operand; None if all outputs that use it do.

        See `OutputWindow.draw_affected_outputs`. The draw is independent of the elements; repeated calls give the same outputs.
        """
        if self.window is None:
            return None
        return self.window.draw_affected_outputs(dependents, channel_axis, np.random.default_rng([self.seed, _REACH]))


Timed = TypeVar("Timed", bound=Fault | UnresolvedFault)


def faults_in_step(faults: Iterable[Timed], step: int) -> list[Timed]:
    """The faults that act in this step, by ``step`` or by ``first_step`` and ``last_step`` (None: open).

    A fault without any of these fields always acts.

    An `UnresolvedFault` that acts in several steps corrupts the same elements with the same drawn values in each of them,
    because a hardware defect stays in one place.
    """
    return [fault for fault in faults if _acts(fault, step)]


def _acts(fault: Fault | UnresolvedFault, step: int) -> bool:
    if fault.step is not None:
        return fault.step == step
    return (fault.first_step or 0) <= step and (fault.last_step is None or step <= fault.last_step)
