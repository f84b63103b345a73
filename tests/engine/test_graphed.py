"""Trials by graphs against the plain engine: the same outcomes and severities, and no bit left behind.

A CUDA graph repeats what a call has launched, without Python. Here operations that were noted are repeated in its place on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import unsilent
from unsilent.basics.errors import InjectionError, ProcessUnusable
from unsilent.basics.nested import tensors_in
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.store import open_store
from unsilent.engine.cached import CachedEngine
from unsilent.engine.graphed import GraphCosts, GraphedEngine, is_cheapest
from unsilent.engine.graphs.batch_graph import BatchGraph, host_read
from unsilent.engine.graphs.staged_faults import GoldenWords, StagedFaults, edits_of_trial
from unsilent.engine.plain import PlainEngine, TrialOutcome
from unsilent.engine.recorder import record
from unsilent.faults import Fault, fault_model
from unsilent.outcomes import judge
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.classify import classify
from unsilent.sites.inputs import named_inputs
from unsilent.sites.operands import gives_views
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.words import facts
from unsilent.workloads import load

FAULTS = ("bitflip", "bitflip:bits=exponent", "bitflip:bits=sign", "bitflip:count=5", "zero:run=3", "bitflip:rate=0.02")


class Operations(TorchDispatchMode):
    """Notes every operation with the tensors that it was given and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, args, kwargs or {}, result))
        return result


def replayed(function: Any) -> Any:
    """What a CUDA graph does, on a CPU: the same operations again on the same memory, and nothing of Python in between."""
    with torch.no_grad(), Operations() as noted:
        output = function()

    def replay() -> Any:
        with torch.no_grad():
            for func, args, kwargs, result in noted.seen:
                again = func(*args, **kwargs)
                written = func._schema.is_mutable or gives_views(func)
                for old, new in () if written else zip(tensors_in(result), tensors_in(again), strict=True):
                    old.copy_(new)
        return output

    return replay


class Replayed(GraphedEngine):
    """Repeats operations where a CUDA device would launch a graph."""

    capture = staticmethod(replayed)


@pytest.fixture(autouse=True)
def _always_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsilent.engine.graphed.is_cheapest", lambda *_: True)
    monkeypatch.setattr(GraphCosts, "trials_on_rows", lambda *_: 0)


def numbers(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=i) * 0.4)
    return module.eval()


