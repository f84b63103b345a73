"""``unsilent triage`` and its subcommands: rank and execute debugging queries on an incident."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import EXECUTION_PANEL, OUTPUT_PANEL, WORKLOAD_PANEL, Option, Request, check_count
from unsilent.command import AFTER_ALARM, Command, DisplayOptions, Result, output_option
from unsilent.triage.findings import Blanks

if TYPE_CHECKING:
    from unsilent.triage.investigation import Order

NO_FOLDER = "no folder was given; give that of an incident, such as incidents/90-0a1b2c3d"
ORDERS = ("learned", "runbook")


@dataclass(frozen=True)
class TriageOptions:
    """Options of ``unsilent triage``."""

    folder: Annotated[Path | None, Option(
        "Folder of an incident, or of the events of a job with one incident.", "", metavar="INCIDENT",
        is_argument=True)] = None  # fmt: skip
    top: Annotated[int, Option("How many of the queries to run next are shown.", OUTPUT_PANEL)] = 5
    run: Annotated[bool, Option(
        "Execute queries until a finding is believed, or no remaining query is expected to tell much.",
        EXECUTION_PANEL)] = False  # fmt: skip
    order: Annotated[str, Option(
        "What orders the queries: learned (a trained model) or runbook (hand-written rules).", EXECUTION_PANEL,
        metavar="ORDER")] = "learned"  # fmt: skip
    model: Annotated[Path | None, Option(
        "The trained model, written by unsilent triage train.", EXECUTION_PANEL,
        default_text="the one that comes with this package")] = None  # fmt: skip
    tools: Annotated[bool, Option(
        "Print all queries and their blanks as JSON Schema, and nothing else.", OUTPUT_PANEL)] = False  # fmt: skip

    def __post_init__(self) -> None:
        check_count("--top", self.top, 1)
        if self.folder is None and not self.tools:
            raise UsageError(NO_FOLDER)
        if self.order not in ORDERS:
            raise unknown_name_error("order", self.order, ORDERS)
        if self.order == "runbook" and self.model is not None:
            raise UsageError("--model is not used with --order runbook; leave one of them out")


@dataclass(frozen=True)
class QueryOptions:
    """Options of ``unsilent triage query``."""

    name: Annotated[str, Option("Name of a query, such as find-onset.", "", missing_error=(
        "no query was named; give one, such as find-onset (unsilent triage --tools lists them)"))]  # fmt: skip
    folder: Annotated[Path, Option("Folder of an incident.", "", metavar="DIR", missing_error=NO_FOLDER)]


@dataclass(frozen=True)
class FarmOptions:
    """Options of ``unsilent triage farm``."""

    folder: Annotated[Path, Option("Folder of the collection.", "", missing_error=(
        "no folder was given; give one for the collection, such as incidents"))]  # fmt: skip
    incidents: Annotated[int, Option("Simulated incidents.", WORKLOAD_PANEL)] = 600
    real: Annotated[int, Option("Further incidents, of two real processes.", WORKLOAD_PANEL)] = 0
    seed: Annotated[int, Option("Seed of everything that is drawn.", WORKLOAD_PANEL)] = 1
    workers: Annotated[int, Option("Processes that simulate; incidents do not depend on it.", EXECUTION_PANEL)] = 1


@dataclass(frozen=True)
class CollectOptions:
    """Options of ``unsilent triage collect``."""

    job: Annotated[Path, Option(
        "Folder of a job, or of an incident in one.", "", metavar="JOBDIR",
        missing_error="no folder was given; give that of a job, in which its logs and traces are")]  # fmt: skip
    output: Annotated[Path | None, output_option("Folder to write the incident to.", metavar="DIR")] = None
    step: Annotated[int | None, Option(
        "The step in which something went wrong, if no alarm recorded one.", WORKLOAD_PANEL,
        default_text="the last one that a trace or a log names")] = None  # fmt: skip
    earlier: Annotated[Path | None, Option(
        "File with the settings of an earlier job that went well.", WORKLOAD_PANEL, metavar="FILE")] = None  # fmt: skip
    report: Annotated[str | None, Option(
        "What somebody observed: a text, or a file that contains it.", WORKLOAD_PANEL, metavar="TEXT|FILE")] = None  # fmt: skip

    def __post_init__(self) -> None:
        if self.output is None:
            raise UsageError("no folder for the incident was given; add -o DIR")
        if self.step is not None:
            check_count("--step", self.step, 0)


def triage(request: Request) -> Result | int:
    """Rank the debugging queries to run next on an incident, with reasons, and execute them.

    The order comes from a trained model or, with --order runbook, from hand-written rules. With --run, queries that the folder
    can answer are executed until a finding is accepted. After each query, the others are ranked again.

    The exit code is 1 if an executed query found something that is not in doubt, otherwise 0.
    """
    from unsilent.triage.investigation import investigate
    from unsilent.triage.queries.table import json_schemas
    from unsilent.triage.triage_report import Triage

    options = request[TriageOptions]
    if options.tools or options.folder is None:
        print(json.dumps(json_schemas(), indent=1))
        return 0
    return Triage(investigate(options.folder, options.run, _selected_order(options)), options.top)


def _selected_order(options: TriageOptions) -> Order:
    """The order of queries that the options select."""
    from unsilent.triage.investigation import RUNBOOK

    if options.order == "runbook":
        return RUNBOOK
    from unsilent.triage.ranking.model_file import SHIPPED, read_model

    return read_model(options.model or SHIPPED)


def query(request: Request) -> Result:
    """Execute one debugging query on an incident.

    The exit code is 1 if something was found, otherwise 0, also if the folder does not answer the query.
    """
    from unsilent.triage.bundle import Bundle
    from unsilent.triage.findings import Query
    from unsilent.triage.queries.table import execute, find_template
    from unsilent.triage.triage_report import QueryAnswer

    options = request[QueryOptions]
    find_template(options.name)
    chosen = Query(options.name, request[Blanks])
    bundle = Bundle(options.folder)
    return QueryAnswer(bundle, chosen, execute(bundle, chosen))


def farm(request: Request) -> Result:
    """Make a collection of incidents with known causes, to measure orders of queries on.

    Simulates small trainings, each once with one cause and once without it. Incidents that the folder already has are kept.
    """
    from unsilent.triage.farm.collection import make_collection
    from unsilent.triage.farm.farm_report import FarmResult

    options = request[FarmOptions]
    incidents = make_collection(
        options.folder, options.incidents, options.seed, options.real, options.workers, request.observer
    )
    return FarmResult(options.folder, tuple(incidents))


def collect(request: Request) -> int:
    """Make an incident folder from the files that a job left, or copy an incident folder and add such files.

    Looks for traces, dumps of the flight recorder in JSON, logs, checkpoints with manifests and a configuration. The folder of
    the job is not changed.
    """
    from unsilent.cli.report_output import show_report
    from unsilent.triage.collect import collect as collect_incident

    options, display = request[CollectOptions], request[DisplayOptions]
    assert options.output is not None
    result = collect_incident(options.job, options.output, options.step, options.earlier, options.report)
    show_report(result.report(), None, display.as_json, display.plain)
    return 0


COMMAND = Command(
    "triage", AFTER_ALARM, "unsilent triage runs/incidents/90-0a1b2c3d --run", (TriageOptions,), triage, has_report=True
)
QUERY = Command(
    "triage query", AFTER_ALARM, "unsilent triage query find-onset runs/incidents/90-0a1b2c3d --rank 1",
    (QueryOptions, Blanks), query, has_report=True,
)  # fmt: skip
FARM = Command(
    "triage farm", AFTER_ALARM, "unsilent triage farm incidents --incidents 600 --seed 1 --workers 2", (FarmOptions,),
    farm, has_report=True, is_long=True,
)  # fmt: skip
COLLECT = Command(
    "triage collect", AFTER_ALARM, "unsilent triage collect runs -o incident --report 'slow since step 400'",
    (CollectOptions, DisplayOptions), collect,
)  # fmt: skip
