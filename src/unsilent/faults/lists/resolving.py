"""Conversion of fault list entries to `Fault` records for a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.printable import short_repr
from unsilent.faults.lists.entries import (
    FaultListEntry,
    ListedCorruption,
    NthLayer,
    ParameterPath,
    WrongEntry,
    errors_at,
    errors_in,
)
from unsilent.faults.naming import parse_site
from unsilent.faults.population import Region
from unsilent.faults.record import Fault

TensorKey = tuple[str, int | None, int | None]
"""Site, batch and occurrence of a tensor; batch and occurrence of a parameter are None."""
_WEIGHT = ".weight"


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a model that can be corrupted, and tensors that cannot.

    Attributes:
        regions: Tensors that can be corrupted.
        names: All names of parameters, including those of tied parameters, each with the name that is in ``regions``.
        not_corruptible: Names of parameters that cannot be corrupted, each with the reason.
        layers: Kind and name of the layers that may be counted, in order.
        batches: Number of batches.
    """

    regions: Mapping[TensorKey, Region]
    names: Mapping[str, str] = field(default_factory=dict)
    not_corruptible: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[tuple[str, str]] = ()
    batches: int = 1

    def parameter_region(self, name: str) -> Region:
        """The region of a parameter by any of its names; raises ``UsageError``."""
        if name in self.not_corruptible:
            raise UsageError(f"{short_repr(name, 80)} cannot be corrupted: {self.not_corruptible[name]}")
        region = self.regions.get((f"param:{self.names.get(name, name)}", None, None))
        if region is None:
            raise unknown_name_error("parameter", name[:80], self.names)
        return region

    def weight_region(self, layer: str | NthLayer | ParameterPath) -> Region:
        """The region of a layer's weight, or of the parameter named by a path; raises ``UsageError``."""
        if isinstance(layer, ParameterPath):
            return self._at_path(layer.path)
        if isinstance(layer, NthLayer):
            layer = self._nth(layer)
        if f"{layer}{_WEIGHT}" not in self.names and f"{layer}{_WEIGHT}" not in self.not_corruptible:
            layers = [name.removesuffix(_WEIGHT) for name in self.names if name.endswith(_WEIGHT)]
            raise unknown_name_error("layer", layer[:80], layers)
        return self.parameter_region(f"{layer}{_WEIGHT}")

    def _at_path(self, path: str) -> Region:
        """The parameter whose name is the end of a path: ``fc.weight`` for ``/model/fc.weight``."""
        dotted = path.strip("/").replace("/", ".")
        fitting = [n for n in (*self.names, *self.not_corruptible) if f".{dotted}".endswith(f".{n}")]
        return self.parameter_region(max(fitting, key=len, default=dotted))

    def _nth(self, layer: NthLayer) -> str:
        counted = [name for kind, name in self.layers if kind in layer.kinds]
        if layer.number < len(counted):
            return counted[layer.number]
        kinds, some = ", ".join(layer.kinds), ", ".join(f"{i} {name}" for i, name in enumerate(counted[:20]))
        more = ", …" if len(counted) > 20 else ""
        raise UsageError(
            f"there is no layer {layer.number}; the model has {len(counted)} layers of kind {kinds}: {some}{more}"
        )


def resolve_entry(entry: FaultListEntry, tensors: ModelTensors, name: str) -> tuple[Fault, ...]:
    """The faults of one trial, one per tensor; raises ``UsageError`` for a fault that does not fit the model."""
    with errors_in(name), errors_at(entry.file_position):
        return _faults_of_entry(entry, tensors)


def _faults_of_entry(entry: FaultListEntry, tensors: ModelTensors) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    corrupts: dict[str, list[tuple[int, ListedCorruption]]] = {}
    for part in entry.corruptions:
        if isinstance(part, Fault):
            faults.append(_checked_fault(part, tensors))
        else:
            site, element = _site_and_element(part, tensors)
            if part.bit_from_sign:
                part = replace(part, operand=tensors.regions[site, None, None].codec.bits - 1 - int(part.operand))
            corrupts.setdefault(site, []).append((element, part))
    faults += [_joined_fault(site, result, tensors) for site, result in corrupts.items()]
    keys = [(f.site, f.step, f.occurrence) for f in faults]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        site = short_repr(twice[0], 80)
        raise WrongEntry(f"names {site} in two records; put all elements of this site into one record")
    return tuple(faults)


