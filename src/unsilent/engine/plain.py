"""The plain engine, which evaluates the full workload for each trial and compares it with a golden run.

The golden run is made twice and must be finite and bit-identical; a workload that draws random numbers from torch is
seeded before every batch, so that golden and faulty runs get the same numbers. Every other engine must give the same
results as this engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import InjectionError, ProcessUnusable, UnsilentError, UsageError, kind_and_line
from unsilent.basics.user_code import user_code
from unsilent.engine.device_placement import clone, place, place_model
from unsilent.engine.running_out import out_of_memory
from unsilent.faults import Fault, Region
from unsilent.faults.naming import is_transient
from unsilent.faults.receipts import AppliedFault
from unsilent.outcomes.base import Judge, Outcome
from unsilent.outcomes.classify import BatchOutcome, classify, same_outcome_for_all, sample_count
from unsilent.outcomes.scores import Score
from unsilent.outcomes.tensors import leaves, samples_that_differ, samples_with_nonfinite
from unsilent.sites import Parameters, Receipt, Survey, TransientInjection
from unsilent.sites.addresses import component_hint
from unsilent.sites.content_hash import ContentHash, content_hashes
from unsilent.sites.memory import content_of
from unsilent.sites.modules import mode_readers, reject_training_mode
from unsilent.workloads.base import InferenceWorkload
from unsilent.workloads.process_side_effects import add_workload_note, check_no_returned_fork, contain_user_process

RANDOM_SEED = 20240503


Samples = NDArray[np.int64] | None
"""Numbers of samples within the batch that the faults of a trial act in, int64[n]; None for all samples of all batches."""


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of each sample of each batch in one trial, in the order of evaluation."""

    batches: tuple[BatchOutcome, ...]
    error: str = ""
    """First exception raised: its type and the first line of its message."""
    out_of_memory: bool = False
    """Whether the exception was caused by exhausted memory of the device or of the host."""
    graphed: bool = False
    """Whether the trial was evaluated by CUDA graphs."""

    def of_samples(self, samples: Samples) -> TrialOutcome:
        """The outcome of these samples only, if one batch was evaluated."""
        if samples is None:
            return self
        return replace(
            self, batches=tuple(b if (b.codes == Outcome.SPARED).all() else b.only(samples) for b in self.batches)
        )

    @property
    def codes(self) -> NDArray[np.uint8]:
        """`Outcome` codes of the samples of all batches, uint8[samples]."""
        return np.concatenate([b.codes for b in self.batches])

    @property
    def scores(self) -> NDArray[np.float64]:
        """Scores of the samples of all batches, float64[samples].

        NaN if a score is not known or not relevant.
        """
        return np.concatenate([np.full(len(b.codes), np.nan) if b.scores is None else b.scores for b in self.batches])

    @property
    def severity(self) -> float:
        """The largest finite severity, or infinity if only detectable outcomes have a severity."""
        values = np.concatenate([b.severity for b in self.batches])
        finite = values[np.isfinite(values)]
        top = float(finite.max()) if finite.size else 0.0
        return top if top > 0 or not np.isinf(values).any() else float("inf")


