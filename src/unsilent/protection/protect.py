"""A model that detects corrupted answers while it computes them, and repairs what it can.

    guarded = protect(model, calibration, detector="dr-dna", recovery=("rerun", "repair"))
    output = guarded(inputs)
    guarded.verdict.flagged        # bool[samples]

Mode ``end``: margins are computed once after each forward pass, with one transfer to the host. Mode ``early``: after each layer,
so that a faulty pass can end at the first layer whose margin is above the threshold. After an alarm, recovery steps are tried in
a fixed order, the rungs of a ladder (`unsilent.protection.recovery_ladder`). If the alarm persists, the last answer is returned,
marked as not recovered.

Only the rungs ``clamp`` and ``zero`` change an answer, and only after an alarm; everything else returns the model's own bits.
One exception: detectors that read layers can turn off the fused path of `torch.nn.MultiheadAttention`, and ``abft``, which does
not read that module, always does. Answers of such a model can then differ by rounding.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UsageError, check_name
from unsilent.detectors.activations.rule import Floats
from unsilent.protection.activation_detector import ActivationDetector
from unsilent.protection.combination import Combination
from unsilent.protection.corrupted_weights import CorruptedWeights
from unsilent.protection.detector import InferenceDetector
from unsilent.protection.layer_watch import LATER, LayerRun, LayerWatch, reject_compiled
from unsilent.protection.live_readings import LiveReadings, largest_of
from unsilent.protection.profile import Profile, make_profile
from unsilent.protection.recorded_pass import RecordedPass, check_output, copy_run
from unsilent.protection.recovery_ladder import (
    CorruptedAnswer,
    WeightRepair,
    limit_to_range,
    make_elsewhere,
    sort_rungs,
)
from unsilent.protection.weight_detector import WeightDetector
from unsilent.sites.modules import mode_readers, reject_training_mode
from unsilent.workloads.base import call_model
from unsilent.workloads.batch_samples import count_samples

MODES = ("end", "early")
VERDICTS_KEPT = 1000


@dataclass(frozen=True, eq=False)
class Verdict:
    """Verdict on one call of a protected model.

    Attributes:
        flagged: bool[n], samples with an alarm in the first run of the call.
        margins: float64[n], largest margin of each sample in that run.
        threshold: Threshold of margins.
        layer: First layer with an alarm; empty if no layer has one.
        detectors: Detectors with an alarm in that run.
        weights: Corrupted parameters and buffers, with elements and bits: first the repaired ones, then the others. Empty without
            a detector or a recovery that checks weights.
        action: Last rung that was tried on the alarm; empty if there was none.
        recovered: Whether there was no alarm in the last run of the call. The answer can still be wrong: detectors can miss a
            fault, and an answer from ``elsewhere`` counts as recovered without being judged.
    """

    flagged: np.ndarray[Any, np.dtype[np.bool_]]
    margins: Floats
    threshold: float
    layer: str = ""
    detectors: tuple[str, ...] = ()
    weights: tuple[CorruptedWeights, ...] = ()
    action: str = ""
    recovered: bool = True


class _AlarmInLayer(Exception):
    """Raised to end a forward pass at a layer with an alarm."""


class ProtectedModel(Closing):
    """A model with a profile that checks each call.

    It is called like the model, and has the attributes of the model.

    Args:
        model: Model that the profile was made from.
        profile: Profile from `make_profile` or a file.
        mode: ``end`` or ``early``, see the module.
        recovery: Rungs of the ladder, of `unsilent.protection.recovery_ladder.RUNGS`.
        elsewhere: Function that is called like the model, or a device for a copy of the model, for the rung ``elsewhere``. After
            `generate`, its own ``generate`` is called, if it has one.

    Raises:
        UsageError: the model is not the profile's, the mode or a rung is unknown, or a rung does not fit the mode or detector. In
            a call: the guard is closed, no calibrated layer was read, or the model was put into training mode, was compiled or
            had tensors replaced since ``weight-integrity`` took their checksums.

    Attributes:
        verdict: Verdict on the last call; ``None`` before the first call.
        verdicts: Verdicts on the last thousand calls with an alarm.
        nbytes: Memory in bytes that detection and repair take besides the model, without the golden copy.
        golden_bytes: Memory of the golden copy on the host, in bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        profile: Profile,
        mode: str = "end",
        recovery: str | Sequence[str] = (),
        elsewhere: Callable[..., Any] | str | torch.device | None = None,
    ) -> None:
        check_name("mode", mode, MODES)
        self._ladder = sort_rungs(recovery)
        if "layer" in self._ladder and mode != "early":
            raise UsageError("recovery 'layer' needs mode 'early': in mode 'end' layers are judged after the pass")
        if elsewhere is not None and "elsewhere" not in self._ladder:
            raise UsageError(
                f"elsewhere is given, but recovery is {self._ladder}; expected 'elsewhere' in it: add it, or leave elsewhere out"
            )
        profile.check_model(model)
        self._mode_readers = mode_readers(model)
        self._model, self._profile, self._is_early = model, profile, mode == "early"
        rules = [part for part in profile.parts if isinstance(part, ActivationDetector)]
        if not rules and {"clamp", "zero"} & set(self._ladder):
            raise UsageError(
                f"recovery 'clamp' and 'zero' need ranges of layers, which {profile.detector.name} does not have"
            )
        self._elsewhere = make_elsewhere(elsewhere, model) if "elsewhere" in self._ladder else None
        checked = next((part.integrity for part in profile.parts if isinstance(part, WeightDetector)), None)
        self._repair = WeightRepair(model, "repair" in self._ladder, "golden" in self._ladder, checked)
        self.golden_bytes = self._repair.copy_bytes
        self.nbytes = profile.detector.nbytes + (0 if checked else self._repair.parity_bytes)
        self._live = [LiveReadings(rule, self._is_early) for rule in rules]
        self._ranges = {name: limits for rule in rules for name, limits in rule.ranges.items()}
        self._keeps_layers = any(part.needs_layers and part not in rules for part in profile.parts)
        # Rules say which runs they read; any other detector gets all of them.
        wanted = None if self._keeps_layers else frozenset(self._ranges)
        self._watch = LayerWatch(model, wanted=wanted, functions=any(rule.reads_functions for rule in rules))
        self._watch.after_pass = self._end_pass
        self._layers: list[LayerRun] = []
        self._first_layer = self._limits = ""
        self._may_stop = self._runs_layers_again = self._is_closed = False
        self.verdict: Verdict | None = None
        self.verdicts: deque[Verdict] = deque(maxlen=VERDICTS_KEPT)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, check its answer, and return it."""
        return self._guarded(self._model, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``generate`` and check every forward pass in it.

        The margin is the largest of all passes, so more passes than in calibration give more false alarms than the rate of the
        profile; a ``UserWarning`` is given then. Calibrate with the largest number of new tokens that will be generated.

        Raises:
            UsageError: the profile was made from single forward passes, without decoding steps.
        """
        if self._ranges and not any(name.endswith(LATER) for name in self._ranges):
            raise UsageError(
                "the profile is of single forward passes and knows nothing of decoding; calibrate with "
                "run=lambda model, batch: model.generate(**batch)"
            )
        return self._guarded(cast(Any, self._model).generate, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_model" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["_model"], name)

    def close(self) -> None:
        """Remove all hooks; later calls raise ``UsageError``."""
        self._is_closed = True
        self._watch.close()

    # -- one call ----------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, and try one rung of the ladder after the other while there is an alarm.

        Raises ``CorruptedAnswer`` with the rung ``abstain``.
        """
        self._check_watched()
        ladder = [rung for rung in self._ladder if rung not in ("layer", "abstain")]
        self._runs_layers_again, self._limits = "layer" in self._ladder, ""
        output, verdict = self._watched(call, args, kwargs, may_stop=bool(ladder))
        self._runs_layers_again = False
        repaired: tuple[CorruptedWeights, ...] = ()
        left = self._suspects() if output is not None else ()
        while not verdict.recovered and ladder:
            rung = ladder.pop(0)
            verdict = replace(verdict, action=rung)
            if rung == "elsewhere":
                assert self._elsewhere is not None
                generates = call is not self._model
                output, verdict = self._elsewhere(generates, args, kwargs), replace(verdict, recovered=True)
                break
            if rung == "repair":
                repaired, left = self._repair.repair()
                if left:
                    if output is None and not ladder:  # stopped early
                        output, _ = self._watched(call, args, kwargs, may_stop=False, judges_recovery=True)
                    continue
            if rung == "golden":
                repaired, left = (*repaired, *self._repair.restore()), ()
            self._limits = rung if rung in ("clamp", "zero") else ""
            output, again = self._watched(call, args, kwargs, may_stop=bool(ladder), judges_recovery=True)
            left = (self._suspects() if output is not None else ()) or left
            verdict = replace(verdict, recovered=again.recovered)
        self._layers = []
        self.verdict = verdict = replace(verdict, weights=(*repaired, *left))
        if verdict.flagged.any():
            self.verdicts.append(verdict)
        if not verdict.recovered and "abstain" in self._ladder:
            self.verdict = replace(verdict, action="abstain")
            place = f" at layer {verdict.layer}" if verdict.layer else ""
            raise CorruptedAnswer(
                f"{', '.join(verdict.detectors)} raised an alarm for {int(verdict.flagged.sum())} of {len(verdict.flagged)} "
                f"samples{place}, and no recovery cleared it; the answer is withheld"
            )
        return output

    def _suspects(self) -> tuple[CorruptedWeights, ...]:
        """Weights that detectors of corrupted weights found in the last call."""
        result: list[CorruptedWeights] = []
        for part in self._profile.parts:
            if isinstance(part, WeightDetector) and part.integrity:
                result += part.integrity.suspects(part.bad_blocks)
        return tuple(result)

    def _check_watched(self) -> None:
        """Raise ``UsageError`` if a call would not be checked."""
        if self._is_closed:
            raise UsageError("the guard is closed, so that no call is watched; protect the model again")
        reject_compiled(self._model)
        reject_training_mode(self._mode_readers)
        for part in self._profile.parts:
            if isinstance(part, WeightDetector):
                part.check_tensors(self._model)

    def _check_layers_read(self) -> None:
        """Raise ``UsageError`` if a rule on activations has read no layer in the call."""
        for live in self._live:
            if self._samples and not live.names:
                raise UsageError(
                    f"{live.detector.name} read none of its {len(live.detector.layers)} layers in this call, as none that ran "
                    f"returned {self._samples} samples; expected inputs like those of the calibration: give the tensor with "
                    "samples in its first dimension first"
                )

    def _warn_of_passes(self) -> None:
        """Warn of a call with more forward passes than calls of the calibration had.

        The false-alarm rate does not hold for such a call.
        """
        if self._live and self._watch.passes > self._profile.passes > 0:
            warnings.warn(
                f"this call has {self._watch.passes} forward passes, but no call of the calibration had more than "
                f"{self._profile.passes}: false alarms can be more frequent than {self._profile.rate:g}; calibrate with as many "
                "passes, such as new tokens",
                stacklevel=5,
            )

    def _watched(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        may_stop: bool,
        judges_recovery: bool = False,
    ) -> tuple[Any, Verdict]:
        """Call the model once, and return the output and the verdict.

        The output is ``None`` if an alarm stopped the call.
        """
        self._samples = count_samples((args, kwargs))
        self._first_layer, self._may_stop, self._layers, output = "", may_stop, [], None
        self._alarmed = set[str]()
        # Largest margins of layers whose alarm was gone when they ran again.
        self._undone = np.full(self._samples, -np.inf)
        for live in self._live:
            live.begin(self._samples)
        try:
            with self._watch.listening(self._layer_ran):
                output = call(*args, **kwargs)
            check_output(output, (args, kwargs))
            self._check_layers_read()
            self._warn_of_passes()
        except _AlarmInLayer:
            return None, self._conclude([(live.detector, live.margins) for live in self._live])
        recorded = RecordedPass(
            self._model, lambda model, batch: _same_call(call, self._model, model)(*args, **kwargs), (args, kwargs), output,
            tuple(self._layers), self._samples, judges_recovery=judges_recovery,
        )  # fmt: skip
        return output, self._conclude(self._margins_of_parts(recorded))

    def _margins_of_parts(self, recorded: RecordedPass) -> Iterator[tuple[InferenceDetector, Sequence[Floats]]]:
        """Each part of the detector with its margins."""
        live = iter(self._live)
        for part in self._profile.parts:
            is_read = isinstance(part, ActivationDetector)
            yield part, next(live).margins if is_read else list(part.margins(recorded))

    def _conclude(self, margins: Iterable[tuple[InferenceDetector, Sequence[Floats]]]) -> Verdict:
        """The verdict on a call, from the margins of each part of the detector."""
        threshold, live = self._profile.threshold, iter(self._live)
        largest = []
        for part, rows in margins:
            scaled = [self._scaled(part, row) for row in rows]
            largest.append(largest_of(scaled, self._samples))
            crossing = [number for number, row in enumerate(scaled) if (row > threshold).any()]
            if crossing:
                self._alarmed.add(part.name)
            if isinstance(part, ActivationDetector):
                names = next(live).names
                self._first_layer = self._first_layer or (names[crossing[0]] if crossing else "")
        values = largest_of(largest, self._samples)
        undone = self._undone > threshold
        return Verdict(
            flagged=(values > threshold) | undone,
            margins=np.maximum(values, self._undone),
            threshold=threshold,
            layer=self._first_layer,
            detectors=tuple(part.name for part in self._profile.parts if part.name in self._alarmed),
            action="layer" if undone.any() else "",
            recovered=not (values > threshold).any(),
        )

    def _scaled(self, part: Any, margins: Floats) -> Floats:
        """Margins of one part of the detector, on the scale of the threshold."""
        whole = self._profile.detector
        return whole.scaled_part(part, margins) if isinstance(whole, Combination) else margins

    # -- one layer ---------------------------------------------------------------------------------------------------

    def _layer_ran(self, layer: LayerRun) -> Tensor | None:
        """Handle one run of a layer, and return the tensor that replaces its output, or None."""
        changed: Tensor | None = None
        if self._limits and layer.name in self._ranges:
            changed = limit_to_range(layer.output, *self._ranges[layer.name], to_zero=self._limits == "zero")
            layer = layer._replace(output=changed)
        if self._keeps_layers:
            self._layers.append(copy_run(layer))
        first = self._add(layer)
        if not (first > self._profile.threshold).any():
            return changed
        self._first_layer = self._first_layer or layer.name
        if self._runs_layers_again:
            for live in self._live:
                live.take_back(layer.name)
            again = layer._replace(output=layer.run_again())
            if not (self._add(again) > self._profile.threshold).any():
                self._undone = np.maximum(self._undone, first)
                return again.output
        if self._may_stop:
            raise _AlarmInLayer
        return changed

    def _add(self, layer: LayerRun) -> Floats:
        """Read a layer, and return its largest margins in mode ``early``, float64[samples].

        In mode ``end`` they are minus infinity.
        """
        margins = [(live.detector, live.add(layer)) for live in self._live]
        scaled = [self._scaled(detector, row) for detector, row in margins if row is not None]
        read = (detector.name for detector, row in margins if row is not None)
        self._alarmed.update(n for n, row in zip(read, scaled, strict=True) if (row > self._profile.threshold).any())
        return np.max(scaled, axis=0) if scaled else np.full(self._samples, -np.inf)

    def _end_pass(self) -> None:
        for live in self._live:
            live.end_pass()


def _same_call(call: Any, model: nn.Module, other_model: nn.Module) -> Any:
    """The other model or its ``generate``, whichever ``call`` is of ``model``."""
    return other_model if call is model else cast(Any, other_model).generate


def protect(
    model: nn.Module,
    calibration: Iterable[Any] | Profile,
    detector: str | InferenceDetector = "dr-dna",
    *,
    recovery: str | Sequence[str] = (),
    mode: str = "end",
    rate: float = 0.01,
    layers: Sequence[str] = (),
    run: Callable[[nn.Module, Any], Any] = call_model,
    elsewhere: Callable[..., Any] | str | torch.device | None = None,
    seed: int = 0,
) -> ProtectedModel:
    """Wrap a model so that it detects corrupted answers, and repairs what it can.

    Args:
        model: Model in eval mode, with the right weights.
        calibration: Batches of clean inputs, or a profile.
        detector: Text of one or several detectors, like ``dr-dna+weight-integrity:slices=64``, or your own detector; not used
            with a profile, which has its own. ``abft`` does not read `torch.nn.MultiheadAttention`.
        recovery: Actions on an alarm: rungs from `unsilent.protection.recovery_ladder`.
        mode: Time at which layers are judged: at the ``end`` of the pass, or ``early``, after each layer.
        rate: Rate of false alarms, per sample and call.
        layers: Globs over names of modules that are read; by default the detector chooses.
        run: Calls the model with a calibration batch; for ``generate()``: ``lambda model, batch: model.generate(**batch)``.
        elsewhere: Function, or a device for a copy of the model, for the recovery ``elsewhere``.
        seed: Seed of the choice of sites.

    Raises:
        UsageError: see `make_profile` and `ProtectedModel`.
    """
    profile = calibration
    if not isinstance(profile, Profile):
        if isinstance(profile, (str, Path, Tensor)) or not isinstance(profile, Iterable):
            raise UsageError(
                f"calibration is of type {type(profile).__name__}; expected a list of batches of clean inputs, or a profile "
                "(from a file: load_profile(path, model))"
            )
        profile = make_profile(model, profile, detector, rate=rate, layers=layers, run=run, seed=seed)
    return ProtectedModel(model, profile, mode, recovery, elsewhere)
