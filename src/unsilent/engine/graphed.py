"""The engine for a GPU, which evaluates a trial by launching one CUDA graph per batch.

The CPU does not wait for a trial; the verdicts of many trials are read together.

With a model of many small operations, a GPU waits for Python. A graph of the whole evaluation, with the verdict inside,
takes a fraction of that time. Faults are written into the memory that the graph reads. `CachedEngine` evaluates what a
graph cannot: some faults in operations, faults in indices (which may stop the device), judges that need whole outputs,
and models that read results back.

A graph is used only after comparisons of raw bits. Without a fault it must give the golden output. With every parameter
and input corrupted it must give the output of a plain run. At each check of a campaign, a trial is run both ways.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unsilent.basics.errors import UnsilentError, kind_and_line
from unsilent.engine.cached import CachedEngine, preparing
from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.graphs.batch_graph import MOST_TRIALS, BatchGraph, Capture, CudaGraphs
from unsilent.engine.graphs.checks import NotGraphed, checked_graph, gives_plain_bits
from unsilent.engine.graphs.injection_points import InjectionPoints, StagedPointFaults
from unsilent.engine.graphs.staged_faults import GoldenWords, StagedFaults, edits_of_trial
from unsilent.engine.plain import PlainEngine, Samples, TrialOutcome, acting_in
from unsilent.engine.running_out import unusable_if_raised
from unsilent.engine.tape import Tape
from unsilent.engine.trial_costs import ENOUGH, PLAIN_ABOVE, MeasuredCost, cost_class_of
from unsilent.engine.validation_sample import ValidationSamples
from unsilent.faults import Fault
from unsilent.faults.naming import is_transient, parse_site
from unsilent.outcomes.classify import BatchOutcome
from unsilent.sites.corrupting import corruptible, misfit, overlaps
from unsilent.sites.inputs import named_inputs
from unsilent.sites.memory import TensorMemory

GROUPS, TRIED = 2, 128
"""Number of groups of trials on rows, and of trials in each, before their cost is used; the first has cold caches."""


@dataclass
class GraphCosts:
    """Measured seconds of trials by graphs, and of trials on some samples only."""

    by_graphs: MeasuredCost = field(default_factory=MeasuredCost)
    on_rows: MeasuredCost = field(default_factory=MeasuredCost)
    groups_on_rows: int = 0

    def add(self, seconds: float, trials: int) -> None:
        """Add the seconds of a group of trials by graphs, including preparation and reading."""
        for _ in range(trials):
            self.by_graphs.add(seconds / trials)

    def add_on_rows(self, seconds: float, trials: int) -> None:
        """Add the seconds of a group of sampled trials that were not evaluated by graphs."""
        self.groups_on_rows += 1
        if self.groups_on_rows > 1:
            self.on_rows.add(seconds / trials)

    @property
    def trial_seconds(self) -> float:
        """Seconds of one trial by graphs, or 0 if not known."""
        return self.by_graphs.mean if self.by_graphs.trials >= ENOUGH else 0.0

    def trials_on_rows(self, by_graphs: float, trials: int) -> int:
        """The number of sampled trials to evaluate on single samples instead of by graphs.

        These are the first of the ``trials``: all, none, or a few while the cost is not known. ``by_graphs``: seconds
        of a trial by graphs, which evaluate whole batches.
        """
        if self.groups_on_rows < GROUPS:
            return min(trials, TRIED)
        return 0 if by_graphs <= self.on_rows.mean else trials


def is_cheapest(graph: BatchGraph, from_tape: float) -> bool:
    """Whether a graph is the cheapest way to evaluate its batch.

    ``from_tape``: seconds to compute the output from the tape.
    """
    return graph.seconds <= min(PLAIN_ABOVE * graph.plain_seconds, from_tape + graph.verdict_seconds)


GROUP_SECONDS = 1.0
"""Approximate largest duration of trials that run together, so that results are returned regularly."""
INDICES = (torch.int64, torch.int32, torch.bool)
"""Tensors of these types may be indices: a corrupted index can stop the device, which must be blamed on one trial."""


Staged = StagedFaults | StagedPointFaults
"""Faults of several trials on their device."""


class GraphedEngine(CachedEngine):
    """Evaluates trials by CUDA graphs if that is measured to be cheapest, else like `CachedEngine`.

    Attributes:
        graphs: Graphs of the batches that could be captured, by batch; ``graph_refusals`` has the reasons for the
            others.
        operation_graphs: Graphs with injection points for faults in operations; made for the first such fault.
        capture: Function that makes a graph of a function; None: CUDA, on a CUDA device.
        placed_on: The device of the model.
        inputs: Memory of inputs that can be corrupted in place, by batch and site.
    """

    capture: Capture | None = None
    recordings = 0

    def _record_all(self) -> None:
        super()._record_all()
        self.recordings += 1
        self.graphs: dict[int, BatchGraph] = {}
        self.operation_graphs: dict[int, BatchGraph] | None = None
        self.graph_refusals: dict[int, str] = {}
        self.graph_costs = GraphCosts()
        self._points: dict[int, InjectionPoints] = {}
        self._graph_samples = ValidationSamples()
        self._tape_seconds: dict[tuple[int, str], float] = {}
        self.placed_on = next((t.device for t, _ in self._writes()), torch.device("cpu"))
        self.inputs = {i: input_memory(batch) for i, batch in enumerate(self.batches)}
        self._capture = self.capture or (CudaGraphs(self.placed_on) if self.placed_on.type == "cuda" else None)
        if self._capture is None:
            return
        for i in range(len(self.batches)):
            self._try(
                i, self.graphs, partial(checked_graph, self, i, partial(self._run, self.batches[i]), self._capture)
            )
        why = Counter(self.graph_refusals.values())
        self.notes += tuple(
            f"{n} of {len(self.batches)} batches run without a CUDA graph. Reason: {text}." for text, n in why.items()
        )

    @property
    def has_scratch_memory(self) -> bool:
        """Whether a run of the model writes into its buffers."""
        return bool(self._scratch)

    def _try(self, i: int, graphs: dict[int, BatchGraph], make: Callable[[], BatchGraph]) -> None:
        """Make the graph of one batch, or store the reason why there is none."""
        try:
            graphs[i] = make()
        except UnsilentError:
            raise
        except Exception as error:
            self.graph_refusals[i] = str(error) if isinstance(error, NotGraphed) else kind_and_line(error)

    def _capture_operations(self) -> dict[int, BatchGraph]:
        """Graphs of all batches in which faults in operations can be injected."""
        graphs: dict[int, BatchGraph] = {}
        with preparing():
            for i in self.graphs:
                self._try(i, graphs, partial(self._graph_with_points, i))
        return graphs

    def _graph_with_points(self, i: int) -> BatchGraph:
        points = InjectionPoints(self.model, self.placed_on)

        def run() -> Any:
            with points:
                return self._run(self.batches[i])

        run()
        points.allocate()
        assert self._capture is not None
        graph = checked_graph(self, i, run, self._capture)
        self._points[i] = points
        return graph

    # -- trials ------------------------------------------------------------------------------------------------

    def preferred_group_size(self, transient: bool, sampled: bool = False) -> int:
        """The number of trials to give to the engine at a time.

        At least as many as for `CachedEngine`, and enough for graphs.
        """
        size = super().preferred_group_size(transient, sampled)
        if not self.graphs:
            return size
        together = min(MOST_TRIALS, self._capacity, int(GROUP_SECONDS / max(self._trial_seconds, 1e-9)))
        return max(size, together)

    @property
    def _capacity(self) -> int:
        return min(graph.capacity for graph in self.graphs.values())

    @property
    def _trial_seconds(self) -> float:
        """Seconds of a trial that evaluates all batches by graphs."""
        return self.graph_costs.trial_seconds or sum(graph.seconds for graph in self.graphs.values())

    def trials(
        self, many: Sequence[Sequence[Fault]], samples: Sequence[Samples] | None = None
    ) -> Iterator[TrialOutcome]:
        """Outcomes of several trials, like `PlainEngine.trials`.

        Trials by graphs are evaluated first.
        """
        self._refresh()
        tried = self.graph_costs.trials_on_rows(self._trial_seconds, len(many)) if samples is not None else 0
        ready = self._by_graphs(many, tried) if self.graphs and self._reads_the_model else {}
        samples_of_trial = [None] * len(many) if samples is None else list(samples)
        left = [i for i in range(len(many)) if i not in ready]
        rest = super().trials([many[i] for i in left], samples and [samples_of_trial[i] for i in left])
        known, seconds = self.recordings, 0.0
        for i, faults in enumerate(many):
            if i in ready:
                self._refresh()  # the receiver of the outcomes may write into the model
                is_valid = self.recordings == known
                yield ready[i].of_samples(samples_of_trial[i]) if is_valid else self.trial(faults, samples_of_trial[i])
                continue
            begun = time.perf_counter()
            outcome = next(rest)
            seconds += time.perf_counter() - begun
            yield outcome
        if samples is not None and left:
            self.graph_costs.add_on_rows(seconds, len(left))

    @property
    def _reads_the_model(self) -> bool:
        """Whether graphs still read the model's memory, that is, no parameter was moved to other memory."""
        return all(site.memory.is_attached for site in self.parameters.sites.values())

    def _by_graphs(self, many: Sequence[Sequence[Fault]], first: int) -> dict[int, TrialOutcome]:
        """Outcomes of the trials for which graphs are the cheapest way, by trial number.

        Only trials from number ``first`` on are considered.
        """
        result: dict[int, TrialOutcome] = {}
        for graphs, fits in ((self.graphs, self._lies_in_memory), (None, self._enters_operations)):
            fitting = [i for i, faults in enumerate(many) if i >= first and faults and fits(faults)]
            if not fitting:
                continue
            if graphs is None:
                self.operation_graphs = graphs = self.operation_graphs or self._capture_operations()
            result |= self._in_groups(many, [i for i in fitting if self._is_cheapest(graphs, many[i])], graphs)
        return result

    def _in_groups(
        self, many: Sequence[Sequence[Fault]], numbers: Sequence[int], graphs: Mapping[int, BatchGraph]
    ) -> dict[int, TrialOutcome]:
        result: dict[int, TrialOutcome] = {}
        for first in range(0, len(numbers), self._capacity):
            part = numbers[first : first + self._capacity]
            for i in part:
                PlainEngine.check_and_prepare(self, many[i])  # the tape needs no preparation
            try:
                outcomes = self._run_graphs([many[i] for i in part], graphs)
            except UnsilentError:
                raise
            except Exception as error:  # one trial fails; run alone, each reports its own error
                with unusable_if_raised(kind_and_line(error)):
                    clock(self.placed_on)()  # raises if the device has stopped
                break
            result.update((i, outcome) for i, outcome in zip(part, outcomes, strict=True) if outcome is not None)
        return result

    def _lies_in_memory(self, faults: Sequence[Fault]) -> bool:
        """Whether all faults of a trial are in memory that graphs read and that holds no indices."""
        return all(self._is_writable(fault) for fault in faults)

    def _is_writable(self, fault: Fault) -> bool:
        kind = parse_site(fault.site).kind
        if kind == "input" and (fault.step is None or fault.site not in self.inputs[fault.step]):
            return False
        if kind not in ("param", "input"):
            return False
        tensor = self._memory(fault, fault.step).tensor
        return tensor.dtype not in INDICES and tensor.device == self.placed_on and not misfit(tensor, fault)

    def _enters_operations(self, faults: Sequence[Fault]) -> bool:
        """Whether all faults of a trial are in outputs of operations in one batch."""
        outputs = all(parse_site(f.site).kind == "op" and parse_site(f.site).operand == "out" for f in faults)
        return outputs and len({f.step for f in faults}) == 1 and faults[0].step in self.graphs

    def _is_cheapest(self, graphs: Mapping[int, BatchGraph], faults: Sequence[Fault]) -> bool:
        """Whether graphs can evaluate a trial and are the cheapest way by measurement."""
        acting = [i for i in range(len(self.batches)) if acting_in(i, faults)]
        if any(i not in graphs for i in acting):
            return False
        if graphs is self.operation_graphs and self._points[acting[0]].faults_at_points(faults) is None:
            return False
        return all(is_cheapest(graphs[i], self._seconds_from_tape(i, faults)) for i in acting)

    def _memory(self, fault: Fault, batch: int | None) -> TensorMemory:
        if is_transient(fault.site):
            assert batch is not None
            return self.inputs[batch][fault.site]
        return self.parameters.memory(fault)

    def _seconds_from_tape(self, batch: int, faults: Sequence[Fault]) -> float:
        """Seconds of an evaluation from the tape.

        The time is estimated from the operations after the first corrupted one if it was not measured yet.
        """
        key, replayer = cost_class_of(batch, faults), self.replayers[batch]
        known = self.ledger.costs.get(key)
        if known is not None and known.tape_cost.trials >= ENOUGH:
            return known.tape_cost.mean
        if replayer is None or len(faults) > 1:
            return float("inf")
        place = batch, faults[0].site
        if place not in self._tape_seconds:
            first = self._first_reader(replayer.tape, batch, faults[0])
            self._tape_seconds[place] = sum(node.seconds for node in replayer.tape.nodes[first:])
        return self._tape_seconds[place]

    def _first_reader(self, tape: Tape, batch: int, fault: Fault) -> int:
        site = parse_site(fault.site)
        if site.kind == "op":
            return tape.by_name.get(site.name, -1) + 1
        value = tape.by_storage.get(self._memory(fault, batch).tensor.untyped_storage().data_ptr())
        return min([] if value is None else tape.values[value].readers, default=len(tape.nodes))

    def staged(self, trials: Sequence[Sequence[Fault]], batch: int | None = None) -> Staged:
        """The faults of several trials, copied to the device.

        All faults must be of one kind. ``batch``: the batch for faults that do not name one.
        """
        if all(parse_site(fault.site).kind == "op" for faults in trials for fault in faults):
            points = [self._points[faults[0].step or 0] for faults in trials]
            at = [
                batch_points.faults_at_points(faults) or [] for batch_points, faults in zip(points, trials, strict=True)
            ]
            return StagedPointFaults(list(zip(points, at, strict=True)), self.placed_on)
        memories = [[(self._memory(f, f.step if batch is None else batch), f) for f in faults] for faults in trials]
        golden = GoldenWords(memories)
        return StagedFaults([edits_of_trial(memory_faults, golden) for memory_faults in memories], self.placed_on)

    def _run_graphs(
        self, trials: Sequence[Sequence[Fault]], graphs: Mapping[int, BatchGraph]
    ) -> list[TrialOutcome | None]:
        """The outcome of each trial, or None if its run may take another path than the golden run."""
        begun = time.perf_counter()
        staged = self.staged(trials)
        for graph in graphs.values():
            graph.clear()
        places: list[dict[int, int]] = []
        for number, faults in enumerate(trials):
            with staged.applied(number):
                places.append({i: graph.evaluate() for i, graph in graphs.items() if acting_in(i, faults)})
        verdicts = {i: graph.outcomes() for i, graph in graphs.items() if graph.count}
        staged.check()
        self.graph_costs.add(time.perf_counter() - begun, len(trials))
        return [
            self._outcome_of(faults, {i: verdicts[i][n] for i, n in batch_places.items()})
            for faults, batch_places in zip(trials, places, strict=True)
        ]

    def _outcome_of(self, faults: Sequence[Fault], verdicts: Mapping[int, BatchOutcome | None]) -> TrialOutcome | None:
        batches = [verdicts[i] if i in verdicts else self.spared_outcome(i) for i in range(len(self.batches))]
        known = [outcome for outcome in batches if outcome is not None]
        if len(known) < len(batches):
            return None
        for i in verdicts:
            self._graph_samples.add(i, [acting_in(i, faults)], 0, bool(known[i].codes.any()))
        return TrialOutcome(tuple(known), graphed=True)

    def check_intact(self, by_copies: bool = False) -> None:
        """Check like `CachedEngine.check_intact`, and check one random trial of each graph against a full run."""
        super().check_intact(by_copies)
        for sample in self._graph_samples.take():
            i, faults = sample.batch, sample.faults
            graphs = self.operation_graphs if parse_site(faults[0].site).kind == "op" else self.graphs
            assert graphs is not None
            if not gives_plain_bits(self, i, graphs[i], faults):
                raise UnsilentError(
                    f"a CUDA graph returned other bits than a plain run ({faults[0].describe()}); trials since the last "
                    "check were not stored: use --engine plain, and report this as a bug"
                )


def input_memory(batch: object) -> dict[str, TensorMemory]:
    """Memory of the inputs that can be corrupted in place, by site.

    Inputs that hold indices or share memory are left out.
    """
    named = [(f"input:{name}", tensor) for name, tensor in named_inputs(batch)]
    named = [(site, tensor) for site, tensor in named if corruptible(tensor)]
    users = Counter(tensor.untyped_storage().data_ptr() for _, tensor in named)
    return {
        site: TensorMemory(tensor)
        for site, tensor in named
        if tensor.dtype not in INDICES and not overlaps(tensor) and users[tensor.untyped_storage().data_ptr()] == 1
    }