class PlainEngine:
    """Evaluates a workload under faults by running the full workload for every trial.

    Args:
        workload: The workload that runs.
        device, dtype: Device and floating-point type (None: unchanged).
        score: Score of faulty outputs, besides the judge; None if they are not scored.

    Attributes:
        parameters: The model's sites.
        survey: Survey of a running evaluation.
        samples: Number of samples of each batch.
        golden: Golden outputs.
        golden_scores: Scores of golden outputs, float64[samples] for each batch; empty if there is no score.
        golden_seconds: Wall time of one fault-free evaluation.
        batch_seconds: CPU time of each batch in it.
        notes: Sentences for the reader of a report.

    Raises:
        UsageError: the golden run is not finite, not repeatable, or does not fit the judge (names the batch).
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        workload: InferenceWorkload,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        judge: Judge | None = None,
        score: Score | None = None,
    ) -> None:
        self.workload = workload
        self.judge: Judge = judge or workload.judge
        self.score = score
        model = workload.model()
        reject_training_mode(mode_readers(model))
        self.model = place_model(model, device, dtype)
        self.batches: Sequence[Any] = [place(b, device, dtype) for b in workload.batches()]
        scored = None if score is None else score.batches
        self._scored_batches = self.batches if scored is None else [place(b, device, dtype) for b in scored]
        if any(t.is_inference() for t in (*self.model.parameters(), *self.model.buffers())):
            raise UsageError(
                "the model was built under torch.inference_mode(), so its operations cannot be observed; "
                "build it outside of this mode"
            )
        self.parameters = Parameters(self.model)
        self.survey = Survey(self.model, self.batches, self.watched_output)
        self.seeded = False
        self.weights_hash = self.parameters.hash()
        self.inputs_hash = _hash(self.batches)
        self._record_golden()

    def _record_golden(self) -> None:
        states, written = _random_states(), self._writes()
        first = self._first_outputs()
        # Buffers that a run uses as scratch memory: a faulty run may leave other content there.
        self._scratch = [(t, t.detach().clone()) for t, before in written if t._version != before]
        self.seeded = any(not torch.equal(a, b) for a, b in zip(states, _random_states(), strict=True))
        if self.seeded:
            first = self._first_outputs()
        self.golden = first
        self.golden_hash = _hash(first)
        self._content_hashes = self._all_content_hashes()
        self.golden_seconds = 0.0
        self.batch_seconds: list[float] = []
        for i, (golden_output, batch) in enumerate(zip(first, self.batches, strict=True)):
            start, cpu = time.perf_counter(), time.process_time()
            with user_code(f"{self.workload.name} (golden run, batch {i})"):
                again = self._run(batch)
            self.golden_seconds += time.perf_counter() - start
            self.batch_seconds.append(time.process_time() - cpu)
            # Copied at once, because the memory of the output may be used again.
            check_golden(golden_output, again, i, partial(self._first_difference, batch))
        with user_code(self.workload.name):
            self.samples = [sample_count(self.judge, g, b) for g, b in zip(first, self.batches, strict=True)]
            self.golden_scores = self._golden_scores()
        largest = max((len(leaf) for output in first for leaf in leaves(output) if leaf.ndim), default=1)
        if max(self.samples) == 1 < largest:
            add_workload_note(
                f"has a judge that returns one value for a batch of {largest}, so each batch counts as one sample"
            )
        if self.parameters.hash() != self.weights_hash:
            raise UsageError(
                "running the model changes its own parameters or buffers; give a model that does not change them in eval mode"
            )
        self._check_memory()

    def _golden_scores(self) -> list[NDArray[np.float64]]:
        if self.score is None:
            return []
        with torch.no_grad(), contain_user_process():
            each = zip(self.golden, self._scored_batches, self.samples, strict=True)
            return [self.score.of_golden(*arguments) for arguments in each]

    def _all_content_hashes(self) -> tuple[list[ContentHash], ...]:
        """Hashes of the weights, the inputs and the golden outputs."""
        return self.parameters.content_hashes(), *(content_hashes(_tensors(of)) for of in (self.batches, self.golden))

    def _first_difference(self, batch: Any) -> str | None:
        from unsilent.engine.differences import first_difference

        return first_difference(lambda: self._run(batch), self.model)

    def _writes(self) -> list[tuple[Tensor, int]]:
        """The tensors of the model, each with the number of writes into it."""
        return [(t, t._version) for t in (*self.model.parameters(), *self.model.buffers())]

    def _first_outputs(self) -> list[Any]:
        """Copies of the golden outputs.

        An exception of the user's code is reported as an error of the user's code.
        """
        outputs = []
        for i, batch in enumerate(self.batches):
            with user_code(f"{self.workload.name} (golden run, batch {i})"):
                outputs.append(clone(self._run(batch)))
        return outputs

    def _run(self, batch: Any) -> Any:
        if self.seeded:
            torch.manual_seed(RANDOM_SEED)
        with torch.no_grad(), contain_user_process():
            return self.workload.run(self.model, batch)

    def trial(self, faults: Sequence[Fault], samples: Samples = None) -> TrialOutcome:
        """The outcome of one trial: inject the faults, evaluate the batches in which they act, and restore.

        A trial without faults is masked and is not run. ``samples``: the samples that count, within the batch that the
        faults act in (None: all). Raises ``ProcessUnusable`` if restoring raises, for example on a device that an
        assertion has stopped.
        """
        if not faults:
            return TrialOutcome(tuple(same_outcome_for_all(Outcome.MASKED, n) for n in self.samples))
        return self._trial_of_all_samples(faults).of_samples(samples)

    def _trial_of_all_samples(self, faults: Sequence[Fault]) -> TrialOutcome:
        self.check_and_prepare(faults)
        outcomes: list[BatchOutcome] = []
        error, short = "", False
        each = bool(self._scratch)  # then one evaluation may overwrite the fault that the next one needs
        try:
            with nullcontext() if each else self.inject_parameter_faults(faults):
                for batch in range(len(self.batches)):
                    acting = acting_in(batch, faults)
                    try:
                        with self.inject_parameter_faults(faults) if each else nullcontext():
                            outcomes.append(self._outcome(batch, acting))
                    except (KeyboardInterrupt, InjectionError):
                        raise
                    except BaseException as raised:
                        # An exception of the model, or of a judge that cannot read such an output; also SystemExit.
                        error, short = error or kind_and_line(raised), short or out_of_memory(raised)
                        outcomes.append(same_outcome_for_all(Outcome.EXCEPTION, self.samples[batch]))
        except (UnsilentError, KeyboardInterrupt):
            raise
        except BaseException as undoing:
            known = bool(outcomes) and not short and not out_of_memory(undoing)
            raise ProcessUnusable(error or kind_and_line(undoing), known) from undoing
        return TrialOutcome(tuple(outcomes), error, short)

    def preferred_group_size(self, transient: bool, sampled: bool = False) -> int:
        """The number of trials to give to the engine at a time, because it may run them together.

        ``sampled``: trials that are evaluated on some samples only.
        """
        return 1

    def trials(
        self, many: Sequence[Sequence[Fault]], samples: Sequence[Samples] | None = None
    ) -> Iterator[TrialOutcome]:
        """Outcomes of several trials in order, as if each ran alone.

        ``samples``: the samples that count, by trial.
        """
        yield from map(self.trial, many, samples or [None] * len(many))

    def _outcome(self, batch: int, acting: Sequence[Fault]) -> BatchOutcome:
        """The outcome of one batch under the faults that act in it.

        Faults in parameters must be injected already.
        """
        if not acting:
            return same_outcome_for_all(Outcome.SPARED, self.samples[batch])
        golden, output = self.golden[batch], self._evaluate(batch, acting)
        if output is golden:
            return same_outcome_for_all(Outcome.MASKED, self.samples[batch])
        try:
            outcome = classify(self.judge, golden, output, self.batches[batch], self.samples[batch])
        except Exception as raised:
            if not isinstance(raised, UnsilentError) and not out_of_memory(raised):
                add_workload_note(
                    f"has a judge that raises {type(raised).__name__} on faulty outputs; such trials count as exceptions"
                )
            raise
        try:
            return self.with_scores(batch, output, outcome)
        except Exception as raised:
            if out_of_memory(raised):
                raise
            add_workload_note(
                f"has a score that raises {type(raised).__name__} on faulty outputs; such outputs count as the lowest score"
            )
            return outcome

    def with_scores(self, batch: int, output: Any, outcome: BatchOutcome) -> BatchOutcome:
        """The outcome of a batch, with scores of its output if scores are used and relevant."""
        if self.score is None or not np.isin(outcome.codes, (Outcome.BENIGN, Outcome.SDC)).any():
            return outcome
        with torch.no_grad(), contain_user_process():
            scores = self.score.of_samples(output, self._scored_batches[batch], self.samples[batch])
        return outcome._replace(scores=scores)

    def scores_alike(self, batch: int, sample: int, first: Any, second: Any) -> bool:
        """Whether a sample has the same score in two outputs whose bits for it are the same.

        True if the workload has no score.
        """
        if self.score is None:
            return True
        batch_and_samples = self._scored_batches[batch], self.samples[batch]
        try:
            with torch.no_grad(), contain_user_process():
                score_a, score_b = (
                    self.score.of_samples(output, *batch_and_samples)[sample] for output in (first, second)
                )
        except Exception:  # an exception for another sample
            return True
        return bool(np.array_equal(score_a, score_b, equal_nan=True))

    def output(self, batch: int, faults: Sequence[Fault]) -> Any:
        """The output of one batch under the faults that act in it.

        The faults are removed afterwards. Raises any exception of the model.
        """
        self.check_and_prepare(faults)
        with self.inject_parameter_faults(faults):
            return self._evaluate(batch, acting_in(batch, faults))

    def check_and_prepare(self, faults: Sequence[Fault]) -> None:
        """Raise ``InjectionError`` for faults whose batch, or whose site in that batch, does not exist.

        Without faults in parameters, the run itself shows whether a site exists. With them, it may take another path
        than the golden run.
        """
        transient = [f for f in faults if is_transient(f.site)]
        mixed = len(transient) < len(faults)
        if len({f.step for f in faults if not is_transient(f.site)}) > 1:
            raise InjectionError(
                "the parameter faults of one trial act in different batches; give each batch a trial of its own"
            )
        for fault in faults:
            if fault.step is not None and not 0 <= fault.step < len(self.batches):
                raise InjectionError(
                    f"{fault.site}: the fault acts in batch {fault.step}, but the workload has {len(self.batches)} batches; "
                    "use the workload that it was drawn for"
                )
            steps = range(len(self.batches)) if fault.step is None else [fault.step]
            for step in steps if mixed and is_transient(fault.site) else []:
                if not self.survey.has_site_of(step, fault):
                    raise InjectionError(
                        f"{fault.site} as {fault.dtype}{list(fault.shape)} is not in batch {step}; "
                        "use the workload and batch that it was drawn for"
                    )

    def inject_parameter_faults(self, faults: Sequence[Fault]) -> AbstractContextManager[None]:
        """Context in which the faults in parameters are in the model's memory.

        Writes of a run into that memory are undone.
        """
        return self._corrupted(faults)

    @contextmanager
    def _corrupted(self, faults: Sequence[Fault]) -> Iterator[None]:
        try:
            with self.parameters.inject([f for f in faults if not is_transient(f.site)]):
                yield
        finally:
            for tensor, golden in self._scratch:
                tensor.data.copy_(golden)

    def _evaluate(self, batch: int, faults: Sequence[Fault]) -> Any:
        """The output of one batch under the faults that act in it.

        Faults in parameters must be in memory already. An engine that knows that the output is bit-identical returns
        ``self.golden[batch]`` itself, which needs no classification.
        """
        transient = [f for f in faults if is_transient(f.site)]
        if not transient:
            return self._run(self.batches[batch])
        corrupt = TransientInjection(self.model, self.batches[batch], transient)
        with corrupt:
            output = self._run(corrupt.batch)
        self._check_landed(corrupt, batch, len(transient) < len(faults))
        return output

    def receipt(self, faults: Sequence[Fault]) -> Receipt:
        """The memory words that the faults of a trial read and write.

        Faults in parameters act in memory, other faults in a run of their batch.
        """
        self.check_and_prepare(faults)
        applied_faults: list[AppliedFault] = []
        with self.parameters.inject([f for f in faults if not is_transient(f.site)]) as receipt:
            applied_faults += receipt.applied_faults
            for batch in range(len(self.batches)):
                transient = [f for f in acting_in(batch, faults) if is_transient(f.site)]
                if transient:
                    with TransientInjection(self.model, self.batches[batch], transient) as corrupt:
                        try:
                            self._run(corrupt.batch)
                        except UnsilentError:
                            raise
                        except Exception:  # noqa: S110 - what the model raises is the trial's outcome
                            pass
                    applied_faults += corrupt.applied_faults
        return Receipt(tuple(applied_faults))

    def _check_landed(self, corrupt: TransientInjection, batch: int, in_memory: bool) -> None:
        """Raise ``InjectionError`` for a fault that should have landed but did not.

        ``in_memory``: whether parameters are corrupted as well.
        """
        for fault, why in corrupt.missed:
            # An earlier fault may have changed later operations; a site that never existed is still an error. With
            # parameters corrupted, sites were checked before.
            if not in_memory and not (corrupt.landed_count and self.survey.has_site_of(batch, fault)):
                raise corrupt.error(fault, why)

    def select_regions(self, addresses: Sequence[str]) -> tuple[Region, ...]:
        """The regions in which faults may be injected, selected by addresses.

        Raises ``UsageError`` for an address that selects nothing, or if memory and values of a run are selected
        together.
        """
        kinds = {is_transient(address) for address in addresses}
        if kinds == {True, False}:
            raise UsageError(
                f"{' '.join(addresses)!r} mixes parameters, which stay corrupted, with values of one evaluation; "
                "run two campaigns"
            )
        try:
            return self.survey.select_regions(addresses) if kinds == {True} else self.parameters.select(*addresses)
        except UsageError as error:
            raise component_hint(error, addresses, self.workload.components) from None

    def watched_output(self, batch: int, mode: AbstractContextManager[Any]) -> Any:
        """The output of one fault-free evaluation under an observing mode, which must not change a bit."""
        with mode:
            output = self._run(self.batches[batch])
        if not same_outputs(self.golden[batch], output):
            raise UsageError(
                f"batch {batch}: observing operations changes the bits of the output, so operations cannot be corrupted; "
                "run the model without compiling or tracing it"
            )
        return output

    def check_intact(self, by_copies: bool = False) -> None:
        """Check that weights, inputs, golden outputs and a fault-free run are the same as at the start.

        ``by_copies``: compare the hashes that identify the campaign; for this, all data are copied from the device to
        the host.

        Raises:
            InjectionError: a bit of the model differs. UsageError: the workload writes into its inputs or outputs, or
                keeps state from one run to the next, so that a trial could depend on earlier trials, or forks a process
                and lets the child return.
        """
        self._check_memory(by_copies)
        for i, (batch, golden) in enumerate(zip(self.batches, self.golden, strict=True)):
            again = self._run(batch)
            if not same_outputs(golden, again):
                raise UsageError(
                    f"batch {i}: a fault-free run returns other bits after some trials than before them, so trials are not "
                    "independent; reset all state outside of parameters and inputs (caches, counters) in run()"
                )

    def _check_memory(self, by_copies: bool = False) -> None:
        """Check that weights, inputs and golden outputs are the same as at the start.

        Raises the same errors as `check_intact`.
        """
        weights, inputs, golden = self._content_hashes
        self.parameters.check(self.weights_hash if by_copies else weights)
        if self._differs(self.batches, inputs, self.inputs_hash if by_copies else ""):
            raise UsageError(
                "the workload writes into its own inputs, so trials depend on each other; let run() work on a copy"
            )
        if self._differs(self.golden, golden, self.golden_hash if by_copies else ""):
            raise UsageError(
                "the judge writes into the outputs it compares, so trials are not independent; let it work on copies"
            )
        check_no_returned_fork(self.workload.name)

    @staticmethod
    def _differs(values: Sequence[Any], known: list[ContentHash], copied: str) -> bool:
        return _hash(values) != copied if copied else content_hashes(_tensors(values)) != known

    def fingerprint(self) -> dict[str, str]:
        """Hashes of the weights, the inputs and the golden outputs, which identify a campaign."""
        return {
            "weights": self.weights_hash,
            "inputs": self.inputs_hash,
            "golden": self.golden_hash,
            "judge": repr(self.judge),
        }


def acting_in(batch: int, faults: Sequence[Fault]) -> list[Fault]:
    """The faults that act in a batch.

    A fault with a ``step`` acts only in the batch of that number, a fault without one in all batches.
    """
    return [f for f in faults if f.step is None or f.step == batch]


def check_golden(first: Any, second: Any, batch: int, difference: Callable[[], str | None] = lambda: None) -> None:
    """Raise ``UsageError`` unless two golden outputs are finite and equal bit for bit.

    ``difference`` finds the first operation that differs if the outputs are not equal.
    """
    tensors = list(leaves(first))
    if not tensors:
        raise UsageError(
            f"golden run, batch {batch}: the output is a {type(first).__name__}; expected at least one tensor in it"
        )
    for leaf in tensors:
        if samples_with_nonfinite(leaf, 1)[0] or (leaf.ndim and samples_with_nonfinite(leaf, leaf.shape[0]).any()):
            raise UsageError(
                f"golden run, batch {batch}: the output holds NaN or infinity without any fault; fix model or inputs"
            )
    if not same_outputs(first, second):
        where = difference()
        raise UsageError(
            f"golden run, batch {batch}: two fault-free runs differ{f', first at {where}' if where else ''}, so a fault "
            "cannot be distinguished from noise; make the run deterministic (dropout off, seeds, deterministic kernels)"
        )


def same_outputs(first: Any, second: Any) -> bool:
    """Whether two outputs have the same tensors, bit for bit."""
    leaves_a, leaves_b = list(leaves(first)), list(leaves(second))
    return len(leaves_a) == len(leaves_b) and not any(
        bool(samples_that_differ(a, b, 1).any()) for a, b in zip(leaves_a, leaves_b, strict=True)
    )


def _random_states() -> list[torch.Tensor]:
    """The states of torch's generators for all devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.random.get_rng_state(), *devices]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors in several outputs or batches."""
    return (leaf for value in values for leaf in leaves(value))


def _hash(values: Sequence[Any]) -> str:
    """xxh3-128 hash of dtypes, shapes and all bits of the tensors in some values, read on the host."""
    digest = xxhash.xxh3_128()
    for leaf in _tensors(values):
        digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        digest.update(content_of(leaf))
    return digest.hexdigest()
