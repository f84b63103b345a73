"""Parameters and buffers as sites: their inventory in a model, and faults in place with verified undo.

Every element of memory is counted once: a tied weight has the first of its names in ``named_parameters``, and a view of
another parameter's memory contributes only the elements outside that parameter. Integer weights are included. Index buffers
(int64, bool: positions, counters, masks) are not weights, and are selected only by an address that matches nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unsilent.basics.errors import InjectionError, UsageError, unknown_name_error
from unsilent.basics.printable import escape_unprintable
from unsilent.faults import CODECS, Fault, Region
from unsilent.faults.naming import is_transient
from unsilent.faults.receipts import AppliedFault, Receipt
from unsilent.sites.addresses import Address, flat_elements
from unsilent.sites.content_hash import ContentHash, content_hashes
from unsilent.sites.corrupting import has_plain_memory, intended_together, landed
from unsilent.sites.memory import TensorMemory, Words, drop_repeated_dimensions, dtype_name, read_together
from unsilent.sites.memory_ownership import StorageOwnership
from unsilent.sites.modules import named_buffers, named_parameters, unregistered

INDEX_DTYPES = (torch.int64, torch.bool)
"""Dtypes of buffers that are not weights. Narrower integers are: quantised weights are int8, or packed into uint8 or int32."""


@dataclass(frozen=True)
class ParameterSite:
    """A tensor of a model: its memory, and the elements that it owns (None: all)."""

    name: str
    memory: TensorMemory
    elements: NDArray[np.int64] | None

    @property
    def region(self) -> Region:
        """The region of this tensor that a fault may corrupt."""
        return Region(f"param:{self.name}", self.memory.codec.name, self.memory.shape, self.elements)


class Parameters:
    """The inventory of a model's parameters and buffers, and the injector for them.

    Args:
        model: Module. Its tensors must stay in the same memory (no ``.to()``) while this object is used.

    Attributes:
        sites: Tensors by name, parameters first, each in the model's own order.
        skipped: Names of tensors that have no elements or a dtype without a codec.
        index_buffers: Names in ``sites`` of buffers that hold indices or counters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sites: dict[str, ParameterSite] = {}
        self.skipped: dict[str, str] = {}
        self._ties: dict[str, str] = {}
        self._views: dict[str, str] = {}
        storages: dict[int, StorageOwnership] = {}
        for name, tensor in _named_tensors(model):
            self._add(name, tensor, storages)
        self._unregistered = unregistered(model)
        held = dict(model.named_buffers())
        self.index_buffers = tuple(n for n in self.sites if n in held and held[n].dtype in INDEX_DTYPES)

    def _add(self, name: str, tensor: Tensor, storages: dict[int, StorageOwnership]) -> None:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(f"parameter {name!r} has no shape yet; run the model once first")
        if tensor.is_meta:
            raise UsageError(f"parameter {name!r} is on the meta device and holds no values; load the weights first")
        if tensor.layout == torch.strided:
            tensor = drop_repeated_dimensions(tensor)
        if dtype_name(tensor.dtype) not in CODECS or not has_plain_memory(tensor) or not tensor.numel():
            self.skipped[name] = f"{dtype_name(tensor.dtype)}, {tensor.layout}" if tensor.numel() else "empty"
            return
        claim = storages.setdefault(tensor.untyped_storage().data_ptr(), StorageOwnership()).claim(name, tensor)
        if claim.tied_to:
            self._ties[name] = claim.tied_to
        elif claim.view_of:
            self._views[name] = claim.view_of
        else:
            self.sites[name] = ParameterSite(name, TensorMemory(tensor), claim.owned)

    @property
    def site_aliases(self) -> dict[str, str]:
        """Every name of a site, including tied names, mapped to its name in ``sites``."""
        return {**{name: name for name in self.sites}, **self._ties}

    @property
    def unfit(self) -> dict[str, str]:
        """Names of tensors that cannot be corrupted under that name, with the reason."""
        views = {name: f"it is a view of the memory of {owner!r}" for name, owner in self._views.items()}
        return {**self.skipped, **views}

    def select(self, *addresses: str) -> tuple[Region, ...]:
        """The regions that the addresses select, in the model's order, with each element only once.

        Raises ``UsageError`` for a glob that matches nothing, an index outside its tensor, or memory without a codec.
        """
        if not (self.sites or self.skipped):
            raise self._no_tensors()
        chosen: dict[str, NDArray[np.int64] | None] = {}
        for address, names in self._matching(addresses):
            for name in self._meant(names):
                if name in self.skipped or name in self._views:
                    self._refuse_exact(name, address)
                    continue
                self._choose(self._ties.get(name, name), address.index, chosen)
        if not chosen:
            raise UsageError(
                f"{' '.join(addresses)!r} selects only tensors that are views or cannot be corrupted; try param:*"
            )
        return tuple(
            Region(f"param:{n}", s.memory.codec.name, s.memory.shape, chosen[n])
            for n, s in self.sites.items()
            if n in chosen
        )

    def _no_tensors(self) -> UsageError:
        """The error for a model in which nothing can be selected."""
        if not self._unregistered:
            return UsageError("the model has no parameters or buffers; expected a model with weights")
        held = f"{', '.join(self._unregistered[:3])}{', …' if len(self._unregistered) > 3 else ''}"
        return UsageError(
            f"the model has no parameters or buffers, only values in {held}, which faults cannot be injected into; expected a "
            "model with weights, such as this one before quantisation"
        )

    def passed_over(self, *addresses: str) -> list[str]:
        """The index buffers that the addresses match but do not select."""
        chosen = {region.site.removeprefix("param:") for region in self.select(*addresses)}
        matched = {self._ties.get(name, name) for _, names in self._matching(addresses) for name in names}
        return [name for name in self.index_buffers if name in matched - chosen]

    def _matching(self, addresses: Iterable[str]) -> Iterator[tuple[Address, Sequence[str]]]:
        known = [*self.sites, *self._ties, *self._views, *self.skipped]
        for address in (_address(text, known) for text in addresses):
            yield address, address.matching(known)

    def _meant(self, names: Sequence[str]) -> Sequence[str]:
        """The names that an address selects: index buffers only if it matches nothing else."""
        weights = [name for name in names if self._ties.get(name, name) not in self.index_buffers]
        return weights if any(self._ties.get(name, name) in self.sites for name in weights) else names

    def _refuse_exact(self, name: str, address: Address) -> None:
        """Raise ``UsageError`` if an address is exactly the name of a tensor that cannot be corrupted."""
        if name == address.glob and name in self.skipped:
            raise UsageError(f"{name!r} cannot be corrupted ({self.skipped[name]}); known dtypes: {', '.join(CODECS)}")
        if name == address.glob:
            raise UsageError(f"{name!r} is a view of the memory of {self._views[name]!r}; address that instead")

    def _choose(self, name: str, index: str | None, chosen: dict[str, NDArray[np.int64] | None]) -> None:
        site = self.sites[name]
        wanted = site.elements
        if index is not None:
            wanted = flat_elements(index, name, site.memory.shape)
            if site.elements is not None:
                wanted = np.intersect1d(wanted, site.elements)
            if not wanted.size:
                raise UsageError(
                    f"index [{index}] of {name!r} selects only memory that belongs to an earlier parameter"
                )
        if name in chosen and wanted is not None and chosen[name] is not None:
            wanted = np.union1d(wanted, chosen[name])  # type: ignore[arg-type]
        elif name in chosen and chosen[name] is None:
            wanted = None
        chosen[name] = wanted

    def hash(self) -> str:
        """The xxh3-128 hash of all bits of all sites."""
        digest = xxhash.xxh3_128()
        for name, site in self.sites.items():
            digest.update(f"{name}={site.memory.hash()};".encode())
        return digest.hexdigest()

    def content_hashes(self) -> list[ContentHash]:
        """A hash of the bits of each site, computed on its device."""
        return content_hashes(site.memory.words for site in self.sites.values())

    def check(self, expected: Sequence[ContentHash] | str) -> None:
        """Raise ``InjectionError`` if any bit differs from when ``content_hashes()`` or ``hash()`` was called."""
        if (self.hash() if isinstance(expected, str) else self.content_hashes()) != expected:
            raise InjectionError(
                "the bits of the model changed, although all injected faults were undone; find what else changed the model"
            )

    def memory(self, fault: Fault) -> TensorMemory:
        """The memory that a fault corrupts; raises ``UsageError`` if the model has no such tensor."""
        if is_transient(fault.site):
            raise UsageError(f"{fault.site!r} exists only while the model runs; give a param: fault")
        name = fault.site.removeprefix("param:")
        name = self._ties.get(name, name)
        if name not in self.sites:
            raise unknown_name_error("parameter", name, self.sites)
        memory = self.sites[name].memory
        if (memory.codec.name, memory.shape) != (fault.dtype, tuple(fault.shape)):
            raise UsageError(
                f"the fault is for {fault.site} {fault.dtype}{list(fault.shape)}, "
                f"but the model has {memory.codec.name}{list(memory.shape)}; use the model that the fault was drawn for"
            )
        return memory

    def inject(self, faults: Sequence[Fault] | Fault, *, strict: bool = False) -> ParameterInjection:
        """A context manager that applies the faults on entry and undoes them on exit (see `ParameterInjection`)."""
        return ParameterInjection(self, (faults,) if isinstance(faults, Fault) else tuple(faults), strict)


