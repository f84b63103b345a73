"""``unsilent training WORKLOAD``: strike single steps of a training, and see what becomes of it."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsilent.cli import options as o
from unsilent.cli.paths import default_store, report_path
from unsilent.cli.reporting import show_report
from unsilent.cli.struck import tell_example
from unsilent.errors import UsageError, unknown
from unsilent.studies.training.kind import TrainingStore

if TYPE_CHECKING:
    from unsilent.outcomes.training import Thresholds
    from unsilent.studies.training.kind import Floors
    from unsilent.studies.training.spec import TrainingSpec

CLASSES = (
    "masked", "immediate-nan", "short-term-nan", "slow-degrade", "sharp-degrade", "sharp-slow-degrade", "low-test",
)  # fmt: skip
OF_MEMORY = ("phase", "accelerator", "value")
"""Options that say where in operations faults are."""
OF_CAMPAIGNS = (
    "trials", "fault", "value", "accelerator", "phase", "layer", "per", "moment", "steps", "horizon", "replicas", "noise",
    "floor",
    "threshold", "margin", "confidence", "guard", "example", "with_", "seed", "init", "jobs", "executor", "ray", "deadline",
    "store",
)  # fmt: skip
"""Options that mean nothing where a published injection is replayed."""


def training(
    context: typer.Context,
    workload: Annotated[
        str | None,
        typer.Argument(help="A training: built-in name, file.py:name or package.module:name.", show_default=False),
    ] = None,
    trials: Annotated[int, typer.Option(help="Struck trainings, of each target with --per.")] = 200,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="A published fault model (RD) or any of unsilent faults; 2*RD weighs it twice; repeat for more.",
            show_default="all 18 published ones alike",
        ),
    ] = None,
    value: Annotated[
        str | None,
        typer.Option(
            help="What struck elements become, like uniform:low=1e16,high=1e18.", show_default="the model's own"
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="Weigh fault models as nvdla, systolic, tensor-core or FILE.toml says.", show_default=False),
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="fwd, grad_in or grad_wt; repeat for more.", show_default="all three")
    ] = None,
    layer: Annotated[list[str] | None, typer.Option(help="Modules, like block1.*; repeat for more.")] = None,
    per: Annotated[
        str | None,
        typer.Option(
            help="Training PVF: strike parameters and optimizer state of each component, layer or tensor instead; "
            "or each kind of memory.",
            show_default=False,
        ),
    ] = None,
    moment: Annotated[
        str,
        typer.Option(
            help="When memory is struck: start (of a step, after the guard's snapshot), update (before it), end (before the "
            "guard's check), between (that and the next snapshot)."
        ),
    ] = "start",
    steps: Annotated[int | None, typer.Option(help="Steps of each run.", show_default="all of the training")] = None,
    horizon: Annotated[
        int | None,
        typer.Option(
            help="Take a run for masked after so many steps inside the fault-free band.", show_default="never"
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Fault-free runs of each noise floor: implementation noise, and other seeds.")
    ] = 20,
    noise: Annotated[
        str, typer.Option(help="What differs between those of the first, as for unsilent noise.")
    ] = "impl",
    floor: Annotated[
        Path | None, typer.Option(help="Where fault-free runs are kept.", show_default="unsilent-noise-….sqlite here")
    ] = None,
    threshold: Annotated[
        list[str] | None, typer.Option(help="Of the classes, like gap=0.05; repeat for more. See docs/training.md.")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="How far below the worst fault-free run a convergence failure is (--per).")
    ] = 0.02,
    confidence: o.Confidence = 0.95,
    guard: Annotated[
        bool, typer.Option("--guard", help="Run every different trial again under the guard, and say what it saved.")
    ] = False,
    example: Annotated[
        str | None, typer.Option(help=f"Show one instance, run again: {', '.join(CLASSES)}.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Replay a published injection (with --data).", show_default=False)
    ] = None,
    with_: o.With = None,
    data: o.Data = None,
    seed: o.Seed = 0,
    init: Annotated[int, typer.Option(help="Seed of the training itself.")] = 0,
    jobs: o.Jobs = 1,
    executor: o.Executor = None,
    ray: o.Ray = None,
    deadline: o.Deadline = None,
    store: o.StorePath = None,
    html: o.Html = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Strike single steps of a training, and see what becomes of it: outcome classes, what foretells harm, training PVF.

    Each trial goes on from the fault-free run at a random step. Resumable: the same command goes on where it stopped, more
    --trials extend it. Ends in tables and an HTML report.
    """
    if file is not None:
        from unsilent.cli.injection import replay_csv

        o.refuse(context, (*OF_CAMPAIGNS, "workload"), "a published injection says what is struck")
        if data is None:
            raise UsageError("--file replays an injection in the published training; give its images: --data CIFAR.npz")
        return replay_csv(file, data=data, html=html, as_json=as_json, plain=plain, quiet=quiet)
    if workload is None:
        raise UsageError("no training was named; give one like train-resnet (see unsilent workloads)")
    if example is not None and example not in CLASSES:
        raise unknown("class of outcomes", example, CLASSES)
    if per is not None:
        o.refuse(context, OF_MEMORY, "--per strikes parameters and optimizer state, not operations")
        check_memory(fault or [])
    else:
        o.refuse(context, ("margin",), "--margin is of convergence failures, which --per counts")
        o.refuse(context, ("moment",), "--moment is of faults in memory, which --per strikes")
    from unsilent.campaigns.driver import Budget
    from unsilent.campaigns.executors import checked, make_executor
    from unsilent.cli.progress import make_observer
    from unsilent.studies.training.judging import horizon_of
    from unsilent.studies.training.report import report
    from unsilent.studies.training.study import Reading, run_training
    from unsilent.studies.training.study import example as find_example

    check_numbers(steps, horizon, seed, init)
    checked(executor, jobs=jobs, deadline=deadline, address=ray)
    budget, reading = Budget(trials), Reading(thresholds(threshold or []), confidence, margin)
    spec = spec_of(
        workload, o.pairs(with_), data, fault or [], value, accelerator, phase, layer, per, moment, seed, init, steps
    )
    path = store or Path(default_store("training", {**spec.identity(), "horizon": horizon}))
    page = report_path(path, html)
    with TrainingStore(path, write=True) as opened:  # before the floor, which takes its time
        floors = floors_of(spec, floor, noise, replicas, jobs, quiet, plain or as_json)
        if horizon is not None:
            spec = replace(spec, horizon=horizon_of(floors.implementation, horizon))
        observer = make_observer(quiet=quiet, plain=plain or as_json)
        made = make_executor(executor, spec, jobs=jobs, deadline=deadline, observer=observer, address=ray)
        with observer, made as running:
            result = run_training(
                spec, budget, running, opened, floors, reading, guard=guard, observer=observer, command=command_line()
            )
            shown = None if example is None else find_example(example, running, opened, reading, observer=observer)
    if shown is not None:
        return tell_example(shown, as_json)
    show_report(report(result), page, as_json, plain, {"Store": path})
    return 0


