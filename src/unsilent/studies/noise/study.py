"""The noise study: how much do fault-free runs of one training differ, and why?

Replicas of each variant (a set of switches) are run where the store does not hold them; then everything is read from the
store. CONTROL is always run: its replicas must agree to the last bit, or nothing that differs could be put down to a switch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import ExecutionOptions, kept
from unsilent.errors import UnsilentError, UsageError
from unsilent.options import Asked
from unsilent.replicas import (
    Replica,
    ReplicaBaseline,
    ReplicaRow,
    ReplicaSpec,
    ReplicaStore,
    StepTraceId,
    Switches,
    run_replicas,
)
from unsilent.replicas.kind import ASKED, AskedFor
from unsilent.replicas.spec import same
from unsilent.replicas.switches import CONTROL, RACING, SWITCHES, VARIANTS
from unsilent.statistics.floor import replicas_needed
from unsilent.statistics.replicas import LEAST, enough, parting
from unsilent.studies.noise.kind import NOISE, question
from unsilent.studies.noise.measures import churn_matrix, loss_spread, measure
from unsilent.studies.noise.parting import first_seen, parts_first
from unsilent.studies.noise.records import Effect, NoiseResult

RACES = 3
"""Runs after which a race that did not show is said not to have shown."""
REPEATS = LEAST
"""Runs of a variant in which nothing is drawn: they should be one and the same run."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is run and how it is read. ``level``: of a rank test that these replicas are to serve; None: not said."""

    spec: ReplicaSpec
    variants: tuple[Switches, ...]
    replicas: int = 20
    confidence: float = 0.95
    level: float | None = None

    def __post_init__(self) -> None:
        enough(self.replicas)
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a number between 0 and 1")
        if self.level is None:
            return
        if not 0 < self.level < 1:
            raise UsageError(f"level is {self.level}; expected a number between 0 and 1")
        needed = replicas_needed(self.level)
        if self.replicas < needed:
            raise UsageError(
                f"{self.replicas} replicas cannot call anything at level {self.level:g}: the smallest p value of a rank test "
                f"is 1/{self.replicas + 1}; at least {needed} are needed: --replicas {needed}"
            )

    def count(self, switches: Switches) -> int:
        """Replicas of a variant."""
        return self.replicas if switches.varies or str(switches) == CONTROL else REPEATS

    def wanted(self, trained: ReplicaBaseline) -> Iterator[Replica]:
        """All runs, those of the clean twin first; raises ``UsageError`` where no variant can be run."""
        nothing_to_run(self, trained)
        yield Replica(Switches(), 0)
        yield Replica(Switches(), 1)
        for part in self.parts():
            yield from probes(part, trained)
        for switches in self.possible(trained):
            yield from (Replica(switches, number) for number in range(self.count(switches)))

    def parts(self) -> list[Switches]:
        """Every switch that occurs, alone."""
        return list(dict.fromkeys(part for switches in self.variants for part in switches.parts()))

    def possible(self, trained: ReplicaBaseline) -> list[Switches]:
        """Variants that can be run here: one is left out where none of its switches can do anything, or one cannot be set."""
        return [switches for switches in self.variants if not _left_out(switches, trained)]


def _left_out(switches: Switches, trained: ReplicaBaseline) -> str:
    """Why a variant is not run; a stream that has no effect does not keep the others of its set from having one."""
    whys = {str(part): impossible(part, trained) for part in switches.parts()}
    if not any(whys.values()):
        return ""
    blocked = [name for name, why in whys.items() if why and name not in ALWAYS]
    if blocked or all(whys.values()):
        return next(why for why in whys.values() if why)
    return ""


ALWAYS = ("init", "order", "augment", "dropout", "within")
"""Switches that can be set in every training, even where they have no effect."""


def nothing_to_run(asked: Question, trained: ReplicaBaseline) -> None:
    """Raise ``UsageError`` where no variant can be run."""
    if not asked.possible(trained):
        whys = "; ".join(f"{name_of(switches)}: {_left_out(switches, trained)}" for switches in asked.variants)
        raise UsageError(f"no variant can be run here ({whys}); ask for another --switch")