class Images(nn.Module):
    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 5)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Words(nn.Module):
    """Token ids in, scores for each position out, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embedding(ids)
        return self.last(torch.tanh(self.mix(y)).cumsum(1))


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 1)

    def forward(self, numbers: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"logits": self.last(numbers) * weight.unsqueeze(1)}


IMAGES = [numbers(4, 3, 6, 6), numbers(3, 3, 6, 6, seed=5)]
IDS = [torch.arange(12).reshape(3, 4) % 11, torch.arange(8).reshape(2, 4) % 11]
SCORES = [{"numbers": numbers(5, 3), "weight": numbers(5)}]
CASES = {
    "top1": (Images, IMAGES, "top1", None),
    "topk": (Images, IMAGES, "topk:k=2", None),
    "channels last": (lambda: Images(True), IMAGES, "top1", None),
    "bfloat16": (Images, IMAGES, "top1", "bfloat16"),
    "float64": (Images, IMAGES, "topk:k=3", "float64"),
    "next token": (Words, IDS, "next-token", None),
    "sequence": (Words, IDS, "exact-sequence", None),
    "segmentation": (Map, IMAGES, "segmentation:iou=0.9", None),
    "threshold": (Score, SCORES, "threshold:at=0.0,tolerance=0.01", None),
    "sigmoid": (Score, SCORES, "threshold:logits=1", None),
}


def engines(case: str) -> tuple[Replayed, PlainEngine]:
    make, batches, name, dtype = CASES[case]
    result = []
    for kind in (Replayed, PlainEngine):
        workload = unsilent.Workload(seeded(make()), batches, judge=name)
        result.append(kind(workload, dtype=dtype))
    graphed, plain = result
    assert isinstance(graphed, Replayed)
    assert not graphed.graph_refusals, graphed.graph_refusals
    return graphed, plain


def draws(engine: PlainEngine, address: str, text: str, count: int) -> list[tuple[Fault, ...]]:
    regions = engine.select_regions([address])
    if address.startswith("param"):
        return [fault_model(text).draw(regions, np.random.default_rng(k)) for k in range(count)]
    by_step: dict[Any, list[Any]] = {}
    for region in regions:
        by_step.setdefault(region.step, []).append(region)
    steps = list(by_step)
    return [fault_model(text).draw(by_step[steps[k % len(steps)]], np.random.default_rng(k)) for k in range(count)]


def assert_same(ours: TrialOutcome, theirs: TrialOutcome) -> None:
    np.testing.assert_array_equal(ours.codes, theirs.codes)
    for a, b in zip(ours.batches, theirs.batches, strict=True):
        np.testing.assert_array_equal(a.severity, b.severity)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("text", FAULTS)
def test_graphs_give_the_rows_of_the_plain_engine(case: str, text: str) -> None:
    graphed, plain = engines(case)
    many = draws(plain, "param:*", text, 40)
    before = graphed.parameters.hash()
    ours = list(graphed.trials(many))
    assert [outcome.graphed for outcome in ours] == [bool(faults) for faults in many]
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))
    assert graphed.parameters.hash() == before
    graphed.check_intact()


@pytest.mark.parametrize("case", ["top1", "segmentation", "threshold", "bfloat16"])
def test_faults_in_inputs_are_those_of_the_plain_engine(case: str) -> None:
    graphed, plain = engines(case)
    many = draws(plain, "input:*", "bitflip:bits=exponent", 30)
    ours = list(graphed.trials(many))
    assert all(outcome.graphed for outcome in ours)
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))
    graphed.check_intact()


def test_trials_of_some_samples_count_those_alone() -> None:
    graphed, plain = engines("top1")
    rng = np.random.default_rng(0)
    many, samples = [], []
    for (fault,) in draws(plain, "param:*", "bitflip:bits=exponent", 40):
        step = int(rng.integers(2))
        many.append((replace(fault, step=step),))
        samples.append(np.sort(rng.choice(plain.samples[step], 2, replace=False)))
    for faults, own, outcome in zip(many, samples, graphed.trials(many, samples), strict=True):
        assert outcome.graphed
        assert_same(outcome, plain.trial(faults, own))
        assert (outcome.codes != Outcome.SPARED).sum() == 2


def test_what_graphs_cannot_do_goes_another_way_in_its_place() -> None:
    graphed, plain = engines("sequence")
    param, ids = draws(plain, "param:*", "bitflip", 12), draws(plain, "input:*", "bitflip:bits=0", 12)
    many = [faults for pair in zip(param, ids, strict=True) for faults in pair]
    ours = list(graphed.trials(many))
    assert [outcome.graphed for outcome in ours] == [True, False] * 12, "token ids are indices"
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))


@pytest.mark.parametrize("case", ["top1", "channels last", "bfloat16", "next token", "segmentation", "sigmoid"])
@pytest.mark.parametrize("text", ["bitflip", "bitflip:bits=exponent,count=3", "zero:run=4", "stuck", "random"])
def test_faults_in_operations_are_those_of_the_plain_engine(case: str, text: str) -> None:
    graphed, plain = engines(case)
    many = draws(plain, "op:*", text, 40)
    ours = list(graphed.trials(many))
    floats = [all(f.dtype not in ("int64", "bool") for f in faults) for faults in many]
    assert [outcome.graphed for outcome in ours] == floats
    assert any(floats)
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))
    graphed.check_intact()


class Ways(Images):
    """Operations in place, on views, and of one module twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[:, :3].mul_(0.5).relu_()
        y += y.flip(1)
        return self.last(self.norm(y.contiguous()).mean((2, 3))) + self.last(y.amax((2, 3)))


def test_each_operation_of_a_run_is_a_point() -> None:
    """Two faults of one operation, too, in their order; a fault that copies a word goes another way."""
    graphed, plain = (kind(unsilent.Workload(seeded(Ways()), IMAGES, judge="top1")) for kind in (Replayed, PlainEngine))
    regions = [r for r in plain.select_regions(["op:*"]) if r.dtype == "float32"]
    assert len({r.site for r in regions}) >= 8
    model, many = fault_model("bitflip:bits=exponent"), []
    for k, region in enumerate(regions):
        faults = model.draw([region], np.random.default_rng(k))
        more = model.draw([region], np.random.default_rng(k + 1000))
        many += [faults, (*faults, *more), (*faults, replace(more[0], operation="set", elements=faults[0].elements))]
        many.append((replace(many[-1][-1]), faults[0]))
    ours = list(graphed.trials(many))
    assert all(outcome.graphed for outcome in ours)
    from_tape = CachedEngine(plain.workload).trials(many)
    for faults, outcome, other in zip(many, ours, from_tape, strict=True):
        assert_same(outcome, plain.trial(faults))
        assert_same(other, plain.trial(faults))
    copied = replace(many[0][0], operation="copy_from", operands=many[0][0].elements + 1)
    (outcome,) = graphed.trials([(copied,)])
    assert not outcome.graphed
    assert_same(outcome, plain.trial((copied,)))