class ParameterInjection:
    """Context manager that applies faults on entry, and restores and verifies the bits on exit.

    Faults on the same tensor are applied in order and undone in reverse. With ``strict``, the exit also raises an error, after
    restoring, if other code changed the corrupted words, for example an overlapping injection that is not nested.
    """

    def __init__(self, parameters: Parameters, faults: tuple[Fault, ...], strict: bool) -> None:
        self._targets = [(fault, parameters.memory(fault)) for fault in faults]
        self._undo: list[tuple[TensorMemory, NDArray[np.int64], Words, Words]] = []
        self._strict = strict

    def __enter__(self) -> Receipt:
        if self._undo:
            raise InjectionError("this injection is already active; make a second injection to nest two")
        applied_faults: list[AppliedFault] = []
        try:
            groups = [self._targets] if self._in_different_tensors else [[target] for target in self._targets]
            for targets in groups:
                applied_faults += self._apply(targets)
        except BaseException:
            self._write_back()
            raise
        return Receipt(tuple(applied_faults))

    @property
    def _in_different_tensors(self) -> bool:
        """Whether every fault is in a different tensor, so that their order does not matter."""
        return len({id(memory) for _, memory in self._targets}) == len(self._targets)

    def _apply(self, targets: Sequence[tuple[Fault, TensorMemory]]) -> list[AppliedFault]:
        """Apply faults in different tensors, with few reads from a device."""
        words = intended_together([(memory, fault) for fault, memory in targets])
        for (fault, memory), (before, after) in zip(targets, words, strict=True):
            self._undo.append((memory, fault.elements, before, after))
            memory.write(fault.elements, after)
        words_now = read_together([(memory, fault.elements) for fault, memory in targets])
        return [landed(fault, *pair, now) for (fault, _), pair, now in zip(targets, words, words_now, strict=True)]

    def _restore(self) -> None:
        try:
            intact = self._write_back()
        except BaseException:  # interrupted by Ctrl-C: finish first, then raise again
            self._write_back()
            raise
        if not intact:
            raise InjectionError(
                "undo did not restore the model, because its memory was replaced or changed during the injection "
                "(the model was moved or converted, or faults overlap without being nested); reload the model"
            )

    def _write_back(self) -> bool:
        """Restore the original words in reverse order; returns whether all memory was intact."""
        intact = True
        while self._undo:
            undone = self._undo[:] if self._in_different_tensors else self._undo[-1:]
            places = [(memory, elements) for memory, elements, _, _ in undone]
            intact &= all(memory.is_attached for memory, _ in places)
            if self._strict:
                intact &= all(map(np.array_equal, read_together(places), [after for *_, after in undone]))
            for memory, elements, before, _ in undone:
                memory.write(elements, before)
            intact &= all(map(np.array_equal, read_together(places), [before for _, _, before, _ in undone]))
            del self._undo[-len(undone) :]
        return intact

    def __exit__(self, *raised: object) -> None:
        self._restore()


def _address(text: str, known: Sequence[str]) -> Address:
    """Parse a parameter address; an exact parameter name takes precedence over the address syntax."""
    name = escape_unprintable(text.strip().removeprefix("param:"))
    address = Address("param", name) if name in known else Address.parse(text)
    if address.kind != "param":
        if address.kind == "file":
            raise UsageError(f"{text!r} is in a checkpoint file; corrupt it with: unsilent checkpoint corrupt FILE")
        if address.kind not in ("op", "input", "kv"):
            raise UsageError(
                f"{text!r} exists only in a training step; corrupt it with unsilent training or unsilent.inject"
            )
        raise UsageError(
            f"{text!r} exists only while the model runs; corrupt it in a campaign: "
            f"unsilent pvf WORKLOAD --at '{address.kind}:*'"
        )
    return address


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from named_parameters(model, remove_duplicate=False)
    yield from named_buffers(model, remove_duplicate=False)
