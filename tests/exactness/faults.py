"""Faults that try an engine hard: a seeded list of trials for one workload.

Exponent bits come up most, so that most trials change the output; some give infinity or NaN (with payloads of their own),
some corrupt several tensors at once, and some flip the lowest bits of a mantissa, which often end masked.

Invariant: the list depends on the sites, the number of trials, the kinds and the seed, on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.faults import Fault, Region, fault_model

KINDS = {
    "param": ("param:*",),
    "op": ("op:*",),
    "operand": ("op:*/fwd/first", "op:*/fwd/second"),
    "input": ("input:*",),
    "kv": ("kv:*",),
}
"""Addresses of everything of a kind."""
SHARE = 1.15
"""Trials that a covering list has for each tensor."""
NEAR = (
    "bitflip:bits=exponent_msb",
    "bitflip:bits=exponent",
    "bitflip:bits=exponent,count=8",
    "infinity",
    "nan",
    "zero:run=4",
    "random:count=4",
    "bitflip:bits=exponent_msb,count=2",
    "bitflip",
    "scale:factor=-1.5,count=8",
    "bitflip:bits=sign,count=6",
    "burst:length=3,count=4",
    "low",
    "copy:count=8",
    "bitflip:bits=exponent",
    "stuck:at=1,count=4",
)
"""Fault models for one tensor, taken in turn; ``infinity``, ``nan`` and ``low`` depend on its dtype."""
FAR = ("bitflip:bits=exponent,count=8", "bitflip:count=8", "random:count=8", "scale:factor=3,count=8")
"""Fault models for a whole model; they corrupt several tensors."""
FAR_EVERY = 5


class Trial(NamedTuple):
    """Faults that act together, and what they were drawn from."""

    label: str
    faults: tuple[Fault, ...]


def enough(regions: Sequence[Region], least: int) -> int:
    """How many trials cover every region, and are at least ``least``."""
    return max(least, math.ceil(len(regions) * SHARE))


def draw(regions: Sequence[Region], trials: int, seed: int) -> list[Trial]:
    """``trials`` trials; from one trial per region on (see `check_replica_count`), every region is hit on its own."""
    rng = np.random.default_rng([seed, 1])
    order = rng.permutation(len(regions))
    found = [one(regions[i], k, rng) for k, i in enumerate(order[:trials])] if trials >= len(regions) else []
    while len(found) < trials:
        if len(found) % FAR_EVERY == 0:
            found.append(several(regions, len(found) // FAR_EVERY, rng))
        else:
            found.append(one(_weighty(regions, rng), len(found), rng))
    return found


def one(region: Region, turn: int, rng: np.random.Generator) -> Trial:
    """A fault in one tensor, by the fault model whose turn it is; a plain flip where that cannot corrupt this tensor."""
    text = _text(NEAR[turn % len(NEAR)], region, rng)
    single = text.partition(",count")[0].partition(":count")[0].partition(":run")[0]
    return _first((text, single, "bitflip"), [region], rng)


def several(regions: Sequence[Region], turn: int, rng: np.random.Generator) -> Trial:
    """Eight elements, in as many tensors as the draw gives."""
    return _first((FAR[turn % len(FAR)], "bitflip:count=8", "bitflip"), regions, rng)


def _first(texts: Sequence[str], regions: Sequence[Region], rng: np.random.Generator) -> Trial:
    """By the first fault model that can corrupt: an integer has no exponent, a scalar no eight elements."""
    for text in texts:
        try:
            return Trial(text, fault_model(text).draw(regions, rng, "per-tensor"))
        except UsageError:
            continue
    raise AssertionError(f"{regions[0].site} cannot be corrupted by a flip")


def _weighty(regions: Sequence[Region], rng: np.random.Generator) -> Region:
    """Mostly a region of floating-point numbers: counters hardly ever reach an output."""
    floating = [r for r in regions if r.codec.kind == "float"]
    chosen = floating if floating and rng.integers(12) else regions
    return chosen[int(rng.integers(len(chosen)))]


def _text(name: str, region: Region, rng: np.random.Generator) -> str:
    """A fault model's text for this dtype."""
    layout = region.codec
    if layout.kind != "float":
        return "random" if name == "infinity" else "bitflip" if name in ("nan", "low") else name
    if name == "infinity":
        return f"set:value={'-inf' if rng.integers(2) else 'inf'}" if layout.has_inf else "set:value=nan"
    if name == "nan":  # any payload, quiet or signalling, either sign
        payload = int(rng.integers(1, 1 << layout.mantissa_bits)) if layout.has_inf else 0
        sign = int(rng.integers(2)) << (layout.bits - 1)
        return f"set:value={layout.smallest_nonfinite_word | payload | sign:#x}"
    return "bitflip:bits=0-1" if name == "low" else name


def sites(trials: Sequence[Trial]) -> set[str]:
    """Names of all sites corrupted."""
    return {fault.site for trial in trials for fault in trial.faults}


def to_json(trials: Sequence[Trial]) -> list[list[Any]]:
    """What the oracle reads."""
    return [[fault.to_json() for fault in trial.faults] for trial in trials]
