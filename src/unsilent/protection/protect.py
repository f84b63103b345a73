"""A model that notices corrupted answers while it computes them, and repairs what it can.

    guarded = protect(model, calibration, detector="dr-dna", recovery=("rerun", "repair"))
    output = guarded(inputs)
    guarded.verdict.flagged        # bool[samples]

Mode ``end``: margins are computed once after each pass, with one transfer to the host. Mode ``early``: after each layer, so that
a faulty pass can end at the first layer whose margin is above the threshold.

Recovery, as far as it was asked for and in this order: ``layer`` (mode ``early``: run the layer again from its inputs, which
undoes a transient fault in it), ``rerun`` (the whole call again), ``repair`` (weights by checksums and parity, then the call
again), ``clamp`` (the call again, with the outputs of layers limited to the range of clean samples). If an alarm stays, the last
answer is returned, marked as not recovered. This ladder is the project's own: the mitigation of Dr. DNA is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.detectors.activations.rule import Floats
from unsilent.errors import UsageError, unknown_name_error
from unsilent.protection.layer_watch import LayerRun, LayerWatch
from unsilent.protection.profile import Profile, make_profile
from unsilent.protection.weight_integrity import WeightIntegrity

MODES = ("end", "early")
RUNGS = ("layer", "rerun", "repair", "clamp")


@dataclass(frozen=True, eq=False)
class Verdict:
    """What was found in one call.

    Attributes:
        flagged: bool[n], samples with an alarm in the pass that the answer is of, or in one that was thrown away.
        margins: float64[n], the largest of each sample in the first pass with an alarm, otherwise in all passes.
        threshold: Of margins.
        layer: Where the first alarm was; empty without one.
        action: What was done about it: empty, or the last rung that was tried.
        recovered: Whether the answer that was returned is without an alarm.
    """

    flagged: np.ndarray[Any, np.dtype[np.bool_]]
    margins: Floats
    threshold: float
    layer: str = ""
    action: str = ""
    recovered: bool = True


class _AlarmInLayer(Exception):
    """Ends a pass early."""


@dataclass(eq=False)
class _Pass:
    """Scores and readings of one forward pass so far."""

    layers: list[str] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    readings: list[Tensor] = field(default_factory=list)


class ProtectedModel:
    """A model with a profile, called as the model is; what is not found here is the model's.

    Args:
        model: That the profile is of.
        profile: From `make_profile` or a file.
        mode: ``end`` or ``early``, see the module.
        recovery: Rungs of the ladder, of `RUNGS`.

    Raises:
        UsageError: another model, an unknown mode or rung.

    Attributes:
        verdict: Of the last call; None before.
        verdicts: Of all calls with an alarm.
    """

    def __init__(self, model: nn.Module, profile: Profile, mode: str = "end", recovery: Sequence[str] = ()) -> None:
        if mode not in MODES:
            raise unknown_name_error("mode", mode, MODES)
        for rung in recovery:
            if rung not in RUNGS:
                raise unknown_name_error("recovery", rung, RUNGS)
        if "layer" in recovery and mode != "early":
            raise UsageError("recovery 'layer' needs mode 'early': in mode 'end' layers are judged after the pass")
        profile.check_model(model)
        self._model, self._profile, self._is_early = model, profile, mode == "early"
        self._ladder = tuple(rung for rung in RUNGS if rung in recovery)
        self._rule = profile.make_rule()
        self._integrity = WeightIntegrity(model) if "repair" in recovery else None
        self._watch = LayerWatch(model, self._rule.reads, seed=profile.seed, wanted=frozenset(profile.layers))
        self._passes: list[_Pass] = []
        self._first_layer = ""
        self._may_stop = self._runs_layers_again = self._clamps = False
        self.verdict: Verdict | None = None
        self.verdicts: list[Verdict] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self._guarded(self._model, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's ``generate`` returns; every pass in it is watched."""
        return self._guarded(cast(Any, self._model).generate, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks."""
        self._watch.close()

    # -- one call ----------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call, and climb the ladder while there is an alarm."""
        ladder = list(self._ladder)
        self._runs_layers_again, self._clamps = "layer" in ladder, False
        if self._runs_layers_again:
            ladder.remove("layer")
        output, first = self._watched(call, args, kwargs, may_stop=bool(ladder))
        action, recovered = first.action, first.recovered
        self._runs_layers_again = False
        while not recovered and ladder:
            action = ladder.pop(0)
            if action == "repair":
                assert self._integrity is not None
                self._integrity.repair()
            self._clamps = action == "clamp"
            output, last = self._watched(call, args, kwargs, may_stop=bool(ladder))
            recovered = not last.flagged.any()
        self.verdict = replace(first, action=action, recovered=recovered)
        if first.flagged.any():
            self.verdicts.append(self.verdict)
        return output

    def _watched(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], may_stop: bool
    ) -> tuple[Any, Verdict]:
        """What a call returns (None where it was stopped) and what was found in it."""
        self._passes, self._first_layer, self._may_stop = [], "", may_stop
        seen, output = self._watch.passes, None
        self._watch.listener = lambda run: self._note(run, self._watch.passes - seen)
        try:
            output = call(*args, **kwargs)
        except _AlarmInLayer:
            pass
        finally:
            self._watch.listener = None
        return output, self._conclude()

    def _note(self, run: LayerRun, number: int) -> Tensor | None:
        """A layer has run; ``number`` of the pass, from 1."""
        while len(self._passes) < number:
            self._passes.append(_Pass())
        current = self._passes[-1]
        current.layers.append(run.name)
        if not self._is_early:
            current.readings.append(run.reading)
            return self._limited(run)
        current.scores.append(self._score(run.name, run.reading))
        if not self._is_alarm(current):
            return self._limited(run)
        self._first_layer = self._first_layer or run.name
        if self._runs_layers_again and (again := self._layer_again(run, current)) is not None:
            return again
        if self._may_stop:
            raise _AlarmInLayer
        return self._limited(run)

    def _limited(self, run: LayerRun) -> Tensor | None:
        """The output within the range of clean samples, where that was asked for; NaN becomes 0."""
        if not self._clamps:
            return None
        low, high = self._profile.ranges[run.name]
        return torch.nan_to_num(run.output, nan=0.0, posinf=high, neginf=low).clamp(low, high)

    def _layer_again(self, run: LayerRun, current: _Pass) -> Tensor | None:
        """The output of a layer that ran once more, if that is without an alarm."""
        again: Tensor = run.module.forward(*run.inputs, **run.named_inputs)
        before = current.scores[-1]
        current.scores[-1] = self._score(run.name, self._watch.read(run.name, run.module, run.inputs, again))
        if not self._is_alarm(current):
            return again
        current.scores[-1] = before
        return None

    def _score(self, name: str, reading: Tensor) -> Floats:
        return self._rule.score(self._profile.layers[name], reading.double().numpy(force=True))

    def _is_alarm(self, current: _Pass) -> bool:
        margins = self._rule.cumulate(np.array(current.scores))[-1]
        return bool((margins > self._profile.threshold).any())

    def _conclude(self) -> Verdict:
        """What was found in all passes of a call; with another number of samples in one of them, of all samples together."""
        largest = []
        for one in self._passes:
            if one.readings:
                one.scores = self._scores_at_end(one)
            margins = self._rule.cumulate(np.array(one.scores))
            largest.append(margins.max(0))
            crossing = np.flatnonzero((margins > self._profile.threshold).any(1))
            if len(crossing) and not self._first_layer:
                self._first_layer = one.layers[crossing[0]]
        if len({len(one) for one in largest}) > 1:
            largest = [one.max(keepdims=True) for one in largest]
        values = np.max(largest, axis=0) if largest else np.zeros(0)
        flagged = values > self._profile.threshold
        was_found = bool(self._first_layer)
        if was_found and not flagged.any():  # undone in its layer
            return Verdict(np.ones_like(flagged), values, self._profile.threshold, self._first_layer, "layer", True)
        return Verdict(flagged, values, self._profile.threshold, self._first_layer, "", not flagged.any())

    def _scores_at_end(self, one: _Pass) -> list[Floats]:
        """Scores of all layers, after one transfer to the host."""
        widths = np.cumsum([reading.shape[1] for reading in one.readings])[:-1]
        values = torch.cat(one.readings, 1).double().numpy(force=True)
        parts = np.split(values, widths, axis=1)
        return [
            self._rule.score(self._profile.layers[name], part) for name, part in zip(one.layers, parts, strict=True)
        ]


def protect(
    model: nn.Module,
    calibration: Iterable[Any] | Profile,
    detector: str = "dr-dna",
    *,
    recovery: Sequence[str] = (),
    mode: str = "end",
    rate: float = 0.01,
    layers: Sequence[str] = ("*",),
    seed: int = 0,
) -> ProtectedModel:
    """A model that notices corrupted answers, and repairs what it can.

    Args:
        model: In eval mode, with the right weights.
        calibration: Batches of clean inputs, or a profile.
        detector: Text of a rule; see `make_profile`. A profile has its own.
        recovery: What is done on an alarm, of ``layer``, ``rerun``, ``repair`` and ``clamp``.
        mode: When layers are judged: ``end`` of the pass or ``early``.
        rate: Of false alarms, per sample and pass.
        layers: Globs over names of modules.
        seed: Of the choice of sites.

    Raises:
        UsageError: see `make_profile` and `ProtectedModel`.
    """
    profile = calibration
    if not isinstance(profile, Profile):
        profile = make_profile(model, profile, detector, rate=rate, layers=layers, seed=seed)
    return ProtectedModel(model, profile, mode, recovery)
