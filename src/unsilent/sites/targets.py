"""Targets: parameters grouped by component, layer, tensor or bit, with the share of the sampling law each one holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from unsilent.errors import UsageError, unknown
from unsilent.faults import Region, codec
from unsilent.sites.parameters import Parameters

LEVELS = ("component", "layer", "tensor", "bit")
LAWS = ("per-element", "per-tensor")
OTHER = "other"


@dataclass(frozen=True)
class Target:
    """One group of elements a campaign strikes.

    ``share``: probability that one fault drawn over the whole selection falls here (sums to 1 over all targets).
    """

    name: str
    level: str
    component: str
    layer: str
    regions: tuple[Region, ...]
    share: float
    bit: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(r.size for r in self.regions)

    @property
    def bits(self) -> int:
        """Number of bits a fault may fall on here."""
        return self.elements if self.bit is not None else sum(r.bits for r in self.regions)


def layer_of(region: Region) -> str:
    """The module that owns a tensor: its name without the last part."""
    return region.site.removeprefix("param:").rpartition(".")[0] or "(root)"


def top_level(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Default components: the children of the first module that has several, or parameters of its own."""
    prefix = ""
    while len(children := dict(model.named_children())) == 1 and not list(model.parameters(recurse=False)):
        name, model = next(iter(children.items()))
        prefix += f"{name}."
    return {prefix + name: (f"{prefix}{name}.*",) for name in children}


def component_of(name: str, components: Mapping[str, Sequence[str]]) -> str:
    """First component one of whose globs matches the parameter name, else ``other``."""
    for component, globs in components.items():
        if any(fnmatchcase(name, g.removeprefix("param:")) for g in globs):
            return component
    return OTHER


def make_targets(
    parameters: Parameters, components: Mapping[str, Sequence[str]], at: Sequence[str], per: str, law: str
) -> tuple[Target, ...]:
    """Split the selection ``at`` into targets; shares follow ``law`` and sum to 1.

    Raises ``UsageError`` for an unknown level or law, or a selection that matches nothing.
    """
    if per not in LEVELS:
        raise unknown("--per", per, LEVELS)
    if law not in LAWS:
        raise unknown("--law", law, LAWS)
    for globs in components.values():
        if isinstance(globs, str):
            raise UsageError(f"components must map a name to a list of globs, found the text {globs!r}")
    regions = parameters.select(*at)
    total = sum(r.size for r in regions)
    found: dict[str, Target] = {}
    for region in regions:
        share = region.size / total if law == "per-element" else 1 / len(regions)
        for piece in _pieces(region, component_of(region.site.removeprefix("param:"), components), per, share):
            known = found.get(piece.name)
            found[piece.name] = (
                piece
                if known is None
                else replace(known, regions=known.regions + piece.regions, share=known.share + piece.share)
            )
    return tuple(found.values())


def _pieces(region: Region, component: str, per: str, share: float) -> list[Target]:
    layer, tensor = layer_of(region), region.site.removeprefix("param:")
    if per == "bit":
        width = codec(region.dtype).bits
        # Layers of several dtypes are split by dtype, so that every target is uniform over its elements.
        stem = layer if region.dtype == "float32" else f"{layer}/{region.dtype}"
        return [Target(f"{stem}/bit{b}", per, component, layer, (region,), share / width, b) for b in range(width)]
    name = {"component": component, "layer": layer, "tensor": tensor}[per]
    return [Target(name, per, component, layer if per != "component" else "", (region,), share)]