def noise(
    workload: str,
    *,
    replicas: int = 20,
    variants: str | Sequence[str] = (),
    switch: str | Sequence[str] = (),
    level: float | None = None,
    steps: int | None = None,
    every: int = 1,
    confidence: float = 0.95,
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    seed: int = 0,
    jobs: int = 1,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> NoiseResult:
    """How much fault-free runs of one training differ, by what is switched between them.

    Arguments are the options of ``unsilent noise``, by the same names and with the same defaults.

    Args:
        workload: a built-in training, ``file.py:name`` or ``package.module:name``. options, data: of the workload.
        replicas, variants, switch, level: which runs, and how many. steps: of a run. every: steps between two hashes of its
            weights.
        store: file to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. UnsilentError: clean twins differ. StoreError: the store cannot be used.
    """
    asked = Asked.in_call(NOISE.options, dict(locals()))
    means = asked.make(ExecutionOptions)
    means.check()
    command = asked.command("noise", NOISE.budget, NOISE.spec, NOISE.reading)
    with kept(store) as path, ReplicaStore(path, write=True) as opened:
        return run_noise(
            question(asked), opened, jobs=means.jobs, executor=means.executor, address=means.ray, deadline=means.deadline,
            observer=observer, command=command,
        )  # fmt: skip


def run_noise(asked: Question, store: ReplicaStore, **how: Any) -> NoiseResult:
    """Run what is missing and read what was found; raises ``UnsilentError`` where clean twins differ.

    ``how``: jobs, executor and so on, see `run_replicas`.
    """

    def check() -> None:
        check_control(list(store.of(Switches())), asked.spec.workload)  # what follows would be worth nothing

    def looks() -> Iterator[StepTraceId]:
        return looks_at(asked, store)

    question = AskedFor(tuple(map(str, asked.variants)), asked.replicas)
    run_replicas(asked.spec, asked.wanted, store, asked_for=question, check=check, looks=looks, **how)
    return read_noise(asked, store)


def read_noise(asked: Question, store: ReplicaStore) -> NoiseResult:
    """The result from what is stored alone."""
    trained = store.description
    missing = set(asked.wanted(trained)) - store.replicas()
    if missing:
        first = min(missing, key=lambda replica: (str(replica.switches), replica.number))
        raise UsageError(
            f"{store.path} lacks replica {first} of {trained.name}; run the study, which makes what is missing"
        )
    clean = list(store.of(Switches(), asked.count(Switches())))
    check_control(clean, asked.spec.workload)
    twin, result, variants = clean[0], [], []
    for switches in asked.possible(trained):
        name = name_of(switches)
        rows = list(store.of(switches, asked.count(switches)))
        result.append((name, rows))
        variants.append(
            replace(measure(name, switches, rows, twin, store, asked.confidence), first=first_seen(rows, twin, store))
        )
    seconds, cpu_seconds = store.usage()
    return NoiseResult(
        workload=trained.name,
        command=store.budget()[1],
        spec={**asdict(asked.spec), "variants": [str(s) for s in asked.variants], "replicas": asked.replicas},
        seed=asked.spec.seed,
        training=trained.campaign,
        steps=trained.steps,
        samples=len(trained.labels),
        parameters=trained.parameters,
        device=trained.device,
        confidence=asked.confidence,
        level=asked.level,
        smallest_p=1 / (asked.replicas + 1),
        variants=tuple(variants),
        effects=tuple(_effect(part, trained, store) for part in asked.parts()),
        matrix=churn_matrix(result or [(CONTROL, clean)]),
        curves=tuple(loss_spread(name, rows) for name, rows in result if any(not same(row, rows[0]) for row in rows)),
        store=str(store.path),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        versions=trained.versions,
        machine=trained.machine,
        info=trained.info,
        notes=tuple(_notes(asked, trained, [*clean, *(row for _, rows in result for row in rows)])),
    )


def asked_of(store: ReplicaStore, confidence: float = 0.95) -> Question:
    """The question that was asked of a store last; raises ``UsageError`` where none was."""
    items: list[AskedFor] = store.records(ASKED)
    if not items:
        raise UsageError(f"{store.path} does not say which replicas were asked for; run unsilent noise again")
    return Question(store.spec, tuple(map(Switches.parse, items[-1].variants)), items[-1].replicas, confidence)


def looks_at(asked: Question, store: ReplicaStore) -> Iterator[StepTraceId]:
    """The steps at which runs part: of each variant, and of each switch alone, the replica that parts first, and the twin."""
    twin = store.twin()
    for switches in dict.fromkeys([*asked.possible(store.description), *asked.parts()]):
        rows = list(store.of(switches, asked.count(switches)))
        if asked.spec.every == 1 and (look := parts_first(rows, twin)) is not None:
            yield look
            yield look._replace(replica=twin.replica)


def _effect(part: Switches, trained: ReplicaBaseline, store: ReplicaStore) -> Effect:
    result = _compared(part, trained, store)
    if not result.changes:
        return result
    return replace(result, first=first_seen(list(store.of(part, RACES)), store.twin(), store))


def impossible(switches: Switches, trained: ReplicaBaseline) -> str:
    """Why one of these switches cannot be tried in this training here; empty where all can."""
    for name, _ in switches.settings:
        switch = SWITCHES[name]
        if switch.cuda and trained.device != "cuda":
            return f"{name} needs a CUDA device, and this training runs on {trained.device}"
        if switch.draws and trained.streams is not None and name not in trained.streams:
            return f"this training draws nothing for {name}"
        if name == "layout" and not trained.layouts:
            return "this training has no weight with four dimensions and more than one input channel"
        for library in ("onednn", "mkl"):
            if name.startswith(library) and trained.machine.get(library) == "False":
                return f"this torch was built without {library}"
    return ""


def probes(part: Switches, trained: ReplicaBaseline) -> Iterator[Replica]:
    """The runs that show what one switch does."""
    if impossible(part, trained):
        return
    racing = _racing(part)
    for number in range(RACES if racing else 1):
        yield Replica(part, number)
    if racing and part.threads > 1:
        yield Replica(_threads(part), 0)


def _compared(part: Switches, trained: ReplicaBaseline, store: ReplicaStore) -> Effect:
    """What was seen of it; the probes must be stored."""
    name = part.settings[0][0]
    parts = (str(part), SWITCHES[name].kind, SWITCHES[name].text)
    if why := impossible(part, trained):
        return Effect(*parts, None, why)
    twin = store.twin()
    rows = list(store.of(part, RACES if _racing(part) else 1))
    changed = not same(rows[0], twin)
    if not _racing(part):
        return Effect(*parts, changed, "changes the bits" if changed else "returns the same bits as the clean twin")
    if any(not same(row, rows[0]) for row in rows):
        return Effect(*parts, True, f"makes runs of the same seeds differ ({RACES} runs)")
    if part.threads > 1:
        alike = same(rows[0], next(store.of(_threads(part), 1)))
        other = "the same bits as" if alike else "other bits than"
        return Effect(*parts, changed, f"ends in {other} {_threads(part)}; no operation raced in {RACES} runs")
    return Effect(*parts, changed, f"runs of the same seeds agreed ({RACES} runs)")


def _racing(part: Switches) -> bool:
    return part.settings[0][0] in RACING


def _threads(part: Switches) -> Switches:
    return Switches((("threads", str(part.threads)),))


def name_of(switches: Switches) -> str:
    """A variant's name in capitals where it has one, else its switches."""
    return next((name.upper() for name, own in VARIANTS.items() if own == switches), str(switches))


def check_control(rows: Sequence[ReplicaRow], workload: str) -> None:
    """Raise ``UnsilentError`` that names the first step and tensor unless clean twins have the same bits, and sound ones."""
    lost = np.flatnonzero(~np.isfinite(rows[0].losses))
    if len(lost):
        raise UnsilentError(
            f"{workload}: the clean twin's loss is {rows[0].losses[lost[0]]} in step {lost[0]}; a floor is made of sound runs: "
            "mend the training (a lower learning rate, clipping, another dtype) and run again"
        )
    for row in rows[1:]:
        if same(row, rows[0]):
            continue
        raise UnsilentError(
            f"{workload}: clean twins {rows[0].replica} and {row.replica} differ {_where(rows[0], row)}; a training that is not "
            f"bit-identical has no floor by source: unsilent noise --control {workload} says what makes it differ (where that "
            "finds nothing, a run leaves something behind for the next one in the same process: a global, a model made once)"
        )


def _where(one: ReplicaRow, other: ReplicaRow) -> str:
    """How two runs differ, as far as it is known: first step of loss and weights, first tensor at the end."""
    result = []
    losses = parting(one.losses.tolist(), other.losses.tolist())
    weights = parting(one.hashes.tolist(), other.hashes.tolist())
    if losses is not None:
        result.append(f"in the loss from step {losses} on")
    if weights is not None:
        result.append(f"in the weights from hash {weights} of {len(one.hashes)} on")
    pairs = zip(json.loads(one.finals), json.loads(other.finals), strict=False)
    tensor = next((mine[0] for mine, theirs in pairs if mine != theirs), None)
    if tensor is not None:
        result.append(f"at the end first in {tensor}")
    return "; ".join(result) or "in what they give for held-out samples, with the same weights: is evaluate random?"


def _notes(asked: Question, trained: ReplicaBaseline, rows: Sequence[ReplicaRow]) -> Iterator[str]:
    for switches in asked.variants:
        if why := _left_out(switches, trained):
            yield f"{name_of(switches)} was not run: {why}"
    yield from sorted({note for row in rows for note in row.notes_list()})
    if any("within" in switches for switches in asked.variants) and trained.draws:
        yield (
            "forward passes of this training draw random numbers by the place in the batch, so in-batch permutations (IMPL) also "
            "deal other dropout masks: what they show is more than rounding"
        )
    if asked.spec.every > 1:
        yield "the operation at which runs part is reported with --every 1 only"
    if asked.spec.steps is not None:
        yield f"runs end after {trained.steps} steps; the workload's own schedule may be longer (--with steps=N sets it)"
