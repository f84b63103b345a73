"""Runs the noise study: how much fault-free runs of one training differ, and why.

Replicas of each variant (a set of switches) are run if the store lacks them; then everything is read from the store. CONTROL is
always run: its replicas must be bit-identical, since otherwise no difference could be attributed to a switch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.options import Request
from unsilent.campaigns.campaign_run import CampaignRun, TrialNumbers
from unsilent.campaigns.options import AnalysisOptions
from unsilent.campaigns.python_function import campaign_function
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
from unsilent.replicas.kind import ASKED, ReplicaRequest
from unsilent.replicas.spec import same_replica_bits
from unsilent.replicas.switches import CONTROL, RACING, SWITCHES, VARIANTS
from unsilent.statistics.floor import replicas_needed
from unsilent.statistics.replica_spread import MIN_REPLICAS, check_replica_count, first_differing_index
from unsilent.studies.noise.diverging_operation import earliest_divergence, stored_diverging_operation
from unsilent.studies.noise.kind import NOISE, NoiseBudget, make_noise_spec
from unsilent.studies.noise.measures import churn_matrix, loss_spread, measure
from unsilent.studies.noise.records import NoiseResult, SwitchEffect

RACES = 3
"""Number of runs with a switch that allows races; if they do not differ, the report says that no race was observed."""
REPEATS = MIN_REPLICAS
"""Number of runs of a variant whose switches do not vary between replicas; they should be bit-identical."""


@dataclass(frozen=True, slots=True)
class NoiseQuestion:
    """The runs of a noise study, and how they are analysed.

    ``level``: significance level of a rank test, for which there must be enough replicas; ``None`` for no test.
    """

    spec: ReplicaSpec
    variants: tuple[Switches, ...]
    replicas: int = 20
    confidence: float = 0.95
    level: float | None = None

    def __post_init__(self) -> None:
        check_replica_count(self.replicas)
        if self.level is None:
            return
        if not 0 < self.level < 1:
            raise UsageError(f"level is {self.level}; expected a number between 0 and 1")
        needed = replicas_needed(self.level)
        if self.replicas < needed:
            raise UsageError(
                f"{self.replicas} replicas are too few for level {self.level:g}: the smallest p value of a rank test "
                f"is 1/{self.replicas + 1}; set --replicas {needed} or more"
            )

    def replica_count(self, switches: Switches) -> int:
        """The number of replicas of a variant."""
        return self.replicas if switches.varies_between_replicas or str(switches) == CONTROL else REPEATS

    def planned_runs(self, trained: ReplicaBaseline) -> Iterator[Replica]:
        """All runs of the study, the clean twins first.

        Raises ``UsageError`` if no variant can be run.
        """
        check_any_runnable(self, trained)
        yield Replica(Switches(), 0)
        yield Replica(Switches(), 1)
        for part in self.single_switches():
            yield from switch_probe_runs(part, trained)
        for switches in self.runnable_variants(trained):
            yield from (Replica(switches, number) for number in range(self.replica_count(switches)))

    def single_switches(self) -> list[Switches]:
        """Every switch of the variants, as a set of its own."""
        return list(dict.fromkeys(part for switches in self.variants for part in switches.single_switches()))

    def runnable_variants(self, trained: ReplicaBaseline) -> list[Switches]:
        """The variants that can be run here.

        A variant is left out if none of its switches has an effect, or if one of them cannot be set.
        """
        return [switches for switches in self.variants if not _left_out(switches, trained)]


def _left_out(switches: Switches, trained: ReplicaBaseline) -> str:
    """The reason why a variant is not run; empty if it is.

    A random stream without an effect does not exclude a variant whose other switches have one.
    """
    whys = {str(part): reason_not_runnable(part, trained) for part in switches.single_switches()}
    if not any(whys.values()):
        return ""
    blocked = [name for name, why in whys.items() if why and name not in ALWAYS]
    if blocked or all(whys.values()):
        return next(why for why in whys.values() if why)
    return ""


ALWAYS = ("init", "order", "augment", "dropout", "within")
"""Switches that can be set in every training, even if they have no effect."""


def check_any_runnable(question: NoiseQuestion, trained: ReplicaBaseline) -> None:
    """Raise ``UsageError`` if no variant can be run."""
    if not question.runnable_variants(trained):
        whys = "; ".join(f"{variant_name(switches)}: {_left_out(switches, trained)}" for switches in question.variants)
        raise UsageError(f"no variant can be run here ({whys}); choose another --switch")


def run_noise_campaign(run: CampaignRun) -> NoiseResult:
    """Run the missing replicas and analyse the store; see `run_noise`."""
    execution = run.request[run.kind.execution_options]
    with run.observe("replica") as observer:
        return run_noise(
            make_noise_question(run.request), run.store, jobs=execution.jobs, executor=execution.executor,
            address=execution.ray, deadline=execution.deadline, observer=observer, command=run.command,
        )  # fmt: skip


def trial_numbers(run: CampaignRun, trained: ReplicaBaseline) -> TrialNumbers:
    """The numbers of the planned replicas, by their switches."""
    counts: dict[tuple[str, int | None], range] = {}
    for replica in make_noise_question(run.request).planned_runs(trained):
        key = (str(replica.switches), None)
        counts[key] = range(max(replica.number + 1, len(counts.get(key, ()))))
    return counts


def run_noise(question: NoiseQuestion, store: ReplicaStore, **run_options: Any) -> NoiseResult:
    """Run the missing replicas and analyse the store.

    Raises ``UnsilentError`` if clean twins differ.

    ``run_options``: further options of `run_replicas`, for example ``jobs``.
    """
    request = ReplicaRequest(tuple(map(str, question.variants)), question.replicas)
    run_replicas(
        question.spec,
        question.planned_runs,
        store,
        replica_request=request,
        # If clean twins differ, all other runs would be useless.
        after_control_runs=lambda: check_control(list(store.runs_with_switches(Switches())), question.spec.workload),
        step_traces=partial(steps_to_trace, question, store),
        **run_options,
    )
    return read_noise(question, store)


def read_noise(question: NoiseQuestion, store: ReplicaStore) -> NoiseResult:
    """The result from the store alone, without running anything."""
    # Long because the result has many fields, each on its own line.
    trained = store.baseline
    missing = set(question.planned_runs(trained)) - store.replicas()
    if missing:
        first = min(missing, key=lambda replica: (str(replica.switches), replica.number))
        raise UsageError(
            f"{store.path} lacks replica {first} of {trained.name}; run unsilent noise again, which adds the missing replicas"
        )
    clean = list(store.runs_with_switches(Switches(), question.replica_count(Switches())))
    check_control(clean, question.spec.workload)
    twin, result, variants = clean[0], [], []
    for switches in question.runnable_variants(trained):
        name = variant_name(switches)
        rows = list(store.runs_with_switches(switches, question.replica_count(switches)))
        result.append((name, rows))
        variants.append(
            replace(
                measure(name, switches, rows, twin, store, question.confidence),
                diverging_operation=stored_diverging_operation(rows, twin, store),
            )
        )
    seconds, cpu_seconds = store.total_session_seconds()
    return NoiseResult(
        workload=trained.name,
        command=store.largest_budget()[1],
        spec={**asdict(question.spec), "variants": [str(s) for s in question.variants], "replicas": question.replicas},
        seed=question.spec.seed,
        training=trained.campaign,
        steps=trained.steps,
        samples=len(trained.labels),
        parameters=trained.parameters,
        device=trained.device,
        confidence=question.confidence,
        level=question.level,
        smallest_p=1 / (question.replicas + 1),
        variants=tuple(variants),
        effects=tuple(_effect(part, trained, store) for part in question.single_switches()),
        churn_matrix=churn_matrix(result or [(CONTROL, clean)]),
        curves=tuple(
            loss_spread(name, rows) for name, rows in result if any(not same_replica_bits(row, rows[0]) for row in rows)
        ),
        store=str(store.path),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        versions=trained.versions,
        machine=trained.machine,
        info=trained.info,
        notes=tuple(_notes(question, trained, [*clean, *(row for _, rows in result for row in rows)])),
    )


def stored_question(store: ReplicaStore, confidence: float = 0.95) -> NoiseQuestion:
    """The question that was last asked of a store.

    Raises ``UsageError`` if the store does not record one.
    """
    items: list[ReplicaRequest] = store.records(ASKED)
    if not items:
        raise UsageError(f"{store.path} does not record which replicas were requested; run unsilent noise again")
    return NoiseQuestion(store.spec, tuple(map(Switches.parse, items[-1].variants)), items[-1].replicas, confidence)


def planned_replica_count(store: ReplicaStore) -> int:
    """The number of replicas that the last question of a store needs."""
    return len(set(stored_question(store).planned_runs(store.baseline)))


def steps_to_trace(question: NoiseQuestion, store: ReplicaStore) -> Iterator[StepTraceId]:
    """The steps to trace: where variants and single switches first diverge from the twin.

    For each variant and each switch alone, one step is traced, in the replica and in the twin.
    """
    twin = store.clean_twin()
    for switches in dict.fromkeys([*question.runnable_variants(store.baseline), *question.single_switches()]):
        rows = list(store.runs_with_switches(switches, question.replica_count(switches)))
        if question.spec.every == 1 and (look := earliest_divergence(rows, twin)) is not None:
            yield look
            yield look._replace(replica=twin.replica)


def _effect(part: Switches, trained: ReplicaBaseline, store: ReplicaStore) -> SwitchEffect:
    result = _effect_of_switch(part, trained, store)
    if not result.changes_bits:
        return result
    return replace(
        result,
        diverging_operation=stored_diverging_operation(
            list(store.runs_with_switches(part, RACES)), store.clean_twin(), store
        ),
    )


def reason_not_runnable(switches: Switches, trained: ReplicaBaseline) -> str:
    """The reason why one of the switches cannot be used in this training; empty if all can."""
    for name, _ in switches.settings:
        switch = SWITCHES[name]
        if switch.needs_cuda and trained.device != "cuda":
            return f"{name} needs a CUDA device, and this training runs on {trained.device}"
        if switch.is_random_stream and trained.effective_streams is not None and name not in trained.effective_streams:
            return f"seeds of {name} have no effect on this training"
        if name == "layout" and not trained.has_channels_last:
            return "this training has no weight with four dimensions and more than one input channel"
        for library in ("onednn", "mkl"):
            if name.startswith(library) and trained.machine.get(library) == "False":
                return f"this torch was built without {library}"
    return ""


def switch_probe_runs(part: Switches, trained: ReplicaBaseline) -> Iterator[Replica]:
    """The runs that show the effect of one switch."""
    if reason_not_runnable(part, trained):
        return
    racing = _racing(part)
    for number in range(RACES if racing else 1):
        yield Replica(part, number)
    if racing and part.threads > 1:
        yield Replica(_threads(part), 0)


def _effect_of_switch(part: Switches, trained: ReplicaBaseline, store: ReplicaStore) -> SwitchEffect:
    """The effect of a switch, from its stored probe runs."""
    name = part.settings[0][0]
    parts = (str(part), SWITCHES[name].kind, SWITCHES[name].varied_aspect)
    if why := reason_not_runnable(part, trained):
        return SwitchEffect(*parts, None, why)
    twin = store.clean_twin()
    rows = list(store.runs_with_switches(part, RACES if _racing(part) else 1))
    changed = not same_replica_bits(rows[0], twin)
    if not _racing(part):
        return SwitchEffect(
            *parts, changed, "differs from the clean twin" if changed else "bit-identical to the clean twin"
        )
    if any(not same_replica_bits(row, rows[0]) for row in rows):
        return SwitchEffect(*parts, True, f"makes runs with the same seeds differ ({RACES} runs)")
    if part.threads > 1:
        alike = same_replica_bits(rows[0], next(store.runs_with_switches(_threads(part), 1)))
        comparison = "bit-identical to" if alike else "differs from"
        return SwitchEffect(*parts, changed, f"{comparison} {_threads(part)}; no race was observed in {RACES} runs")
    return SwitchEffect(*parts, changed, f"runs with the same seeds were bit-identical ({RACES} runs)")


def _racing(part: Switches) -> bool:
    return part.settings[0][0] in RACING


def _threads(part: Switches) -> Switches:
    return Switches((("threads", str(part.threads)),))


def variant_name(switches: Switches) -> str:
    """The name of a variant in capitals; its switches if it has no name."""
    return next((name.upper() for name, named in VARIANTS.items() if named == switches), str(switches))


def check_control(rows: Sequence[ReplicaRow], workload: str) -> None:
    """Raise ``UnsilentError`` unless clean twins are bit-identical and have finite losses.

    The message names the first step and tensor that differ.
    """
    lost = np.flatnonzero(~np.isfinite(rows[0].losses))
    if len(lost):
        raise UnsilentError(
            f"{workload}: the clean twin's loss is {rows[0].losses[lost[0]]} in step {lost[0]}; a noise floor needs finite "
            "losses: fix the training (a lower learning rate, gradient clipping, another dtype) and run again"
        )
    for row in rows[1:]:
        if same_replica_bits(row, rows[0]):
            continue
        raise UnsilentError(
            f"{workload}: clean twins {rows[0].replica} and {row.replica} differ {_where(rows[0], row)}; noise can be attributed "
            f"to switches only if clean runs are bit-identical: run unsilent explain --check-only {workload} to find the cause "
            "(if it finds none, a run leaves state for the next one in the same process: a global, a model created only once)"
        )


def _where(first: ReplicaRow, second: ReplicaRow) -> str:
    """A description of where two runs first differ."""
    result = []
    losses = first_differing_index(first.losses.tolist(), second.losses.tolist())
    weights = first_differing_index(first.hashes.tolist(), second.hashes.tolist())
    if losses is not None:
        result.append(f"in the loss from step {losses} on")
    if weights is not None:
        result.append(f"in the weights from hash {weights} of {len(first.hashes)} on")
    pairs = zip(json.loads(first.final_hashes), json.loads(second.final_hashes), strict=False)
    tensor = next((mine[0] for mine, theirs in pairs if mine != theirs), None)
    if tensor is not None:
        result.append(f"in the final state, first in {tensor}")
    held_out = {
        "loss": np.float64(first.loss).tobytes() != np.float64(second.loss).tobytes(),
        "metrics": first.metrics != second.metrics,
        "predictions": first.predictions.tobytes() != second.predictions.tobytes(),
    }
    names = " and ".join(name for name, differs in held_out.items() if differs)
    return "; ".join(result) or (
        f"in {names} of held-out samples, although weights are equal (does evaluate draw random numbers? was the store edited?)"
    )


def _notes(question: NoiseQuestion, trained: ReplicaBaseline, rows: Sequence[ReplicaRow]) -> Iterator[str]:
    for switches in question.variants:
        if why := _left_out(switches, trained):
            yield f"{variant_name(switches)} was not run: {why}"
    yield from sorted({note for row in rows for note in row.notes_list()})
    if any("within" in switches for switches in question.variants) and trained.draws_per_batch:
        yield (
            "forward passes of this training draw random numbers by position in the batch, so in-batch permutations (IMPL) also "
            "change dropout masks and cause more variation than rounding"
        )
    if question.spec.every > 1:
        yield "the operation at which runs diverge is reported only with --every 1"
    if question.spec.steps is not None:
        yield f"runs end after {trained.steps} steps; the workload's own schedule may be longer (--with steps=N sets it)"


def make_noise_question(wanted: Request) -> NoiseQuestion:
    """The question that a request asks; raises ``UsageError``."""
    budget = wanted[NoiseBudget]
    return NoiseQuestion(
        make_noise_spec(wanted),
        budget.chosen_variants,
        budget.replicas,
        wanted[AnalysisOptions].confidence,
        budget.level,
    )


def check_options(request: Request, spec: ReplicaSpec) -> None:
    """Raise ``UsageError`` if the options do not make a valid question."""
    make_noise_question(request)


def analyse(store: ReplicaStore, confidence: float = 0.95) -> NoiseResult:
    """The result of the replicas in a store.

    Raises ``UsageError`` if replicas are missing.
    """
    return read_noise(stored_question(store, confidence), store)


noise = campaign_function(
    NOISE,
    NoiseResult,
    "How much fault-free runs of one training differ, by what is switched between them.\n\n"
    "Raises ``UnsilentError`` where clean twins differ.",
)
