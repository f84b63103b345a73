"""Faults made by hand to show a class of outcomes, for classes that a random campaign did not come upon.

Which class a fault ends in depends on the training, so these are candidates in the order in which they are worth trying; who asks
runs one after the other until one ends as wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.engine.forking import GoldenTraining
from unsilent.errors import UsageError, unknown
from unsilent.faults import fault_model
from unsilent.faults.drawn import Draw
from unsilent.faults.naming import SiteName, parse_site
from unsilent.studies.training.drawing import Drawing, Drawn
from unsilent.studies.training.ladders import LADDERS
from unsilent.studies.training.spec import Place, Struck


def made(golden: GoldenTraining, drawing: Drawing, kind: str, number: int) -> Drawn:
    """The number-th candidate for a class; raises ``UsageError`` where there is none."""
    if kind not in LADDERS:
        raise unknown("class of outcomes", kind, LADDERS)
    ladder = LADDERS[kind]
    if not 0 <= number < len(ladder):
        raise UsageError(f"there are {len(ladder)} faults made by hand for {kind}, numbered from 0; asked for {number}")
    share, what, depth, model = ladder[number]
    step = min(golden.steps - 1, int(share * golden.steps))
    sites = list(_sites(drawing, what))
    if not sites:
        raise UsageError(f"no {what} of this training can be struck")
    site = sites[round(depth * (len(sites) - 1))]
    parsed = parse_site(site)
    layer = parsed.layer if parsed.kind == "op" else SiteName("param", parsed.name).layer
    return Drawn(Struck(step, site, what, layer, model), (Draw(site, fault_model(model), seed=number),))


def _sites(drawing: Drawing, what: str) -> Iterator[str]:
    """Sites of one kind in the order of the step: weights of several axes, or products."""
    if what == "param":
        yield from (r.site for r in drawing.regions if r.site.startswith("param:") and len(r.shape) > 1)
        return
    places: list[Place] = drawing.everywhere
    yield from (f"op:{place.operation}/{what}/out" for place in places if place.phase == what)
