"""Runs the trials of a PVF campaign in a worker."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from unsilent.basics.errors import InjectionError, UsageError, unknown_name_error
from unsilent.basics.fault_trace import FaultTrace
from unsilent.basics.printable import escape_unprintable
from unsilent.campaigns.code import code_fingerprint, versions
from unsilent.campaigns.codec import MOST_ELEMENTS, faults_text
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import DeferredTrial, TrialId, WorkerSettings, campaign_hash, sorted_json_text, trial_seed
from unsilent.engine import Samples, TrialOutcome, make_engine, trace_batch
from unsilent.engine.device_placement import resolve_device
from unsilent.engine.embedding_lookups import EmbeddingLookupCounter
from unsilent.engine.listed_faults import ListedFaults
from unsilent.engine.plain import PlainEngine
from unsilent.engine.running_out import release_cached_memory, unusable_if_raised
from unsilent.engine.trial_work import WorkCounter
from unsilent.faults import Fault, FaultModel, Region
from unsilent.faults.fault_texts import from_text, function_file
from unsilent.faults.hardware.description_file import load_accelerator
from unsilent.faults.mixtures import Mixture, asked_fault_model
from unsilent.faults.naming import parse_site
from unsilent.faults.receipts import Receipt
from unsilent.faults.sampling import shuffled_index
from unsilent.outcomes import Outcome, judge, judge_text
from unsilent.outcomes.base import incorrect
from unsilent.outcomes.classify import same_outcome_for_all
from unsilent.outcomes.scores import lost_score
from unsilent.report.text import count_text
from unsilent.sites.modules import unregistered
from unsilent.sites.targets import (
    RegionsByBatch,
    Target,
    check_components,
    component_of,
    default_components,
    make_targets,
    with_index_buffers,
)
from unsilent.studies.pvf.file_hashes import file_hashes
from unsilent.studies.pvf.golden_answers import golden_scores, right_answers_text
from unsilent.studies.pvf.memory_faults import MemoryFaults
from unsilent.studies.pvf.spec import PvfBaseline, PvfSpec, PvfTrialRow, TargetInfo, TensorInfo
from unsilent.workloads.base import InferenceWorkload, score_of
from unsilent.workloads.model_fitting import Progress, no_progress
from unsilent.workloads.process_side_effects import take_notes
from unsilent.workloads.registry import load

PROOF_EVERY = 500
PROOF_GOLDENS, LEAST_PROOF_GOLDENS = 300, 60
MOST_SORTED_ELEMENTS = 2**24
"""Most elements of a model that are sorted by sign; their numbers are held in memory."""
FIRST_PROOFS = (1, 10)
"""Numbers of trials before the first proofs that the model is intact and trials are independent."""


class DrawnTrial(NamedTuple):
    """The faults of a trial, the batch that they corrupt, and the samples that count.

    ``batch`` and ``samples`` are None for all.
    """

    batch: int | None
    faults: tuple[Fault, ...]
    samples: Samples = None

    def acts_in(self, batch: int) -> bool:
        """Whether the trial evaluates a batch."""
        return self.batch in (None, batch) or any(fault.step == batch for fault in self.faults)


class TrialRunner(Runner[PvfSpec, PvfBaseline, PvfTrialRow]):
    """Runs the trials of one loaded workload, with its golden run.

    Args:
        spec: Settings of the campaign.
        workload: A live workload instead of the one that ``spec`` names.
        progress: Called with the progress of training.
        worker_settings: Engine, memory and number of workers.

    Raises:
        UsageError: a setting does not fit the workload; raised before the first trial.
    """

    # Long because every step needs those before it, and settings that do not fit must be refused before the first trial.
    def __init__(
        self,
        spec: PvfSpec,
        workload: InferenceWorkload | None = None,
        progress: Progress | None = None,
        worker_settings: WorkerSettings | None = None,
    ) -> None:
        worker_settings = worker_settings or WorkerSettings()
        super().__init__(spec)
        self._progress = progress or no_progress
        if workload is None:
            workload = load(spec.workload, dict(spec.options), data=spec.data, weights=spec.weights, progress=progress)
        self.workload: InferenceWorkload = workload
        torch.set_num_threads(spec.threads)  # after training, which uses every core
        self.engine = make_engine(
            workload,
            engine=worker_settings.engine,
            memory=worker_settings.memory,
            worker_count=worker_settings.jobs,
            device=resolve_device(spec.device),
            dtype=spec.dtype,
            judge=judge(spec.judge) if spec.judge else None,
            score=score_of(workload),
            sampled=spec.samples != 0,
        )
        self.scores = golden_scores(self.engine)
        self._check_samples()
        named = {
            escape_unprintable(k): v if isinstance(v, str) else tuple(map(escape_unprintable, v))
            for k, v in workload.components.items()
        }
        check_components(self.engine.parameters, named)
        self.components = with_index_buffers(self.engine.parameters, named or default_components(self.engine.model))
        self.listed = None
        if spec.faults is not None:
            self.listed = ListedFaults(
                spec.faults, spec.faults_as, spec.per, self.engine, self.components, MOST_ELEMENTS
            )
        self.memories = None
        if spec.accelerator is not None:
            self._accelerator = load_accelerator(spec.accelerator)
            self.memories = MemoryFaults(self._accelerator, self.engine, self.components, spec.per)
        drawn = self.listed or self.memories
        self.regions = self._selected_regions() if drawn is None else drawn.regions
        self._work = WorkCounter()
        self._lookups = {} if spec.is_transient else self._count_lookups()
        self.targets = {t.name: t for t in self._make_targets()}
        self._evaluations = {}
        if self.memories is None:
            self._evaluations = {name: RegionsByBatch(target, spec.law) for name, target in self.targets.items()}
        self._proofs, self._proven_at = 0, time.monotonic()
        self._check_capacity()
        self.max_trials_together = self.engine.preferred_group_size(spec.is_transient, spec.samples != 0)
        self.fingerprint = self._fingerprint()
        self.campaign = campaign_hash(spec, self.fingerprint)

    # Long because of the notes, which come in the order in which they are read, and the fields of the record.
    def make_baseline(self) -> PvfBaseline:
        """The facts that are established before the first trial."""
        engine = self.engine
        notes = [*engine.notes, *take_notes(self.workload.name)]
        notes += [self.listed.note] if self.listed and self.listed.note else []
        notes += self.memories.notes() if self.memories else []
        if engine.seeded:
            notes.append("The workload draws random numbers; torch's generator is seeded before every batch.")
        fused = [r.site for r in self.regions if "_transformer_encoder_layer_fwd" in r.site]
        if self.spec.is_transient and fused:
            notes.append(
                f"{fused[0]} is a whole layer in one operation, so that no values inside of it are corrupted; before the model "
                "is built, torch.backends.mha.set_fastpath_enabled(False) makes torch run its parts."
            )
        outside = [] if self.spec.is_transient else unregistered(engine.model)
        if outside:
            notes.append(
                f"No faults in these values, because no parameter or buffer holds them: {', '.join(outside[:8])}."
            )
        corrupted = {r.site for t in self.targets.values() for r in t.regions}
        spared = list(dict.fromkeys(r.site for r in self.regions if r.site not in corrupted))
        if spared:
            notes.append(f"The fault model cannot corrupt {', '.join(spared[:4])}{' …' if len(spared) > 4 else ''}.")
        selects_weights = not self.spec.is_transient and self.listed is None
        if selects_weights and (indices := engine.parameters.passed_over(*self.spec.at)):
            shown = f"{', '.join(indices[:4])}{' …' if len(indices) > 4 else ''}"
            notes.append(
                f"Indices and counters are not weights and were left out: {shown}; name them in --at to include them."
            )
        if engine.parameters.skipped and not self.spec.is_transient:
            notes.append(
                "No faults in these tensors, which are empty or of an unsupported dtype: "
                f"{', '.join(sorted(engine.parameters.skipped))}."
            )
        device = resolve_device(self.spec.device).partition(":")[0]
        right = right_answers_text(engine, self.workload, notes)
        return PvfBaseline(
            campaign=self.campaign,
            fingerprint=self.fingerprint,
            files=file_hashes(self.spec),
            right_answers=right,
            scores=self.scores,
            targets=tuple(
                TargetInfo(
                    name=t.name,
                    level=t.level,
                    component=t.component,
                    layer=t.layer,
                    share=t.share,
                    elements=t.elements,
                    bits_by_width=t.bits_by_width,
                    group=t.group,
                    bits=t.bits,
                    dtype=t.regions[0].dtype if t.bits or self.spec.strata == "dtype" else "",
                    elements_by_site=elements_by_site(t) if t.bits and self.spec.strata == "bits" else {},
                    slots=self._slots(t) if self.spec.is_enumerated else 0,
                    flips=t.flips,
                )
                for t in self.targets.values()
            ),
            tensors=tensor_infos(self.regions, self.components),
            samples=tuple(engine.samples),
            golden_seconds=engine.golden_seconds,
            judge=judge_text(engine.judge),
            info=dict(self.workload.info),
            versions=versions(),
            notes=tuple(notes),
            lookups=self._lookups,
            memory_parts=self.memories.parts if self.memories else (),
            memories=self.memories.facts if self.memories else (),
            trial_seconds=self._work.trial_seconds(device, len(engine.batches)),
            sample_seconds=self._work.sample_seconds(device, sum(engine.samples)),
        )

    def answer(self, what: str, trial: TrialId, batch: int = 0) -> FaultTrace | Receipt:
        """A trace of how a trial's faults spread through one batch, or a receipt of what they wrote.

        ``what`` is ``trace`` or ``receipt``. A receipt has the values that the faults find and write where they first act.
        """
        if what == "trace":
            return trace_batch(self.engine, batch, self.draw(trial), progress=self._progress)
        return self.engine.receipt(self.draw(trial))

    def draw(self, trial: TrialId) -> tuple[Fault, ...]:
        """Draw the faults of a trial, from its identity alone."""
        return self._draw(trial).faults

    def _draw(self, trial: TrialId) -> DrawnTrial:
        target = self.targets.get(trial.target)
        if target is None:
            raise unknown_name_error("target", trial.target, self.targets)
        if self.spec.is_enumerated and not 0 <= trial.k < (slots := self._slots(target)):
            kind = "single" if self.listed is None else "listed"
            raise UsageError(
                f"trial {trial} does not exist; {target.name!r} has {slots} {kind} faults, numbered from 0"
            )
        if self.listed is not None:
            return DrawnTrial(*self.listed.faults_of_trial(trial.target, trial.k))
        if self.spec.exhaustive:
            step, faults = self._nth(target, trial)
            return DrawnTrial(step, self._lasting(faults, self._model(target.bits, trial.flips).lasts))
        rng = np.random.Generator(np.random.PCG64(trial_seed(self.campaign, self.spec.seed, trial)))
        if self.memories is not None:
            return DrawnTrial(*self.memories.draw(target.name, rng))
        step, population = self._evaluations[target.name].draw_batch(rng)
        model = (self._mixture or self._model(target.bits, trial.flips)).choose(rng)
        faults = self._lasting(model.draw(population, rng, self.spec.law), model.lasts)
        count = trial.sample_count or self.spec.samples or 0
        if not count or count >= sum(self.engine.samples):
            return DrawnTrial(step, faults)
        ends = np.cumsum(self.engine.samples)  # batches are drawn by their size, so that all samples are equally likely
        step = int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))
        size = self.engine.samples[step]
        samples = np.sort(rng.choice(size, min(count, size), replace=False)).astype(np.int64)
        return DrawnTrial(step, tuple(replace(fault, step=step) for fault in faults), samples)

    def _lasting(self, faults: tuple[Fault, ...], lasts: int | None) -> tuple[Fault, ...]:
        """The faults, with copies for the later batches in which they last."""
        if lasts == 1 or not faults:
            return faults
        first = faults[0].step or 0
        end = len(self.engine.batches) if lasts is None else min(first + lasts, len(self.engine.batches))
        later = [replace(fault, step=step) for step in range(first + 1, end) for fault in faults]
        return (*faults, *(fault for fault in later if self.engine.survey.has_site_of(fault.step or 0, fault)))

    def _nth(self, target: Target, trial: TrialId) -> tuple[int | None, tuple[Fault, ...]]:
        """The fault of a trial in an exhaustive campaign, from a shuffled list of all faults."""
        evaluations, model = self._evaluations[target.name], self._model(target.bits, trial.flips)
        number = shuffled_index(trial.k, self._slots(target))
        for step, population in zip(evaluations.steps, evaluations.populations, strict=True):
            if number < (here := model.capacity(population)):
                return step, model.nth_fault(population, number)
            number -= here
        raise AssertionError("the number of the fault exceeds the slots of all populations")

    def _slots(self, target: Target) -> int:
        """The number of all possible or listed faults in a target."""
        if self.listed is not None:
            return self.listed.count(target.name)
        model = self._model(target.bits, 1)
        return sum(model.capacity(population) for population in self._evaluations[target.name].populations)

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[PvfTrialRow | DeferredTrial]:
        """Run trials in order; the engine may evaluate several together.

        Args:
            alone: Nothing else of the campaign runs meanwhile, so running out of memory is an outcome; otherwise it gives a
                `DeferredTrial`.

        Raises:
            ProcessUnusable: the model could not be restored after a trial, or a fault-free run raises.
        """
        if alone:
            release_cached_memory()
        start = time.perf_counter()
        drawn = [self._draw(trial) for trial in trials]
        acting = [d for d in drawn if d.faults]
        samples = [d.samples for d in acting] if any(d.samples is not None for d in acting) else None
        outcomes = self.engine.trials([d.faults for d in acting], samples)
        if alone:  # a trial that may have stopped a device gets one run of its own and nothing else
            outcomes = (self.engine.trial(d.faults, d.samples) for d in acting)
        for trial, drawn_trial in zip(trials, drawn, strict=True):
            with unusable_if_raised():
                outcome = next(outcomes) if drawn_trial.faults else self._all(Outcome.MASKED, drawn_trial)
            self.unverified_row_count += 1
            if outcome.error or self._proof_due():
                self.verify_restored_state(after=outcome)
            now = time.perf_counter()
            if outcome.out_of_memory and not alone:
                yield DeferredTrial(trial, outcome.error)
            else:
                yield make_row(self.engine, trial, drawn_trial.faults, outcome, now - start)
            start = now

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> PvfTrialRow:
        """The row of a trial during which the worker process was lost."""
        drawn = self._draw(trial)
        return make_row(self.engine, trial, drawn.faults, replace(self._all(ended, drawn), error=reason), seconds)

    def _all(self, ended: Outcome, drawn: DrawnTrial) -> TrialOutcome:
        """The outcome of a trial in which all evaluated samples end the same way."""
        ends = [ended if drawn.acts_in(i) else Outcome.SPARED for i in range(len(self.engine.samples))]
        return TrialOutcome(tuple(map(same_outcome_for_all, ends, self.engine.samples))).of_samples(drawn.samples)

    def _check_samples(self) -> None:
        """Raise ``UsageError`` if more samples are requested than a batch has."""
        sample_count, most, total = self.spec.samples or 0, max(self.engine.samples), sum(self.engine.samples)
        if sample_count > most:
            raise UsageError(
                f"--samples is {sample_count}, but a trial evaluates samples of one batch and the largest batch has {most}; "
                f"give at most {most}, or all ({total} samples in {count_text(len(self.engine.samples), 'batch')})"
            )

    def verify_restored_state(self, after: TrialOutcome | None = None) -> None:
        """Check that the model and the fault-free run are unchanged since the start.

        Args:
            after: The outcome of the trial that has just run, if one has.

        Raises:
            InjectionError: the model differs from the one with which the campaign began.
            ProcessUnusable: reading the model or a fault-free run raises.
        """
        raised = "" if after is None else after.error
        with unusable_if_raised(raised, known=bool(raised) and not (after and after.out_of_memory)):
            self.engine.check_intact(by_copies=after is None)
        changed = [k for k, v in self.engine.fingerprint().items() if self.fingerprint[k] != v]
        if changed:
            raise InjectionError(
                f"the model was changed during the campaign ({', '.join(changed)} differ); start a new campaign"
            )
        self.unverified_row_count = 0
        self._proofs += 1
        self._proven_at = time.monotonic()

    def _proof_due(self) -> bool:
        """Whether the state is to be verified now, which happens often at first and rarely later."""
        if self._proofs < len(FIRST_PROOFS):
            return self.unverified_row_count >= FIRST_PROOFS[self._proofs]
        goldens = (time.monotonic() - self._proven_at) / max(self.engine.golden_seconds, 1e-9)
        if self.unverified_row_count >= PROOF_EVERY and goldens > LEAST_PROOF_GOLDENS:
            return True
        return goldens > PROOF_GOLDENS and time.monotonic() - self._proven_at > 1.0

    def _selected_regions(self) -> list[Region]:
        """The regions that ``--at`` selects, in the batches in which faults may begin."""
        spec, parts = self.spec, asked_fault_model(self.spec.fault).parts
        regions, moments = list(self.engine.select_regions(spec.at)), {part.begins for part in parts}
        if moments == {None}:
            return regions
        if not spec.is_transient:
            raise UsageError("a fault in parameters is in all batches of its trial; leave out from, or use --at 'op:*'")
        if len(moments) > 1 or (begins := parts[0].begins) is None:
            raise UsageError("the parts of a mixture begin in different batches; give each the same from")
        if begins[1] >= (count := len(self.engine.batches)):
            raise UsageError(
                f"{from_text(begins)} of --fault goes beyond the last batch: the workload has {count_text(count, 'batch')}, "
                "counted from 0"
            )
        inside = [region for region in regions if region.step is not None and begins[0] <= region.step <= begins[1]]
        if not inside:
            raise UsageError(
                f"no value of --at {' '.join(spec.at)} is in a batch of {from_text(begins)}; choose others"
            )
        return inside

    def _make_targets(self) -> tuple[Target, ...]:
        if (drawn := self.listed or self.memories) is not None:
            return drawn.targets
        spec, plain = self.spec, asked_fault_model(self.spec.fault)
        if not spec.is_transient and any(part.lasts != 1 for part in plain.parts):
            raise UsageError(
                "a fault in parameters is in all batches of its trial; leave out lasts, or use --at 'op:*'"
            )
        if spec.exhaustive and spec.law != "per-element":
            raise UsageError(f"--trials all gives all elements equal weight, but --law is {spec.law}; omit --law")
        if spec.exhaustive and (plain.parts[0].name != "bitflip" or spec.flips != (1,)):
            raise UsageError(
                f"--trials all tries single bit flips, found --fault {plain.text} with flips "
                f"{', '.join(map(str, spec.flips))}; use bitflip with one flip, or bitflip:bits=… for some bits only"
            )
        if spec.strata == "bits" and (plain.text != "bitflip" or 1 not in spec.flips):
            raise UsageError(
                f"--strata {spec.strata} needs one flip of any bit, found --fault {plain.text} with flips "
                f"{', '.join(map(str, spec.flips))}; omit --strata"
            )
        negative = self._negative_elements() if spec.strata == "bits" else None
        make = partial(make_targets, self.regions, self.components, spec.per, spec.law, plain.can_corrupt)
        targets, several = make(spec.strata, negative), tuple(n for n in spec.flips if n is not None and n > 1)
        if not several or spec.strata != "bits" or spec.per == "bit":
            return targets
        # Several flips of a trial fall on bits of several classes.
        return (*(replace(t, flips=(1,)) for t in targets), *(replace(t, flips=several) for t in make()))

    def _count_lookups(self) -> dict[str, list[int]]:
        """Count the look-ups of each embedding row in one evaluation, by parameter name."""
        with self._work, EmbeddingLookupCounter(self.engine.parameters) as lookups:
            for batch in self.engine.batches:
                self.engine._run(batch)
        return {name: counts.tolist() for name, counts in lookups.counts.items()}

    def _negative_elements(self) -> dict[str, NDArray[np.bool_]]:
        """Masks of the negative elements of each parameter, without embedding tables."""
        tensors = {name: site.memory.tensor for name, site in self.engine.parameters.sites.items()}
        split = {name: t for name, t in tensors.items() if t.is_floating_point() and name not in self._lookups}
        if sum(t.numel() for t in split.values()) > MOST_SORTED_ELEMENTS:
            return {}
        return {name: t.detach().lt(0).reshape(-1).cpu().numpy() for name, t in split.items()}

    @cached_property
    def _mixture(self) -> Mixture | None:
        """The mixture of fault models of the campaign; None if it has a single one."""
        are_given = self.listed is not None or self.memories is not None
        model = None if are_given else asked_fault_model(self.spec.fault)
        return model if isinstance(model, Mixture) else None

    @lru_cache(maxsize=4096)  # noqa: B019 - a runner lives as long as its worker
    def _model(self, bits: tuple[int, ...] | None, flips: int | None) -> FaultModel:
        text = self.spec.fault
        if bits is not None:
            if "bits=" in text:
                raise UsageError(f"--per bit chooses the bits itself; leave bits= out of --fault {text!r}")
            text += f"{',' if ':' in text else ':'}bits={'+'.join(map(str, bits))}"
        model = asked_fault_model(text)
        assert isinstance(model, FaultModel)
        return model if flips is None else model.with_count(flips)

    def _check_capacity(self) -> None:
        if self.listed is not None or self.memories is not None:
            return
        for flips in self.spec.flips:
            targets = [t for t in self.targets.values() if not t.flips or flips in t.flips]
            if flips is None or not any(self._capacity(t, flips) for t in targets):
                continue  # there is nothing to corrupt: drawing raises an error with the reason
            short = [t for t in targets if self._capacity(t, flips) < flips]
            if short:
                raise UsageError(
                    f"{flips} flips were requested, but {short[0].name!r} can hold at most {self._capacity(short[0], flips)}"
                    f" ({len(short)} of {len(targets)} targets are too small); use fewer flips or narrow --at"
                )
        # Draw one fault of each kind, so that faults that cannot be drawn are found before the first trial.
        for target in self.targets.values():
            for population in self._evaluations[target.name].populations:
                for flips in target.flips or self.spec.flips:
                    for model in (self._mixture or self._model(target.bits, flips)).parts:
                        model.draw(population, np.random.default_rng(0), self.spec.law)

    def _capacity(self, target: Target, flips: int) -> int:
        """The number of flips that fit into every batch of the target."""
        model = self._model(target.bits, flips)
        return min(model.capacity(population) for population in self._evaluations[target.name].populations)

    def _fingerprint(self) -> dict[str, str]:
        spec, result = self.spec, self.engine.fingerprint()
        device = resolve_device(spec.device)
        result["device"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
        result["threads"] = str(spec.threads)
        result["torch"] = str(torch.__version__)  # not a plain string: unpickling it would import torch
        result["numpy"] = ".".join(np.__version__.split(".")[:2])
        result["code"] = code_fingerprint(spec.workload, self.workload, self.engine.judge, function_file(spec.fault))
        if self.scores is not None:
            each = [values.tobytes() for values in self.engine.golden_scores]
            result["score"] = xxhash.xxh3_64_hexdigest(b"".join([repr(self.scores).encode(), *each]))
        if self.listed is not None:
            result["faults"] = self.listed.digest
        if self.memories is not None:  # a file, whose content may change
            described = self._accelerator.description.model_dump_json(include={"memories"})
            result["accelerator"] = xxhash.xxh3_128_hexdigest(described.encode())
        result["components"] = xxhash.xxh3_64_hexdigest(
            sorted_json_text({k: list(v) for k, v in self.components.items()}).encode()
        )
        return result


def elements_by_site(target: Target) -> dict[str, int]:
    """The number of corruptible elements of a target at each site."""
    counts: Counter[str] = Counter()
    for region in target.regions:
        counts[region.site] += region.eligible_count
    return dict(counts)


def tensor_infos(regions: Sequence[Region], components: Mapping[str, Sequence[str]]) -> tuple[TensorInfo, ...]:
    """Facts about the corrupted tensors, each listed once for all batches."""
    by_name: dict[tuple[str, str], TensorInfo] = {}
    for r in regions:
        known = by_name.get((r.site, r.dtype))
        owner = known.component if known else component_of(parse_site(r.site), components)
        shape = max(known.shape if known else r.shape, r.shape, key=prod)
        size = r.eligible_count + (known.elements if known else 0)
        by_name[r.site, r.dtype] = TensorInfo(r.site, owner, r.dtype, shape, size, r.codec.bits)
    return tuple(by_name.values())


def make_row(
    engine: PlainEngine, trial: TrialId, faults: tuple[Fault, ...], outcome: TrialOutcome, seconds: float
) -> PvfTrialRow:
    """The row of a trial, from its faults and outcome."""
    wrong = sum(bool(incorrect(b.codes).any()) for b in outcome.batches)
    text, lost = faults_text(faults), math.nan
    if (score := engine.score) is not None:
        golden = np.concatenate(engine.golden_scores)
        lost = lost_score(outcome.codes, outcome.scores, golden, score.lowest, score.highest)
    return PvfTrialRow(
        trial=trial,
        faults=text,
        outcome_codes=outcome.codes.tobytes(),
        incorrect_batches=wrong,
        severity=float(outcome.severity),
        error=outcome.error,
        seconds=seconds,
        graphed=outcome.graphed,
        score_lost=lost,
    )
