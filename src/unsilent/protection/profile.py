"""Profile of a model: the calibrated detector and the threshold of its margins, stored in a file.

The samples are divided: the detector learns from the first ones, and the others give the threshold. No sample is in both. The
file is in safetensors format, with everything but arrays as JSON in its header. Data that follows from the weights alone, for
example checksums, is not stored but computed from the model that the profile is used with; its weights must be those that the
profile was made from. The header has a hash of the whole content, so that a file with a flipped bit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import tensors_in
from unsilent.detectors.activations.rule import Floats
from unsilent.engine.digests import tensors_hasher
from unsilent.protection.activation_detector import ActivationDetector, not_finite_error
from unsilent.protection.calibration_batches import ExplainedRun, check_batches, divide
from unsilent.protection.combination import Combination
from unsilent.protection.detector import (
    InferenceDetector,
    StoredDetector,
    check_can_be_stored,
    largest_margins,
    make_detector,
)
from unsilent.protection.golden_test import GoldenTest
from unsilent.protection.hashed_file import FileKind, restored, stored
from unsilent.protection.layer_watch import find_layers, reject_compiled
from unsilent.protection.recorded_pass import record_pass
from unsilent.protection.weight_detector import WeightDetector
from unsilent.sites.modules import mode_readers, named_tensors, packed_weights, reject_training_mode
from unsilent.statistics.conformal import conformal_threshold, samples_needed
from unsilent.workloads.base import as_inputs, call_model

_FILE = FileKind("profile", "unsilent/activation-profile/", 4, "an activation profile", "unsilent profile")


@dataclass(eq=False)
class Profile:
    """A calibrated detector and its threshold.

    Attributes:
        detector: Detector, calibrated with a model.
        layers: Globs over names of modules that the detector was restricted to; empty if it chose layers itself.
        rate: Rate of false alarms, per sample and call.
        seed: Seed of the choice of sites.
        samples: Number of samples that the threshold was computed from.
        model: Fingerprint of the weights.
        dtypes: Dtypes of the weights.
        threshold: A margin above it is an alarm.
        passes: Largest number of forward passes in a call that the threshold was computed from; 0 if unknown. The margin of a
            call is the largest of its passes, so the rate holds for calls of at most as many passes.
    """

    detector: InferenceDetector
    layers: tuple[str, ...]
    rate: float
    seed: int
    samples: int
    model: str
    dtypes: tuple[str, ...]
    threshold: float
    passes: int = 0

    @property
    def parts(self) -> tuple[InferenceDetector, ...]:
        """The detectors of a combination, or the one detector."""
        return self.detector.parts if isinstance(self.detector, Combination) else (self.detector,)

    @property
    def layer_names(self) -> list[str]:
        """Names of the runs of layers that rules on activations read."""
        readers = [part for part in self.parts if isinstance(part, ActivationDetector)]
        return list(dict.fromkeys(name for part in readers for name in part.layers))

    def check_model(self, model: nn.Module) -> None:
        """Raise ``UsageError`` for a model in training mode, with other weights or another dtype."""
        reject_training_mode(mode_readers(model))
        if (dtypes := dtypes_of(model)) != self.dtypes:
            raise UsageError(
                f"the profile is of a model with weights in {', '.join(self.dtypes)}, this one has {', '.join(dtypes)}; make a "
                "profile of this model"
            )
        if (now := model_fingerprint(model)) != self.model:
            raise UsageError(
                f"the profile is of a model with other weights (fingerprint {self.model[:8]}, this one has {now[:8]}); make a "
                "profile of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write a file that `load_profile` reads.

        Raises ``UsageError`` if it cannot be written.
        """
        check_can_be_stored(self.detector)
        arrays: dict[str, Tensor] = {}
        text: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        text |= {"detector": self.detector.name, "parts": []}
        if isinstance(self.detector, Combination):
            text["scales"] = self.detector.scales
        for number, part in enumerate(self.parts):
            text["parts"].append(_part_as_json(part, f"{number}/", arrays))
        try:
            _FILE.write(path, text, arrays)
        except TypeError as error:
            raise UsageError(
                f"the content of {self.detector.name} cannot be written as JSON ({error}), such as the input that golden-test "
                "stores; leave this detector out"
            ) from None


_PLAIN = ("layers", "rate", "seed", "samples", "model", "dtypes", "threshold", "passes")


def _part_as_json(part: InferenceDetector, prefix: str, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """The content of a profile for one detector, as JSON.

    Its arrays are added to ``arrays``, under names with this prefix.
    """
    if isinstance(part, ActivationDetector):
        for number, layer in enumerate(part.layers.values()):
            for key, value in layer.items():
                arrays[f"{prefix}{number}/{key}"] = torch.from_numpy(np.ascontiguousarray(value))
        stride, layers = part.readers.stride, list(part.layers)
        return {"layers": layers, "ranges": part.ranges, "widths": part.widths, "stride": stride}
    if isinstance(part, GoldenTest):
        return {"batch": stored(part.batch, prefix, arrays), "answer": stored(part.answer, prefix, arrays)}
    if isinstance(part, StoredDetector):
        return {"learnt": stored(part.learnt(), prefix, arrays)}
    return {}


def load_profile(path: str | Path, model: nn.Module, run: Callable[[nn.Module, Any], Any] = call_model) -> Profile:
    """Read a profile from a file, for the model that it was made from.

    Args:
        path: A file of `Profile.save`.
        model: Model that the profile was made from.
        run: Function that calls the model once, as in `make_profile`; ``golden-test`` needs the same function.

    Raises:
        UsageError: the file is not a profile, the model is another one, or ``run`` does not give the stored answer of
            ``golden-test``.
    """
    with _FILE.reading(path) as (text, arrays):
        detector = make_detector(text["detector"], text["layers"], text["seed"])
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v := text[name], list) else v for name in _PLAIN}
        profile = Profile(detector, **plain)
        profile.check_model(model)
        if isinstance(detector, Combination):
            detector.scales = [(float(middle), float(high)) for middle, high in text["scales"]]
        for number, (part, known) in enumerate(zip(profile.parts, text["parts"], strict=True)):
            _restore_part(part, known, f"{number}/", arrays, model, run)
    return profile


