"""The engine that evaluates only the operations that a fault affects, with the same bits as the plain engine.

A batch is recorded on a tape once. A trial re-executes the operations that read corrupted memory and the operations
that depend on them, until no value that is still needed differs from golden. Source of the idea: SCI-FI (Gavarini et
al. 2023), which starts late and drops faults at the borders of top-level layers. This engine does so at every operation
of any model.

A tape is used only after comparisons of raw bits. Executing all of it must give the golden output. If it contains
tensors of unknown origin, it must give the same output as a plain run while every parameter is corrupted. At each check
of a campaign, a trial is run both ways.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from unsilent.basics.errors import ProcessUnusable, UnsilentError, kind_and_line
from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.fault_entries import trial_entry_of
from unsilent.engine.memory_plan import default_budget, minimum_memory, plan_memory
from unsilent.engine.perturbation_check import hidden_read_check, perturbation_check
from unsilent.engine.plain import PlainEngine, Samples, TrialOutcome, acting_in, same_outputs
from unsilent.engine.recorder import record
from unsilent.engine.sampled_trials import SampledTrial, gives_plain_bits, group_size, outcomes_together
from unsilent.engine.tape import Diverged, Node, Unrecordable
from unsilent.engine.tape_replay import Replayer, assemble_output
from unsilent.engine.trial_costs import TrialCosts, cost_class_of
from unsilent.engine.validation_sample import ValidationSample, ValidationSamples
from unsilent.faults import Fault
from unsilent.faults.naming import is_transient
from unsilent.outcomes import judges_samples_apart
from unsilent.outcomes.base import Judge, Outcome
from unsilent.outcomes.classify import BatchOutcome, same_outcome_for_all
from unsilent.outcomes.scores import Score
from unsilent.sites import Parameters
from unsilent.sites.inputs import named_inputs
from unsilent.workloads.base import InferenceWorkload

PACK = 64
"""Number of trials that are given to the engine at a time."""
PACK_BYTES = 64 << 20
"""Limit in bytes for the largest value of a tape times the number of trials that are evaluated together."""
PASSES_BEFORE_HOLDING = 8
"""Passes over a tape after which its golden values are held; fresh memory costs about as much as they do."""
HELD_AT_ONCE = 16 << 20
"""Size in bytes up to which the golden values of a tape are held from the start."""


class CachedEngine(PlainEngine):
    """Evaluates a workload under faults by running only the operations that a fault affects.

    ``sampled``: whether trials will be evaluated on some samples of a batch, which needs preparation.

    Attributes:
        replayers: One per batch, or None if the batch is run in full; ``fallback_reasons`` has the reason by batch.
        diverged_count: Number of evaluations that were begun on a tape and had to be run in full.
    """

    def __init__(
        self,
        workload: InferenceWorkload,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        judge: Judge | None = None,
        score: Score | None = None,
        memory: int | None = None,
        worker_count: int = 1,
        sampled: bool = False,
    ) -> None:
        self.validation_samples = ValidationSamples()
        self._sampled = sampled
        super().__init__(workload, device=device, dtype=dtype, judge=judge, score=score)
        self.memory, self.sharers = memory, worker_count
        self.diverged_count = 0
        self.replayers: list[Replayer | None] = []
        self.fallback_reasons: dict[int, str] = {}
        self.ledger = TrialCosts()
        self._ready: dict[int, Any] = {}
        """Known outputs of the current trial, by batch."""
        self.record()

    def record(self) -> None:
        """Record every batch on a tape, and check each tape before it is used.

        Raises ``ProcessUnusable`` if the device only raises after the checks, which corrupt parameters and inputs.
        """
        with preparing():
            self._record_all()

    def _record_all(self) -> None:
        self.replayers, self.fallback_reasons = [], {}
        self._timed: dict[str, Replayer] = {}
        """The first tape of each structure, whose operations are timed."""
        self._ready, self._operations = {}, False
        self._checked: dict[str, Replayer] = {}
        """The first tape of each structure that has passed every check."""
        self._unheld: dict[int, Replayer] = {}
        """Replayers whose golden values are not held yet, by batch."""
        scratch = {id(t) for t, _ in self._scratch}
        self._watched = [t for t, _ in self._writes() if id(t) not in scratch]
        self._versions = self._count_writes()
        for i in range(len(self.batches)):
            try:
                self.replayers.append(self._record(i))
            except Unrecordable as why:
                self.fallback_reasons[i] = str(why)
                self.replayers.append(None)
        self.ledger = TrialCosts(self.batch_seconds)
        self._hold()
        self.notes = tuple(self.fallback_notes())

    def _record(self, i: int) -> Replayer:
        """Record one batch and return the replayer of its tape.

        The tape gives the golden output and knows the costs of all operations; no golden value is held yet.
        """
        try:
            tape = record(lambda: self._run(self.batches[i]), self.model, named_inputs(self.batches[i]))
        except Unrecordable:
            raise
        except Exception as error:  # the model runs, but not under a dispatch mode
            raise Unrecordable(f"recording it raised {type(error).__name__}: {error}") from None
        replayer = Replayer(tape)
        timed = self._timed.setdefault(replayer.structure, replayer)
        with torch.no_grad():
            observe = timer(clock(tape.device)) if timed is replayer else None
            outputs = replayer.run_golden(lambda value: False, observe)
            for node, same in zip(tape.nodes, timed.tape.nodes, strict=True):
                node.seconds = same.seconds
            if not same_outputs(self.golden[i], assemble_output(replayer, outputs)):
                raise Unrecordable("executing the recorded operations again gives other bits than the recorded run")
        return replayer

    def _hold(self) -> None:
        """Hold the golden values that the memory budget allows, and test the shortcuts that use them."""
        able = [(i, r) for i, r in enumerate(self.replayers) if r is not None]
        device = able[0][1].tape.device if able else torch.device("cpu")
        tapes = [r.tape for _, r in able]
        least = self.sharers * sum(map(minimum_memory, tapes))  # this memory is in use already
        budget = max(default_budget(device), least) if self.memory is None else self.memory
        operations = float(self._operations or self._sampled)
        self.plan = plan_memory(tapes, budget, operations=operations, worker_count=self.sharers)
        self._unheld.clear()
        for (i, replayer), keep in zip(able, self.plan.kept_values, strict=True):
            try:
                with torch.no_grad():
                    self._try_shortcuts(i, replayer, keep)
            except Unrecordable as why:
                self.fallback_reasons[i] = str(why)
                self.replayers[i] = None

    def _try_shortcuts(self, i: int, replayer: Replayer, keep: frozenset[int]) -> None:
        """Check one tape and find the operations that can run in blocks or on single samples.

        Done once for all batches whose tapes have the same structure.
        """
        first = self._checked.get(replayer.structure, replayer)
        replayer.plan_to_hold(keep)
        if first is replayer or replayer.kept or self._is_held_at_once(replayer):
            replayer.hold()
        else:
            self._unheld[i] = replayer
        if first is replayer and not self._operations:  # only for faults in parameters
            replayer.try_blocks()
        if replayer.structure not in self._checked or replayer.tape.unexplained:
            self._check_hidden(i, replayer)
        self._checked.setdefault(replayer.structure, replayer)
        if first is replayer and (self._operations or self._sampled):
            replayer.row_plan.try_row_counts(replayer)
        if first is replayer and self._sampled:
            able_on_rows = [index for index, sizes in replayer.row_plan.sizes.items() if sizes]
            replayer.in_place_plan.try_row_counts(replayer, except_for=able_on_rows)
        if first is not replayer:
            replayer.adopt(first)

    def _is_held_at_once(self, replayer: Replayer) -> bool:
        """Whether to hold the golden values of a batch now, because they are small or costly to miss."""
        size = sum(replayer.tape.values[v].nbytes for v in replayer.planned)
        return size <= HELD_AT_ONCE or replayer.needs_golden_values or replayer.tape.device.type != "cpu"

    def _hold_one_more(self, faults: Sequence[Fault]) -> None:
        """Hold the golden values of one more batch that is used often.

        Only one batch per call, so that no trial takes long. Trials on some samples need so many golden values that
        those for the batch of ``faults`` are held at once.
        """
        steps = {fault.step for fault in faults} if self._sampled else set()
        due = next((i for i, r in self._unheld.items() if i in steps or r.passes >= PASSES_BEFORE_HOLDING), None)
        if due is None:
            return
        replayer = self._unheld.pop(due)
        with preparing(), torch.no_grad():
            replayer.hold()
        self.ledger.forget_batch(due)

    def _check_hidden(self, i: int, replayer: Replayer) -> None:
        """Check that the output depends on nothing that the tape does not contain."""
        hidden_read_check(self, i, replayer, partial(assemble_output, replayer))
        perturbation_check(self, i, replayer.tape)
        self._run(self.batches[i])  # check that an earlier exception has not left the model unusable

    def output_without_tape(self, batch: int, faults: Sequence[Fault]) -> Any:
        """The output of a full run of one batch.

        Faults in parameters must be injected already.
        """
        return super()._evaluate(batch, faults)

    def check_and_prepare(self, faults: Sequence[Fault]) -> None:
        """Check the faults of a trial and prepare for them, before any memory is corrupted."""
        super().check_and_prepare(faults)
        if any(is_transient(f.site) for f in faults):
            self.prepare_for_transient_faults()
        self._hold_one_more(faults)

    def prepare_for_transient_faults(self) -> None:
        """Prepare for faults in operations and inputs.

        Done once. Holds the golden values that such faults need, and measures operations on single samples.
        """
        if self._operations:
            return
        self._operations = True
        self._refresh()
        with preparing():
            self._hold()

    def output_from_tape(self, batch: int, faults: Sequence[Fault], packed: bool = True) -> Any:
        """The output of a batch computed from its tape.

        ``packed``: on single samples if possible. Raises `Diverged` if the batch has to be run in full.
        """
        replayer = self.replayers[batch]
        assert replayer is not None
        try:
            (result,) = self._take(batch, replayer, [faults], packed)
        finally:
            replayer.drop_recomputed()
        if isinstance(result, Diverged):
            raise result
        return result

    def fallback_notes(self) -> list[str]:
        """Notes for a report: the batches that run without shortcuts, and the reasons."""
        why = Counter(self.fallback_reasons.values())
        notes = []
        if self._sampled and not judges_samples_apart(self.judge):
            notes = ["Trials evaluate whole batches, because a judge of your own may compare samples with each other."]
        return notes + [
            f"{n} of {len(self.batches)} batches run completely for every trial, without shortcuts. Reason: {text}."
            for text, n in why.items()
        ]

    # -- trials ------------------------------------------------------------------------------------------------

    def trials(
        self, many: Sequence[Sequence[Fault]], samples: Sequence[Samples] | None = None
    ) -> Iterator[TrialOutcome]:
        """Outcomes of several trials, like `PlainEngine.trials`.

        Trials with ``samples`` or without faults in parameters are evaluated together.
        """
        if samples is not None and self._sampled:
            yield from self._sampled_trials(many, samples)
            return
        transient = [bool(faults) and all(is_transient(f.site) for f in faults) for faults in many]
        if not any(transient):
            yield from super().trials(many, samples)
            return
        self._refresh()
        self.prepare_for_transient_faults()
        together = [faults if able else () for faults, able in zip(many, transient, strict=True)]
        ready = self._packed(together) if sum(transient) > 1 else {}
        for i, faults in enumerate(many):
            if self._refresh():  # the receiver of the outcomes may write into the model
                ready = {}
            self._ready = ready.pop(i, {})
            try:
                outcome = self.trial(faults)
            finally:
                self._ready = {}
            yield outcome

    def _sampled_trials(self, many: Sequence[Sequence[Fault]], samples: Sequence[Samples]) -> Iterator[TrialOutcome]:
        """Outcomes of trials with faults in parameters, each evaluated on some samples only."""
        self._refresh()
        for faults in many:
            self.check_and_prepare(faults)
        ready = outcomes_together(
            self, [None if chosen is None else SampledTrial(f, chosen) for f, chosen in zip(many, samples, strict=True)]
        )
        for i, (faults, chosen) in enumerate(zip(many, samples, strict=True)):
            if self._refresh():  # the receiver of the outcomes may write into the model
                ready = {}
            yield ready[i] if i in ready else self.trial(faults, chosen)

    def spared_outcome(self, batch: int) -> BatchOutcome:
        """The outcome of a batch that a trial does not evaluate."""
        return same_outcome_for_all(Outcome.SPARED, self.samples[batch])

    def preferred_group_size(self, transient: bool, sampled: bool = False) -> int:
        """The number of trials to give to the engine at a time, because it may run them together.

        ``sampled``: trials that are evaluated on some samples only.
        """
        if sampled and self._sampled:
            return group_size(self)
        return PACK if transient and any(r is not None and r.row_plan.sizes for r in self.replayers) else 1

    def _packed(self, many: Sequence[Sequence[Fault]]) -> dict[int, dict[int, Any]]:
        """Outputs of the trials that could be evaluated together, by trial and batch."""
        mapping: dict[int, dict[int, Any]] = {}
        for batch, replayer in enumerate(self.replayers):
            sharing = [
                (i, acting)
                for i, faults in enumerate(many)
                if (acting := acting_in(batch, faults)) and not self.ledger.prefers_plain(cost_class_of(batch, acting))
            ]
            size = PACK_BYTES // max(replayer.largest, 1) if replayer is not None else 0
            for first in range(0, len(sharing), size) if size > 1 else ():
                found_now = self._pack(batch, sharing[first : first + size])
                for i, output in found_now.items():
                    mapping.setdefault(i, {})[batch] = output
        return mapping

    def _pack(self, batch: int, sharing: Sequence[tuple[int, Sequence[Fault]]]) -> dict[int, Any]:
        """Outputs of trials that are evaluated together on one batch.

        Trials that have to be run in full are left out.
        """
        replayer = self.replayers[batch]
        assert replayer is not None
        try:
            outputs = self._take(batch, replayer, [acting for _, acting in sharing])
        except Exception:  # one trial fails; run alone, each reports its own error
            return {}
        finally:
            replayer.drop_recomputed()
        result = {i: out for (i, _), out in zip(sharing, outputs, strict=True) if not isinstance(out, Diverged)}
        company = [acting for _, acting in sharing]
        for place, (i, _) in enumerate(sharing):
            if i in result:
                self.validation_samples.add(batch, company, place, result[i] is not self.golden[batch])
        return result

    def _evaluate(self, batch: int, faults: Sequence[Fault]) -> Any:
        if batch in self._ready:
            return self._ready.pop(batch)
        replayer, key = self.replayers[batch], cost_class_of(batch, faults)
        if replayer is None:
            return super()._evaluate(batch, faults)
        begun = time.process_time()
        if self.ledger.is_plain_run_due(key):
            output = super()._evaluate(batch, faults)
            self.ledger.add_plain(key, time.process_time() - begun)
            return output
        try:
            (result,) = self._take(batch, replayer, [faults])
            if isinstance(result, Diverged):
                raise result
        except Exception:  # any exception on the tape: the plain run decides the outcome
            self.diverged_count += 1
            between = time.process_time()
            try:
                return super()._evaluate(batch, faults)
            finally:
                now = time.process_time()
                self.ledger.add(key, now - begun, now - between)
        finally:
            replayer.drop_recomputed()
        self.ledger.add(key, time.process_time() - begun)
        self.validation_samples.add(batch, [list(faults)], 0, result is not self.golden[batch])
        return result

    def _take(self, batch: int, replayer: Replayer, many: Sequence[Sequence[Fault]], packed: bool = True) -> list[Any]:
        """Outputs of some trials for one batch, computed from the tape.

        The output is the golden output if nothing differs, and `Diverged` for a trial that has to be run in full.
        ``packed``: on rows if possible. Faults in parameters, which only a single trial may have, must be injected
        already.
        """
        with torch.no_grad():
            starts = [trial_entry_of(replayer.tape, self.parameters, faults) for faults in many]
            return [
                dirty
                if isinstance(dirty, Diverged)
                else assemble_output(replayer, dirty)
                if dirty
                else self.golden[batch]
                for dirty in replayer.run(starts, packed)
            ]

    # -- proofs ------------------------------------------------------------------------------------------------

    def check_intact(self, by_copies: bool = False) -> None:
        """Check like `PlainEngine.check_intact`, and check one random trial of each batch against a full run.

        The trial is drawn from those that were evaluated on the tape since the last check, and is repeated in the same
        group of trials.

        Raises:
            UnsilentError: the two results differ.
        """
        super().check_intact(by_copies)
        for witness in self.validation_samples.take():
            if not self._stands(witness):
                raise UnsilentError(
                    f"shortcuts returned other bits than a plain run ({witness.faults[0].describe()}); trials since the last "
                    "check were not stored: use --engine plain, and report this as a bug"
                )

    def _stands(self, witness: ValidationSample) -> bool:
        """Whether a trial gives the same bits from the tape and in a full run."""
        batch, faults, replayer = witness.batch, witness.faults, self.replayers[witness.batch]
        assert replayer is not None
        try:
            with self.inject_parameter_faults(faults):
                plain = self.output_without_tape(batch, faults)
                if witness.group_samples is None and len(witness.group_faults) == 1:
                    return same_outputs(plain, self.output_from_tape(batch, faults))
            if witness.group_samples is not None:
                group = [
                    SampledTrial(*trial) for trial in zip(witness.group_faults, witness.group_samples, strict=True)
                ]
                return gives_plain_bits(self, batch, group, witness.group_index, plain)
            return same_outputs(plain, self._take(batch, replayer, witness.group_faults)[witness.group_index])
        except Exception:
            return False
        finally:
            replayer.drop_recomputed()

    def inject_parameter_faults(self, faults: Sequence[Fault]) -> AbstractContextManager[None]:
        self._refresh()
        return super().inject_parameter_faults(faults)

    def _refresh(self) -> bool:
        """Record again if other code has written into the model, and return whether that was so."""
        if self._versions == self._count_writes():
            return False
        self.parameters, self.validation_samples = Parameters(self.model), ValidationSamples()
        self.weights_hash = self.parameters.hash()
        self._record_golden()
        self.record()
        return True

    def _count_writes(self) -> list[int]:
        """Version counters of the model's tensors, which increase when other code writes into them."""
        return [tensor._version for tensor in self._watched]


@contextmanager
def preparing() -> Iterator[None]:
    """Context for preparations, in which an unexpected exception is raised as ``ProcessUnusable``.

    The exception is then not counted as the result of a trial.
    """
    try:
        yield
    except (UnsilentError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise ProcessUnusable(kind_and_line(error), shortcuts=True) from error


def timer(now: Callable[[], float]) -> Callable[[Node | None], None]:
    """A function to be called before every operation, which stores the seconds of the previous operation."""
    last: list[tuple[Node, float]] = []

    def observe(node: Node | None) -> None:
        at = now()
        if last:
            before, since = last.pop()
            before.seconds = at - since
        if node is not None:
            last.append((node, now()))

    return observe
