"""Numbers that a run reads back (`item`, `bool`, `float`) and branches on, in an evaluation that cannot wait for them.

A captured evaluation takes the way of the golden run. Where the golden run read a number, the same number is given again, and on
the device it is noted whether the tensor still holds it. If not, a real run may take another way, and has to be made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsilent.outcomes.tensors import words_of
from unsilent.sites.dispatch_mode import DispatchMode

READ = torch.ops.aten._local_scalar_dense.default


class HostReads(DispatchMode):
    """Active around each evaluation of one batch. The first one reads; all others compare.

    Attributes:
        changed: Whether a number of the last evaluation was another, bool[1] on the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._known: list[tuple[Tensor, Any]] = []
        self._recorded = False
        self._none = torch.zeros(1, dtype=torch.bool, device=device)
        self.changed = self._none
        self._count = 0

    def __enter__(self) -> HostReads:
        self._count, self.changed = 0, self._none
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._recorded = True

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not READ:
            return func(*args, **kwargs)
        words = words_of(args[0].detach())
        if not self._recorded:
            self._known.append((words.clone(), func(*args, **kwargs)))
            return self._known[-1][1]
        golden, value = self._known[self._count]
        self._count += 1
        self.changed = self.changed | (words != golden).reshape(1)
        return value
