"""`Draw`: a fault whose site is fixed and whose elements are drawn once the tensor is there, as shapes are known only then."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from unsilent.faults.models import FaultModel
from unsilent.faults.population import Region
from unsilent.faults.record import Fault
from unsilent.faults.sampling import Ints


@dataclass(frozen=True)
class Draw:
    """What is struck (the text of one site), how, and when; ``seed`` fixes the elements and values.

    ``index``: which elements may be struck, as in an address (``3,5``; None: all).
    ``micro_step``, ``occurrence``, ``rank``, ``first_step`` and ``last_step`` mean what they mean in a `Fault`.
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

    def resolved(self, dtype: str, shape: tuple[int, ...], elements: Ints | None = None) -> tuple[Fault, ...]:
        """The fault in a tensor like this; none where the draw (a rate) hits nothing.

        ``elements``: those that may be struck, in the order that runs follow (None: all, in C order). Raises ``UsageError``
        where the tensor cannot hold what is asked.
        """
        region = Region(self.site, dtype, shape, elements, self.step, self.occurrence)
        found = self.model.draw([region], np.random.default_rng(self.seed), self.law)
        moment = {k: getattr(self, k) for k in ("rank", "micro_step", "first_step", "last_step")}
        return tuple(replace(fault, **moment) for fault in found)