def _restore_part(
    part: InferenceDetector,
    known: dict[str, Any],
    prefix: str,
    arrays: dict[str, Tensor],
    model: nn.Module,
    run: Callable[[nn.Module, Any], Any],
) -> None:
    if isinstance(part, ActivationDetector):
        layers: dict[str, dict[str, Floats]] = {name: {} for name in known["layers"]}
        names = list(layers)
        for key, value in arrays.items():
            if key.startswith(prefix):
                number, _, array = key.removeprefix(prefix).partition("/")
                layers[names[int(number)]][array] = value.double().numpy()
        ranges = {name: (float(low), float(high)) for name, (low, high) in known["ranges"].items()}
        part.know(layers, ranges, {name: int(width) for name, width in known["widths"].items()}, known["stride"], model)
        return
    device = next((tensor.device for tensor in named_tensors(model).values()), torch.device("cpu"))
    if isinstance(part, GoldenTest):
        part.know(restored(known["batch"], arrays, device), restored(known["answer"], arrays, device), model, run)
    elif isinstance(part, StoredDetector):
        part.know(restored(known["learnt"], arrays, device), model)
    else:
        part.calibrate(model, ())


def model_fingerprint(model: nn.Module) -> str:
    """Hash of all parameters, buffers and packed weights, as 16 hex digits.

    The hash covers their names, dtypes, shapes and bits.
    """
    tensors = named_tensors(model)
    hasher = tensors_hasher((*tensors.values(), *_packed_values(model)))
    hasher.update(json.dumps([(n, str(t.dtype), list(t.shape)) for n, t in tensors.items()]).encode())
    return str(hasher.hexdigest())


def _packed_values(model: nn.Module) -> Iterator[Tensor]:
    """The weights that quantised modules hold in packed form: integers, their scales, and biases."""
    for value in model.state_dict().values() if packed_weights(model) else ():
        for tensor in tensors_in(value):
            if not tensor.is_quantized:
                yield tensor
                continue
            yield tensor.int_repr()
            per_channel = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
            yield tensor.q_per_channel_scales() if per_channel else torch.tensor(tensor.q_scale())


def dtypes_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the floating-point types of parameters and buffers, sorted."""
    tensors = named_tensors(model).values()
    return tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()}))


def make_profile(
    model: nn.Module,
    batches: Iterable[Any],
    detector: str | InferenceDetector = "dr-dna",
    *,
    rate: float = 0.01,
    layers: Sequence[str] = (),
    run: Callable[[nn.Module, Any], Any] = call_model,
    seed: int = 0,
) -> Profile:
    """Calibrate a detector with clean samples, and find the threshold of its margins.

    Args:
        model: Model in eval mode, with the right weights.
        batches: Inputs of ``run``. The detector learns from the first part, and the last part gives the threshold, so keep
            altered copies of one original together.
        detector: Text of the detector, see `make_detector`, or a detector of your own.
        rate: Rate of false alarms, per sample and call of at most as many forward passes as in ``batches``.
        layers: Globs over names of modules that are read; by default the detector chooses.
        run: Function that calls the model once.
        seed: Seed of the choice of sites.

    Raises:
        UsageError: there are too few samples for the rate; batches contain NaN or do not fit the model; values of layers are not
            finite; no layer can be read; the model is compiled or in training mode; or, with ``weight-integrity``, parameters or
            buffers change in clean calls.
    """
    reject_compiled(model)
    reject_training_mode(mode_readers(model))
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    find_layers(model, layers)
    new_detector = make_detector(detector, layers, seed)
    inputs, explained = [as_inputs(batch, run) for batch in batches], ExplainedRun(run)
    check_batches(model, inputs, explained)
    learnt, held_out = divide(inputs, samples_needed(rate), rate)
    new_detector.calibrate(model, learnt, explained)
    final, passes = [], 0
    for batch in held_out:
        recorded = record_pass(model, explained, batch, new_detector.needs_layers)
        for part in new_detector.parts if isinstance(new_detector, Combination) else (new_detector,):
            if isinstance(part, WeightDetector):
                part.check_unchanged(model)
        for layer in recorded.layers:
            passes = max(passes, layer.number)
            if not layer.output.isfinite().all():
                raise not_finite_error(layer.name)
        final.append(largest_margins(new_detector, recorded))
    explained.explains = False  # a detector may keep it
    margins = np.concatenate(final)
    threshold, fingerprint = conformal_threshold(margins, rate), model_fingerprint(model)
    return Profile(new_detector, layers, rate, seed, len(margins), fingerprint, dtypes_of(model), threshold, passes)
