"""Faults from a list in a file, used in place of randomly drawn faults.

They are resolved for the workload and sorted into targets, one fault per trial. The list itself is measured: trial k of
a target is the k-th of its faults in the file's order, and a target's share is its part of the list. After all faults
were run, the result is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Fault, Region
from unsilent.faults.lists import FaultListEntry, ModelTensors, read_entries, read_list_bytes, resolve_entry
from unsilent.faults.naming import SiteName, is_transient, parse_site
from unsilent.sites.modules import named_modules
from unsilent.sites.targets import LEVELS, Target, component_of

KINDS: Mapping[str, type[nn.Module]] = {"conv2d": nn.Conv2d, "conv3d": nn.Conv3d, "fcc": nn.Linear}
"""Types of layers that a list may count, by their names in lists."""

Faults = tuple[Fault, ...]


class ListedFaults:
    """The faults of a list, sorted into targets.

    Args:
        path: Path of the list.
        kind: The format; None if the content shows it.
        per: Unit of a target.
        components: Name of a component -> its modules.
        most_elements: Largest number of elements that the faults of a trial may have.

    Attributes:
        targets: Targets of the faults, with the elements that they corrupt as regions.
        regions: Regions of all targets.
        digest: Digest of the file's content.
        note: A sentence for the reader of a report.

    Raises:
        UsageError: the file cannot be read, or names something that the workload does not have.
    """

    def __init__(
        self,
        path: str,
        kind: str | None,
        per: str,
        engine: PlainEngine,
        components: Mapping[str, Sequence[str]],
        most_elements: int,
    ) -> None:
        content = read_list_bytes(path)
        self.digest = xxhash.xxh3_128_hexdigest(content)
        entries = list(read_entries(content, path, kind))
        tensors = _tensors(engine, entries)
        by_name: dict[str, list[Faults]] = defaultdict(list)
        owners: dict[str, Target] = {}
        touched: dict[str, dict[tuple[Any, ...], list[Fault]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            faults = resolve_entry(entry, tensors, path)
            if (size := sum(map(len, faults))) > most_elements:
                raise UsageError(
                    f"{path} {entry.file_position}: corrupts {size:,} elements, but at most {most_elements:,} can "
                    f"be stored; corrupt fewer"
                )
            owner = _owner(faults, components, per)
            owners.setdefault(owner.name, owner)
            by_name[owner.name].append(faults)
            for fault in faults:
                # A transient fault acts in one batch, so that the same elements in another batch are another region.
                step = fault.step if is_transient(fault.site) else None
                key = (fault.site, fault.dtype, fault.shape, step, fault.occurrence)
                touched[owner.name][key].append(fault)
        self._faults = dict(by_name)
        targets = []
        everywhere: dict[tuple[Any, ...], list[Fault]] = defaultdict(list)
        for target, owner in owners.items():
            regions = tuple(_region(key, corrupted) for key, corrupted in touched[target].items())
            targets.append(replace(owner, regions=regions, share=len(by_name[target]) / len(entries)))
            for key, corrupted in touched[target].items():
                everywhere[key] += corrupted
        self.targets = tuple(targets)
        self.regions = tuple(_region(key, corrupted) for key, corrupted in everywhere.items())
        self.note = (
            f"All numbers describe only the {len(entries):,} faults of the list, each injected once. If the list itself "
            "is a random sample of faults, no interval here includes the error of that sampling."
        )

    def count(self, target: str) -> int:
        """The number of faults in a target."""
        return len(self._faults[target])

    def faults_of_trial(self, target: str, number: int) -> tuple[int | None, Faults]:
        """The corrupted batch (None: all batches) and the faults of one trial of a target.

        Trials are numbered from 0.
        """
        faults = self._faults[target][number]
        return faults[0].step, faults


def _tensors(engine: PlainEngine, entries: Sequence[FaultListEntry]) -> ModelTensors:
    """The tensors of the workload of all kinds that occur in the list."""
    sites = [parse_site(p.site) for e in entries for p in e.corruptions if isinstance(p, Fault)]
    addresses = dict.fromkeys(_everything(site) for site in sites) or {"param:*": None}
    if "param:*" in addresses:  # param:* leaves out index buffers
        addresses |= dict.fromkeys(f"param:{name}" for name in engine.parameters.index_buffers)
    regions = engine.select_regions(tuple(addresses))
    layers = [
        (kind, name)
        for name, module in named_modules(engine.model)
        for kind, known in KINDS.items()
        if isinstance(module, known)
    ]
    known = {(r.site, r.step, r.occurrence): r for r in regions}
    return ModelTensors(known, engine.parameters.site_aliases, engine.parameters.unfit, layers, len(engine.batches))


def _everything(site: SiteName) -> str:
    """The address of all sites of the same kind as this one."""
    return f"op:*/fwd/{site.operand}" if site.kind == "op" else f"{site.kind}:*"


def _owner(faults: Faults, components: Mapping[str, Sequence[str]], per: str) -> Target:
    """The target to which the faults of a trial belong.

    The target has no regions. If its faults are in several targets, the names are joined.
    """
    if per not in LEVELS or per == "bit":
        raise UsageError(f"--per is {per!r}; expected component, layer or tensor for a list of faults")
    sites = [parse_site(fault.site) for fault in faults]
    names: dict[str, list[str]] = {
        "component": [component_of(site, components) for site in sites],
        "layer": [site.layer for site in sites],
        "tensor": [site.label for site in sites],
    }
    joined = {level: "+".join(dict.fromkeys(result)) for level, result in names.items()}
    layer = "" if per == "component" else joined["layer"]
    return Target(joined[per], per, joined["component"], layer, (), 1.0, None, joined[per])


def _region(key: tuple[Any, ...], corrupted: Sequence[Fault]) -> Region:
    site, dtype, shape, step, occurrence = key
    return Region(site, dtype, shape, np.unique(np.concatenate([f.elements for f in corrupted])), step, occurrence)
