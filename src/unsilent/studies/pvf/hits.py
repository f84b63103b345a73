"""Trials that struck one single element: where they fell, for the heat map, layer rows and embedding rows."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from unsilent.errors import StoreError
from unsilent.faults import Codec, codec
from unsilent.outcomes.base import Outcome, incorrect
from unsilent.statistics import Stratum, stratified
from unsilent.studies.pvf.records import HeatMap, LookupRow
from unsilent.studies.pvf.spec import Description, TensorInfo, TrialRow


@dataclass(frozen=True)
class SingleHit:
    """One trial whose faults were exactly one element of one tensor; ``bit`` when exactly one bit of it was flipped."""

    row: TrialRow
    tensor: TensorInfo
    element: int
    bit: int | None

    def incorrect(self, samples: Sequence[int], unit: str) -> tuple[int, int]:
        """Incorrect units and units of this trial."""
        codes = np.frombuffer(self.row.codes, np.uint8)
        ran = codes != Outcome.SPARED
        if unit == "sample":
            return int(incorrect(codes).sum()), int(ran.sum())
        firsts = np.cumsum([0, *samples[:-1]])
        return self.row.incorrect_batches, int(ran[firsts].sum())


def single_hits(rows: Iterable[TrialRow], description: Description) -> list[SingleHit]:
    """The trials of ``rows`` that struck one element."""
    tensors = {(t.site, t.dtype): t for t in description.tensors}
    found = []
    for row in rows:
        if row.trial.flips not in (1, None):
            continue
        try:
            faults = json.loads(row.faults)
            if not isinstance(faults, list) or len(faults) != 1 or len(faults[0]["elements"]) != 1:
                continue
            fault = faults[0]
            mask = int(fault["operands"][0], 16) if fault["operation"] == "xor" else 0
            bit = mask.bit_length() - 1 if mask.bit_count() == 1 else None
            tensor, element = tensors[fault["site"], fault["dtype"]], int(fault["elements"][0])
            if not 0 <= element < prod(tensor.shape) or (bit is not None and bit >= tensor.width):
                raise ValueError("outside of its tensor")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"the store is damaged: the fault of trial {row.trial} cannot be read ({error})") from None
        found.append(SingleHit(row, tensor, element, bit))
    return found


def dtypes(description: Description) -> tuple[str, ...]:
    """The dtypes of what may be struck, that of most elements first."""
    sizes: Counter[str] = Counter()
    for tensor in description.tensors:
        sizes[tensor.dtype] += tensor.elements
    return tuple(name for name, _ in sizes.most_common())


def heat_maps(hits: Sequence[SingleHit], description: Description, unit: str) -> tuple[HeatMap, ...]:
    """A map for each dtype that a single flip fell on: bits of several layouts have no common axis."""
    found = []
    for name in dtypes(description):
        flips = [h for h in hits if h.bit is not None and h.tensor.dtype == name]
        if flips:
            found.append(_heat_map(flips, codec(name), description, unit))
    return tuple(found)


def _heat_map(flips: Sequence[SingleHit], layout: Codec, description: Description, unit: str) -> HeatMap:
    """Layer x bit position over the tensors of one dtype.

    A cell that several targets share is weighted by their share of the law, and by how many of all their faults fell in it where
    all are tried.
    """
    shares = {t.name: t.share / max(t.slots, 1) for t in description.targets}
    counted = {t.name for t in description.targets if t.slots}
    cells: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for hit in flips:
        assert hit.bit is not None
        wrong, units = hit.incorrect(description.samples, unit)
        cells[hit.tensor.layer, hit.bit][hit.row.trial.target].append(wrong / units)
    layers = tuple(dict.fromkeys(t.layer for t in description.tensors if t.dtype == layout.name))
    bits = tuple(range(layout.bits))

    def value(layer: str, bit: int) -> float | None:
        parts = cells.get((layer, bit))
        if not parts:
            return None
        weights = {name: shares[name] * (len(seen) if name in counted else 1) for name, seen in parts.items()}
        return float(sum(weights[name] * np.mean(seen) for name, seen in parts.items()) / sum(weights.values()))

    return HeatMap(
        dtype=layout.name,
        layers=layers,
        bits=bits,
        fields={b: _field(layout, b) for b in bits},
        estimate=tuple(tuple(value(layer, b) for b in bits) for layer in layers),
        n=tuple(tuple(sum(map(len, cells.get((layer, b), {}).values())) for b in bits) for layer in layers),
    )


def _field(layout: Codec, bit: int) -> str:
    """As the codec names it, but the digits of an integer are its value."""
    name = layout.field(bit)
    return "value" if layout.kind == "int" and name == "mantissa" else name


Heats = NDArray[np.str_]


def heat_classes(counts: Sequence[int]) -> Heats:
    """``hot``, ``warm`` or ``cold`` for each row of a table from its look-ups (see `LookupRow`)."""
    seen = np.asarray(counts, np.int64)
    order = np.argsort(-seen, kind="stable")
    before = np.cumsum(seen[order]) - seen[order]
    classes = np.full(seen.size, "warm")
    classes[order[before < seen.sum() / 2]] = "hot"
    classes[seen == 0] = "cold"
    return classes


def lookup_rows(
    hits: Sequence[SingleHit], description: Description, unit: str, confidence: float
) -> tuple[LookupRow, ...]:
    """PVF of hot, warm and cold embedding rows over all tables that were looked up."""
    tables = {
        t.site: (t, heat_classes(description.lookups[name]))
        for t in description.tensors
        if (name := t.site.removeprefix("param:")) in description.lookups
    }
    mine = [h for h in hits if h.tensor.site in tables]
    if not mine:
        return ()
    shares = {t.name: t.share for t in description.targets}
    total = sum(t.elements for t, _ in tables.values())
    out = []
    for heat in ("hot", "warm", "cold"):
        groups: dict[str, list[float]] = {name: [] for name in shares}
        for hit in mine:
            tensor, classes = tables[hit.tensor.site]
            if classes[hit.element // prod(tensor.shape[1:])] == heat:
                wrong, units = hit.incorrect(description.samples, unit)
                groups[hit.row.trial.target].append(wrong / units)
        rows = sum(int((classes == heat).sum()) for _, classes in tables.values())
        if not rows:
            continue
        weights = {name: shares[name] * _part(name, heat, tables.values(), description) for name in groups}
        mass = sum(weights.values())  # strata without a hit weigh as much as they do
        whole = stratified([Stratum.of(g, weights[name] / mass) for name, g in groups.items()], confidence)
        out.append(
            LookupRow(
                heat=heat,
                rows=rows,
                lookups=sum(
                    int(np.asarray(description.lookups[s.removeprefix("param:")])[c == heat].sum())
                    for s, (_, c) in tables.items()
                ),
                share_of_elements=sum(int((c == heat).sum()) * prod(t.shape[1:]) for t, c in tables.values()) / total,
                estimate=whole.estimate,
                low=whole.low,
                high=whole.high,
                n=sum(len(g) for g in groups.values()),
            )
        )
    return tuple(out)


def _part(target: str, heat: str, tables: Iterable[tuple[TensorInfo, Heats]], description: Description) -> float:
    """Which part of a target's elements are embedding rows of this class."""
    info = next(t for t in description.targets if t.name == target)
    own = {"component": info.component, "tensor": info.group}.get(info.level, info.layer)

    def owner(tensor: TensorInfo) -> str:
        names = {"component": tensor.component, "tensor": tensor.site.removeprefix("param:")}
        return names.get(info.level, tensor.layer)

    struck = sum(int((c == heat).sum()) * prod(t.shape[1:]) for t, c in tables if owner(t) == own)
    return struck / info.elements
