"""Faults in one evaluation of one batch: in operations, inputs and cache entries together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import nn

from unsilent.basics.errors import InjectionError, UsageError
from unsilent.faults import Fault
from unsilent.faults.naming import kind_of, parse_site
from unsilent.faults.receipts import AppliedFault
from unsilent.sites.inputs import corrupted_inputs
from unsilent.sites.operations import OperationInjector


class TransientInjection:
    """Context manager that applies transient faults to one evaluation of its ``batch``.

    Attributes:
        batch: Inputs to run, with corrupted copies of those that a fault names.

    Raises:
        InjectionError: in the constructor, if an input does not exist or does not fit its fault.
        UsageError: a cache fault has no ``occurrence``.
    """

    def __init__(self, model: nn.Module, batch: Any, faults: Sequence[Fault]) -> None:
        self._inputs = [f for f in faults if kind_of(f.site) == "input"]
        self._inside = [f for f in faults if kind_of(f.site) in ("op", "kv")]
        for fault in self._inside:
            if kind_of(fault.site) == "kv" and fault.occurrence is None:
                raise UsageError(f"{fault.site}: the fault names no call; give it an occurrence, 0 or more")
        self._input_faults: list[AppliedFault] = []
        self.batch = corrupted_inputs(batch, self._inputs, self._input_faults)
        self._operations = OperationInjector(model, self._inside) if self._inside else None

    @property
    def landed_count(self) -> int:
        """Number of faults that were applied so far."""
        return len(self._inputs) + (self._operations.landings.count if self._operations else 0)

    @property
    def applied_faults(self) -> list[AppliedFault]:
        """The faults that were applied so far, inputs first."""
        return self._input_faults + (self._operations.landings.applied_faults if self._operations else [])

    @property
    def missed(self) -> list[tuple[Fault, str]]:
        """The faults that were not applied, with the reason."""
        if self._operations is None:
            return []
        landings = self._operations.landings
        return [(f, landings.why(f) or _never(f)) for f in self._inside if not landings.has_landed(f)]

    def error(self, fault: Fault, why: str) -> InjectionError:
        """The error for a fault that was not applied."""
        return InjectionError(f"{fault.site} was not hit: {why}; use the workload and batch that it was drawn for")

    def __enter__(self) -> TransientInjection:
        if self._operations is not None:
            self._operations.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._operations is None:
            return
        self._operations.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not self.landed_count:
            for fault in self._inside:
                if why := self._operations.landings.why(fault):
                    raise self.error(fault, why) from error


def _never(fault: Fault) -> str:
    if kind_of(fault.site) == "kv":
        return f"call {fault.occurrence} did not happen, or the cache of this call has no such entry"
    if parse_site(fault.site).phase != "fwd":
        return "the phase of the site exists only in a training step"
    return "no operation with the name of the site ran"
