"""A detector that applies a rule on activations to the layers of a model, in a live call or a recorded one.

The rule learns from two thirds of the clean samples. The others standardise its scores; if there are several batches, they come
from other batches. A layer is judged if it runs in each clean call with one row per sample. Layers with the same number of
readings are scored in one array operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.detectors.activations.rule import CHECKSUM, SITES, ActivationRule, Floats
from unsilent.detectors.activations.rules import make_activation_rule
from unsilent.protection.layer_readers import ChosenLayers, LayerCosts, LayerReaders
from unsilent.protection.layer_watch import LATER, LayerRun, LayerWatch
from unsilent.protection.recorded_pass import RecordedPass, check_output
from unsilent.sites.modules import named_tensors
from unsilent.workloads.base import call_model
from unsilent.workloads.batch_samples import count_samples

LEARNING_SHARE = 2 / 3
LEAST_SAMPLES = 20
"""Least number of clean samples that a rule needs."""
Readings = Mapping[str, Floats]
"""Readings of one forward pass: float64[samples, numbers] by name of the layer's run."""


class ActivationDetector:
    """Detects corrupted answers by a rule on activations.

    Args:
        text: Text of the rule: ``dr-dna:bins=64``.
        layers: Globs over names of modules; by default all layers that the rule can read within its cost (`LayerCosts`).
        seed: Seed of the choice of sites.

    Attributes:
        layers: Arrays that the rule has learnt for each run of a layer, in the order of the runs; empty before `calibrate`.
        ranges: Smallest and largest clean value of each run.
        widths: Number of values that each run gives.
    """

    needs_layers = True

    def __init__(self, text: str, layers: Iterable[str] = (), seed: int = 0) -> None:
        self.name, self.rule = text, make_activation_rule(text)
        self.globs, self.seed = tuple(layers), seed
        self.layers: dict[str, Mapping[str, Floats]] = {}
        self.ranges: dict[str, tuple[float, float]] = {}
        self.widths: dict[str, int] = {}
        self.readers = LayerReaders(self.rule.reads, seed)
        self._scores = StackedLayers(self.rule, {})

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays learnt for each layer, and of summed weights."""
        return self.readers.nbytes + sum(array.nbytes for layer in self.layers.values() for array in layer.values())

    @property
    def reads_functions(self) -> bool:
        """Whether products in functions such as `torch.matmul` are read as well."""
        return self.rule.reads == CHECKSUM

    def calibrate(
        self, model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any] = call_model
    ) -> None:
        """Learn the activations of each layer from clean samples."""
        self.readers = LayerReaders(self.rule.reads, self.seed)
        batches = list(batches)
        globs = self.globs
        if not globs and self.rule.reads == SITES and batches:
            chosen = _choose_layers(model, batches[0], run)
            self.readers.stride = chosen.stride
            globs = tuple(escape(name) for name in chosen.modules)
        calls, self.ranges = self._clean_readings(model, batches, run, globs)
        self.learn([reading for call in calls for reading in call])

    def learn(self, readings: Sequence[Readings]) -> None:
        """Learn from readings of clean forward passes."""
        first = list(dict.fromkeys(name for reading in readings for name in reading))
        kinds: dict[bool, list[Readings]] = {}
        for later in (False, True):
            kinds[later] = [reading for reading in readings if any(name.endswith(LATER) == later for name in reading)]
        self.layers, self.widths = {}, {}
        for name in first:
            parts = [reading.get(name) for reading in kinds[name.endswith(LATER)]]
            if any(part is None for part in parts):
                continue
            learnt, held_out = _split_samples([part for part in parts if part is not None])
            if len(learnt) < LEAST_SAMPLES * LEARNING_SHARE:
                raise UsageError(
                    f"{self.name} was given {len(learnt) + len(held_out):,} clean samples; expected {LEAST_SAMPLES} or more"
                )
            for values in (learnt, held_out):
                if not np.isfinite(values).all():
                    raise not_finite_error(name)
            self.layers[name] = self.rule.fit(learnt, held_out)
            self.widths[name] = learnt.shape[1]
        if not self.layers:
            raise UsageError(
                f"{self.name} can read no layer of the model; expected layers that return a tensor with samples first"
            )
        self.ranges = {name: self.ranges[name] for name in self.layers}
        self._scores = StackedLayers(self.rule, self.layers)

    def know(
        self,
        layers: Mapping[str, Mapping[str, Floats]],
        ranges: Mapping[str, tuple[float, float]],
        widths: Mapping[str, int],
        stride: int,
        model: nn.Module,
    ) -> None:
        """Restore what was learnt about the layers of a model, for example from a file.

        The model must have the right weights.
        """
        self.layers, self.ranges, self.widths = dict(layers), dict(ranges), dict(widths)
        self.readers.stride = stride
        self.readers.prepare(model, layers)
        self._scores = StackedLayers(self.rule, self.layers)

    def margins(self, recorded: RecordedPass) -> Floats:
        """Margins of the layers of all forward passes, stacked as float64[layers, samples]."""
        passes: dict[int, dict[str, Floats]] = {}
        for layer in recorded.layers:
            if layer.name in self.layers and len(layer.output) == recorded.samples:
                key = self.readers.key(layer)
                if key not in recorded.readings:
                    with torch.no_grad():
                        recorded.readings[key] = self.readers.read(layer).double().numpy(force=True)
                passes.setdefault(layer.number, {})[layer.name] = recorded.readings[key]
        if not passes:
            return np.zeros((1, recorded.samples))
        return np.concatenate([self.margins_of(reading) for reading in passes.values()])

    def margins_of(self, readings: Readings) -> Floats:
        """Margins of the layers in one forward pass, float64[layers, samples]."""
        return self.rule.cumulate(self._scores.scores(readings))

    def scores(self, readings: Readings) -> Floats:
        """Scores of the layers in these readings, float64[layers, samples]."""
        return self._scores.scores(readings)

    def read(self, layer: LayerRun, memory: Tensor | None = None) -> Tensor:
        """The numbers that the rule reads of a layer, float32[samples, numbers] on its device.

        They are written to ``memory`` if it is given.
        """
        return self.readers.read(layer, memory)

    def _clean_readings(
        self, model: nn.Module, batches: Iterable[Any], run: Callable[[nn.Module, Any], Any], globs: Sequence[str]
    ) -> tuple[list[list[Readings]], dict[str, tuple[float, float]]]:
        """Readings of all forward passes in each call, and the range of values of each layer."""
        calls: list[list[Readings]] = []
        ranges: dict[str, tuple[float, float]] = {}
        samples, passes = 0, dict[int, dict[str, Floats]]()

        def note(layer: LayerRun) -> None:
            if len(layer.output) != samples or not self.readers.can_read(layer):
                return
            reading = self.readers.read(layer).double().numpy(force=True)
            passes.setdefault(layer.number, {})[layer.name] = reading
            low, high = (float(limit) for limit in layer.output.aminmax())
            known = ranges.get(layer.name, (low, high))
            ranges[layer.name] = min(low, known[0]), max(high, known[1])

        with LayerWatch(model, globs or ("*",), functions=self.reads_functions) as watch, torch.no_grad():
            for batch in batches:
                samples, passes = count_samples(batch), {}
                with watch.listening(note):
                    check_output(run(model, batch), batch)
                calls.append(list(passes.values()))
        return calls, ranges


def not_finite_error(layer: str) -> UsageError:
    """The error for NaN or infinity in a clean sample."""
    return UsageError(f"layer {layer} gives values that are not finite for a clean sample; leave such samples out")


def _choose_layers(model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any]) -> ChosenLayers:
    """The layers that are read by default, chosen by their costs."""
    costs = LayerCosts()
    with LayerWatch(model) as watch, torch.no_grad(), watch.listening(costs.add):
        run(model, batch)
    weights = named_tensors(model).values()
    return costs.choose(sum(t.numel() * t.element_size() for t in weights))


class StackedLayers:
    """Arrays that a rule has learnt, stacked for layers with equally many numbers.

    Args:
        layers: Arrays of layers by name, in their order.
    """

    def __init__(self, rule: ActivationRule, layers: Mapping[str, Mapping[str, Floats]]) -> None:
        self._rule, self._layers = rule, layers
        self._stacks: dict[tuple[str, ...], dict[str, Floats]] = {}

    def scores(self, readings: Readings) -> Floats:
        """Scores of the layers in the readings, in the same order, float64[layers, samples]."""
        groups: dict[int, list[str]] = {}
        for name, reading in readings.items():
            groups.setdefault(reading.shape[1], []).append(name)
        scores: dict[str, Floats] = {}
        for names in groups.values():
            stacked = self._rule.score(self._stack(tuple(names)), np.stack([readings[name] for name in names]))
            scores.update(zip(names, stacked, strict=True))
        return np.array([scores[name] for name in readings])

    def _stack(self, names: tuple[str, ...]) -> dict[str, Floats]:
        if names not in self._stacks:
            known = [self._layers[name] for name in names]
            self._stacks[names] = {key: np.stack([arrays[key] for arrays in known]) for key in known[0]}
        return self._stacks[names]


def _split_samples(parts: Sequence[Floats]) -> tuple[Floats, Floats]:
    """The samples to learn from, and the samples to standardise the scores.

    They come from different batches if there are several.
    """
    ends = np.cumsum([len(part) for part in parts])
    wanted = ends[-1] * LEARNING_SHARE
    place = int(np.abs(ends[:-1] - wanted).argmin()) + 1 if len(parts) > 1 else 0
    if place and 0.4 * ends[-1] <= ends[place - 1] <= 0.9 * ends[-1]:
        return np.concatenate(parts[:place]), np.concatenate(parts[place:])
    every = np.concatenate(parts)
    return every[: round(wanted)], every[round(wanted) :]
