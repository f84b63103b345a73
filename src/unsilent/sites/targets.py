"""Targets: corrupted elements grouped by component, layer, tensor or bit, with their shares of the sampling law.

A fault in a transient value acts in one evaluation of one batch: `RegionsByBatch` draws the batch, then the fault is drawn in it.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray
from torch import nn

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.printable import escape_unprintable
from unsilent.faults import Population, Region, codec
from unsilent.faults.naming import SiteName, parse_site
from unsilent.sites.parameters import Parameters

LEVELS = ("component", "layer", "tensor", "bit")
LAWS = ("per-element", "per-tensor")
OTHER = "other"
INDEX_BUFFERS = "index-buffers"
"""Component of indices and counters, if a campaign selects them."""


@dataclass(frozen=True)
class Target:
    """A group of elements that a campaign corrupts.

    ``share``: probability that one fault drawn over the whole selection is in this target (sums to 1 over all targets of trials
    with the same number of flips).
    ``bits``: bits that are corrupted (None: all). ``group``: name of the reported group if it was split into strata.
    ``weights``: mass of each region if it differs from that of the sampling law. ``flips``: numbers of flips in the target's
    trials; empty for all numbers in the campaign.
    """

    name: str
    level: str
    component: str
    layer: str
    regions: tuple[Region, ...]
    share: float
    bits: tuple[int, ...] | None = None
    group: str = ""
    weights: tuple[float, ...] = ()
    flips: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements in the target."""
        return sum(r.eligible_count for r in self.regions)

    @property
    def bits_by_width(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an element width and the number of corruptible bits in elements of that width."""
        mapping: Counter[int] = Counter()
        for region in self.regions:
            width = codec(region.dtype).bits
            mapping[width] += region.eligible_count * (width if self.bits is None else len(self.bits))
        return tuple(sorted(mapping.items()))


class RegionsByBatch:
    """The regions of a target grouped by batch; parameters are regions of all batches (``step`` None).

    The batch is drawn by its mass, then a slot in it. For one flip this equals the sampling law over all regions; several
    flips stay in one evaluation. If regions have weights, each region is drawn by its weight.
    """

    def __init__(self, target: Target, law: str) -> None:
        mapping: dict[Hashable, list[Region]] = {}
        for number, region in enumerate(target.regions):
            mapping.setdefault(number if target.weights else region.step, []).append(region)
        self.steps = tuple(regions[0].step for regions in mapping.values())
        self.populations = tuple(Population(regions) for regions in mapping.values())
        mass = [
            sum(r.eligible_count for r in regions) if law == "per-element" else len(regions)
            for regions in mapping.values()
        ]
        self._weighted_ends = np.cumsum(target.weights)
        self._ends = np.cumsum(np.array(mass, np.int64))

    def draw_batch(self, rng: np.random.Generator) -> tuple[int | None, Population]:
        """Draw a batch and return it with its population; a single batch needs no draw."""
        chosen = 0
        if self._weighted_ends.size > 1:
            place = rng.random() * self._weighted_ends[-1]
            chosen = min(int(np.searchsorted(self._weighted_ends, place, side="right")), len(self.steps) - 1)
        elif len(self.steps) > 1:
            chosen = int(np.searchsorted(self._ends, rng.integers(self._ends[-1]), side="right"))
        return self.steps[chosen], self.populations[chosen]


def default_components(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Default components: the child modules of the first module that has several children or own parameters."""
    prefix = ""
    while len(children := dict(model.named_children())) == 1 and not list(model.parameters(recurse=False)):
        name, model = next(iter(children.items()))
        prefix += f"{escape_unprintable(name)}."
    return {
        prefix + name: (f"{glob.escape(prefix + name)}.*",)
        for name, child in ((escape_unprintable(name), child) for name, child in children.items())
        if any(True for _ in child.parameters()) or any(True for _ in child.buffers())
    }


def component_of(site: SiteName, components: Mapping[str, Sequence[str]]) -> str:
    """The first component with a matching glob, else ``other``; ``input`` and ``kv`` are their own components.

    Globs match parameter names; ``layer1.*`` also includes the operation ``layer1.0.conv1#convolution.0``.
    """
    if site.kind in ("input", "kv"):
        return site.kind
    name = site.name if site.kind == "param" else ".".join(site.name.rsplit("#", 1))
    for component, globs in components.items():
        if any(fnmatchcase(name, g.removeprefix("param:")) for g in globs):
            return component
    return OTHER


def make_targets(
    selected: Sequence[Region],
    components: Mapping[str, Sequence[str]],
    per: str,
    law: str,
    corruptible: Callable[[Region], bool] = lambda region: True,
    strata: str = "none",
    negative: Mapping[str, NDArray[np.bool_]] | None = None,
) -> tuple[Target, ...]:
    """Split the selected regions into targets; shares follow ``law`` and sum to 1.

    ``strata`` splits every target into several targets: ``dtype`` by dtype, so that all bits of a target are equally likely;
    ``bits`` also by class of bits (`Codec.bit_strata`), and the top exponent bit by the sign of the element (``negative``: masks
    of the negative elements by parameter name).

    ``corruptible`` returns whether a fault model can corrupt a tensor (exponent bits of an integer: no); other tensors are not in
    any target and have no share.

    Raises ``UsageError`` for an unknown level or law.
    """
    if per not in LEVELS:
        raise unknown_name_error("--per", per, LEVELS)
    if law not in LAWS:
        raise unknown_name_error("--law", law, LAWS)
    regions = [r for r in selected if corruptible(r)] or selected  # if there is none, the draw raises the error
    total = sum(r.eligible_count for r in regions)
    by_name: dict[str, list[Target]] = {}
    for region in regions:
        share = region.eligible_count / total if law == "per-element" else 1 / len(regions)
        site = parse_site(region.site)
        below = None if negative is None or site.kind != "param" else negative.get(site.name)
        for piece in _pieces(region, site, component_of(site, components), per, strata, share):
            for part in _by_sign(piece, below):
                by_name.setdefault(part.name, []).append(part)
    return tuple(_joined_target(pieces) for pieces in by_name.values())


def _joined_target(pieces: Sequence[Target]) -> Target:
    regions = tuple(region for piece in pieces for region in piece.regions)
    return replace(pieces[0], regions=regions, share=sum(piece.share for piece in pieces))


def check_components(parameters: Parameters, components: Mapping[str, Sequence[str]]) -> None:
    """Check that every component owns a tensor; a typo in a glob would put its tensors into ``other``.

    Raises ``UsageError`` for a component without a tensor, or for globs that are not a list.
    """
    for globs in components.values():
        if isinstance(globs, str):
            raise UsageError(f"components must map each name to a list of globs, found the text {globs!r}")
    names = [SiteName("param", name) for name in parameters.sites]
    owners = {component_of(name, components) for name in names}
    for component, globs in components.items():
        if component not in owners:
            matched = [n for n in names if component_of(n, {component: globs}) == component]
            why = "it matches no parameter"
            if matched:
                why = "all parameters that it matches belong to an earlier component"
            raise UsageError(
                f"component {component!r} ({', '.join(globs)}) is empty: {why}; correct the components of the workload"
            )


def with_index_buffers(parameters: Parameters, components: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The components, preceded by one for the index buffers that share a component with other tensors."""
    owner = {name: component_of(SiteName("param", name), components) for name in parameters.sites}
    shared = {OTHER, *(component for name, component in owner.items() if name not in parameters.index_buffers)}
    result = [glob.escape(name) for name in parameters.index_buffers if owner[name] in shared]
    return {**({INDEX_BUFFERS: result} if result else {}), **components}


def _pieces(region: Region, site: SiteName, component: str, per: str, strata: str, share: float) -> list[Target]:
    layer, tensor = site.layer, site.label
    layout = codec(region.dtype)
    if per == "bit":
        # Layers of several dtypes are split by dtype, so that every target is uniform over its elements.
        stem = layer if region.dtype == "float32" else f"{layer}/{region.dtype}"
        names = {f"{stem}/bit{b}": (b,) for b in range(layout.bits)}
        return [
            Target(name, per, component, layer, (region,), share / layout.bits, bits, name)
            for name, bits in names.items()
        ]
    name = {"component": component, "layer": layer, "tensor": tensor}[per]
    layer = layer if per != "component" else ""
    if strata == "none":
        return [Target(name, per, component, layer, (region,), share, None, name)]
    stem = name if region.dtype == "float32" else f"{name}/{region.dtype}"
    if strata == "dtype":
        return [Target(stem, per, component, layer, (region,), share, None, name)]
    return [
        Target(f"{stem}/{part}", per, component, layer, (region,), share * len(bits) / layout.bits, bits, name)
        for part, bits in layout.bit_strata.items()
    ]


def _by_sign(target: Target, negative: NDArray[np.bool_] | None) -> list[Target]:
    """Split a target for the top exponent bit by the sign of its elements; other targets are unchanged.

    A flip of this bit makes a value huge, and an activation function like ReLU often stops huge values of only one sign.
    """
    if negative is None or not target.name.endswith("/exponent-top"):
        return [target]
    (region,) = target.regions
    elements = np.arange(region.numel) if region.elements is None else region.elements
    chosen = negative[elements]
    return [
        replace(
            target,
            name=target.name + ending,
            regions=(replace(region, elements=elements[part]),),
            share=target.share * float(part.mean()),
        )
        for ending, part in (("-negative", chosen), ("-positive", ~chosen))
        if part.any()
    ]