def spec_of(
    workload: str,
    options: tuple[tuple[str, str], ...],
    data: str | None,
    faults: list[str],
    value: str | None,
    accelerator: str | None,
    phases: list[str] | None,
    layers: list[str] | None,
    per: str | None,
    moment: str,
    seed: int,
    init: int,
    steps: int | None,
) -> TrainingSpec:
    """What was asked, checked as far as that is possible without the training."""
    from unsilent.studies.training.spec import MOMENTS, PHASES, TrainingSpec

    for name in phases or ():
        if name not in PHASES:
            raise unknown("phase", name, PHASES)
    if moment not in MOMENTS:
        raise unknown("moment", moment, MOMENTS)
    return TrainingSpec(
        workload,
        options,
        data,
        tuple(weighted(text) for text in faults),
        accelerator,
        value,
        tuple(dict.fromkeys(phases)) if phases else PHASES,
        tuple(dict.fromkeys(layers)) if layers else ("*",),
        per,
        moment,
        seed,
        init,
        steps,
    )


def weighted(text: str) -> tuple[str, float]:
    """``2*RD`` -> (RD, 2); the fault model itself is read where it is used."""
    found = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)\*(.+)", text)
    name, weight = (found[2], float(found[1])) if found else (text, 1.0)
    if not weight > 0:
        raise UsageError(f"--fault {text} has weight {weight:g}; expected more than 0")
    from unsilent.faults import fault_model
    from unsilent.faults.hardware.presets import PRESETS
    from unsilent.faults.values import VALUES

    if name in PRESETS:
        return name, weight
    if name.partition(":")[0] not in VALUES:
        raise unknown("fault model", name, [*VALUES, *PRESETS])
    return fault_model(name).text, weight


def check_memory(faults: list[str]) -> None:
    """Raise ``UsageError`` for fault models of operations."""
    from unsilent.faults.hardware.presets import PRESETS

    for text in faults:
        if text.rpartition("*")[2] in PRESETS:
            raise UsageError(
                f"--fault {text} is of an operation, and --per strikes memory; name one like bitflip or zero"
            )


def thresholds(given: list[str]) -> Thresholds:
    """``gap=0.05`` and the like in place of defaults; raises ``UsageError``."""
    from unsilent.outcomes.training import Thresholds

    kinds = {part.name: type(getattr(Thresholds(), part.name)) for part in fields(Thresholds)}
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in kinds:
            raise unknown("threshold", name, kinds)
        try:
            found[name] = kinds[name](number)
        except ValueError:
            noun = "a whole number" if kinds[name] is int else "a number"
            raise UsageError(
                f"--threshold {text!r}: expected {noun}, like {name}={getattr(Thresholds(), name)}"
            ) from None
    return Thresholds(**found)


def check_numbers(steps: int | None, horizon: int | None, seed: int, init: int) -> None:
    """Raise ``UsageError`` for numbers that make no sense."""
    for name, value, least in (("steps", steps, 1), ("horizon", horizon, 2), ("seed", seed, 0), ("init", init, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{name} is {value}; expected {least} or more")


def floors_of(
    spec: TrainingSpec, floor: Path | None, noise: str, replicas: int, jobs: int, quiet: bool, lines: bool
) -> Floors:
    """The fault-free runs of both floors, in the file that ``unsilent noise`` keeps them in."""
    from unsilent.cli.progress import make_observer
    from unsilent.replicas import ReplicaStore, Switches
    from unsilent.studies.training.judging import replica_spec, run_floors

    switches = Switches.parse(noise)
    path = floor or Path(default_store("noise", replica_spec(spec).identity()))
    observer = make_observer(quiet=quiet, plain=lines, noun="replica")
    with observer, ReplicaStore(path, write=True) as opened:
        return run_floors(spec, opened, switches, replicas, jobs=jobs, observer=observer)


def command_line() -> str:
    """What was typed."""
    return shlex.join(["unsilent", *sys.argv[1:]]) if sys.argv[1:2] == ["training"] else "unsilent training"
