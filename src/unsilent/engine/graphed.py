"""The engine for a GPU: a trial launches one CUDA graph a batch and waits for nothing; many verdicts are read together.

A model of many small operations keeps a GPU waiting for Python. A graph of the whole evaluation, with the verdict inside, costs a
fraction of that. Faults go into the memory that the graph reads. What a graph cannot do goes the way of `CachedEngine`: faults in
operations, in indices (which may stop the device), judges that need whole outputs, models that read results back.

A graph is trusted only after comparisons of raw bits: without a fault it gives the golden output, with every parameter and input
shaken it gives what a plain run gives, and at each proof of a campaign a trial is run both ways.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from unsilent.engine.batch_graph import MOST_TRIALS, BatchGraph, Capture, CudaGraphs, host_read
from unsilent.engine.cached import CachedEngine
from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.graph_costs import GraphCosts
from unsilent.engine.perturbation_check import input_element_swap_faults, perturbing_faults
from unsilent.engine.plain import PlainEngine, Samples, TrialOutcome, acting_in, same_outputs
from unsilent.engine.staged_faults import GoldenWords, MemoryFault, StagedFaults, edits_of_trial
from unsilent.engine.trial_costs import ENOUGH, cost_class_of
from unsilent.engine.validation_sample import ValidationSamples
from unsilent.errors import UnsilentError, kind_and_line
from unsilent.faults import Fault
from unsilent.faults.naming import is_transient, parse_site
from unsilent.outcomes.classify import BatchOutcome, classify
from unsilent.outcomes.decision_judges import DecisionJudge
from unsilent.sites.corrupting import corruptible, misfit
from unsilent.sites.inputs import named_inputs
from unsilent.sites.memory import TensorMemory

GROUP_SECONDS = 1.0
"""Trials that run together take about as long at most, so that rows keep coming."""
TIMED = 3
"""Evaluations that are timed when a graph is made."""
INDICES = (torch.int64, torch.int32, torch.bool)
"""Tensors of these types may be indices: a corrupted index can stop the device, which must be the fault of one trial."""


class NotGraphed(Exception):
    """No graph stands for the evaluation of this batch; the message says why."""


class GraphedEngine(CachedEngine):
    """Evaluates trials by CUDA graphs where that is measured to be cheapest, else as `CachedEngine`.

    Attributes:
        graphs: By batch, of those that could be captured; ``graph_refusals`` says why another could not.
        capture: What makes a graph of a function; None: CUDA, on a CUDA device.
    """

    capture: Capture | None = None
    recordings = 0

    def _record_all(self) -> None:
        super()._record_all()
        self.recordings += 1
        self.graphs: dict[int, BatchGraph] = {}
        self.graph_refusals: dict[int, str] = {}
        self.graph_costs = GraphCosts()
        self._graph_samples = ValidationSamples()
        self._tape_seconds: dict[tuple[int, str], float] = {}
        self._device = next((t.device for t, _ in self._writes()), torch.device("cpu"))
        self._inputs = {i: input_memory(batch) for i, batch in enumerate(self.batches)}
        capture = self.capture or (CudaGraphs(self._device) if self._device.type == "cuda" else None)
        if capture is None:
            return
        for i in range(len(self.batches)):
            try:
                self.graphs[i] = self._checked_graph(i, capture)
            except UnsilentError:
                raise
            except Exception as error:
                self.graph_refusals[i] = str(error) if isinstance(error, NotGraphed) else kind_and_line(error)
        why = Counter(self.graph_refusals.values())
        self.notes += tuple(
            f"{n} of {len(self.batches)} batches run without a CUDA graph. Reason: {text}." for text, n in why.items()
        )

    def _checked_graph(self, i: int, capture: Capture) -> BatchGraph:
        if why := self._refusal(i):
            raise NotGraphed(why)
        assert isinstance(self.judge, DecisionJudge)
        graph = BatchGraph(lambda: self._run(self.batches[i]), self.golden[i], self.judge, self.samples[i], capture)
        graph.evaluate()
        if not same_outputs(self.golden[i], graph.output) or graph.outcomes()[0].codes.any():
            raise NotGraphed("the graph gives other bits than the run that it was captured from")
        self._shake(i, graph)
        self._measure(i, graph)
        return graph

    def _refusal(self, i: int) -> str:
        """Why no graph is tried; empty where it is."""
        if not isinstance(self.judge, DecisionJudge):
            return "the judge needs whole outputs"
        if self.seeded:
            return "the workload draws random numbers"
        if self._scratch:
            return "a run writes into buffers of the model"
        replayer = self.replayers[i]
        return self.fallback_reasons[i] if replayer is None else host_read(replayer.tape)

    def _shake(self, i: int, graph: BatchGraph) -> None:
        """With everything corrupted, strongly or else gently, a plain run and the graph must give the same bits."""
        swaps = [f for f in input_element_swap_faults(self.batches[i], i) if f.site in self._inputs[i]]
        for strongly in (True, False):
            try:
                same = self._gives_plain_bits(i, graph, [*perturbing_faults(self.parameters, strongly), *swaps])
            except UnsilentError:
                raise
            except Exception:  # noqa: S112 - the run takes another way then, or fails
                continue
            if not same:
                raise NotGraphed("with corrupted parameters the graph gives other bits than a plain run")
            return
        raise NotGraphed("every run with corrupted parameters fails")

    def _gives_plain_bits(self, i: int, graph: BatchGraph, faults: Sequence[Fault]) -> bool:
        with self.inject_parameter_faults(faults):
            plain = self.output_without_tape(i, faults)
        memories = [(self._memory(fault, i), fault) for fault in faults]
        staged = StagedFaults([edits_of_trial(memories, GoldenWords([memories]))], self._device)
        graph.clear()
        with staged.applied(0):
            graph.evaluate()
        staged.check([0])
        return same_outputs(plain, graph.output)

    def _measure(self, i: int, graph: BatchGraph) -> None:
        """Seconds of an evaluation with its verdict, by the graph and plainly."""

        def plain() -> None:
            classify(self.judge, self.golden[i], self._run(self.batches[i]), self.batches[i], self.samples[i])

        now, seconds = clock(self._device), []
        graph.clear()
        for evaluate in (graph.evaluate, plain):
            evaluate()
            begun = now()
            for _ in range(TIMED):
                evaluate()
            seconds.append((now() - begun) / TIMED)
        self.graph_costs.graph[i], self.graph_costs.plain[i] = seconds

    # -- trials ------------------------------------------------------------------------------------------------

    def preferred_group_size(self, transient: bool, sampled: bool = False) -> int:
        """As `CachedEngine.preferred_group_size`, and enough for graphs."""
        size = super().preferred_group_size(transient, sampled)
        if not self.graphs:
            return size
        return max(
            size, min(MOST_TRIALS, int(GROUP_SECONDS / max(self.graph_costs.trial_seconds, 1e-9)), self._capacity)
        )

    @property
    def _capacity(self) -> int:
        return min(graph.capacity for graph in self.graphs.values())

    def trials(
        self, many: Sequence[Sequence[Fault]], samples: Sequence[Samples] | None = None
    ) -> Iterator[TrialOutcome]:
        """As `PlainEngine.trials`; those that graphs evaluate are evaluated first."""
        self._refresh()
        ready = self._by_graphs(many, samples is not None) if self.graphs else {}
        own = [None] * len(many) if samples is None else list(samples)
        left = [i for i in range(len(many)) if i not in ready]
        rest = super().trials([many[i] for i in left], samples and [own[i] for i in left])
        known, seconds = self.recordings, 0.0
        for i, faults in enumerate(many):
            if i in ready:
                self._refresh()  # whoever is given the outcomes may write into the model
                yield ready[i].of_samples(own[i]) if self.recordings == known else self.trial(faults, own[i])
                continue
            begun = time.perf_counter()
            outcome = next(rest)
            seconds += time.perf_counter() - begun
            yield outcome
        if samples is not None and left:
            self.graph_costs.add_on_rows(seconds, len(left))

    def _by_graphs(self, many: Sequence[Sequence[Fault]], sampled: bool) -> dict[int, TrialOutcome]:
        """The outcomes, by number, of the trials that graphs can evaluate and for which that is cheapest."""
        if sampled and not self.graph_costs.prefers_graph_to_rows:
            return {}
        fitting = [i for i, faults in enumerate(many) if faults and self._fits_graphs(faults)]
        for i in fitting:
            PlainEngine.check_and_prepare(self, many[i])  # the tape need not be prepared
        result: dict[int, TrialOutcome] = {}
        for first in range(0, len(fitting), self._capacity):
            numbers = fitting[first : first + self._capacity]
            try:
                outcomes = self._run_graphs([many[i] for i in numbers])
            except UnsilentError:
                raise
            except Exception:  # one of them fails, and alone each says so for itself
                return result
            result.update(zip(numbers, outcomes, strict=True))
        return result

    def _fits_graphs(self, faults: Sequence[Fault]) -> bool:
        """Whether graphs can evaluate a trial, and are measured to be the cheapest way."""
        acting = [i for i in range(len(self.batches)) if acting_in(i, faults)]
        if any(i not in self.graphs for i in acting) or not all(self._is_writable(fault) for fault in faults):
            return False
        return all(self.graph_costs.prefers_graph(i, self._seconds_from_tape(i, faults)) for i in acting)

    def _is_writable(self, fault: Fault) -> bool:
        """Whether a fault lies in memory that graphs read, and not in what may be an index."""
        kind = parse_site(fault.site).kind
        if kind == "input" and (fault.step is None or fault.site not in self._inputs[fault.step]):
            return False
        if kind not in ("param", "input"):
            return False
        tensor = self._memory(fault, fault.step).tensor
        return tensor.dtype not in INDICES and tensor.device == self._device and not misfit(tensor, fault)

    def _memory(self, fault: Fault, batch: int | None) -> TensorMemory:
        if is_transient(fault.site):
            assert batch is not None
            return self._inputs[batch][fault.site]
        return self.parameters.memory(fault)

    def _seconds_from_tape(self, batch: int, faults: Sequence[Fault]) -> float:
        """Of an evaluation from the tape: measured, else of all operations from the first that reads what is corrupted."""
        key, replayer = cost_class_of(batch, faults), self.replayers[batch]
        known = self.ledger.costs.get(key)
        if known is not None and known.tape_cost.trials >= ENOUGH:
            return known.tape_cost.mean
        if replayer is None or len(faults) > 1:
            return float("inf")
        if (batch, faults[0].site) not in self._tape_seconds:
            tape = replayer.tape
            value = tape.by_storage.get(self._memory(faults[0], batch).tensor.untyped_storage().data_ptr())
            readers = [] if value is None else tape.values[value].readers
            first = min(readers, default=len(tape.nodes))
            self._tape_seconds[batch, faults[0].site] = sum(node.seconds for node in tape.nodes[first:])
        return self._tape_seconds[batch, faults[0].site]

    def _run_graphs(self, trials: Sequence[Sequence[Fault]]) -> list[TrialOutcome]:
        begun = time.perf_counter()
        memories: list[list[MemoryFault]] = [[(self._memory(f, f.step), f) for f in faults] for faults in trials]
        golden = GoldenWords(memories)
        staged = StagedFaults([edits_of_trial(one, golden) for one in memories], self._device)
        for graph in self.graphs.values():
            graph.clear()
        places: list[dict[int, int]] = []
        for number, faults in enumerate(trials):
            with staged.applied(number):
                places.append({i: graph.evaluate() for i, graph in self.graphs.items() if acting_in(i, faults)})
        verdicts = {i: graph.outcomes() for i, graph in self.graphs.items() if graph.count}
        staged.check(range(len(trials)))
        for _ in trials:
            self.graph_costs.trial.add((time.perf_counter() - begun) / len(trials))
        return [self._outcome_of(faults, {i: verdicts[i][n] for i, n in own.items()})
            for faults, own in zip(trials, places, strict=True)]  # fmt: skip

    def _outcome_of(self, faults: Sequence[Fault], verdicts: Mapping[int, BatchOutcome]) -> TrialOutcome:
        for i, verdict in verdicts.items():
            self._graph_samples.add(i, [acting_in(i, faults)], 0, bool(verdict.codes.any()))
        batches = range(len(self.batches))
        return TrialOutcome(
            tuple(verdicts[i] if i in verdicts else self.spared_outcome(i) for i in batches), graphed=True
        )

    def check_intact(self) -> None:
        """As `CachedEngine.check_intact`; and a random trial of each graph since the last proof must give the plain bits."""
        super().check_intact()
        for sample in self._graph_samples.take():
            if not self._gives_plain_bits(sample.batch, self.graphs[sample.batch], sample.faults):
                raise UnsilentError(
                    f"a CUDA graph returned other bits than a plain run ({sample.faults[0].describe()}); trials since the last "
                    "check were not stored: use --engine plain, and report this as a bug"
                )


def input_memory(batch: object) -> dict[str, TensorMemory]:
    """By site, the memory of each input that can be corrupted in place: none that two inputs share."""
    named = [(f"input:{name}", tensor) for name, tensor in named_inputs(batch)]
    users = Counter(tensor.untyped_storage().data_ptr() for _, tensor in named if corruptible(tensor))
    return {
        site: TensorMemory(tensor)
        for site, tensor in named
        if corruptible(tensor) and users[tensor.untyped_storage().data_ptr()] == 1
    }
