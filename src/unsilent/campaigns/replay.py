"""One stored trial, run again alone: same campaign, same fault, same end."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.spec import CampaignSpec, TrialId, TrialRow
from unsilent.campaigns.store import Store
from unsilent.errors import StoreError, UsageError
from unsilent.faults import Fault
from unsilent.outcomes.base import Outcome
from unsilent.workloads import ZOO


@dataclass(frozen=True)
class Replay:
    """The stored row and the new one."""

    stored: TrialRow
    again: TrialRow

    @property
    def same(self) -> bool:
        """Whether faults, outcomes of all samples and severity are equal."""
        return self.stored.content() == self.again.content()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": "unsilent/replay/1",
            "trial": str(self.stored.trial),
            "same": self.same,
            "faults": json.loads(self.stored.faults),
            "stored": outcome_counts(self.stored),
            "again": outcome_counts(self.again),
            "severity": [_finite(r.severity) for r in (self.stored, self.again)],
            "error": [r.error for r in (self.stored, self.again)],
        }

    def __str__(self) -> str:
        def counted(row: TrialRow) -> str:
            return ", ".join(f"{n} {name}" for name, n in outcome_counts(row).items() if n)

        verdict = "ended the same" if self.same else "ENDED DIFFERENTLY"
        lines = [
            f"{self.stored.trial} {verdict}",
            f"stored: {counted(self.stored)}",
            f"again:  {counted(self.again)}",
            f"fault:  {describe_faults(self.stored)}",
        ]
        return "\n".join(lines)


def replay_trial(store: Store, trial: TrialId, workload: str | None = None) -> Replay:
    """Run a stored trial again.

    A store is a file from anywhere: it names the workload, and a workload that is the user's code is run only when the user
    names it as well (``workload``).

    Raises ``UsageError`` when it has to be named, ``StoreError`` when the workload is not the stored one any more.
    """
    stored, spec, description = store.row(trial), store.spec, store.description
    if workload is not None:
        spec = replace(spec, workload=workload)
    elif spec.workload not in ZOO and not spec.workload.startswith("hf:"):
        raise UsageError(
            f"the trial ran {spec.workload!r}, which is code; to run it again say so: --workload {shlex.quote(spec.workload)}"
        )
    with _drawable(spec, stored) as (asked, number), make_executor("serial", asked) as executor:
        found = executor.describe()
        changed = [k for k in found.fingerprint if found.fingerprint[k] != description.fingerprint.get(k)]
        if spec.faults is not None:
            changed = [k for k in changed if k != "faults"]  # a list of one
        if changed or (spec.faults is None and found.campaign != description.campaign):
            raise StoreError(
                f"{store.path} was made with another {', '.join(changed) or 'setting'}; "
                "a bit-exact replay needs the same weights, inputs, device model, threads and versions"
            )
        (again,) = (row for rows in executor.run([number]) for row in rows)
        return Replay(stored, replace(again, trial=trial))


@contextmanager
def _drawable(spec: CampaignSpec, stored: TrialRow) -> Iterator[tuple[CampaignSpec, TrialId]]:
    """A campaign that has the trial, and its name there: of a list, which is not needed any more, one of this fault alone."""
    if spec.faults is None:
        yield spec, stored.trial
        return
    with tempfile.TemporaryDirectory(prefix="unsilent-") as folder:
        path = Path(folder) / "stored.jsonl"
        path.write_text(stored.faults + "\n", encoding="utf-8")
        yield replace(spec, faults=str(path), faults_as="unsilent"), stored.trial._replace(k=0)


def outcome_counts(row: TrialRow) -> dict[str, int]:
    """Samples by outcome."""
    counts = np.bincount(np.frombuffer(row.codes, np.uint8), minlength=len(Outcome))
    return {o.name.lower(): int(counts[o]) for o in Outcome}


def describe_faults(row: TrialRow, most: int = 4) -> str:
    """The first faults of a trial in words."""
    faults = json.loads(row.faults)
    if not isinstance(faults, list):
        return f"{faults['elements']} elements (digest {faults['digest']})"
    words = [Fault.from_json(f).describe() for f in faults[:most]]
    return "; ".join(words) + (f"; and {len(faults) - most} tensors more" if len(faults) > most else "") or "none drawn"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
