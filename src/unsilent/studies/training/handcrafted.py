"""Faults made by hand to show a class of outcomes, for classes that a random campaign did not come upon.

Which class a fault ends in depends on the training, so these are candidates in the order in which they are worth trying; who asks
runs one after the other until one ends as wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from unsilent.errors import UsageError, unknown_name_error
from unsilent.faults.naming import SiteName, parse_site
from unsilent.studies.training.spec import InjectionPoint, OperationPhase

if TYPE_CHECKING:
    from unsilent.engine.forking import GoldenTraining
    from unsilent.studies.training.fault_sampler import FaultSampler, SampledFault

FaultRecipe = tuple[float, str, float, str]
"""When (share of the run), what is corrupted (a phase, or ``param``), which of these (share of all in order), the fault model."""

SHARES = (0.7, 0.4, 0.9, 0.15)
DEPTHS = (1.0, 0.5, 0.0)
_SMALL = ("bitflip:bits=0", "bitflip:bits=3")
_LARGE = ("set:value=1e3", "set:value=1e9", "set:value=9e17", "set:value=1e25", "set:value=1e37")


def _ladder(
    whats: tuple[str, ...], models: tuple[str, ...], shares: tuple[float, ...] = SHARES
) -> tuple[FaultRecipe, ...]:
    return tuple(
        (share, what, depth, model) for share in shares for model in models for what in whats for depth in DEPTHS
    )


_WEIGHTS = ("scale:factor=-1,rate=1", "scale:factor=30,rate=1", "zero:rate=1", "scale:factor=3,rate=1", "set:value=1e4")
EXAMPLE_CANDIDATES: Mapping[str, tuple[FaultRecipe, ...]] = {
    "masked": _ladder(("grad_wt", "fwd"), _SMALL),
    "immediate-nan": _ladder(("fwd",), ("set:value=nan,rate=1", "set:value=inf,rate=1")),
    "short-term-nan": _ladder(("grad_wt", "grad_in"), ("set:value=nan", "set:value=1e38", *_LARGE[::-1])),
    "sharp-degrade": _ladder(("param", "grad_wt"), (*_WEIGHTS, *_LARGE), (0.97, *SHARES)),
    "slow-degrade": _ladder(("param",), _WEIGHTS) + _ladder(("grad_in", "grad_wt", "fwd"), _LARGE),
    "sharp-slow-degrade": _ladder(("param", "grad_in"), (*_WEIGHTS, *_LARGE)),
    "low-test": _ladder(("fwd",), ("set:value=1e18", "set:value=1e24", "set:value=1e6"), (0.97, 0.99, 0.9, 0.7)),
}
"""By the class that is looked for."""


def handcrafted(golden: GoldenTraining, sampler: FaultSampler, kind: str, number: int) -> SampledFault:
    """The number-th candidate for a class; raises ``UsageError`` where there is none."""
    from unsilent.faults import fault_model  # who reads a store does without numpy and torch
    from unsilent.faults.unresolved_fault import UnresolvedFault
    from unsilent.studies.training.fault_sampler import SampledFault

    if kind not in EXAMPLE_CANDIDATES:
        raise unknown_name_error("class of outcomes", kind, EXAMPLE_CANDIDATES)
    ladder = EXAMPLE_CANDIDATES[kind]
    if not 0 <= number < len(ladder):
        raise UsageError(
            f"there are {len(ladder)} faults made by hand for {kind}, numbered from 0; found number {number}"
        )
    share, what, depth, model = ladder[number]
    step = min(golden.steps - 1, int(share * golden.steps))
    sites = list(_sites(sampler, what))
    if not sites:
        raise UsageError(
            f"the fault made by hand for {kind} needs a site of kind {what}, but this training has none; "
            "use another training"
        )
    site = sites[round(depth * (len(sites) - 1))]
    parsed = parse_site(site)
    layer = parsed.layer if parsed.kind == "op" else SiteName("param", parsed.name).layer
    return SampledFault(
        InjectionPoint(step, site, what, layer, model), (UnresolvedFault(site, fault_model(model), seed=number),)
    )


def _sites(sampler: FaultSampler, what: str) -> Iterator[str]:
    """Sites of one kind in the order of the step: weights of several axes, or products."""
    if what == "param":
        yield from (r.site for r in sampler.regions if r.site.startswith("param:") and len(r.shape) > 1)
        return
    places: list[OperationPhase] = sampler.everywhere
    yield from (f"op:{place.operation}/{what}/out" for place in places if place.phase == what)
