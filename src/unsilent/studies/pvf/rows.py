"""Rows of estimates: targets, what they roll up to, and layers seen through where single faults fell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unsilent.outcomes.base import Outcome
from unsilent.studies.pvf.hits import SingleHit
from unsilent.studies.pvf.records import PvfRow
from unsilent.studies.pvf.spec import TargetInfo, TensorInfo, TrialRow
from unsilent.studies.pvf.stored import NOTHING, Stored
from unsilent.studies.pvf.tallies import Question, Sample, Tally, Weighed


@dataclass(frozen=True)
class Group:
    """What one row is about: one or several strata with their trials, and the memory they stand for."""

    name: str
    level: str
    parent: str
    flips: int | None
    targets: tuple[TargetInfo, ...]
    sample: Sample
    elements: int
    bits: Counter[int]
    """Bits by the width of the elements they belong to."""

    @property
    def tally(self) -> Tally:
        """All its trials together."""
        return Tally.joined(s.tally for s in self.sample.strata)

    def mix(self) -> dict[str, float]:
        """Share of the units by outcome, strata weighted; empty without trials."""
        seen = [s for s in self.sample.strata if s.tally.classes.size]
        total = sum(s.share for s in seen)
        found: dict[str, float] = {}
        for stratum in seen:
            units = max(1, int(stratum.tally.sizes.sum()))
            for name, count in stratum.tally.totals().items():
                if name != Outcome.SPARED.name.lower():
                    found[name] = found.get(name, 0.0) + stratum.share / total * count / units
        return found

    def silent(self) -> float | None:
        """Share of the incorrect units that are silent, weighted like the estimate."""
        strata = self.sample.strata
        if len(strata) == 1:
            return strata[0].tally.silent
        wrong = [s.share * float(s.tally.shares.mean()) if s.tally.shares.size else 0.0 for s in strata]
        if not sum(wrong):
            return None
        return sum(w * (s.tally.silent or 0.0) for w, s in zip(wrong, strata, strict=True)) / sum(wrong)


def target_groups(stored: Stored, flips: int | None) -> list[Group]:
    """The targets of one number of flips, what they belong to, and the model; coarse levels first."""
    targets = stored.description.targets
    level = targets[0].level
    found = [_rolled_up("model", "model", "", targets, stored, flips)]
    if level != "component":
        for name, members in _by(targets, lambda t: t.component):
            found.append(_rolled_up(name, "component", "", members, stored, flips))
    if level in ("tensor", "bit"):
        for name, members in _by(targets, lambda t: t.layer):
            found.append(_rolled_up(name, "layer", members[0].component, members, stored, flips))
    for name, members in _by(targets, lambda t: t.group):
        parent = {"component": "", "layer": members[0].component}.get(level, members[0].layer)
        found.append(_rolled_up(name, level, parent, members, stored, flips))
    return found


def _by(targets: Sequence[TargetInfo], key: Callable[[TargetInfo], str]) -> list[tuple[str, list[TargetInfo]]]:
    found: dict[str, list[TargetInfo]] = {}
    for target in targets:
        found.setdefault(key(target), []).append(target)
    return list(found.items())


def _rolled_up(
    name: str, level: str, parent: str, members: Sequence[TargetInfo], stored: Stored, flips: int | None
) -> Group:
    bits: Counter[int] = Counter()
    for target in members:
        bits.update(dict(target.bits_by_width))
    # Targets by bits have the same elements again at every position.
    elements = sum(t.elements for t in members if len(members) == 1 or t.bits is None or 0 in t.bits)
    return Group(name, level, parent, flips, tuple(members), stored.sample(members, flips), elements, bits)


def layer_groups(hits: Sequence[SingleHit], stored: Stored) -> list[Group]:
    """Layers of a campaign per component: the trials whose one fault fell in that layer.

    Given the layer that was hit, such a trial is a uniform draw from it, so the estimate is fair; its n is whatever chance gave.
    """
    if not hits:
        return []
    description = stored.description
    tensors: dict[tuple[str, str], list[TensorInfo]] = {}
    for tensor in description.tensors:
        tensors.setdefault((tensor.component, tensor.layer), []).append(tensor)
    groups = []
    for (component, layer), own in tensors.items():
        rows: dict[str, list[TrialRow]] = {}
        for hit in hits:
            if (hit.tensor.component, hit.tensor.layer) == (component, layer):
                rows.setdefault(hit.row.trial.target, []).append(hit.row)
        targets = tuple(t for t in description.targets if t.component == component and _share(t, own, stored.spec.law))
        strata = tuple(
            Weighed(
                _share(t, own, stored.spec.law),
                Tally.of(rows[t.name], description.samples, stored.unit) if t.name in rows else NOTHING,
            )
            for t in targets
        )
        bits = Counter[int]()
        for tensor in own:
            bits[tensor.width] += tensor.elements * tensor.width
        strata = strata or (Weighed(1.0, NOTHING),)  # the fault model strikes nothing there
        look = stored.look([component], 1)
        whole = stored.sample([t for t in description.targets if t.component == component], 1)
        sample = Sample(strata, None if look == -1 else look, whole.complete)
        groups.append(Group(layer, "layer", component, 1, targets, sample, sum(t.elements for t in own), bits))
    return groups


def _share(target: TargetInfo, tensors: Sequence[TensorInfo], law: str) -> float:
    """Which part of the law's mass in these tensors is in the bits of a target."""
    mass = {t.site + t.dtype: float(t.elements) if law == "per-element" else 1.0 for t in tensors}
    if not target.dtype:
        return 1.0
    mine = sum(
        mass[t.site + t.dtype]
        * (1 if target.bits is None else len(target.bits) / t.width)
        * (target.parts.get(t.site, 0) / t.elements if target.parts else 1)
        for t in tensors
        if t.dtype == target.dtype
    )
    return mine / sum(mass.values())


def make_rows(groups: Iterable[Group], question: Question) -> list[PvfRow]:
    """One row a group; joint limits hold over all rows of a level and number of flips."""
    groups = list(groups)
    family = Counter((g.level, g.flips) for g in groups)
    return [_row(group, question, family[group.level, group.flips]) for group in groups]


def _row(group: Group, question: Question, family: int) -> PvfRow:
    interval = question.estimate(group.sample)
    joint = question.jointly(family).estimate(group.sample)
    tally = group.tally
    totals = tally.totals()
    due = {o.name.lower(): totals[o.name.lower()] for o in Outcome if o.due}
    return PvfRow(
        target=group.name,
        level=group.level,
        parent=group.parent,
        flips=group.flips,
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        confidence=question.confidence,
        n=len(tally.classes),
        unit=question.unit or "sample",
        units=int(tally.sizes.sum()),
        masked=totals["masked"],
        benign=totals["benign"],
        sdc=totals["sdc"],
        due=sum(due.values()),
        due_kinds=due,
        elements=group.elements,
        bits=sum(group.bits.values()),
        method=interval.method,
        silent_share=group.silent(),
        incorrect_trials=int((tally.incorrect > 0).sum()),
        joint_low=joint.low,
        joint_high=joint.high,
        mix=group.mix(),
        width_share=max(group.bits.values()) / sum(group.bits.values()),
    )
