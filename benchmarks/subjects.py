"""What is benchmarked: models with a batch, as workloads; the faults drawn for them; the peers that can run them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

import unsilent
from benchmarks import peers
from benchmarks.models import calibrated, gpt
from benchmarks.timing import Strata, clock
from unsilent.engine.cached import CachedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.faults import Fault, Region, fault_model
from unsilent.workloads.base import InferenceWorkload

Faults = tuple[Fault, ...]


@dataclass(frozen=True)
class Subject:
    """A model and one batch. ``times``: so many faults are drawn a round, more where they are cheap."""

    name: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    times: int
    middle: str
    """A layer in the middle, for MRFI."""
    judge: str = "top1"

    def workload(self) -> InferenceWorkload:
        """A fresh workload."""
        model, x = self.make()
        return unsilent.Workload(model, [x], judge=self.judge, name=self.name)


SUBJECTS = {
    "cifar": Subject("ResNet-18, CIFAR stem, batch 64", lambda: calibrated("cifar"), 2, "layers.2.0.conv1"),
    "light": Subject("ResNet-18, light stem, batch 64", lambda: calibrated("light"), 12, "layers.2.0.conv1"),
    "gpt": Subject("GPT, 6 layers of width 128, batch 16 of 32 tokens", gpt, 12, "blocks.3.mlp.0", "next-token"),
}
ZOO = ("digits-cnn", "digits-vit", "chargpt", "dlrm")


@dataclass(frozen=True)
class Law:
    """Where faults fall."""

    title: str
    at: tuple[str, ...]
    law: str
    neurons: bool = False


LAWS = (
    Law("weights, uniform over elements", ("param:*.weight",), "per-element"),
    Law("weights, uniform over layers", ("param:*.weight",), "per-tensor"),
    Law("neurons, uniform over outputs of convolutions and linear layers", ("op:*",), "per-element", neurons=True),
)
FEWEST = 3
"""Faults drawn in every tensor."""
LAYER_OPERATIONS = ("convolution", "addmm", "mm", "linear", "bmm", "_convolution", "mkldnn_convolution")


def regions(engine: PlainEngine, law: Law) -> tuple[Any, ...]:
    """What a law draws from."""
    found = engine.select_regions(law.at)
    if law.neurons:
        found = tuple(r for r in found if r.site.endswith("/fwd/out") and _operation(r.site) in LAYER_OPERATIONS)
    return found


def _operation(site: str) -> str:
    return site.rpartition("#")[2].partition(".")[0]


def draw(places: Sequence[Any], count: int, law: str = "per-element", seed: int = 0) -> list[Faults]:
    """Single bit flips, each a trial's list of faults."""
    model, rng = fault_model("bitflip"), np.random.default_rng(seed)
    return [model.draw(tuple(places), rng, law) for _ in range(count)]


def draw_by_tensor(places: Sequence[Region], count: int, law: str) -> tuple[list[Faults], Strata]:
    """About ``count`` faults under a law, at least `FEWEST` in every tensor, shuffled.

    A trial's cost is a matter of its tensor, and few elements lie in the dearest ones: with faults drawn from all elements
    the mean cost would hang on whether three or five of them fall there.
    """
    weights = np.array([r.numel if law == "per-element" else 1 for r in places], dtype=np.float64)
    probability = weights / weights.sum()
    counts = np.maximum(FEWEST, np.round(probability * count)).astype(np.int64)
    of = np.random.default_rng(1).permutation(np.repeat(np.arange(len(places)), counts))
    drawn = [iter(draw((r,), n, seed=i)) for i, (r, n) in enumerate(zip(places, counts.tolist(), strict=True))]
    return [next(drawn[i]) for i in of], Strata(of, probability)


def engines(workload: InferenceWorkload, device: str = "cpu") -> tuple[PlainEngine, CachedEngine]:
    """Both engines on the same model."""
    return PlainEngine(workload, device=device), CachedEngine(workload, device=device)


def setup_seconds(workload: InferenceWorkload, device: str, repeats: int = 3) -> float:
    """What building the fast engine costs more than building the plain one: recording, checks, calibration."""
    now = clock(device)

    def seconds(kind: type[PlainEngine]) -> float:
        start = now()
        kind(workload, device=device)
        return now() - start

    return statistics.median(seconds(CachedEngine) - seconds(PlainEngine) for _ in range(repeats))


def peer_methods(subject: Subject, law: Law) -> dict[str, Callable[[Any], object]]:
    """Trials of the peers, which draw for themselves; each has its own model."""
    if not peers.available():
        return {}
    weight = {
        "PyTorchFI 0.6.0": lambda m, x: peers.pytorchfi(m, x, peers.LAYERS),
        "MRFI 2.1.0, one layer": lambda m, x: peers.mrfi(m, x, subject.middle),
        "MRFI 2.1.0, all layers": lambda m, x: peers.mrfi(m, x, "all"),
    }
    neuron = {
        "PyTorchFI 0.6.0": peers.pytorchfi_neuron,
        "MRFI 2.1.0, one layer": lambda m, x: peers.mrfi_neuron(m, x, subject.middle),
        "MRFI 2.1.0, all layers": lambda m, x: peers.mrfi_neuron(m, x, "all"),
    }
    return {name: ignoring(make(*subject.make())) for name, make in (neuron if law.neurons else weight).items()}


def ignoring(trial: Callable[[], object]) -> Callable[[Any], object]:
    """A trial that draws for itself, as a method that is given a fault."""
    return lambda faults: trial()
