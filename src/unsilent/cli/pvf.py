"""``unsilent pvf WORKLOAD``: parameter vulnerability per component, layer and bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from unsilent.cli import options as o
from unsilent.cli.paths import default_store, report_path
from unsilent.errors import UsageError, unknown
from unsilent.studies.pvf.kind import PvfStore

if TYPE_CHECKING:
    from unsilent.campaigns import Means
    from unsilent.studies.pvf.spec import Description

ENGINES = ("auto", "plain")
OF_DRAWN = ("trials", "ci", "rel", "strata", "exhaustive", "one_batch", "flips", "fault", "at", "law")
"""Options that mean nothing where faults are given."""


def pvf(
    context: typer.Context,
    workload: o.Workload,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Trials per target and number of flips; with --ci or --rel the most there may be.",
            show_default="1000; 200000 with --ci or --rel",
        ),
    ] = None,
    ci: Annotated[
        str | None, typer.Option(help="Run until every row's interval has this half-width, like 0.1%.")
    ] = None,
    rel: Annotated[
        str | None,
        typer.Option(help="The same relative to the estimate, like 20%; --ci (default 0.02%) is always enough."),
    ] = None,
    strata: Annotated[
        str | None,
        typer.Option(
            help="bits: draw within classes of bits, as many in each as it takes; risk: and of predicted risk; or none.",
            show_default="bits with --ci or --rel and single flips",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Run part I of N, like 2/4; unsilent merge joins the stores.", show_default="1/1, all"),
    ] = None,
    one_batch: Annotated[
        bool, typer.Option("--one-batch", help="Each trial evaluates one batch, drawn at random: many cheap trials.")
    ] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Try every single bit flip there is; narrow it with --at or bits=.")
    ] = False,
    faults: Annotated[
        str | None,
        typer.Option(help="Try each fault of this file once: JSON lines of faults, a list of SCI-FI or PyTorchALFI."),
    ] = None,
    faults_as: Annotated[
        str | None,
        typer.Option(help="How --faults is read, where the file does not say it: unsilent, sci-fi, pytorchalfi:…"),
    ] = None,
    flips: Annotated[str | None, typer.Option(help="Faults per trial, like 1,8,128.", show_default="1")] = None,
    fault: Annotated[
        str, typer.Option(help="Fault model, like bitflip:bits=exponent; see unsilent faults.")
    ] = "bitflip",
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="What is struck: parameters like 'layer1.*', or values of a run: 'op:*', 'op:layer1.*', 'input:*', 'kv:*'. "
            "Repeat for more.",
            show_default="param:*",
        ),
    ] = None,
    per: Annotated[str, typer.Option(help="What a target is: component, layer, tensor or bit.")] = "component",
    law: Annotated[
        str, typer.Option(help="per-element (uniform over elements) or per-tensor (uniform over tensors first).")
    ] = "per-element",
    judge: Annotated[
        str | None, typer.Option(help="What an incorrect output is, like topk:k=3.", show_default="the workload's own")
    ] = None,
    assertion: Annotated[
        list[str] | None, typer.Option("--assert", help="Exit 1 unless the upper limit holds, like 'top_mlp<=0.01'.")
    ] = None,
    unit: o.Unit = None,
    confidence: o.Confidence = 0.95,
    interval: o.Interval = "clopper-pearson",
    fit_per_bit: o.FitPerBit = None,
    with_: o.With = None,
    data: o.Data = None,
    weights: o.Weights = None,
    seed: o.Seed = 0,
    jobs: o.Jobs = 1,
    executor: o.Executor = None,
    ray: o.Ray = None,
    threads: o.Threads = 1,
    deadline: o.Deadline = None,
    engine: o.Engine = "auto",
    memory: o.Memory = None,
    store: o.StorePath = None,
    html: o.Html = None,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure the parameter vulnerability factor: how often a corrupted parameter makes an output wrong.

    Resumable: the same command goes on where it stopped, more --trials extend it. Ends in a table and an HTML report.
    """
    from unsilent.campaigns import Budget, make_executor
    from unsilent.cli.progress import make_observer
    from unsilent.cli.reporting import show_report
    from unsilent.outcomes.tallies import Question
    from unsilent.studies.pvf.analysis import check_rate
    from unsilent.studies.pvf.precision import Precision
    from unsilent.studies.pvf.records import Gate
    from unsilent.studies.pvf.report import report
    from unsilent.studies.pvf.study import EACH, MOST, make_spec, run_pvf

    if faults is not None:
        o.refuse(context, OF_DRAWN, "--faults says which faults are tried, each once")
    question = Question(unit, confidence, interval)
    precision = Precision.parse(ci, rel)
    budget = Budget(trials if trials is not None else (MOST if precision else EACH), _part(shard))
    if exhaustive and (precision or trials is not None):
        raise UsageError("--exhaustive runs every fault there is: leave out --trials, --ci and --rel")
    if precision and shard is not None:
        raise UsageError("--shard goes with --trials alone: where --ci or --rel stop is decided from all trials")
    gates = [Gate.parse(text) for text in assertion or ()]
    if threads < 1:
        raise UsageError(f"--threads is {threads}; expected 1 or more")
    spec = make_spec(
        fault, _numbers(flips), workload=workload, options=o.pairs(with_), data=data, weights=weights,
        at=tuple(at or ("param:*",)), per=per, law=law, judge=judge, seed=seed, device=_device(device), dtype=dtype,
        threads=threads, strata=strata, exhaustive=exhaustive, one_batch=one_batch,
        adaptive=precision is not None, faults=faults, faults_as=faults_as,
    )  # fmt: skip
    if fit_per_bit is not None:
        check_rate(fit_per_bit, spec.transient)
    means = _means(engine, memory)
    path = store or Path(default_store("pvf", spec.identity()))
    page = report_path(path, html)
    observer = make_observer(quiet=quiet, plain=plain or as_json)
    with (
        observer,
        PvfStore(path, write=True) as opened,
        make_executor(
            executor, spec, jobs=jobs, deadline=deadline, observer=observer, means=means, address=ray
        ) as running,
    ):
        for gate in gates:
            gate.check(spec, cast("Description", running.describe()))
        result = run_pvf(spec, budget, running, opened, question, observer, precision=precision)
    failures = [line for gate in gates for line in gate.failures(result)]
    found = report(result, fit_per_bit)
    show_report(found, page, as_json, plain, {"Store": result.store}, failed_assertions=failures)
    for line in failures:
        print(f"unsilent: assertion failed: {line}", file=sys.stderr)
    for line in result.short:
        print(f"unsilent: {line}", file=sys.stderr)
    return 1 if failures or result.short else 0


def _means(engine: str, memory: str | None) -> Means:
    from unsilent.campaigns import Means
    from unsilent.sizes import parse_bytes

    if engine not in ENGINES:
        raise unknown("--engine", engine, ENGINES)
    return Means(engine, None if memory is None else parse_bytes(memory))


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--flips is {text!r}; expected whole numbers joined by commas, like 1,8,128") from None


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not found:
        raise UsageError(f"cannot read --shard {text!r}; expected I/N, like 2/4")
    return int(found[1]), int(found[2])


def _device(device: str) -> str:
    """``auto`` stays undecided where torch need not be imported to know: without a CUDA driver it is the CPU."""
    if device == "auto" and not Path("/proc/driver/nvidia/version").exists():
        return "cpu"
    from unsilent.engine.placement import resolve_device

    return device if device == "cpu" else resolve_device(device)
