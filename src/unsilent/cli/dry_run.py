"""The option ``--dry-run``: report the trials a command would run and their cost, without running any."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.options import OptionField, options_of
from unsilent.basics.sizes import rough_duration_text
from unsilent.campaigns.driver import check_strata
from unsilent.campaigns.executors import chosen_job_count
from unsilent.campaigns.spec import TrialId, differences, spec_value_text
from unsilent.cli.report_output import show_report
from unsilent.command import DisplayOptions
from unsilent.report.model import Column, Report, Section, Table, TableRow
from unsilent.report.text import count_text

if TYPE_CHECKING:
    from unsilent.campaigns.campaign_run import CampaignRun
    from unsilent.campaigns.kinds import Kind


def dry_run(kind: Kind[Any, Any, Any], campaign: CampaignRun, path: Path) -> int:
    """Load the workload and print how many trials would run.

    Raises ``StoreError`` if the store belongs to another campaign.
    """
    request, spec = campaign.request, campaign.spec
    with campaign.open_executor() as (executor, _):
        baseline = executor.establish_baseline()
        check_strata(spec, baseline)
        done = find_stored_trials(kind, spec, baseline, path)
        end = kind.dry_run.expected_end(campaign, path, executor)
    strata = kind.dry_run.trial_numbers(campaign, baseline)
    total = sum(map(len, strata.values()))
    groups = {target.name: getattr(target, "group", "") for target in baseline.targets}
    # Stored trials of a target that is not itself a stratum count for its group.
    names = ((t, t.target if (t.target, t.flips) in strata else groups.get(t.target, "")) for t in done)
    left = total - sum(t.k in strata.get((name, t.flips), ()) for t, name in names)
    each, asked_of = kind.dry_run.fault_free_seconds(baseline), request[kind.execution_options]
    jobs = chosen_job_count(asked_of.executor, spec, asked_of.jobs, asked_of.ray)
    seconds, is_open = left * each, kind.dry_run.has_open_number(request)
    most = f"at most about {rough_duration_text(seconds / jobs)}"
    headline = f"{count_text(left, 'trial')} would run, in {most} with {count_text(jobs, 'job')}"
    if end is not None:
        more = max(0, end.trials[1] - len(done))
        headline = f"about {count_text(more, 'trial')} would run, {end.time_text}, with {count_text(jobs, 'job')}"
    elif is_open:
        headline = f"at most {headline}; the campaign decides how many"
    counts = (TableRow((target, flips, len(trials))) for (target, flips), trials in strata.items())
    heads = (Column("target", left_aligned=True), Column("flips"), Column("trials", "number"))
    table = Table(heads, tuple(counts), "Trials")
    options = options_of(kind.spec).items()
    values = ((asking.flag, _value_text(kind.spec, name, asking, getattr(spec, name))) for name, asking in options)
    spelled = Table((Column(""), Column("", left_aligned=True)), tuple(map(TableRow, values)), "Options")
    report = Report(
        schema="unsilent/dry-run/1",
        report_type="Dry run",
        title="Dry run",
        headline=headline,
        estimates=table,
        findings=(
            *([] if end is None else [f"by the pilot, {end}"]),
            f"{total - left:,} of {count_text(total, 'trial')} are already stored in {path}",
            f"a fault-free run takes {rough_duration_text(each)}, and a trial that does not hang takes at most that long",
            "the time estimate does not include set-up and checks of the workload",
            *kind.dry_run.notes(campaign, baseline, path),
        ),
        sections=(Section("Plan", "", (table, spelled)),),
        repeat_command=campaign.command,
        further_json={
            "command": campaign.command, "spec": spec.to_json(), "store": str(path), "trials": total,
            "stored": total - left,
            "golden_seconds": each, "cpu_seconds": seconds, "seconds": seconds / jobs, "jobs": jobs,
            **({} if end is None else {"expected_trials": end.trials, "expected_seconds": end.seconds}),
        },
    )  # fmt: skip
    display = request[DisplayOptions]
    show_report(report, None, display.as_json, display.plain)
    return 0


def _value_text(spec: type, name: str, asking: OptionField, value: Any) -> str:
    """A value of a spec as text, or ``default`` if no value was given and the option documents its default."""
    text = spec_value_text(spec, name, value)
    return "default" if text == "none" != value and asking.default_text else text


def find_stored_trials(kind: Kind[Any, Any, Any], spec: Any, result: Any, path: Path) -> set[TrialId]:
    """The trials in a store; raises ``StoreError`` if the store holds another campaign."""
    from unsilent.campaigns.store import Store

    if not path.exists() or not path.stat().st_size:
        return set()
    with Store(path, kind) as store:
        if {key for key, _ in differences((store.spec, store.baseline), (spec, result))} - {*kind.late_fields}:
            store.check_campaign(spec, result)
        return store.stored_trial_ids()
