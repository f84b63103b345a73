"""One fault in one line: ``with unsilent.inject(model, "param:fc.weight[3,5]", bit=30) as receipt:``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from unsilent.errors import UsageError
from unsilent.faults import Fault, FaultModel, fault_model
from unsilent.sites.parameters import Injection, Parameters


def inject(
    model: nn.Module,
    what: str | Fault | Sequence[Fault],
    fault: str | FaultModel | None = None,
    *,
    bit: int | None = None,
    seed: int = 0,
    law: str = "per-element",
) -> Injection:
    """A context manager that corrupts a model on entry and restores it, proven bit by bit, on exit.

    Args:
        model: any module; nothing is copied, hooked or wrapped.
        what: an address (``"param:fc.weight[3,5]"``, ``"param:layer1.*"``) from which a fault is drawn, or resolved
            faults to replay.
        fault: fault model for an address, default ``"bitflip"`` (one uniformly drawn bit).
        bit: flip this bit position (0 = least significant) in *every* addressed element; instead of ``fault``, which draws
            one of them.
        seed, law: of the draw.

    Returns:
        the injection; entering it gives a `Receipt`.

    Raises:
        UsageError: the address matches nothing, or the fault does not fit it.
        InjectionError: on entry when a fault did not land as asked, on exit when the bits were not restored.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"inject needs a torch.nn.Module first, found {type(model).__name__}: inject(model, address)")
    parameters = Parameters(model)
    if not isinstance(what, str):
        if fault is not None or bit is not None:
            raise UsageError("resolved faults are replayed as they are; leave out fault= and bit=")
        return parameters.inject(what, strict=True)
    if fault is not None and bit is not None:
        raise UsageError(
            "give fault= or bit=, not both; bit=30 is short for flipping bit 30 of every addressed element"
        )
    regions = parameters.select(what)
    if bit is not None:
        drawn = fault_model(f"bitflip:bits={bit}")
        drawn = drawn.with_count(max(1, drawn.capacity(regions)))
    else:
        drawn = fault if isinstance(fault, FaultModel) else fault_model(fault or "bitflip")
    return parameters.inject(drawn.draw(regions, np.random.default_rng(seed), law), strict=True)
