"""Is any kind of site slower on the fast engine than on the plain one? Every tensor of a model is tried, worst first.

A class is one tensor: a parameter or buffer, an input, an output or operand of one operation. Faults drawn in it are run
both ways, in turn; the ratio of the totals has an interval from resampling them. Of hundreds of classes some exceed any
limit by chance: a class whose upper limit is above `LIMIT` is tried again on more and fresh faults, and then on many more;
only the last figure counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.bound import Bound
from benchmarks.subjects import SUBJECTS, ZOO, draw, engines
from benchmarks.timing import Ratio, paired, ratio
from unsilent.basics.errors import UsageError
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Region, fault_model
from unsilent.faults.naming import parse_site
from unsilent.workloads import load
from unsilent.workloads.base import InferenceWorkload

BUDGET = 40.0
"""Seconds for one model; of a slow model only the classes with most dependents are tried."""
FEWEST = 6
SHOWN = 6
LIMIT = 1.05
STAGES = (1, 3, 12)
"""Times as many faults at every stage."""
WARM = 4
"""Trials of each class before it is measured: the engine goes over to plain runs where it finds them cheaper."""


class Class(NamedTuple):
    """Ratio auto / plain of one tensor. ``kind``: type of its module and which of its tensors."""

    site: str
    kind: str
    found: Ratio
    share: float


def kind_of(model: nn.Module, region: Region) -> str:
    """``Conv2d.weight``, ``Linear addmm/out``, ``input``."""
    site = parse_site(region.site)
    modules = dict(model.named_modules())
    if site.kind == "param":
        layer, _, name = site.name.rpartition(".")
        return f"{type(modules[layer]).__name__}.{name}"
    if site.kind == "op":
        name = site.name.rpartition("#")[2].partition(".")[0]
        owner = modules.get(site.layer)
        return f"{type(owner).__name__ if owner is not None else site.layer} {name}/{site.operand}"
    return site.kind


def places(engine: PlainEngine) -> list[Region]:
    """Every tensor that can be corrupted; of transient ones, those of the first batch."""
    found = list(engine.select_regions(["param:*"]))
    for address in ("input:*", "op:*", "op:*/fwd/first", "op:*/fwd/second"):
        try:
            found += engine.select_regions([address])
        except UsageError:  # a model without such sites
            continue
    flips = fault_model("bitflip")
    return [r for r in {(r.site, r.step): r for r in found}.values() if r.step in (None, 0) and flips.capacity((r,))]


def compare(plain: PlainEngine, auto: CachedEngine, region: Region, rounds: int, seed: int, device: str) -> Ratio:
    """The ratio auto / plain of faults in one region."""
    for faults in draw((region,), WARM, seed=seed + 100):
        auto.trial(faults)
    drawn = draw((region,), rounds, seed=seed)
    times = paired({"auto": auto.trial, "plain": plain.trial}, drawn, block=5, device=device)
    return ratio(times["auto"], times["plain"])


def classes(workload: InferenceWorkload, rounds: int, device: str) -> list[Class]:
    """All classes of a workload that the budget allows, worst upper limit first."""
    plain, auto = engines(workload, device)
    bound = Bound(auto, device=device)
    shares = {r: bound.share(draw((r,), 1)[0]) for r in places(plain)}
    affordable = max(FEWEST, int(BUDGET / (2 * rounds * plain.golden_seconds)))
    tried = sorted(shares, key=lambda r: -shares[r])[:affordable]
    found = []
    for region in tried:
        for seed, times in enumerate(STAGES):
            ratio_ = compare(plain, auto, region, times * rounds, seed + 1, device)
            if ratio_.high <= LIMIT:
                break
        found.append(Class(region.site, kind_of(plain.model, region), ratio_, shares[region]))
    return sorted(found, key=lambda c: -c.found.high)


def text(name: str, found: Sequence[Class], of: int) -> str:
    """The worst classes, and how the others did."""
    slower = [c for c in found if c.found.low > 1]
    unsure = [c for c in found if c.found.low <= 1 <= c.found.high]
    above = Counter(c.kind for c in found if c.found.high > LIMIT)
    lines = [
        f"\n{name}: auto / plain of {len(found)} classes of sites, {of} faults each or more; upper limit above {LIMIT}: "
        f"{above.total()}; {len(slower)} slower, {len(unsure)} not told apart, "
        f"{len(found) - len(slower) - len(unsure)} faster"
    ]
    lines += [f"  above: {', '.join(f'{k} ({n})' for k, n in above.most_common())}"] if above else []
    lines += [f"  {c.found!s:24}{c.share:8.3f} of the forward  {c.kind:28} {c.site}" for c in found[:SHOWN]]
    return "\n".join(lines)


def main(rounds: int, device: str) -> None:
    """Print the worst classes of every model."""
    torch.set_num_threads(1)
    workloads = {name: (lambda name=name: load(name)) for name in ZOO}
    workloads |= {s.name: s.workload for s in (SUBJECTS["gpt"], SUBJECTS["light"], SUBJECTS["cifar"])}
    for name, make in workloads.items():
        print(text(name, classes(make(), rounds, device), rounds), flush=True)
