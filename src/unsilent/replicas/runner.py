"""The runner of replicas, which trains with given seeds and switches and restores all settings afterwards.

The runner belongs in a worker, because it imports torch. Some switches are environment variables that torch reads when it
is loaded; the worker starts another process for these.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.nested import leaves_in
from unsilent.basics.user_code import user_code
from unsilent.campaigns.code import code_fingerprint, versions
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import DeferredTrial, TrialId, WorkerSettings, campaign_hash, sorted_json_text
from unsilent.campaigns.stored_values import dump_stored_json
from unsilent.engine.digests import digest, digest_unordered, tensors_hasher
from unsilent.engine.tracing.flow import DataflowRecorder, RecordedOperation
from unsilent.replicas.replica_process import ReplicaProcess
from unsilent.replicas.spec import WEIGHT_BYTES, Replica, ReplicaBaseline, ReplicaRow, ReplicaSpec
from unsilent.replicas.step_trace import Operation, StepTrace, StepTraceId, replica_or_step_trace
from unsilent.replicas.switches import Switches
from unsilent.sites.calls import OUTSIDE
from unsilent.sites.memory import content_of
from unsilent.sites.modules import named_modules
from unsilent.workloads import load_training
from unsilent.workloads.model_fitting import Progress
from unsilent.workloads.process_side_effects import check_no_returned_fork, take_notes
from unsilent.workloads.trainings.base import Seeds, TrainingState, TrainingWorkload
from unsilent.workloads.trainings.dropout import RowDropout
from unsilent.workloads.trainings.snapshots import model_tensors

# TF32 is set by ``allow_tf32``, which programs read. If a program has used the newer ``fp32_precision``, reading
# ``allow_tf32`` raises an error; then ``fp32_precision`` is used here too.

PRECISIONS = {True: "tf32", False: "ieee"}
"""Values of ``fp32_precision`` if TF32 is allowed and if it is not."""


def parts_with_precision() -> tuple[Any, ...]:
    """The parts of torch whose ``fp32_precision`` decides whether TF32 is used."""
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


@contextmanager
def tf32_set(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions, inside a ``with`` block."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        with _by_precision(allowed):
            yield
        return
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def _by_precision(allowed: bool) -> Iterator[None]:
    before = [(part, part.fp32_precision) for part in parts_with_precision()]
    for part, _ in before:
        part.fp32_precision = PRECISIONS[allowed]
    try:
        yield
    finally:
        for part, precision in before:
            part.fp32_precision = precision


PROBE_STEPS = 2
"""Number of steps trained before the first run, so that the fingerprint includes code and data that these steps load."""
_CHOOSE = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKL_CBWR",
    "MKL_ENABLE",
    "MKL_DEBUG",
    "NVIDIA_TF32",
    "CUDNN_",
    "TORCH_ALLOW_TF32",
)
_UNSURE = "does not have a deterministic implementation"
SECOND_TWIN = Replica(Switches(), 1).trial
"""The clean twin repeated in a new process. The first twin may run in the process that made the baseline and has trained steps
already. The second one shows effects of the process, for example the order of sets, or state left behind by earlier runs."""


class ReplicaRunner(Runner[ReplicaSpec, ReplicaBaseline, ReplicaRow]):
    """The runner of replicas of one training.

    Every run starts from a new state, so the state is not verified afterwards.
    """

    def __init__(
        self, spec: ReplicaSpec, progress: Progress | None = None, worker_settings: WorkerSettings | None = None
    ) -> None:
        # cuBLAS needs this to be deterministic; it has no effect without CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        super().__init__(spec)
        self._jobs = (worker_settings or WorkerSettings()).jobs
        self.workload: TrainingWorkload = load_training(spec.workload, dict(spec.options), data=spec.data)
        self._steps = self.workload.steps if spec.steps is None else spec.steps
        self._child: ReplicaProcess | None = None
        if not self._steps >= 1:
            raise UsageError(f"steps is {self._steps}; expected at least 1")

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[ReplicaRow | DeferredTrial]:
        """Run trials and yield their rows.

        Runs with several threads are deferred to run alone, because two at a time would slow each other down a hundredfold.
        """
        for trial in trials:
            switches = replica_or_step_trace(trial).switches
            if switches.threads > 1 and self._jobs > 1 and not alone:
                yield DeferredTrial(trial, "")
            elif switches.environment or trial == SECOND_TWIN:
                yield self._in_child(trial, dict(switches.environment))
            else:
                yield self._checked(self.run_here(trial))

    def _in_child(self, trial: TrialId, environment: Mapping[str, str]) -> ReplicaRow:
        """Run a trial in a child process, which is kept for the next trials with the same environment."""
        if self._child is None or trial == SECOND_TWIN or self._child.environment != environment:
            self.close()
            self._child = ReplicaProcess(type(self), self.spec, environment)
        return self._checked(self._child.run_trial(trial))

    def _checked(self, row: ReplicaRow) -> ReplicaRow:
        """The row itself; raises ``UsageError`` if its number of predictions is not that of the held-out samples."""
        samples = len(self.baseline.labels)
        if not row.step_trace_json and row.predictions.size != samples:
            raise UsageError(
                f"replica {row.replica} made {row.predictions.size} predictions; expected {samples}, one per held-out "
                "sample: evaluate the same samples in the same order at every call"
            )
        return row

    def lost_trial_row(self, trial: TrialId, ended: Any, seconds: float, reason: str) -> ReplicaRow:
        """Raise an error, as a run that ends its process has no outcome: ``UsageError`` or ``UnsilentError``."""
        replica = f"{self.spec.workload}: replica {replica_or_step_trace(trial)}"
        if ended.name == "HANG":
            raise UsageError(
                f"{replica} did not end before the deadline; stored results are safe: allow more time (--deadline SECONDS), or "
                "train fewer steps (--steps N)"
            )
        raise UnsilentError(
            f"{replica} ended its process ({reason}); stored results are safe: find out why, then run the same command again"
        )

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def run_here(self, trial: TrialId) -> ReplicaRow:
        """Run a trial in this process and return its row."""
        requested = replica_or_step_trace(trial)
        return self.run_replica(requested) if isinstance(requested, Replica) else self.trace_step(requested)

    def make_baseline(self) -> ReplicaBaseline:
        """The baseline of all runs, found by training the first steps with the base seed and evaluating."""
        with apply_switches(Switches()), collect_nondeterminism_warnings(), user_code(self.spec.workload):
            state = self.workload.start(Seeds.same_for_all(self.spec.seed))
            start = digest_of_tensors(_all_tensors(self.workload.snapshot(state)))
            evaluation = self.workload.evaluate(state)
            draws = self._draws()
            began, probed = time.perf_counter(), min(PROBE_STEPS, self._steps)
            losses = [self.workload.step(state).loss for _ in range(probed)]
            step_seconds = (time.perf_counter() - began) / probed
            first = digest_of_tensors(_all_tensors(self.workload.snapshot(state)))
        parameters = list(state.model.parameters())
        labels = np.asarray(evaluation.labels, np.int64)
        machine = {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "processor": _processor(),
            "onednn": str(torch.backends.mkldnn.is_available()),
            "mkl": str(torch.backends.mkl.is_available()),
        }
        streams = getattr(self.workload, "streams", None)
        fingerprint = {
            # Computed here, after the first steps have loaded everything that is loaded late.
            "code": code_fingerprint(self.spec.workload, self.workload, None),
            "data": _file_hash(self.spec.data),
            "start": start,
            "first steps": xxhash.xxh3_64_hexdigest(np.array(losses).tobytes()) + first,
            "labels": xxhash.xxh3_128_hexdigest(labels.tobytes()),
            "environment": _environment(),
            **{name: value for name, value in versions().items() if name != "unsilent"},
            **machine,
        }
        return ReplicaBaseline(
            campaign=campaign_hash(self.spec, fingerprint),
            fingerprint=fingerprint,
            name=str(self.workload.name),
            steps=self._steps,
            hash_count=-(-self._steps // self.spec.every),
            labels=tuple(labels.tolist()),
            groups={name: np.packbits(np.asarray(m)).tobytes().hex() for name, m in evaluation.groups.items()},
            effective_streams=None if streams is None else tuple(streams),
            has_channels_last=any(p.ndim == 4 and p.shape[1] > 1 for p in parameters),
            draws_per_batch=draws,
            device=parameters[0].device.type if parameters else "cpu",
            parameters=sum(p.numel() for p in parameters),
            machine=machine,
            versions=versions(),
            run_seconds=self._steps * step_seconds,
            info=dict(self.workload.info),
        )

    def _draws(self) -> bool:
        """Whether a module draws random numbers that are not drawn separately for each row of a batch."""
        state = self.workload.start(Seeds.same_for_all(self.spec.seed))
        flow = DataflowRecorder(state.model)
        try:
            with flow:
                self.workload.step(state)
        except UnsilentError:  # a compiled model cannot be traced
            return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in state.model.modules())
        by_row = {name for name, module in named_modules(state.model) if isinstance(module, RowDropout)}
        drawn = {
            met.key.name.partition("#")[0] for met in flow.recorded_operations if met.draws and met.key is not None
        }
        return bool(drawn - by_row - {OUTSIDE})

    def _start(self, replica: Replica) -> TrainingState:
        state = self.workload.start(Seeds(**replica.seeds(self.spec.seed)))  # type: ignore[arg-type]
        if "layout" in replica.switches:
            state.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return state

    def trace_step(self, wanted: StepTraceId) -> ReplicaRow:
        """Trace one step and return the row with the inputs and outputs of every operation, as hashes."""
        began = time.perf_counter()
        seen = self._trace_step(wanted)
        seconds = time.perf_counter() - began
        return ReplicaRow.without_result(
            wanted.trial, final_hashes="[]", metrics="{}", notes="[]", step_trace_json=seen.text(), seconds=seconds
        )

    def _trace_step(self, wanted: StepTraceId) -> StepTrace:
        with apply_switches(wanted.switches), collect_nondeterminism_warnings(), user_code(self.spec.workload):
            state = self._start(wanted.replica)
            for _ in range(wanted.step):
                self.workload.step(state)
            kind = digest_unordered if wanted.unordered else _digest_of_order
            flow, before = DataflowRecorder(state.model, kind), _digests(state, kind)
            try:
                with flow:
                    self.workload.step(state)
            except (
                UnsilentError
            ) as error:  # a step that cannot be traced (for example of a compiled model) still has its other measures
                return StepTrace(note=str(error))
            after = _digests(state, kind)
        return StepTrace(before, after, [_operation(met) for met in flow.recorded_operations])

    def run_replica(self, replica: Replica) -> ReplicaRow:
        """Run a training from start to end and return its row."""
        began = time.perf_counter()
        losses, hashes = [], []
        with (
            apply_switches(replica.switches),
            collect_nondeterminism_warnings() as notes,
            user_code(self.spec.workload),
        ):
            state = self._start(replica)
            for step in range(self._steps):
                losses.append(self.workload.step(state).loss)
                if (step + 1) % self.spec.every == 0 or step + 1 == self._steps:
                    hashes.append(_quick_hash(state))
            evaluation = self.workload.evaluate(state)
            snapshot = self.workload.snapshot(state)
        check_no_returned_fork(self.workload.name)
        notes += take_notes(self.workload.name)
        finals = [(name, xxhash.xxh3_64_hexdigest(content_of(t))) for name, t in _all_tensors(snapshot).items()]
        weights = _weights(state)
        return ReplicaRow(
            trial=replica.trial,
            final_hashes=sorted_json_text(finals),
            loss=float(evaluation.loss),
            metrics=sorted_json_text({name: float(value) for name, value in evaluation.metrics.items()}),
            dtype="" if weights is None else str(weights.dtype),
            notes=dump_stored_json(sorted(set(notes))),
            losses=np.array(losses, dtype=np.float64),
            hashes=np.array(hashes, dtype=np.uint64),
            predictions=np.asarray(evaluation.predictions, np.int64),
            weights=b"" if weights is None else weights.tobytes(),
            seconds=time.perf_counter() - began,
        )


@contextmanager
def apply_switches(switches: Switches) -> Iterator[None]:
    """Apply the settings of these switches inside a ``with`` block.

    Environment variables must be set already.
    """
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic: Any = torch.utils.deterministic
    strict, filling = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    free = "race" in switches or "nondeterministic" in switches
    with ExitStack() as stack, tf32_set("tf32" in switches):
        try:
            torch.set_num_threads(switches.threads)
            # Torch fills memory only for debugging, which would take time.
            deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(not free, warn_only=True)
            torch.backends.cudnn.benchmark = "cudnn-benchmark" in switches
            if "onednn" in switches:
                # `flags` is not used because it also sets TF32, which warns if TF32 is not available.
                stack.callback(torch.backends.mkldnn.set_flags, torch.backends.mkldnn.set_flags(False)[0])
            yield
        finally:
            torch.set_num_threads(threads)
            deterministic.fill_uninitialized_memory = filling
            torch.use_deterministic_algorithms(strict, warn_only=only_warn)
            torch.backends.cudnn.benchmark = benchmark


@contextmanager
def collect_nondeterminism_warnings() -> Iterator[list[str]]:
    """Collect torch's warnings of operations without a deterministic kernel in a ``with`` block.

    Other warnings are issued again.
    """
    items: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield items
    for warning in caught:
        text = str(warning.message)
        if _UNSURE in text:
            items.append(f"{text.split(_UNSURE)[0].strip()} has no deterministic kernel")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A hash of the names and contents of tensors."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name};{tensor.dtype};{list(tensor.shape)};".encode())
        digest.update(content_of(tensor))
    return digest.hexdigest()


def _quick_hash(state: TrainingState) -> int:
    """A 64-bit hash of parameters and buffers."""
    return int(tensors_hasher(model_tensors(state.model).values()).intdigest())


def _digest_of_order(tensor: Tensor) -> int:
    return digest([tensor])


def _digests(state: TrainingState, digest: Callable[[Tensor], int]) -> tuple[int, ...]:
    """The digest of each parameter and buffer."""
    return tuple(map(digest, model_tensors(state.model).values()))


def _operation(met: RecordedOperation) -> Operation:
    name, phase = (met.kernel, "") if met.key is None else (met.key.name, met.key.phase)
    return Operation(name, met.kernel, phase, met.draws, met.moves, met.reads, met.gives)


def _all_tensors(value: Any) -> dict[str, Tensor]:
    """All tensors in a snapshot, by their path."""
    return {"/".join(path): leaf for path, leaf in leaves_in(value) if isinstance(leaf, Tensor)}


def _weights(state: TrainingState) -> NDArray[Any] | None:
    """All parameters concatenated, as float32 or float64; None if they are too large to store."""
    parameters = [p.detach() for p in state.model.parameters()]
    wide = any(p.dtype == torch.float64 for p in parameters)
    dtype = torch.float64 if wide else torch.float32
    if sum(p.numel() for p in parameters) * dtype.itemsize > WEIGHT_BYTES or any(p.is_complex() for p in parameters):
        return None
    result: NDArray[Any] = torch.cat([p.to("cpu", dtype).contiguous().reshape(-1) for p in parameters]).numpy()
    return result


def _environment() -> str:
    """A hash of the environment variables by which libraries choose kernels."""
    ordered = sorted((name, value) for name, value in os.environ.items() if name.startswith(_CHOOSE))
    return xxhash.xxh3_64_hexdigest(repr(ordered).encode())


def _file_hash(data: str | None) -> str:
    if data is None or not Path(data).is_file():
        return ""
    with Path(data).open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def _processor() -> str:
    """The name of the processor model, which influences the choice of kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
