"""Survey of the sites of operations, inputs and caches that can be corrupted in fault-free evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault, Region
from unsilent.faults.naming import OPERANDS, SiteName, parse_site
from unsilent.sites.addresses import Address, flat_elements
from unsilent.sites.corrupting import corruptible
from unsilent.sites.inputs import named_inputs
from unsilent.sites.memory import dtype_name
from unsilent.sites.memory_ownership import distinct_elements
from unsilent.sites.operations import OperationInjector


class TransientKey(NamedTuple):
    """Key of a tensor in one evaluation: site, batch and occurrence (for cache entries)."""

    site: SiteName
    step: int
    occurrence: int | None


class Survey:
    """The transient sites of a workload, found in one fault-free evaluation of every batch on first use.

    Args:
        model: Model that runs.
        batches: Inputs of the model.
        evaluate: Function that runs the batch with this number while ``watch`` is active, and raises an error if the output
            differs from the golden one.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], evaluate: Callable[[int, OperationInjector], Any]
    ) -> None:
        self._model = model
        self._batches = batches
        self._evaluate = evaluate
        self._regions: dict[TransientKey, Region] = {}
        self._non_sites: set[str] = set()
        self._operands: frozenset[str] | None = None
        for step, batch in enumerate(batches):
            for name, tensor in named_inputs(batch):
                if corruptible(tensor):
                    self._add(SiteName("input", name), tensor, step, None)

    def select_regions(self, addresses: Sequence[str]) -> tuple[Region, ...]:
        """The regions that ``op:``, ``input:`` and ``kv:`` addresses select, with each element only once.

        Raises ``UsageError`` for an address that selects nothing, with the available sites.
        """
        parsed = [Address.parse(text) for text in addresses]
        if any(a.kind != "input" for a in parsed):
            self._look([o for o in OPERANDS[1:] if any("/" in a.glob for a in parsed)])
        chosen: dict[TransientKey, Region] = {}
        for address in parsed:
            for key, region in self._regions_at_index(address, set(self._matching(address))):
                chosen[key] = _joined_region(chosen[key], region) if key in chosen else region
        return tuple(chosen[key] for key in self._regions if key in chosen)

    def has_site_of(self, step: int, fault: Fault) -> bool:
        """Whether the fault-free evaluation of a batch contains the tensor that a fault corrupts."""
        site = parse_site(fault.site)
        self._look([site.operand] if site.operand in OPERANDS[1:] else [])
        value = self._regions.get(TransientKey(site, step, fault.occurrence))
        return value is not None and (value.dtype, value.shape) == (fault.dtype, tuple(fault.shape))

    def _look(self, operands: Sequence[str]) -> None:
        """Evaluate every batch once, and again only if more operands are needed."""
        if self._operands is not None and self._operands.issuperset(operands):
            return
        self._operands = frozenset(operands) | (self._operands or frozenset())
        for step in range(len(self._batches)):
            self._evaluate(
                step, OperationInjector(self._model, on_site=self._teller(step), operands=tuple(self._operands))
            )

    def _teller(self, step: int) -> Callable[[SiteName, Tensor | None, int | None], None]:
        def tell(site: SiteName, tensor: Tensor | None, occurrence: int | None) -> None:
            if tensor is None:
                self._non_sites.add(site.name)
            else:
                self._add(site, tensor, step, occurrence)

        return tell

    def _add(self, site: SiteName, tensor: Tensor, step: int, occurrence: int | None) -> None:
        shape = tuple(tensor.shape)
        self._regions[TransientKey(site, step, occurrence)] = Region(
            site.text, dtype_name(tensor.dtype), shape, own_elements(tensor), step, occurrence
        )

    def _matching(self, address: Address) -> list[SiteName]:
        known = list(dict.fromkeys(key.site for key in self._regions if key.site.kind == address.kind))
        if address.kind == "op":
            return address.operations(known, self._non_sites)
        if address.kind == "kv" and not known:
            raise UsageError(
                "this workload has no key/value cache to corrupt: no module is called with non-empty past_key_values; "
                "for an hf: workload add --with generate=N, for your own workload give a run= that calls generate()"
            )
        names = {site.text.removeprefix(f"{site.kind}:"): site for site in known}
        if address.kind == "kv" and address.glob.isdecimal():
            layers = list(dict.fromkeys(site.name for site in known))
            if address.glob not in layers:
                raise UsageError(f"unknown cache layer {address.glob}; expected one of {', '.join(layers)}")
            address = replace(address, glob=f"{address.glob}/*")
        return [names[name] for name in address.matching(names)]

    def _regions_at_index(self, address: Address, sites: set[SiteName]) -> list[tuple[TransientKey, Region]]:
        """The regions of these sites, limited to the address's index; batches too small for the index are left out."""
        matching = [(key, region) for key, region in self._regions.items() if key.site in sites]
        if address.index is None:
            return matching
        result, error = [], None
        for key, region in matching:
            try:
                elements = flat_elements(address.index, region.site, region.shape)
            except UsageError as refused:
                error = error or refused
                continue
            if region.elements is not None:
                elements = np.intersect1d(elements, region.elements)
            if elements.size:
                result.append((key, replace(region, elements=elements)))
        if not result:
            raise error or UsageError(
                f"index [{address.index}] selects only elements that share their memory with another element"
            )
        return result


def own_elements(tensor: Tensor) -> NDArray[np.int64] | None:
    """The elements with their own memory in a tensor that may overlap itself (None: all)."""
    with no_dispatch():  # called during an observed run
        return None if torch._debug_has_internal_overlap(tensor) == 0 else distinct_elements(tensor)


def _joined_region(first: Region, second: Region) -> Region:
    if first.elements is None or second.elements is None:
        return first if first.elements is None else second
    return replace(first, elements=np.union1d(first.elements, second.elements))