def _checked_fault(fault: Fault, tensors: ModelTensors) -> Fault:
    """The fault under its tensor's main name, after a check of its site, dtype and shape."""
    site = parse_site(fault.site)
    if site.kind == "param":
        with errors_at(column="site"):
            region = tensors.parameter_region(site.name)
        if (fault.step or 0) >= tensors.batches:
            text = f"there is no batch {fault.step}; the workload has {tensors.batches} batches, counted from 0"
            raise WrongEntry(text, "step")
    else:
        value = tensors.regions.get((fault.site, fault.step, fault.occurrence))
        if value is None:
            raise _nowhere(fault, tensors)
        region = value
    if (region.dtype, region.shape) != (fault.dtype, fault.shape):
        raise WrongEntry(
            f"the fault is for {fault.dtype}{list(fault.shape)}, but {short_repr(fault.site, 80)} of the workload is "
            f"{region.dtype}{list(region.shape)}; give a list for this workload"
        )
    return fault if fault.site == region.site else replace(fault, site=region.site)


def _nowhere(fault: Fault, tensors: ModelTensors) -> WrongEntry:
    """The error for a fault in a value that does not occur in the run."""
    steps = sorted({step for site, step, _ in tensors.regions if site == fault.site and step is not None})
    if steps:
        call = "" if fault.occurrence is None else f" at call {fault.occurrence}"
        where = ", ".join(map(str, steps[:20])) + (", …" if len(steps) > 20 else "")
        text = f"{short_repr(fault.site, 80)} is not in batch {fault.step}{call}; it is in {where}"
        return WrongEntry(text, "step")
    known = dict.fromkeys(site for site, *_ in tensors.regions)
    return WrongEntry(str(unknown_name_error("site", fault.site[:80], known)), "site")


def _site_and_element(corrupt: ListedCorruption, tensors: ModelTensors) -> tuple[str, int]:
    """Site and flat element of a listed corruption; raises `WrongEntry` if the model has no such element."""
    columns = corrupt.columns
    with errors_at(column=columns.layer):
        region = tensors.weight_region(corrupt.layer)
    parameter = short_repr(region.site.removeprefix("param:"), 80)
    if corrupt.required_dtype not in (None, region.dtype):
        text = f"{parameter} is {region.dtype}; expected {corrupt.required_dtype} for such a bit"
        raise WrongEntry(text, columns.operand)
    if corrupt.operation == "set" and region.codec.kind == "int":
        raise WrongEntry(f"{parameter} is {region.dtype}; expected floating point", columns.operand)
    if corrupt.operation == "xor" and corrupt.operand >= region.codec.bits:
        bit, last = short_repr(corrupt.operand), region.codec.bits - 1
        raise WrongEntry(f"bit {bit} is outside {region.dtype}; {parameter} has bits 0-{last}", columns.operand)
    index, shape = corrupt.index, region.shape
    if isinstance(index, int):
        index, shape = (index,), (prod(shape),)
    if len(index) != len(shape):
        columns_text = " and ".join(filter(None, (", ".join(columns.coordinates[:-1]), columns.coordinates[-1])))
        text = f"{len(index)} coordinates are given, but {parameter} has shape {list(shape)}"
        raise WrongEntry(text, columns_text)
    for axis, (i, size) in enumerate(zip(index, shape, strict=True)):
        if i >= size:
            text = f"{i} is outside {parameter} of shape {list(region.shape)}; expected 0-{size - 1}"
            raise WrongEntry(text, columns.coordinates[min(axis, len(columns.coordinates) - 1)])
    return region.site, int(np.ravel_multi_index(index, shape))


def _joined_fault(site: str, result: Sequence[tuple[int, ListedCorruption]], tensors: ModelTensors) -> Fault:
    """All corruptions of one tensor as one fault; two flips of the same bit cancel."""
    region = tensors.regions[site, None, None]
    operation = result[0][1].operation
    operands: dict[int, int] = {}
    for element, corrupt in sorted(result, key=lambda pair: pair[0]):
        if operation == "xor":
            operands[element] = operands.get(element, 0) ^ (1 << int(corrupt.operand))
        elif element in operands:
            text = f"element {element} of {short_repr(site, 80)} is set twice; give it once"
            raise WrongEntry(text, corrupt.columns.operand)
        else:
            operands[element] = int(region.codec.encode(np.array([corrupt.operand]))[0])
    elements = np.array(list(operands), np.int64)
    words = np.array(list(operands.values()), region.codec.word_dtype)
    return Fault(site, region.dtype, region.shape, elements, operation, words)