def test_more_trials_than_are_collected_at_once() -> None:
    graphed, plain = engines("top1")
    many = draws(plain, "param:*", "bitflip:bits=exponent", 150)
    assert len(many) > 2 * graphed.graphs[0].capacity
    for faults, outcome in zip(many, graphed.trials(many), strict=True):
        assert_same(outcome, plain.trial(faults))


def test_a_write_between_two_trials_is_seen() -> None:
    """Whoever is given an outcome may write into the model: what was evaluated beforehand does not count."""
    graphed, plain = engines("top1")
    many = draws(plain, "param:*", "bitflip:bits=exponent", 6)
    for i, (faults, outcome) in enumerate(zip(many, graphed.trials(many), strict=True)):
        assert_same(outcome, plain.trial(faults))
        if i == 2:
            for engine in (graphed, plain):
                with torch.no_grad():
                    engine.model.last.weight.mul_(1.5)
            plain = PlainEngine(plain.workload)


def test_a_graph_that_lies_is_found_by_the_proof() -> None:
    graphed, plain = engines("top1")
    many = draws(plain, "param:conv.weight", "bitflip:bits=30", 8)
    assert all(outcome.graphed for outcome in graphed.trials(many))
    golden = graphed.golden[0]
    for graph in graphed.graphs.values():
        graph._call = lambda: golden
    with pytest.raises(unsilent.basics.errors.UnsilentError, match="CUDA graph returned other bits"):
        graphed.check_intact()


