"""``unsilent noise WORKLOAD``: how much fault-free runs of one training differ, by what is switched between them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError
from unsilent.options import MEANS, OUTPUT, PRECISION, RUNS

if TYPE_CHECKING:
    from unsilent.replicas import Switches

OF_EXPLAINING = ("runs",)
"""Options that only ``--explain`` and ``--control`` read."""
OF_REPLICAS = (
    "replicas", "variants", "switch", "every", "level", "confidence", "with_", "data", "seed", "jobs", "executor", "ray", "store",
    "output",
)  # fmt: skip
"""Options that mean nothing where a loop is explained."""


def noise(
    context: typer.Context,
    workload: Annotated[
        str | None,
        typer.Argument(help="A training: built-in name, file.py:name or package.module:name.", show_default=False),
    ] = None,
    replicas: Annotated[int, o.option("Runs of each variant.", PRECISION)] = 20,
    variants: Annotated[
        str | None, o.option("Named sets of switches: control, algo, impl, algo+impl.", RUNS, usual="all four")
    ] = None,
    switch: Annotated[
        list[str] | None,
        o.option(
            "A variant of your own, like within, threads=2 or init+order; repeat for more. See docs/noise.md.", RUNS
        ),
    ] = None,
    steps: Annotated[int | None, o.option("Steps of each run.", RUNS, usual="all of the training")] = None,
    every: Annotated[int, o.option("Steps between two hashes of the weights.", PRECISION)] = 1,
    level: Annotated[
        float | None, o.option("Refuse to run too few replicas for a rank test at this level, like 0.05.", PRECISION)
    ] = None,
    confidence: o.Confidence = 0.95,
    explain: Annotated[str | None, o.option("Say what makes runs of this loop differ: file.py:loop.", RUNS)] = None,
    control: Annotated[str | None, o.option("Say whether runs of this loop end in the same bits here.", RUNS)] = None,
    runs: Annotated[
        int | None, o.option("Runs that --explain and --control compare.", PRECISION, usual="as many as they need")
    ] = None,
    deadline: Annotated[
        float | None,
        o.option("Seconds that one run may take.", MEANS, usual="no limit; 600 with --explain and --control"),
    ] = None,
    with_: o.With = None,
    data: o.Data = None,
    seed: Annotated[int, o.option("Base seed: of the clean twin, and what fresh seeds derive from.", RUNS)] = 0,
    jobs: o.Jobs = 1,
    executor: o.Executor = None,
    ray: o.Ray = None,
    store: Annotated[
        Path | None,
        o.option("Where replicas are kept.", OUTPUT, usual="unsilent-noise-….sqlite here"),
    ] = None,
    output: o.Page = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure how much fault-free runs of a training differ, and why: accuracy, churn, distance of weights, parts of the data.

    Resumable: the same command goes on where it stopped, more --replicas extend it. Ends in a table and an HTML report.
    """
    if explain is not None or control is not None:
        if workload is not None or (explain is not None and control is not None):
            raise UsageError("give one thing to look at: WORKLOAD, --explain FILE.py:LOOP or --control FILE.py:LOOP")
        o.refuse(context, OF_REPLICAS, "--explain and --control compare runs of a loop as it is")
        from unsilent.cli.explain_noise import explain_loop

        ref = explain if explain is not None else control or ""
        return explain_loop(
            ref,
            control=control is not None,
            runs=runs,
            steps=steps,
            deadline=deadline,
            arguments=context.obj or (),
            as_json=as_json,
            plain=plain,
            quiet=quiet,
        )
    if context.obj:
        raise UsageError("what follows -- are the arguments of a script; give them with --explain or --control")
    o.refuse(context, OF_EXPLAINING, "--runs belongs to --explain and --control; of replicas say --replicas")
    if workload is None:
        raise UsageError(
            "no training was named; give one like train-resnet (see unsilent workloads), or --explain FILE.py:LOOP"
        )
    from unsilent.campaigns.executors import checked
    from unsilent.cli.paths import default_store, report_path
    from unsilent.cli.progress import make_observer
    from unsilent.cli.reporting import show_report
    from unsilent.replicas import ReplicaSpec, ReplicaStore
    from unsilent.studies.noise.report import report
    from unsilent.studies.noise.study import Asked, run_noise

    if every < 1 or (steps is not None and steps < 1) or seed < 0:
        raise UsageError("--every and --steps are numbers from 1 on, --seed from 0 on")
    checked(executor, jobs=jobs, deadline=deadline, address=ray)
    spec = ReplicaSpec(workload, o.pairs(with_), data, seed, steps, every)
    asked = Asked(spec, chosen(variants, switch or []), replicas, confidence, level)
    path = store or Path(default_store("noise", spec.identity()))
    page = report_path(path, output)
    observer = make_observer(quiet=quiet, plain=plain or as_json, noun="replica")
    with observer, ReplicaStore(path, write=True) as opened:
        found = report(
            run_noise(
                asked, opened, jobs=jobs, deadline=deadline, executor=executor, address=ray, observer=observer,
                command=command_line(),
            )
        )  # fmt: skip
    show_report(found, page, as_json, plain, {"Store": path})
    return 0


def chosen(variants: str | None, switches: list[str]) -> tuple[Switches, ...]:
    """The variants that were asked for, each once; all named ones where nothing was said."""
    from unsilent.errors import unknown
    from unsilent.replicas import VARIANTS, Switches

    names = [name.strip().lower() for name in variants.split(",")] if variants is not None else []
    for name in names:
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS)
    if not names and not switches:
        names = list(VARIANTS)
    return tuple(dict.fromkeys([*(VARIANTS[name] for name in names), *map(Switches.parse, switches)]))


def command_line() -> str:
    """What was typed."""
    return shlex.join(["unsilent", *sys.argv[1:]]) if sys.argv[1:2] == ["noise"] else "unsilent noise"
