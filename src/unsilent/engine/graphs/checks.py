"""Checks and cost measurements of the graph of a batch before it is used.

The graph must give the golden output, and with every parameter and input corrupted it must give the bits of a plain
run. A graph without some dependence of the run would give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UnsilentError
from unsilent.engine.device_or_cpu_clock import clock
from unsilent.engine.graphs.batch_graph import BatchGraph, Capture, host_read
from unsilent.engine.perturbation_check import input_element_swap_faults, perturbing_faults
from unsilent.engine.plain import same_outputs
from unsilent.engine.tape import Diverged
from unsilent.faults import Fault
from unsilent.outcomes.classify import classify, has_one_result_a_sample
from unsilent.outcomes.decision_judges import DecisionJudge

if TYPE_CHECKING:
    from unsilent.engine.graphed import GraphedEngine

TIMED = 3
"""Number of evaluations that are timed."""


class NotGraphed(Exception):
    """Raised when no graph can evaluate a batch; the message gives the reason."""


def checked_graph(engine: GraphedEngine, i: int, run: Callable[[], Any], capture: Capture) -> BatchGraph:
    """The graph of ``run``, an evaluation of batch ``i``, after it has passed all checks.

    Raises:
        NotGraphed: the run cannot be captured, or the graph gives other bits. Exception: any exception during the
            capture.
    """
    if why := _refusal(engine, i):
        raise NotGraphed(why)
    assert isinstance(engine.judge, DecisionJudge)
    graph = BatchGraph(run, engine.golden[i], engine.judge, engine.samples[i], capture)
    graph.evaluate()
    outcome = graph.outcomes()[0]
    if not same_outputs(engine.golden[i], graph.output) or outcome is None or outcome.codes.any():
        raise NotGraphed("the graph gives other bits than the run that it was captured from")
    _shake(engine, i, graph)
    _measure(engine, i, graph)
    return graph


def _refusal(engine: GraphedEngine, i: int) -> str:
    """The reason why no graph is attempted for a batch, or ""."""
    if not isinstance(engine.judge, DecisionJudge):
        return "the judge needs whole outputs"
    if engine.score is not None:
        return "the score needs whole outputs"
    if has_one_result_a_sample(engine.golden[i], engine.samples[i]):
        return "the output is a list with an entry for each sample"
    if engine.seeded:
        return "the workload draws random numbers"
    if engine.has_scratch_memory:
        return "a run writes into buffers of the model"
    replayer = engine.replayers[i]
    return engine.fallback_reasons[i] if replayer is None else host_read(replayer.tape)


def _shake(engine: GraphedEngine, i: int, graph: BatchGraph) -> None:
    """Check that the graph and a plain run give the same bits when all parameters and inputs are corrupted.

    Milder corruptions are used if the run fails under strong ones.
    """
    swaps = [f for f in input_element_swap_faults(engine.batches[i], i) if f.site in engine.inputs[i]]
    for strongly in (True, False):
        try:
            same = gives_plain_bits(engine, i, graph, [*perturbing_faults(engine.parameters, strongly), *swaps])
        except UnsilentError:
            raise
        except Exception:  # noqa: S112 - the run takes another way then, or fails
            continue
        if not same:
            raise NotGraphed("with corrupted parameters the graph gives other bits than a plain run")
        return
    raise NotGraphed("every run with corrupted parameters fails")


def gives_plain_bits(engine: GraphedEngine, i: int, graph: BatchGraph, faults: Sequence[Fault]) -> bool:
    """Whether the graph of batch ``i`` and a plain run give the same bits under these faults."""
    with engine.inject_parameter_faults(faults):
        plain = engine.output_without_tape(i, faults)
    staged = engine.staged([faults], i)
    graph.clear()
    with staged.applied(0):
        graph.evaluate()
    staged.check()
    if graph.outcomes()[0] is None:
        raise Diverged("a number that the run reads back is another one")
    return same_outputs(plain, graph.output)


def _measure(engine: GraphedEngine, i: int, graph: BatchGraph) -> None:
    """Measure the seconds of an evaluation by the graph, of a plain evaluation, and of the verdict alone."""
    outputs: list[Any] = []

    def run() -> None:
        outputs[:] = [engine.output_without_tape(i, ())]

    def verdict() -> None:
        classify(engine.judge, engine.golden[i], outputs[0], engine.batches[i], engine.samples[i])

    now, seconds = clock(engine.placed_on), []
    graph.clear()
    for evaluate in (graph.evaluate, run, verdict):
        evaluate()
        begun = now()
        for _ in range(TIMED):
            evaluate()
        seconds.append((now() - begun) / TIMED)
    graph.seconds, run_seconds, graph.verdict_seconds = seconds
    graph.plain_seconds = run_seconds + graph.verdict_seconds
