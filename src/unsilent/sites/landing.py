"""Where faults meet tensors in the middle of a run: each lands once, or it is remembered why it did not.

What is wanted is a resolved `Fault`, or a `Draw` whose elements are drawn now that the tensor is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from unsilent.errors import UsageError
from unsilent.faults import Fault
from unsilent.faults.drawn import Draw
from unsilent.faults.receipts import Hit
from unsilent.faults.sampling import Ints
from unsilent.sites.addresses import flat_elements
from unsilent.sites.axes import FLAT, Axes
from unsilent.sites.memory import dtype_name
from unsilent.sites.reaching import Use, dependents
from unsilent.sites.striking import copied, corrupt, misfit, strikeable

Wanted = Fault | Draw


class Struck(NamedTuple):
    """A corrupted tensor, and which outputs see it (None: all)."""

    tensor: Tensor
    reach: Ints | None


class Landings:
    """What becomes of the faults of one run.

    Attributes:
        hits: what landed, in order. misfits: what did not fit where it was met, with the reason.
    """

    def __init__(self) -> None:
        self.hits: list[Hit] = []
        self.misfits: list[tuple[Wanted, str]] = []
        self._landed: set[int] = set()

    @property
    def count(self) -> int:
        """How many faults landed."""
        return len(self._landed)

    def has(self, wanted: Wanted) -> bool:
        """Whether it landed."""
        return id(wanted) in self._landed

    def why(self, wanted: Wanted) -> str:
        """Why it did not land where it was met; empty where it was not met."""
        return next((why for one, why in reversed(self.misfits) if one is wanted), "")

    def refuse(self, wanted: Wanted, why: str) -> None:
        """Remember that it does not fit."""
        self.misfits.append((wanted, why))

    def strike(
        self, wanted: Wanted, tensor: Tensor, copy: bool, axes: Axes = FLAT, use: Use | None = None
    ) -> Struck | None:
        """Corrupt a tensor or a copy of it.

        Args:
            axes: order of runs in the tensor, and the channels of the output. use: what is made of it; None for what is no
                operand, or where that cannot be told.

        Returns:
            None, and remembered, where the fault does not fit.

        Raises:
            UsageError: a draw asks for what no tensor like this has (an index outside of it, more elements than there are).
        """
        if why := self._misfit(wanted, tensor):
            self.refuse(wanted, why)
            return None
        faults = self._faults(wanted, tensor, axes, use)
        struck = copied(tensor) if copy else tensor
        self.hits += [corrupt(struck, fault) for fault in faults]
        self._landed.add(id(wanted))
        return Struck(struck, faults[0].reach if faults else None)

    def _misfit(self, wanted: Wanted, tensor: Tensor) -> str:
        if id(wanted) in self._landed:
            return "it was met twice"
        if not strikeable(tensor):
            found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            return f"found {found} without memory of its own, or of a dtype without a codec"
        return misfit(tensor, wanted) if isinstance(wanted, Fault) else ""

    def _faults(self, wanted: Wanted, tensor: Tensor, axes: Axes, use: Use | None) -> tuple[Fault, ...]:
        """The resolved faults, with what sees them."""
        if isinstance(wanted, Fault):
            if wanted.reach is not None and use is None:
                raise UsageError("a reach is for an operand of an operation that writes over nothing")
            return (wanted,)
        shape = tuple(tensor.shape)
        elements = None if wanted.index is None else flat_elements(wanted.index, wanted.site, shape)
        order = None if elements is not None else axes.order
        faults = wanted.resolved(dtype_name(tensor.dtype), shape, elements, order)
        if wanted.window is None:
            return faults
        if use is None:
            raise UsageError("a window of outputs is for an operand of an operation that writes over nothing")
        seen = [dependents(use, tensor, fault.elements) for fault in faults]
        return tuple(
            replace(fault, reach=wanted.reach(mask, axes.channel(mask.ndim)))
            for fault, mask in zip(faults, seen, strict=True)
        )
