"""``--dry-run``: what a command would run, what of it is stored, what it costs at most. No trial is run, no file is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.campaigns.spec import TrialId, differences, value_text
from unsilent.cli.reporting import show_report
from unsilent.options import Asked, options_of
from unsilent.report.model import Column, Report, Row, Section, Table
from unsilent.report.text import counted
from unsilent.sizes import lasting

if TYPE_CHECKING:
    from unsilent.cli.campaign import Verb


def dry_run(verb: Verb, asked: Asked, spec: Any, path: Path) -> int:
    """Load what would run, and say how many trials there would be; raises ``StoreError`` for a store of another campaign."""
    with verb.running(asked, spec) as (executor, _):
        baseline = executor.describe()
    done = stored(verb, spec, baseline, path)
    strata = verb.numbers(asked, spec, baseline)
    total = sum(map(len, strata.values()))
    groups = {target.name: getattr(target, "group", "") for target in baseline.targets}
    names = ((t, t.target if (t.target, t.flips) in strata else groups.get(t.target, "")) for t in done)
    left = total - sum(t.k in strata.get((name, t.flips), ()) for t, name in names)
    each, jobs = verb.seconds(baseline), asked["jobs"]
    seconds = left * each
    table = Table(
        (Column("target", left=True), Column("flips"), Column("trials", "number")),
        tuple(Row((target, flips, len(own))) for (target, flips), own in strata.items()),
        "Trials",
    )
    options = options_of(verb.kind.spec)
    spelled = Table(
        (Column(""), Column("", left=True)),
        tuple(Row((asking.flag, value_text(name, getattr(spec, name)))) for name, asking in options.items()),
        "What is asked",
    )
    report = Report(
        schema="unsilent/dry-run/1",
        kicker="Dry run",
        title="Dry run",
        headline=f"{counted(left, 'trial')} would run: at most about {lasting(seconds / jobs)}, with {counted(jobs, 'job')}",
        estimates=table,
        findings=(
            f"{total - left:,} of {counted(total, 'trial')} are stored already in {path}",
            f"an estimate: a fault-free run takes {lasting(each)}, a trial that at most; set-up, proofs and "
            "trials that hang come on top",
            *verb.foreseen(asked),
        ),
        sections=(Section("Plan", "", (table, spelled)),),
        again=verb.command(asked),
        data={
            "command": verb.command(asked), "spec": spec.to_json(), "store": str(path), "trials": total, "stored": total - left,
            "golden_seconds": each, "cpu_seconds": seconds, "seconds": seconds / jobs, "jobs": jobs,
        },
    )  # fmt: skip
    show_report(report, None, asked["as_json"], asked["plain"])
    return 0


def stored(verb: Verb, spec: Any, result: Any, path: Path) -> set[TrialId]:
    """Trials that the store holds; raises ``StoreError`` where they are of another campaign."""
    from unsilent.campaigns.store import Store

    if not path.exists() or not path.stat().st_size:
        return set()
    with Store(path, verb.kind) as store:
        if {key for key, _ in differences((store.spec, store.description), (spec, result))} - {*verb.unresolved}:
            store.check(spec, result)
        return store.done()