class Reading(Images):
    """Python reads numbers and takes another way."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if (self.last.bias < 0.1).sum().item() > 2:
            y = y * 2
        return y + 1 if bool(y.isfinite().all()) else y.nan_to_num()


def test_a_run_that_may_take_another_way_is_made() -> None:
    """Numbers that Python reads are compared on the device; only where one differs the trial runs plainly."""
    graphed, plain = (
        kind(unsilent.Workload(seeded(Reading()), IMAGES, judge="top1")) for kind in (Replayed, PlainEngine)
    )
    assert len(graphed.graphs) == len(IMAGES)
    many = draws(plain, "param:*", "bitflip:bits=exponent", 60) + draws(
        plain, "param:last.bias", "bitflip:bits=sign", 9
    )
    ours = list(graphed.trials(many))
    assert 9 < sum(outcome.graphed for outcome in ours) < len(many)
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))
    graphed.check_intact()


class Listing(Images):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(x.sum((1, 2, 3)).tolist())


class Choosing(Images):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + y[y > 0].numel()


class Noisy(Images):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.rand_like(y)


@pytest.mark.parametrize(("model", "why"), [(Listing, "reads a result back"), (Choosing, "depends on data")])
def test_a_run_that_waits_for_the_device_is_not_captured(model: type[nn.Module], why: str) -> None:
    made = seeded(model())
    with torch.no_grad():
        tape = record(lambda: made(IMAGES[0]), made, named_inputs(IMAGES[0]))
    assert why in host_read(tape)
    engine = Replayed(unsilent.Workload(made, IMAGES, judge="top1"))
    assert not engine.graphs
    assert why in " ".join(engine.notes)


@pytest.mark.parametrize(("model", "name", "why"), [
    (Noisy, "top1", "draws random numbers"),
    (Images, "tolerance", "whole outputs"),
])  # fmt: skip
def test_a_workload_that_graphs_do_not_fit_says_why(model: type[nn.Module], name: str, why: str) -> None:
    engine = Replayed(unsilent.Workload(seeded(model()), IMAGES, judge=name))
    assert not engine.graphs
    assert why in " ".join(engine.notes)
    (outcome,) = engine.trials(draws(engine, "param:*", "bitflip", 1))
    assert not outcome.graphed


def test_faults_of_one_tensor_are_applied_in_order() -> None:
    """Flips that overlap, and a copy of a word that an earlier fault has changed."""
    graphed, plain = engines("top1")
    memory = graphed.parameters.sites["last.weight"].memory
    shape, site = memory.shape, "param:last.weight"

    def fault(elements: Sequence[int], operation: str, operands: Any) -> Fault:
        return Fault(site, "float32", shape, np.array(elements, np.int64), operation, operands)

    words = np.array([0x3F800000, 0x40000000], np.uint32)
    faults = [
        fault([1, 3], "set", words),
        fault([3, 5], "set", words),
        fault([7], "copy_from", np.array([3], np.int64)),
        fault([8], "copy_from", np.array([0], np.int64)),
    ]
    pairs = [(memory, one) for one in faults]
    staged = StagedFaults([edits_of_trial(pairs, GoldenWords([pairs]))], torch.device("cpu"))
    every = np.arange(np.prod(shape))
    golden = memory.read(every)
    with graphed.parameters.inject(faults):
        wanted = memory.read(every)
    with staged.applied(0):
        np.testing.assert_array_equal(memory.read(every), wanted)
    np.testing.assert_array_equal(memory.read(every), golden)
    staged.check()
    assert_same(next(iter(graphed.trials([faults]))), plain.trial(faults))


def test_a_word_that_another_changes_meanwhile_is_an_error() -> None:
    graphed, plain = engines("top1")
    (faults,) = draws(plain, "param:last.weight", "bitflip", 1)
    memory = graphed.parameters.memory(faults[0])
    pairs = [(memory, faults[0])]
    staged = StagedFaults([edits_of_trial(pairs, GoldenWords([pairs]))], torch.device("cpu"))
    with staged.applied(0):
        memory.write(faults[0].elements, memory.read(faults[0].elements) ^ np.uint32(2))
    with pytest.raises(InjectionError, match="left other bits"):
        staged.check()


@pytest.mark.parametrize("name", ["top1", "topk:k=3", "next-token", "exact-sequence", "threshold", "segmentation"])
def test_verdicts_of_many_trials_are_those_of_each(name: str) -> None:
    """Collected on the device and judged together, against `classify` of each output."""
    shape = {"next-token": (5, 3, 7), "exact-sequence": (5, 3, 7), "threshold": (5, 1), "segmentation": (5, 3, 4, 4)}
    made, outputs = judge(name), []
    golden = numbers(*shape.get(name, (5, 7)))
    for k in range(30):
        output = golden.clone()
        flat = output.view(-1)
        at = numbers(4, seed=k).abs().mul(1000).long() % flat.numel()
        flat[at] = torch.tensor([float("nan"), float("inf"), 3.0, -0.0])[torch.arange(4) % (1 + k % 4)]
        outputs.append(output)
    given = iter([golden, golden, *outputs])
    graph = BatchGraph(lambda: next(given), golden, made, 5, lambda function: function)
    for _ in range(31):
        graph.evaluate()
    for outcome, output in zip(graph.outcomes(), [golden, *outputs], strict=True):
        expected = classify(made, golden, output, None, 5)
        np.testing.assert_array_equal(outcome.codes, expected.codes)
        np.testing.assert_array_equal(outcome.severity, expected.severity)


class Heads(nn.Module):
    """A list of dictionaries, as detectors return for each image; here for each of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(4))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"logits": head(x)} for head in self.heads]


def test_an_entry_for_each_sample_is_no_decision_row() -> None:
    workload = unsilent.Workload(seeded(Heads()), [numbers(4, 3)], judge="top1")
    graphed, plain = Replayed(workload), PlainEngine(workload)
    assert "an entry for each sample" in graphed.graph_refusals[0]
    many = draws(plain, "param:*", "bitflip:bits=exponent", 20)
    for faults, outcome in zip(many, graphed.trials(many), strict=True):
        assert_same(outcome, plain.trial(faults))


