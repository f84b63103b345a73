"""How often queries in the order of the runbook localise a planted fault, beside the same queries in random order.

Run: ``python -m benchmarks.triage_runbook FOLDER``. Twenty small trainings of one or two ranks with a planted anomaly run under
the real monitor, which writes an incident each; what is in the folder already is not run again. Five are healthy: an unusual
batch or another learning rate. Each is taken twice: as it is, and without the fault verdict of the monitor.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from unsilent.events.incident_folder import INCIDENT_FILE, find_incident
from unsilent.incidents.plant import WORKLOADS, PlantedIncident, plant
from unsilent.incidents.planted_job import run_planted
from unsilent.statistics.intervals import clopper_pearson
from unsilent.triage.farm.real_job import run_gang
from unsilent.triage.findings import Finding, FindingKind, Outcome
from unsilent.triage.investigation import Executed, executable, investigate
from unsilent.triage.queries.table import TEMPLATES, execute

COUNTS = {
    1: {"transient": 1, "checkpoint": 1, "data": 1, "numerics": 1, "benign": 1},
    2: {"transient": 2, "device": 2, "checkpoint": 2, "data": 3, "numerics": 2, "benign": 4},
}
"""Incidents of each kind, by number of ranks: 20."""
FIRST_SEED = 20
"""Incidents of other seeds were looked at while the queries were written."""
ORDERS = 200
"""Random ones of each incident."""
LONGEST = 1200.0
"""Seconds that a gang may take."""


@dataclass(frozen=True)
class Trail:
    """How it went on one incident: the finding that ended it, queries that were executed, and seconds by the table."""

    finding: Finding | None
    queries: int
    seconds: float


def incidents(ranks: int) -> list[PlantedIncident]:
    """Those of one number of ranks."""
    return [
        plant(kind, world_size=ranks, seed=FIRST_SEED + number, workload=WORKLOADS[number // 2 % 2])
        for kind, count in COUNTS[ranks].items()
        for number in range(count)
    ]


def folder_of(above: Path, incident: PlantedIncident) -> Path:
    """Where the job of an incident writes."""
    return above / f"{incident.kind}-{incident.world_size}-{incident.seed}"


def run_rank(rank: int, ranks: int, above: Path) -> None:
    """In one process of a gang: run all incidents of one number of ranks that are not there."""
    for incident in incidents(ranks):
        folder = folder_of(above, incident)
        is_done = (folder / "done").exists()
        if ranks > 1:
            dist.barrier()
        if is_done:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        run_planted(incident, rank, events=folder / "events.jsonl")
        if ranks > 1:
            dist.barrier()
        (folder / "done").touch()


def without_verdict(folder: Path, copy: Path) -> Path:
    """The same incident without the monitor's fault verdict."""
    shutil.copytree(find_incident(folder), copy)
    values = json.loads((copy / INCIDENT_FILE).read_text())
    values.pop("fault_verdict", None)
    (copy / INCIDENT_FILE).write_text(json.dumps(values))
    return copy


def by_runbook(path: Path) -> Trail:
    """As ``unsilent triage --run`` goes."""
    own = investigate(path, is_run=True)
    return Trail(
        own.localised, len(own.executed), sum(TEMPLATES[one.query.query.template].seconds for one in own.executed)
    )


def at_random(path: Path, seed: int) -> list[Trail]:
    """The same queries in random orders; each is executed once, for its answer is always the same."""
    own, rng = investigate(path), random.Random(seed)
    answers = {one.query: execute(own.bundle, one.query) for one in executable(own.ranked, ())}
    trails = []
    for _ in range(ORDERS):
        executed: list[Executed] = []
        while (left := executable(own.ranked, executed)) and not any(
            one.finding.outcome is Outcome.LOCALISED for one in executed
        ):
            chosen = rng.choice(left)
            executed.append(Executed(chosen, answers[chosen.query], 0.0))
        last = executed[-1].finding if executed and executed[-1].finding.outcome is Outcome.LOCALISED else None
        seconds = sum(TEMPLATES[one.query.query.template].seconds for one in executed)
        trails.append(Trail(last, len(executed), seconds))
    return trails


