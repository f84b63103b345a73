"""Reads the items of the parameters, and the trials that hit them, from the store of a PVF campaign."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np

from unsilent.basics.errors import StoreError, UsageError
from unsilent.faults import codec
from unsilent.faults.naming import parse_site
from unsilent.outcomes.tallies import Tally
from unsilent.studies.plan.items import Item, ItemTrials, ParameterItems, StratumTrials
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.row_scopes import StoredTrials, single_element_trials
from unsilent.studies.pvf.spec import PvfBaseline, PvfSpec, PvfTrialRow, TargetInfo, TensorInfo

MOST_ROW_BLOCKS = 8
"""Most blocks of rows into which a tensor is divided."""


def check_plannable(store: PvfStore, granularity: str) -> None:
    """Raise ``UsageError`` if the trials of a campaign cannot be used for a plan.

    The message gives the command of a campaign that can be used.
    """
    spec = store.spec
    fitting = f"run unsilent pvf {spec.workload} --per tensor --strata bits --trials 500"
    if spec.accelerator is not None:
        raise UsageError(
            f"{store.path} has faults drawn by the memories of an accelerator; a plan needs a campaign with single faults in "
            f"parameters: {fitting}"
        )
    if spec.is_transient:
        raise UsageError(
            f"{store.path} has faults at {' '.join(spec.at)}; a plan needs faults in parameters: {fitting}"
        )
    if spec.faults is not None or 1 not in spec.flips:
        raise UsageError(f"{store.path} has {_found(spec)}; a plan needs trials with one drawn fault each: {fitting}")
    if spec.fault != "bitflip" and (granularity == "tensor-bits" or spec.per != "tensor"):
        needed = "--granularity tensor-bits needs" if spec.per == "tensor" else f"one row per {spec.per} needs"
        raise UsageError(f"{store.path} has the fault model {spec.fault}; {needed} bitflip: {fitting}")


def _found(spec: PvfSpec) -> str:
    """A description of the faults in a campaign that has no trials with one drawn fault."""
    if spec.faults is not None:
        return "faults of a list"
    if None in spec.flips:
        return f"the fault model {spec.fault}, which says itself what a trial corrupts"
    return f"{', '.join(map(str, spec.flips))} flips in a trial"


def read_items(store: PvfStore, granularity: str, unit: str) -> ParameterItems:
    """The items and trials of a campaign; raises ``UsageError`` if it cannot be used for a plan."""
    check_plannable(store, granularity)
    items = make_items(store.baseline, store.spec.law, granularity)
    trials = read_trials(store, items, unit)
    if store.spec.is_enumerated and not trials.exact:
        raise UsageError(f"{store.path} is an unfinished exhaustive campaign; run its command again to finish it")
    if trials.exact:
        return ParameterItems(items, trials, trials)
    halves = [replace(trials, strata=tuple(s.half(slice(n, None, 2)) for s in trials.strata)) for n in (0, 1)]
    return ParameterItems(items, *halves)


def make_items(description: PvfBaseline, law: str, granularity: str) -> tuple[Item, ...]:
    """All items of the parameters of a campaign, in the order of the tensors."""
    shares = defaultdict[tuple[str, str], float](float)
    for target in description.targets_at(1):
        tensors = _tensors_of(target, description)
        mass = [_mass(tensor, target, law) for tensor in tensors]
        for tensor, part in zip(tensors, mass, strict=True):
            shares[tensor.site, tensor.dtype] += target.share * part / math.fsum(mass)
    return tuple(
        item
        for tensor in description.tensors
        if (share := shares[tensor.site, tensor.dtype])
        for item in _items_of_tensor(tensor, share, granularity)
    )


def _mass(tensor: TensorInfo, target: TargetInfo, law: str) -> float:
    """An unnormalised probability that a fault of the target hits the tensor."""
    if target.elements_by_site:
        mine = float(target.elements_by_site.get(tensor.site, 0))
        return mine if law == "per-element" else mine / tensor.elements
    return float(tensor.elements) if law == "per-element" else 1.0


def _tensors_of(target: TargetInfo, description: PvfBaseline) -> list[TensorInfo]:
    def owner(tensor: TensorInfo) -> str:
        level = {"component": tensor.component, "tensor": parse_site(tensor.site).label}
        return level.get(target.level, tensor.layer)

    name = {"component": target.component, "tensor": target.group}.get(target.level, target.layer)
    return [t for t in description.tensors if owner(t) == name and target.dtype in ("", t.dtype)]


def _items_of_tensor(tensor: TensorInfo, share: float, granularity: str) -> list[Item]:
    """The items that a tensor is divided into."""
    label, key = parse_site(tensor.site).label, (tensor.site, tensor.dtype)
    size = tensor.elements * tensor.width
    if granularity == "tensor-bits":
        return [
            Item(f"{label}/{name}", key, None, bits, size * len(bits) // tensor.width, share * len(bits) / tensor.width)
            for name, bits in codec(tensor.dtype).bit_strata.items()
        ]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    if granularity == "tensor" or rows == 1 or prod(tensor.shape) != tensor.elements:  # a selection has unknown rows
        return [Item(label, key, None, None, size, share)]
    blocks = min(rows, MOST_ROW_BLOCKS)
    ends = [n * rows // blocks for n in range(blocks + 1)]
    return [
        Item(f"{label}[{a}:{b}]", key, (a, b), None, size * (b - a) // rows, share * (b - a) / rows)
        for a, b in pairwise(ends)
    ]


def read_trials(store: PvfStore, items: Sequence[Item], unit: str) -> ItemTrials:
    """The counted trials of a campaign, each with the item that its fault hit."""
    stored = StoredTrials(store, unit)
    targets = stored.description.targets_at(1)
    sample = stored.sample(targets, 1)
    try:
        strata = [
            _stratum(target, stored.counted_rows(target, 1, sample.look_number), stored, items, part.expected_mean)
            for target, part in zip(targets, sample.strata, strict=True)
        ]
    except (KeyError, StopIteration, ZeroDivisionError) as error:
        raise StoreError(f"the store is damaged: its contents are inconsistent ({error}); use a backup copy") from error
    total = math.fsum(s.share for s in strata)
    return ItemTrials(
        tuple(replace(s, share=s.share / total) for s in strata), sample.look_number, sample.exhaustive_of
    )


def _stratum(
    target: TargetInfo, rows: Sequence[PvfTrialRow], stored: StoredTrials, items: Sequence[Item], expected_mean: float
) -> StratumTrials:
    tensors = {(t.site, t.dtype) for t in _tensors_of(target, stored.description)}
    bits = None if target.bits is None else set(target.bits)
    reachable = [
        n
        for n, item in enumerate(items)
        if item.tensor in tensors and (bits is None or item.bits is None or bits & set(item.bits))
    ]
    tally = Tally.of([row.outcome_codes for row in rows], stored.description.samples, stored.unit)
    if len(reachable) == 1:
        hit_items = np.full(len(rows), reachable[0], np.int64)
    else:
        hits = single_element_trials(rows, stored.description)
        if len(hits) != len(rows):
            raise UsageError(
                f"the campaign has trials with several faults ({stored.spec.fault}); a plan needs one fault in a trial"
            )
        shapes = {(t.site, t.dtype): t.shape for t in stored.description.tensors}
        places = [
            (
                hit.tensor.site,
                hit.tensor.dtype,
                hit.element // prod(shapes[hit.tensor.site, hit.tensor.dtype][1:]),
                hit.bit,
            )
            for hit in hits
        ]
        item_of = {place: _item_at(place, items, reachable) for place in set(places)}
        hit_items = np.array([item_of[place] for place in places], np.int64)
    judged = tally.units_per_trial > 0
    outcomes = tally.incorrect_share_per_trial
    return StratumTrials(target.share, np.array(reachable, np.int64), hit_items[judged], outcomes, expected_mean)


def _item_at(place: tuple[str, str, int, int | None], items: Sequence[Item], among: Sequence[int]) -> int:
    """The number of the item that contains a row and bit of a tensor."""
    site, dtype, row, bit = place
    return next(
        n
        for n in among
        if items[n].tensor == (site, dtype)
        and ((rows := items[n].rows) is None or rows[0] <= row < rows[1])
        and ((bits := items[n].bits) is None or bit in bits)
    )
