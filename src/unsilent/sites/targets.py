"""Targets: parameters grouped by component, layer, tensor or bit, with the share of the sampling law each one holds."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

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
    def bits_by_width(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an element width and the bits that a fault may fall on in elements of it."""
        found: Counter[int] = Counter()
        for region in self.regions:
            width = codec(region.dtype).bits
            found[width] += region.size * (1 if self.bit is not None else width)
        return tuple(sorted(found.items()))


def layer_of(region: Region) -> str:
    """The module that owns a tensor: its name without the last part."""
    return region.site.removeprefix("param:").rpartition(".")[0] or "(root)"


def top_level(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Default components: the children of the first module that has several, or parameters of its own."""
    prefix = ""
    while len(children := dict(model.named_children())) == 1 and not list(model.parameters(recurse=False)):
        name, model = next(iter(children.items()))
        prefix += f"{name}."
    return {
        prefix + name: (f"{glob.escape(prefix + name)}.*",)
        for name, child in children.items()
        if any(True for _ in child.parameters()) or any(True for _ in child.buffers())
    }


def unregistered(model: nn.Module) -> list[str]:
    """Places that hold numbers outside of parameters and buffers: packed quantised weights, plain tensor attributes."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_packed_params" or (isinstance(value, Tensor) and value.numel()):
                found.append(f"{name}.{key}".lstrip("."))
    return sorted(set(found))


def component_of(name: str, components: Mapping[str, Sequence[str]]) -> str:
    """First component one of whose globs matches the parameter name, else ``other``."""
    for component, globs in components.items():
        if any(fnmatchcase(name, g.removeprefix("param:")) for g in globs):
            return component
    return OTHER


def make_targets(
    parameters: Parameters,
    components: Mapping[str, Sequence[str]],
    at: Sequence[str],
    per: str,
    law: str,
    strikeable: Callable[[Region], bool] = lambda region: True,
) -> tuple[Target, ...]:
    """Split the selection ``at`` into targets; shares follow ``law`` and sum to 1.

    ``strikeable`` says whether a fault model can strike a tensor at all (exponent bits of an integer: no); a tensor that it
    cannot is in no target and has no share.

    Raises ``UsageError`` for an unknown level or law, or a selection that matches nothing.
    """
    if per not in LEVELS:
        raise unknown("--per", per, LEVELS)
    if law not in LAWS:
        raise unknown("--law", law, LAWS)
    for globs in components.values():
        if isinstance(globs, str):
            raise UsageError(f"components must map a name to a list of globs, found the text {globs!r}")
    _check_components(parameters, components)
    selected = parameters.select(*at)
    regions = tuple(r for r in selected if strikeable(r)) or selected  # none at all: drawing says why
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


def _check_components(parameters: Parameters, components: Mapping[str, Sequence[str]]) -> None:
    """Every component must own something: a glob with a typo would put its parameters into ``other`` unseen."""
    owners = {component_of(name, components) for name in parameters.sites}
    for component, globs in components.items():
        if component not in owners:
            matched = [n for n in parameters.sites if component_of(n, {component: globs}) == component]
            why = "an earlier component owns all it matches" if matched else "it matches no parameter"
            raise UsageError(
                f"component {component!r} ({', '.join(globs)}) is empty: {why}; mend the workload's components"
            )


def _pieces(region: Region, component: str, per: str, share: float) -> list[Target]:
    layer, tensor = layer_of(region), region.site.removeprefix("param:")
    if per == "bit":
        width = codec(region.dtype).bits
        # Layers of several dtypes are split by dtype, so that every target is uniform over its elements.
        stem = layer if region.dtype == "float32" else f"{layer}/{region.dtype}"
        return [Target(f"{stem}/bit{b}", per, component, layer, (region,), share / width, b) for b in range(width)]
    name = {"component": component, "layer": layer, "tensor": tensor}[per]
    return [Target(name, per, component, layer if per != "component" else "", (region,), share)]
