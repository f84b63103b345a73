"""One stored trial, run again alone: same campaign, same fault, same end."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from unsilent.campaigns.executors import LocalExecutor, make_executor
from unsilent.campaigns.named_again import named_again
from unsilent.campaigns.spec import Means, TrialId
from unsilent.errors import StoreError, UsageError
from unsilent.faults import Fault
from unsilent.faults.receipts import Receipt
from unsilent.outcomes.base import Outcome
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.spec import CampaignSpec, TrialRow
from unsilent.traced import Trace
from unsilent.workloads import ZOO


@dataclass(frozen=True)
class Replay:
    """The stored row and the new one; the trace of batch ``batch``, and the receipt, where they were asked for."""

    stored: TrialRow
    again: TrialRow
    trace: Trace | None = None
    batch: int | None = None
    receipt: Receipt | None = None

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
            "stored": self.stored.derived(),
            "again": self.again.derived(),
            "severity": [_finite(r.severity) for r in (self.stored, self.again)],
            "error": [r.error for r in (self.stored, self.again)],
            **({} if self.trace is None else {"batch": self.batch, "trace": self.trace.to_json()}),
        }

    @property
    def ended(self) -> str:
        """How the samples ended now, in words."""
        return _counted(self.again)

    def __str__(self) -> str:
        verdict = "ended the same" if self.same else "ENDED DIFFERENTLY"
        lines = [
            f"{self.stored.trial} {verdict}",
            f"stored: {_counted(self.stored)}",
            f"again:  {_counted(self.again)}",
            *([f"raised: {self.again.error}"] if self.again.error else []),
            f"fault:  {describe_faults(self.stored)}",
        ]
        return "\n".join(lines)


def replay_trial(
    store: PvfStore,
    trial: TrialId,
    workload: str | None = None,
    data: str | None = None,
    weights: str | None = None,
    *,
    options: tuple[tuple[str, str], ...] = (),
    trace: bool = False,
    batch: int | None = None,
    receipt: bool = False,
) -> Replay:
    """Run a stored trial again.

    A store is a file from anywhere: a workload that is not built in, and files, are used only when the user names them as well.

    Args:
        workload, data, weights: named as for ``unsilent pvf``; None: what is built in. options: of a workload that is not.
        trace: also compare every operation of one batch with the golden run: of ``batch``, else of the first whose output
            the stored trial changed (the first that its faults act in, where it changed none). receipt: also say what the
            faults find and write.

    Raises ``UsageError`` when something has to be named or there is nothing to trace, ``StoreError`` when the workload is not
    the stored one any more.
    """
    stored, description = store.row(trial), store.description
    given = {"workload": workload, "data": data, "weights": weights}
    spec = named_again(store.spec, given, {"workload": ZOO}, options)
    chosen = _batch(stored, description.samples, batch) if trace else None
    means = Means(engine="plain") if trace else None  # a trace needs no shortcuts, which take time to prepare
    with _drawable(spec, stored) as (asked, number), make_executor("serial", asked, means=means) as executor:
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
        assert isinstance(again, TrialRow)
        if trace or receipt:
            _check_alive(again, trial)
        near = cast("LocalExecutor", executor)
        struck = near.receipt(number) if receipt else None
        spread = near.trace(number, chosen) if chosen is not None else None
        return Replay(stored, replace(again, trial=trial), spread, chosen, struck)


def _batch(row: TrialRow, samples: Sequence[int], asked: int | None) -> int:
    """The batch to trace; raises ``UsageError`` for one that is not there or that no fault acted in."""
    _check_alive(row, row.trial)
    ends = np.cumsum(samples)
    codes = np.split(np.frombuffer(row.codes, np.uint8), ends[:-1])
    acted = [i for i, part in enumerate(codes) if (part != Outcome.SPARED).any()]
    if asked is not None and not 0 <= asked < len(samples):
        raise UsageError(f"--batch is {asked}; the workload has batches 0 to {len(samples) - 1}")
    if asked is not None and asked not in acted:
        raise UsageError(f"no fault of {row.trial} acts in batch {asked}; it acts in {', '.join(map(str, acted[:8]))}")
    if asked is not None:
        return asked
    return next((i for i in acted if (codes[i] != Outcome.MASKED).any()), acted[0] if acted else 0)


def _check_alive(row: TrialRow, trial: TrialId) -> None:
    """Raise ``UsageError`` where a trial took its process with it, and with that what it had computed."""
    codes = np.frombuffer(row.codes, np.uint8)
    for ended in (Outcome.CRASH, Outcome.HANG):
        if (codes == ended).any():
            raise UsageError(
                f"{trial} ended in a {ended.name.lower()}, which leaves nothing to trace; replay it without --trace"
            )


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


def _counted(row: TrialRow) -> str:
    return ", ".join(f"{n} {name}" for name, n in row.derived().items() if n)


def describe_faults(row: TrialRow, most: int = 4) -> str:
    """The first faults of a trial in words."""
    faults = json.loads(row.faults)
    if not isinstance(faults, list):
        return f"{faults['elements']} elements (digest {faults['digest']})"
    words = [Fault.from_json(f).describe() for f in faults[:most]]
    return "; ".join(words) + (f"; and {len(faults) - most} tensors more" if len(faults) > most else "") or "none drawn"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