def test_inputs_that_lie_several_times_in_one_memory_go_another_way() -> None:
    workload = unsilent.Workload(seeded(nn.Linear(6, 3)), [numbers(1, 6).expand(4, 6)], judge="top1")
    graphed, plain = Replayed(workload), PlainEngine(workload)
    many = draws(plain, "param:*", "bitflip:bits=exponent", 20) + draws(plain, "input:*", "bitflip", 5)
    ours = list(graphed.trials(many))
    assert [outcome.graphed for outcome in ours] == [True] * 20 + [False] * 5
    for faults, outcome in zip(many, ours, strict=True):
        assert_same(outcome, plain.trial(faults))


def test_a_parameter_that_was_given_other_memory_is_not_read_by_graphs() -> None:
    graphed = graphs_of(Images)
    many = draws(graphed, "param:conv.weight", "bitflip", 3)
    graphed.model.last.weight.data = graphed.model.last.weight.data.clone()
    assert not any(outcome.graphed for outcome in graphed.trials(many))
    with pytest.raises(InjectionError, match="memory was replaced"):
        list(graphed.trials(draws(graphed, "param:last.weight", "bitflip", 3)))


def test_the_cheapest_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    graph = graphs_of(Images).graphs[0]
    graph.seconds, graph.plain_seconds = 1.0, 2.0
    assert is_cheapest(graph, from_tape=1.5)
    assert not is_cheapest(graph, from_tape=0.9), "a fault near the output"
    graph.plain_seconds = 1.0
    assert not is_cheapest(graph, from_tape=1.5), "a plain run of the same cost is simpler"


def graphs_of(model: type[nn.Module]) -> Replayed:
    return Replayed(unsilent.Workload(seeded(model()), IMAGES, judge="top1"))


def test_rows_are_tried_before_graphs_of_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    costs = GraphCosts()
    for _ in range(2):
        assert costs.trials_on_rows(1.0, 500) == 128
        costs.add_on_rows(seconds=64.0, trials=128)
    assert costs.trials_on_rows(0.4, 500) == 0
    assert costs.trials_on_rows(0.6, 500) == 500
    costs.add(0.3 * 64, trials=64)
    assert costs.trial_seconds == pytest.approx(0.3)


def test_a_device_that_has_stopped_is_not_blamed_on_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed = graphs_of(Images)
    many = draws(graphed, "param:*", "bitflip", 5)

    def stopped(*_: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(BatchGraph, "outcomes", stopped)
    monkeypatch.setattr("unsilent.engine.graphed.clock", stopped)
    with pytest.raises(ProcessUnusable, match="device-side assert") as caught:
        list(graphed.trials(many))
    assert not caught.value.caused_by_trial


@pytest.mark.parametrize("at", ["param:*", "input:*", "op:*"])
def test_campaigns_have_the_same_canonical_export(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = []
    for kind in (Replayed, PlainEngine):
        monkeypatch.setattr("unsilent.studies.pvf.runner.make_engine", engine_maker(kind))
        workload = unsilent.Workload(seeded(Images()), IMAGES, judge="top1")
        result = unsilent.pvf(workload, at=at, trials=30, samples="all", store=tmp_path / f"{kind.__name__}.sqlite")
        assert (result.graphed_trials == result.trials_done) == (kind is Replayed)
        text = " ".join(f"{name} {value}" for name, value in facts(result))
        assert ("by CUDA graphs 100 % of trials" in text) == (kind is Replayed)
        with open_store(result.store, PVF) as store:
            exports.append(list(canonical_lines(store)))
    assert exports[0] == exports[1]
    assert len(exports[0]) > 30


def engine_maker(kind: type[PlainEngine]) -> Any:
    def make(workload: Any, **options: Any) -> PlainEngine:
        return kind(workload, **{name: options[name] for name in ("device", "dtype", "judge")})

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "digits-cnn",
        "digits-vit",
        "digits-efficientnet",
        "digits-mobilenet",
        "chargpt",
        "llama-chars",
        "dlrm",
        "scenes-unet",
    ],
)
@pytest.mark.parametrize("at", ["param:*", "op:*", "input:*"])
def test_built_in_workloads_have_graphs(name: str, at: str) -> None:
    workload = load(name, {})
    graphed, plain = Replayed(workload), PlainEngine(workload)
    assert len(graphed.graphs) == len(graphed.batches), graphed.graph_refusals
    many = draws(plain, at, "bitflip", 30)
    for faults, outcome in zip(many, graphed.trials(many), strict=True):
        assert outcome.graphed or faults[0].dtype == "int64"
        assert_same(outcome, plain.trial(faults))
    graphed.check_intact()
