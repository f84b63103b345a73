"""Rows of estimates: targets, what they roll up to, and layers seen through where single faults fell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unsilent.campaigns.spec import Description, TargetInfo
from unsilent.outcomes.base import Outcome
from unsilent.studies.hits import SingleHit
from unsilent.studies.records import PvfRow
from unsilent.studies.tallies import Question, Tally

Strata = Sequence[tuple[TargetInfo, Tally]]


@dataclass(frozen=True)
class Group:
    """What one row is about: one or several strata with their shares, and the memory they stand for."""

    name: str
    level: str
    parent: str
    flips: int | None
    shares: tuple[float, ...]
    tallies: tuple[Tally, ...]
    elements: int
    bits: Counter[int]
    """Bits by the width of the elements they belong to."""

    @property
    def strata(self) -> list[tuple[float, Tally]]:
        """Shares and tallies."""
        return list(zip(self.shares, self.tallies, strict=True))

    def silent(self) -> float | None:
        """Share of the incorrect units that are silent, weighted like the estimate."""
        if len(self.tallies) == 1:
            return self.tallies[0].silent
        wrong = [s * float(t.shares.mean()) if t.shares.size else 0.0 for s, t in self.strata]
        if not sum(wrong):
            return None
        return sum(w * (t.silent or 0.0) for w, t in zip(wrong, self.tallies, strict=True)) / sum(wrong)


def strata_groups(strata: Strata, flips: int | None) -> list[Group]:
    """The targets of one number of flips, what they belong to, and the model; coarse levels first."""
    level = strata[0][0].level
    groups = [_rolled_up("model", "model", "", strata, flips)]
    if level != "component":
        for name in dict.fromkeys(t.component for t, _ in strata):
            members = [(t, y) for t, y in strata if t.component == name]
            groups.append(_rolled_up(name, "component", "", members, flips))
    if level in ("tensor", "bit"):
        for name in dict.fromkeys(t.layer for t, _ in strata):
            members = [(t, y) for t, y in strata if t.layer == name]
            groups.append(_rolled_up(name, "layer", members[0][0].component, members, flips))
    for target, tally in strata:
        parent = {"component": "", "layer": target.component}.get(level, target.layer)
        groups.append(_rolled_up(target.name, level, parent, [(target, tally)], flips))
    return groups


def _rolled_up(name: str, level: str, parent: str, members: Strata, flips: int | None) -> Group:
    bits: Counter[int] = Counter()
    for target, _ in members:
        bits.update(dict(target.bits_by_width))
    # Elements of bit targets are the same ones again at every position.
    elements = sum(t.elements for t, _ in members if len(members) == 1 or t.level != "bit" or t.name.endswith("/bit0"))
    return Group(
        name, level, parent, flips, tuple(t.share for t, _ in members), tuple(y for _, y in members), elements, bits
    )


def layer_groups(hits: Sequence[SingleHit], description: Description, question: Question) -> list[Group]:
    """Layers of a campaign per component: the trials whose one fault fell in that layer.

    Given the layer that was hit, such a trial is a uniform draw from it, so the estimate is fair; its n is whatever chance gave.
    """
    if not hits:
        return []
    elements: Counter[tuple[str, str]] = Counter()
    bits: dict[tuple[str, str], Counter[int]] = {}
    for tensor in description.tensors:
        key = (tensor.component, tensor.layer)
        elements[key] += tensor.elements
        bits.setdefault(key, Counter())[tensor.width] += tensor.elements * tensor.width
    groups = []
    for (component, layer), size in elements.items():
        mine = [h.row for h in hits if (h.tensor.component, h.tensor.layer) == (component, layer)]
        tally = Tally.of(mine, description.samples, question.unit or "sample")
        groups.append(Group(layer, "layer", component, 1, (1.0,), (tally,), size, bits[component, layer]))
    return groups


def make_rows(groups: Iterable[Group], question: Question) -> list[PvfRow]:
    """One row a group; joint limits hold over all rows of a level and number of flips."""
    groups = list(groups)
    family = Counter((g.level, g.flips) for g in groups)
    return [_row(group, question, family[group.level, group.flips]) for group in groups]


def _row(group: Group, question: Question, family: int) -> PvfRow:
    interval = question.estimate(group.strata)
    joint = question.jointly(family).estimate(group.strata)
    tally = Tally.joined(group.tallies)
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
        width_share=max(group.bits.values()) / sum(group.bits.values()),
    )
