"""What a rule on activations knows of the layers of one model, and the threshold of its margins; kept in a file.

The samples are divided in three: from the first the rule learns, by the second its scores are standardised, the third gives the
threshold. No sample is in two of them. The file is in safetensors format, with everything but arrays as JSON in its header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from unsilent.detectors.activations.rule import ActivationRule, Floats, margins
from unsilent.detectors.activations.rules import make_activation_rule
from unsilent.engine.digests import tensors_hasher
from unsilent.errors import UsageError
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.sites.modules import named_tensors
from unsilent.statistics.conformal import conformal_threshold, samples_needed
from unsilent.workloads.base import call_model

FORMAT = "unsilent/activation-profile/1"
PARTS = (0.4, 0.2, 0.4)
"""Shares of the samples that the rule learns from, that standardise it, and that give the threshold."""


@dataclass(frozen=True, eq=False)
class Profile:
    """What is known of a model.

    Attributes:
        rule: Text of the rule.
        rate: Of false alarms, per sample and pass.
        seed: Of the choice of sites.
        samples: That the threshold was taken of.
        model: Fingerprint of the weights.
        threshold: A margin above it is an alarm.
        layers: Runs of layers in their order, and what the rule knows of each.
        ranges: Smallest and largest clean value of each.
    """

    rule: str
    rate: float
    seed: int
    samples: int
    model: str
    threshold: float
    layers: Mapping[str, Mapping[str, Floats]]
    ranges: Mapping[str, tuple[float, float]]

    def make_rule(self) -> ActivationRule:
        """The rule."""
        return make_activation_rule(self.rule)

    def check_model(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for a model with other weights."""
        if (now := model_fingerprint(model)) != self.model:
            raise UsageError(
                f"the profile is of a model with other weights (fingerprint {self.model[:8]}, this one has {now[:8]}); make a "
                "profile of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write a file that `load_profile` reads."""
        text = {name: value for name, value in asdict(self).items() if name != "layers"}
        text |= {"format": FORMAT, "layers": list(self.layers)}
        arrays = {
            f"{number}/{key}": np.ascontiguousarray(value)
            for number, layer in enumerate(self.layers.values())
            for key, value in layer.items()
        }
        save_file(arrays, str(path), metadata={"profile": json.dumps(text)})


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises ``UsageError`` for any other file."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            text = json.loads((file.metadata() or {}).get("profile", "{}"))
            if text.pop("format", None) != FORMAT:
                raise ValueError("its header has no profile")
            layers: dict[str, dict[str, Floats]] = {name: {} for name in text.pop("layers")}
            names = list(layers)
            for key in file.keys():  # noqa: SIM118 - not a mapping
                number, _, part = key.partition("/")
                layers[names[int(number)]][part] = file.get_tensor(key).astype(np.float64)
        ranges = {name: (float(low), float(high)) for name, (low, high) in text.pop("ranges").items()}
        return Profile(layers=layers, ranges=ranges, **text)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(
            f"{path} is not an activation profile ({error}); expected a file of unsilent profile"
        ) from None


def model_fingerprint(model: nn.Module) -> str:
    """32 hex digits of names, dtypes, shapes and bits of all parameters and buffers."""
    tensors = named_tensors(model)
    hasher = tensors_hasher(tensors.values())
    hasher.update(json.dumps([(n, str(t.dtype), list(t.shape)) for n, t in tensors.items()]).encode())
    return str(hasher.hexdigest())


def make_profile(
    model: nn.Module,
    batches: Iterable[Any],
    rule: str = "dr-dna",
    *,
    rate: float = 0.01,
    layers: Sequence[str] = ("*",),
    run: Callable[[nn.Module, Any], Any] = call_model,
    seed: int = 0,
) -> Profile:
    """Run a model on clean samples, and find what is usual in its layers.

    Args:
        model: In eval mode, with the right weights.
        batches: Inputs of ``run``; the more samples, the better the profile.
        rule: Text of a rule: ``dr-dna``, ``ranger``, ``quantiles``, ``abft``, ``nonfinite``.
        rate: Of false alarms, per sample and pass.
        layers: Globs over names of modules.
        run: One call of the model.
        seed: Of the choice of sites.

    Raises:
        UsageError: too few samples for the rate, values that are not finite, no layer that can be read.
    """
    judge = make_activation_rule(rule)
    readings, ranges = _clean_readings(model, batches, judge.reads, tuple(layers), run, seed)
    count = len(next(iter(readings.values())))
    ends = np.cumsum([round(share * count) for share in PARTS[:2]])
    needed = samples_needed(rate)
    if count - ends[1] < needed:
        raise UsageError(
            f"there are {count:,} clean samples for a rate of false alarms of {rate:g}; expected "
            f"{round(needed / PARTS[2]) + 2:,} or more: give more samples, or choose a higher rate"
        )
    known = {name: judge.fit(values[: ends[0]], values[ends[0] : ends[1]]) for name, values in readings.items()}
    final = margins(judge, list(known.values()), [values[ends[1] :] for values in readings.values()]).max(0)
    return Profile(
        rule, rate, seed, len(final), model_fingerprint(model), conformal_threshold(final, rate), known, ranges
    )


def _clean_readings(
    model: nn.Module,
    batches: Iterable[Any],
    kind: str,
    layers: tuple[str, ...],
    run: Callable[[nn.Module, Any], Any],
    seed: int,
) -> tuple[dict[str, Floats], dict[str, tuple[float, float]]]:
    """Readings of all samples, float64[n, numbers] for each layer that every pass has, in the order of the first; and ranges."""
    passes: list[dict[str, Floats]] = []
    ranges: dict[str, tuple[float, float]] = {}
    with LayerWatch(model, kind, layers, seed) as watch, torch.no_grad():

        def note(layer: LayerRun) -> None:
            if len(passes) < watch.passes:
                passes.extend({} for _ in range(watch.passes - len(passes)))
            passes[-1][layer.name] = layer.reading.double().numpy(force=True)
            low, high = (float(one) for one in layer.output.aminmax())
            known = ranges.get(layer.name, (low, high))
            ranges[layer.name] = min(low, known[0]), max(high, known[1])

        watch.listener = note
        for batch in batches:
            run(model, batch)
    passes = [one for one in passes if one]
    if not passes:
        raise UsageError("no layer of the model can be read; expected layers that return a tensor with samples first")
    sizes = [max(set(counts), key=counts.count) for one in passes if (counts := [len(v) for v in one.values()])]
    common = [
        name
        for name in passes[0]
        if all(name in one and len(one[name]) == size for one, size in zip(passes, sizes, strict=True))
    ]
    readings = {name: np.concatenate([one[name] for one in passes]) for name in common}
    for name, values in readings.items():
        if not np.isfinite(values).all():
            raise UsageError(
                f"layer {name} gives values that are not finite for a clean sample; leave such samples out"
            )
    return readings, {name: ranges[name] for name in readings}
