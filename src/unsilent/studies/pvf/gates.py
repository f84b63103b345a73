"""Gates for continuous integration: ``top_mlp<=0.01`` holds when the *upper* limit of every matching row does."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unsilent.errors import UsageError, unknown
from unsilent.studies.pvf.records import PvfResult, PvfRow, at_flips
from unsilent.studies.pvf.spec import CampaignSpec, Description

_GATE = re.compile(r"\s*(?P<target>[^@<>=]+?)(?:@(?P<flips>\d+))?\s*<=\s*(?P<limit>[0-9.eE+-]+)(?P<percent>%?)\s*$")


@dataclass(frozen=True)
class Gate:
    """``TARGET[@FLIPS]<=LIMIT``: without ``@FLIPS`` it must hold at every number of flips."""

    target: str
    flips: int | None
    limit: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read a gate; raises ``UsageError`` for anything else or a limit outside [0, 1]."""
        match = _GATE.match(text)
        try:
            limit = float(match["limit"]) / (100 if match["percent"] else 1) if match else -1.0
        except ValueError:
            limit = -1.0
        if match is None or not 0 <= limit <= 1:
            raise UsageError(
                f"cannot read --assert {text!r}; expected TARGET<=LIMIT with a limit from 0 to 1, like 'top_mlp<=0.01'"
            )
        return cls(match["target"], int(match["flips"]) if match["flips"] else None, limit)

    def check(self, spec: CampaignSpec, description: Description) -> None:
        """Raise ``UsageError`` when the campaign will have no row this speaks of; before its first trial."""
        names = {"model", *(t.name for t in description.targets), *(t.component for t in description.targets)}
        names |= {t.layer for t in description.tensors}
        if self.target not in names:
            raise unknown("target of --assert", self.target, names)
        if self.flips is not None and self.flips not in spec.flips:
            raise unknown("number of flips of --assert", str(self.flips), map(str, spec.flips))

    def rows(self, result: PvfResult) -> list[PvfRow]:
        """The rows it speaks of; raises ``UsageError`` when there are none."""
        found = [r for r in result.rows if r.target == self.target and self.flips in (None, r.flips)]
        if found:  # a component and its only layer may share a name: the coarser level is meant
            found = [r for r in found if r.level == found[0].level]
            return found
        raise unknown(
            "target of --assert",
            self.target if self.flips is None else f"{self.target}@{self.flips}",
            {r.target if self.flips is None else f"{r.target}@{r.flips}" for r in result.rows},
        )

    def failures(self, result: PvfResult) -> list[str]:
        """One line for each row whose upper limit is above the limit."""
        return [
            f"{r.target}{at_flips(r.flips)}: upper limit {r.high:.3g} is above {self.limit:g} "
            f"(estimate {'none' if r.estimate is None else f'{r.estimate:.3g}'}, n {r.n})"
            for r in self.rows(result)
            if r.high > self.limit
        ]
