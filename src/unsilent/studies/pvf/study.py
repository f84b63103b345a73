"""PVF, the *parameter* vulnerability factor: P(incorrect output | corruption of that parameter), estimated as D / N.

Source: Jiao et al., arXiv 2405.01741 (the acronym also means program vulnerability factor, which is something else).
"Incorrect" is judged against the golden output. This module asks the campaign and hands back records; what they are
computed from is in `unsilent.studies.pvf.analysis`.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from unsilent.campaigns import Budget, Means, TrialId, make_executor, run_campaign
from unsilent.campaigns.driver import run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer, Silent
from unsilent.errors import UsageError
from unsilent.outcomes.tallies import Question
from unsilent.sizes import lasting, read_bytes
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.precision import Precision, PrecisionPlanner
from unsilent.studies.pvf.records import PvfResult
from unsilent.studies.pvf.spec import LISTED, CampaignSpec, Description

if TYPE_CHECKING:
    from unsilent.faults import FaultModel
    from unsilent.workloads.base import InferenceWorkload


MOST_EXHAUSTIVE = 20_000_000
"""Trials of an exhaustive campaign at most: a store of some ten gigabytes."""
PROBES = 16
"""Trials of each target that its time is estimated from."""
EACH, MOST = 1000, 200_000
"""Trials per target and number of flips: of a campaign that is planned at once, and at most where a precision is asked."""


def make_spec(
    fault: str = "bitflip",
    flips: Sequence[int] | None = None,
    *,
    strata: str | None = None,
    adaptive: bool = False,
    faults: str | None = None,
    faults_as: str | None = None,
    **values: object,
) -> CampaignSpec:
    """A checked spec: fault model and flips are read together, texts are made canonical.

    ``strata`` None: classes of bits where a precision is asked (``adaptive``) of single flips of any bit, else none.

    ``faults``: a file of given faults, read as ``faults_as`` says; then nothing is left that could be drawn.

    Raises ``UsageError`` when flips are given both here and in the fault model, are repeated or below 1.
    """
    from unsilent.faults import fault_model

    if faults is not None:
        drawn = {"fault": fault, "flips": flips, "strata": strata, "ci": adaptive or None}
        return _listed_spec(faults, faults_as, drawn, values)
    if faults_as is not None:
        raise UsageError(f"--faults-as {faults_as} says how a list is read; give --faults FILE, or leave it out")
    model = fault_model(fault)
    counts: tuple[int | None, ...]
    if flips is not None and model.counted:
        raise UsageError(f"--flips and the {model.pattern.text} of --fault both say how many; give one of them")
    if flips is not None:
        if isinstance(flips, str) or not all(isinstance(count, int) for count in flips):
            raise UsageError(f"flips is {flips!r}; expected whole numbers, like [1, 8]")
        if any(count < 1 for count in flips):
            raise UsageError(f"--flips has {min(flips)}; expected 1 or more")
        if len(set(flips)) != len(flips) or not flips:
            raise UsageError(f"--flips is {','.join(map(str, flips))!r}; expected different numbers, like 1,8,128")
        counts = tuple(flips)
    else:
        counts = (None,) if model.counted else (1,)
    if strata is None:
        single = model.text == "bitflip" and counts == (1,) and values.get("per") != "bit"
        strata = "dtype" if values.get("exhaustive") else "bits" if adaptive and single else "none"
    return CampaignSpec(fault=model.text, flips=counts, strata=strata, **values)  # type: ignore[arg-type]


def _listed_spec(
    faults: str, faults_as: str | None, drawn: Mapping[str, object], values: Mapping[str, object]
) -> CampaignSpec:
    """The spec of a campaign over a list; raises ``UsageError`` where something else says what is struck, or how often."""
    from unsilent.faults.lists import kind_of_list

    usual = CampaignSpec("")
    names = ("at", "law", "exhaustive", "one_batch")
    given = [name for name, value in drawn.items() if value not in (None, usual.fault)]
    given += [name for name in names if values.get(name, getattr(usual, name)) != getattr(usual, name)]
    if given:
        raise UsageError(f"the list says which faults are tried, each once: leave out {', '.join(given)}")
    at = (f"{kind_of_list(faults, faults_as)}:*",)
    own = {"fault": LISTED, "law": LISTED, "flips": (None,), "at": at, "faults": faults, "faults_as": faults_as}
    return CampaignSpec(**{**values, **own})  # type: ignore[arg-type]


def python_call(spec: CampaignSpec, budget: Mapping[str, object]) -> str:
    """The exact call for a live workload, which no command can name; ``budget``: trials, precision, strata."""
    default = CampaignSpec(spec.workload)
    given = {**budget, "flips": list(spec.flips) if None not in spec.flips else None}
    drawn = ("fault", "at", "law") if spec.faults is None else ("faults", "faults_as")
    names = (*drawn, "per", "judge", "device", "dtype", "threads", "exhaustive", "one_batch")
    given |= {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(default, name)}
    arguments = ", ".join(
        f"{key}={value!r}" for key, value in {**given, "seed": spec.seed}.items() if value is not None
    )
    return f"unsilent.pvf(workload, {arguments})"


def command_line(spec: CampaignSpec, budget: Mapping[str, object]) -> str:
    """The exact command that asks for this campaign."""
    words = ["unsilent", "pvf", spec.workload]
    for key, value in spec.options:
        words += ["--with", f"{key}={value}"]
    default = CampaignSpec(spec.workload)
    if spec.flips not in ((1,), (None,)):
        words += ["--flips", ",".join(map(str, spec.flips))]
    for glob in spec.at if spec.at != default.at and spec.faults is None else ():
        words += ["--at", glob]
    drawn = ("fault", "law") if spec.faults is None else ("faults", "faults_as")
    for name in ("data", "weights", *drawn, "per", "judge", "device", "dtype", "threads", "seed"):
        if (value := getattr(spec, name)) != getattr(default, name) or name == "seed":
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--exhaustive"] if spec.exhaustive else []
    words += ["--one-batch"] if spec.one_batch else []
    for key, given in budget.items():
        words += [f"--{key}", str(given)]
    return shlex.join(words)


def _budget(spec: CampaignSpec, budget: Budget, precision: Precision | None) -> dict[str, object]:
    """What says how many trials there are, by the names of its options."""
    found: dict[str, object] = {} if spec.enumerated else {"trials": budget.trials}
    if precision is not None:
        found = {
            "ci": f"{precision.absolute:.15g}",
            **({"rel": f"{precision.relative:.15g}"} if precision.relative else {}),
        }
        found |= {"trials": budget.trials} if budget.trials != MOST else {}
    if budget.shard != (1, 1):
        found["shard"] = "{}/{}".format(*budget.shard)
    if spec.faults is not None:
        return found
    flips = [f for f in spec.flips if f is not None] or None
    if spec.strata != make_spec(spec.fault, flips, adaptive=precision is not None, per=spec.per, workload="").strata:
        found["strata"] = spec.strata
    return found


def run_pvf(
    spec: CampaignSpec,
    budget: Budget,
    executor: Executor,
    store: PvfStore,
    question: Question,
    observer: Observer | None = None,
    live: bool = False,
    precision: Precision | None = None,
) -> PvfResult:
    """Run (or resume) a campaign and answer the question from its store; ``precision``: until all rows have it."""
    planner = None if precision is None else PrecisionPlanner(precision, question, budget.trials)
    command = (python_call if live else command_line)(spec, _budget(spec, budget, precision))
    if spec.enumerated:
        probe(spec, budget, executor, store, observer or Silent())
    run_campaign(spec, budget, executor, store, planner=planner, observer=observer, command=command)
    found = analyse(store, question)
    if planner is None or not planner.short:
        return found
    rows = ", ".join(planner.short)
    return replace(
        found, short=(f"--trials {budget.trials} is not enough for {precision}: wider are {rows}; ask for more",)
    )


def probe(spec: CampaignSpec, budget: Budget, executor: Executor, store: PvfStore, watcher: Observer) -> None:
    """Say how long all faults will take, from a few trials of each target; refuse what is more than can be stored."""
    found = cast(Description, executor.describe())
    total = sum(t.slots for t in found.targets)
    if total > MOST_EXHAUSTIVE:
        plain = total * found.golden_seconds
        raise UsageError(
            f"--exhaustive would run {total:,} trials (at most {lasting(plain)} of CPU time), {MOST_EXHAUSTIVE:,} is the most; "
            "narrow it with --at or --fault bitflip:bits=30, or sample: --rel 20%"
        )
    store.bind(spec, found)
    begun = time.perf_counter()
    part, parts = budget.shard
    first = [TrialId(t.name, spec.flips[0], k) for t in found.targets for k in range(part - 1, t.slots, parts)[:PROBES]]
    new = run_trials(first, executor, store, watcher)
    if new:
        each = (time.perf_counter() - begun) / new
        left = total // parts - len(first)
        watcher.say(
            f"{total:,} faults: about {lasting(max(0, left) * each)} more, at {1e3 * each:.2g} ms each ({new} tried)"
        )


def pvf(
    workload: str | InferenceWorkload,
    *,
    trials: int | None = None,
    ci: float | str | None = None,
    rel: float | str | None = None,
    strata: str | None = None,
    exhaustive: bool = False,
    one_batch: bool = False,
    faults: str | Path | None = None,
    faults_as: str | None = None,
    flips: int | Sequence[int] | None = None,
    fault: str | FaultModel = "bitflip",
    at: str | Sequence[str] = "param:*",
    per: str = "component",
    law: str = "per-element",
    unit: str | None = None,
    confidence: float = 0.95,
    interval: str = "clopper-pearson",
    judge: str | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str | None = None,
    threads: int = 1,
    options: Mapping[str, object] | None = None,
    data: str | None = None,
    weights: str | None = None,
    jobs: int = 1,
    engine: str = "auto",
    memory: int | str | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> PvfResult:
    """Parameter vulnerability of a workload: a PVF with its interval for every component, layer and number of flips.

    Args:
        workload: a live workload (run in this process) or what the command line takes (run in worker processes, so that
            a crash or a hang is an outcome).
        trials: per target and number of flips (default 1000), or the most there may be where ``ci`` or ``rel`` is given.
        ci, rel: run until every row's interval has this half-width, or this one relative to its estimate. strata: ``bits``
            draws within classes of bits (default where a precision is asked of single flips), ``risk`` in classes of predicted
            risk as well, ``none``.
        exhaustive: every single bit flip there is. one_batch: a trial evaluates one batch, drawn at random, instead of all.
        faults: a file of given faults, each tried once, instead of drawn ones; faults_as: its format, where it does not say so.
        flips: faults per trial, default one.
        at: what is struck: globs over parameters, or over what one evaluation computes: ``op:*``, ``input:*``, ``kv:*``.
        per: what a target is: ``component``, ``layer``, ``tensor`` or ``bit``.
        law: ``per-element`` draws uniformly over elements, ``per-tensor`` over tensors first.
        unit: what one incorrect output is counted on, ``sample`` (default for parameters) or ``batch`` (default else).
        options, data, weights: for a named workload, what ``--with``, ``--data`` and ``--weights`` give it.
        engine: ``auto`` runs only what a fault changes, ``plain`` everything; rows are the same, bit for bit. memory: what
            all workers may hold for that, in bytes or as text (``"2GB"``); default a quarter of what is free.
        interval: ``clopper-pearson`` (Gaffke's generalisation for faults scored on many samples and for strata) or ``wilson``.
        store: file to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit; the golden run is not finite or not repeatable.
        StoreError: the store cannot be used.
    """
    means = Means(engine, read_bytes(memory))
    question = Question(unit, confidence, interval)
    precision = Precision.parse(*(None if x is None else str(x) for x in (ci, rel)))
    _check_arguments(workload, judge)
    globs = (at,) if isinstance(at, str) else tuple(at)
    live = not isinstance(workload, str)
    if faults is not None and trials is not None:
        raise UsageError("faults= runs every fault of the list once: leave out trials")
    if device == "auto":
        from unsilent.engine.placement import resolve_device

        device = resolve_device(device)
    spec = make_spec(
        fault if isinstance(fault, str) else fault.text,
        (flips,) if isinstance(flips, int) else flips,
        workload=workload if isinstance(workload, str) else workload.name,
        options=tuple(sorted((str(k), str(v)) for k, v in (options or {}).items())),
        data=data,
        weights=weights,
        at=globs,
        per=per,
        law=law,
        judge=judge,
        seed=seed,
        device=device,
        dtype=dtype,
        threads=threads,
        strata=strata,
        exhaustive=exhaustive,
        one_batch=one_batch,
        adaptive=precision is not None,
        faults=None if faults is None else str(faults),
        faults_as=faults_as,
    )
    budget = Budget(trials if trials is not None else MOST if precision else EACH)
    with ExitStack() as stack:
        executor = stack.enter_context(_executor(spec, workload, jobs, observer, means))
        opened = stack.enter_context(PvfStore(stack.enter_context(_file(store)), write=True))
        return run_pvf(spec, budget, executor, opened, question, observer, live, precision)


def _check_arguments(workload: object, judge: object) -> None:
    if not isinstance(workload, str) and not hasattr(workload, "batches"):
        raise UsageError(
            f"pvf needs a workload, found {type(workload).__name__}; wrap a model and inputs: unsilent.Workload(model, batches)"
        )
    if judge is not None and not isinstance(judge, str):
        raise UsageError("judge= takes a name like 'topk:k=3'; give a judge object or a function to the Workload")


def _executor(
    spec: CampaignSpec, workload: str | InferenceWorkload, jobs: int, observer: Observer | None, means: Means
) -> Executor:
    if isinstance(workload, str):
        return make_executor(None, spec, jobs=jobs, observer=observer, means=means)
    if jobs != 1:
        raise UsageError("a live workload runs in this process, jobs must be 1; name it as 'file.py:name' for more")
    return live_executor(spec, workload, observer, means)


def live_executor(
    spec: CampaignSpec, workload: InferenceWorkload, observer: Observer | None = None, means: Means | None = None
) -> Executor:
    """Runs trials of a live workload, in this process."""
    from unsilent.campaigns.inline import InlineExecutor
    from unsilent.studies.pvf.runner import TrialRunner

    release = getattr(workload, "release", None)
    return InlineExecutor(spec, lambda told, means: TrialRunner(spec, workload, told, means), observer, means, release)


@contextmanager
def _file(store: str | Path | None) -> Iterator[Path]:
    if store is not None:
        yield Path(store)
        return
    with tempfile.TemporaryDirectory(prefix="unsilent-") as folder:
        yield Path(folder) / "campaign.sqlite"
