"""Runs one stored trial of a PVF campaign again, and traces how its fault spreads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.fault_trace import FaultTrace
from unsilent.campaigns.confirmed_files import with_confirmed_files
from unsilent.campaigns.replay import replay_executor, run_one_trial
from unsilent.campaigns.spec import TrialId, WorkerSettings
from unsilent.campaigns.trial_replay import TrialReplay
from unsilent.faults import Fault
from unsilent.faults.corruption_log import trial_lines
from unsilent.outcomes.base import Outcome
from unsilent.report.model import Report
from unsilent.report.text import count_text
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow


def replay_pvf_trial(
    store: PvfStore,
    trial: TrialId,
    confirmed: Mapping[str, str | None],
    options: Collection[tuple[str, str]] = (),
    *,
    trace: bool = False,
    batch: int | None = None,
    log: bool = False,
) -> TrialReplay[PvfTrialRow]:
    """Run a stored trial again.

    Args:
        confirmed, options: Files and options that the user names again, see `with_confirmed_files`.
        trace: Also compare every operation of one batch with the golden run. The batch is ``batch`` if given, else the first
            whose output the stored trial changed; if it changed none, the first batch in which its faults act.
        log: Also report the values that the faults find and write.

    Raises:
        UsageError: a file or option must be named again, or there is nothing to trace.
        StoreError: the trial does not exist, or its workload differs from the stored one.
    """
    stored, samples = store.row(trial), store.baseline.samples
    spec = with_confirmed_files(store.spec, confirmed, PVF.builtin_values, options)
    chosen = _batch(stored, samples, batch) if trace else None
    # A trace does not need the shortcuts of other engines, which take time to prepare.
    settings = WorkerSettings(engine="plain") if trace else None
    with (
        _drawable(spec, stored) as (drawable_spec, number, ignored),
        replay_executor(store, drawable_spec, ignored_differences=ignored, worker_settings=settings) as executor,
    ):
        again = replace(run_one_trial(executor, number), trial=trial)
        if trace or log:
            _check_alive(again, trial)
        receipt = executor.ask_runner("receipt", number) if log else None
        spread = executor.ask_runner("trace", number, chosen) if trace else None
    parts = [f"stored: {_counts_text(stored)}", f"again:  {_counts_text(again)}"]
    parts += [f"raised: {again.error}"] if again.error else []
    return TrialReplay(
        stored,
        again,
        (*parts, f"fault:  {describe_faults(stored)}"),
        {} if spread is None else {"batch": chosen, "trace": spread.to_json()},
        None if spread is None else _trace_report(store, again, spread, chosen or 0),
        () if receipt is None else tuple(trial_lines(receipt)),
    )


def _trace_report(store: PvfStore, row: PvfTrialRow, trace: FaultTrace, batch: int) -> Report:
    """The report on the trace of a trial."""
    from unsilent.studies.propagation_report import report

    spec, baseline = store.spec, store.baseline
    place = f"{batch} (counted from 0) of {count_text(len(baseline.samples), 'batch')}"
    facts = (
        ("workload", spec.workload),
        ("store", str(store.path)),
        ("trial", str(row.trial)),
        ("batch", f"{place}, {count_text(baseline.samples[batch], 'sample')}"),
        ("ended", _counts_text(row)),
        ("versions", ", ".join(f"{name} {version}" for name, version in baseline.versions.items())),
    )
    return report(trace, f"how the fault of {row.trial} spreads: batch {batch} of {spec.workload}", facts)


def _batch(row: PvfTrialRow, samples: Sequence[int], chosen_batch: int | None) -> int:
    """The number of the batch to trace; raises ``UsageError`` if it does not exist or has no fault."""
    _check_alive(row, row.trial)
    ends = np.cumsum(samples)
    codes = np.split(np.frombuffer(row.outcome_codes, np.uint8), ends[:-1])
    acted = [i for i, part in enumerate(codes) if (part != Outcome.SPARED).any()]
    if chosen_batch is not None and not 0 <= chosen_batch < len(samples):
        raise UsageError(f"--batch is {chosen_batch}; the workload has batches 0 to {len(samples) - 1}")
    if chosen_batch is not None and chosen_batch not in acted:
        raise UsageError(
            f"no fault of {row.trial} acts in batch {chosen_batch}; expected one of: {', '.join(map(str, acted[:8]))}"
        )
    if chosen_batch is not None:
        return chosen_batch
    return next((i for i in acted if (codes[i] != Outcome.MASKED).any()), acted[0] if acted else 0)


def _check_alive(row: PvfTrialRow, trial: TrialId) -> None:
    """Raise ``UsageError`` if the trial ended in a crash or hang, since nothing can be traced then."""
    codes = np.frombuffer(row.outcome_codes, np.uint8)
    for ended in (Outcome.CRASH, Outcome.HANG):
        if (codes == ended).any():
            raise UsageError(
                f"{trial} ended in a {ended.name.lower()}, which leaves nothing to trace; replay it without --trace"
            )


@contextmanager
def _drawable(spec: PvfSpec, stored: PvfTrialRow) -> Iterator[tuple[PvfSpec, TrialId, tuple[str, ...]]]:
    """A campaign in which the trial can be drawn, the trial's id in it, and the fields that may differ.

    For a trial from a list of faults, the campaign has a list of this fault alone; the original list is not needed.
    """
    if spec.faults is None:
        yield spec, stored.trial, ()
        return
    with tempfile.TemporaryDirectory(prefix="unsilent-") as folder:
        path = Path(folder) / "stored.jsonl"
        path.write_text(stored.faults + "\n", encoding="utf-8")
        list_of_one = replace(spec, faults=str(path), faults_as="unsilent")
        yield list_of_one, stored.trial._replace(k=0), ("faults", "faults_as")


def _counts_text(row: PvfTrialRow) -> str:
    """The number of samples by outcome, as text."""
    return ", ".join(f"{n} {name}" for name, n in row.derived().items() if n)


def describe_faults(row: PvfTrialRow, most: int = 4) -> str:
    """A description of the first faults of a trial."""
    faults = json.loads(row.faults)
    if not isinstance(faults, list):
        return f"{faults['elements']} elements (digest {faults['digest']})"
    words = [Fault.from_json(f).describe() for f in faults[:most]]
    return "; ".join(words) + (f"; and {len(faults) - most} more tensors" if len(faults) > most else "") or "none drawn"