def is_right(incident: PlantedIncident, trail: Trail) -> bool:
    """Whether rank and step are those of the fault; of a state that all ranks have, any of them is right."""
    finding = trail.finding
    ranks = range(incident.world_size) if incident.kind == "checkpoint" else [incident.rank]
    return (
        finding is not None and finding.step == incident.step and bool(finding.ranks) and {*finding.ranks} <= {*ranks}
    )


def is_accusation(trail: Trail) -> bool:
    """Whether a fault is localised; a verdict that names an alarm benign is none."""
    return trail.finding is not None and trail.finding.kind is not FindingKind.BENIGN


def share_text(trails: Sequence[Sequence[Trail]], holds: Callable[[int, Trail], bool]) -> str:
    """How many incidents it holds for, with a 95 % interval where there is one order of each, else the mean share."""
    shares = [statistics.mean(holds(place, one) for one in own) for place, own in enumerate(trails)]
    if all(len(own) == 1 for own in trails):
        right = int(sum(shares))
        found = clopper_pearson(right, len(shares))
        return f"{right} of {len(shares)} [{100 * found.low:.0f}, {100 * found.high:.0f}] %"
    return f"{100 * statistics.mean(shares):.0f} %"


def print_rows(name: str, wanted: Sequence[PlantedIncident], trails: Sequence[Sequence[Trail]]) -> None:
    """A row: right, wrong place, benign incidents in which a fault is localised, queries and seconds."""
    sick = [place for place, one in enumerate(wanted) if one.kind != "benign"]
    well = [place for place, one in enumerate(wanted) if one.kind == "benign"]
    own = [trails[place] for place in sick]
    right = share_text(own, lambda n, one: is_right(wanted[sick[n]], one))
    wrong = share_text(own, lambda n, one: one.finding is not None and not is_right(wanted[sick[n]], one))
    accused = share_text([trails[place] for place in well], lambda _, one: is_accusation(one))
    queries = statistics.mean(statistics.mean(one.queries for one in trail) for trail in own)
    seconds = statistics.mean(statistics.mean(one.seconds for one in trail) for trail in own)
    print(f"| {name} | {right} | {wrong} | {accused} | {queries:.1f} | {seconds:.1f} |", flush=True)


def detail(name: str, incident: PlantedIncident, trail: Trail) -> str:
    """One line: what was planted, and what was found."""
    found = (
        f"{trail.finding.place}: {trail.finding.kind.value}"
        if trail.finding and trail.finding.kind
        else "not localised"
    )
    planted = (
        f"{incident.kind}, {incident.variety}, rank {incident.rank} of {incident.world_size}, step {incident.step}"
    )
    return f"{name}: {planted}: {found}, {trail.queries} queries"


def main() -> None:
    """Run what is not there, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triage_runbook", description=__doc__)
    parser.add_argument("folder", type=Path)
    above = parser.parse_args().folder
    for ranks in COUNTS:
        if not all((folder_of(above, one) / "done").exists() for one in incidents(ranks)):
            run_gang(ranks, run_rank, (ranks, above), LONGEST)
    every = [one for ranks in COUNTS for one in incidents(ranks)]
    wanted = [one for one in every if [*(folder_of(above, one) / "incidents").glob("*-*")]]
    silent = [f"{one.kind} ({one.variety}, {one.world_size})" for one in every if one not in wanted]
    print(
        f"{len(wanted)} of {len(every)} planted anomalies raised an alarm; the others: {', '.join(silent) or 'none'}.\n"
    )
    print(
        "| | rank and step right | another place | benign, but localised | queries | seconds |\n|---|---|---|---|---|---|"
    )
    details = []
    with tempfile.TemporaryDirectory() as own:
        bare = [without_verdict(folder_of(above, one), Path(own, str(n))) for n, one in enumerate(wanted)]
        full = [find_incident(folder_of(above, one)) for one in wanted]
        for name, paths in (("with the fault verdict", full), ("without it", bare)):
            trails = [by_runbook(path) for path in paths]
            print_rows(f"runbook, {name}", wanted, [[one] for one in trails])
            print_rows(f"random order, {name}", wanted, [at_random(path, n) for n, path in enumerate(paths)])
            details += [detail(name, one, trail) for one, trail in zip(wanted, trails, strict=True)]
    print("\n" + "\n".join(details))


if __name__ == "__main__":
    main()
