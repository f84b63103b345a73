"""Suspects: layers of a quantised or pruned network that differ more than quantisation explains.

Three properties are checked, each for the layer alone, so that a fault in one layer does not make later ones suspicious:

- *Weights*, if they can be read. Rounding changes a weight by half a step at most. If most layers of the network keep to this
  limit, a channel that does not is a suspect; the step is the usual one of the network's layers for the range of their weights.
  Otherwise, for example after further training, a channel is a suspect if it stands out from the largest changes of the others.
- *Outputs*: the error, compared with the sum of rounding errors and with the other layers; if weights can be read, the error that
  remains with these weights, which is the rounding of inputs.
- *Range of inputs*, if it can be read, compared with the inputs that the layer had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unsilent.compare.quantised_products import INPUT_LEVELS, LayerNoise

HALF_STEP = 0.505
"""Largest change of a weight by rounding, in steps, including float32 rounding of the computation."""
KEPT = 0.9
"""Least share of channels within this limit if a layer's weights are the original's, rounded."""
SPREAD = 4.0
"""Multiple of the usual change of weights, or of the usual error of a layer, from which on one stands out."""
CHANNEL_SPREAD = 50.0
"""Multiple of the error of the layer's other channels from which on one stands out: errors of weights add up or cancel."""
UNKNOWN_RANGE = 30.0
"""Allowed multiple of the error if a layer's input range and weights cannot be read, as inputs may be cut off."""
WIDTH, SHIFT, ZERO_SHIFT = 2.0, 0.35, 2.5 / INPUT_LEVELS
"""Limits for the range of quantised inputs relative to that of the inputs: factor of the width, shift of the middle as a share of
the width, and for inputs that are never negative, distance of the least one from 0."""
ROUNDING, TINY = 1e-6, 1e-300
"""Relative error of float32 arithmetic; and a number that avoids a division by 0."""
CUT = 0.02
"""Largest share of a layer's inputs that its range may cut off."""
OTHER_WEIGHT, OTHER_OUTPUT = 0.52, 0.8
"""Change of a kept weight, as a share of its channel's largest, that no rounding causes, not even to -1, 0 and 1; and the squared
error of outputs, as a share of their squares, from which on the two have little in common (1 dB)."""


@dataclass(frozen=True)
class Suspect:
    """A layer that differs more than its quantisation explains.

    Attributes:
        layer: Name of the layer in the original.
        channel: Output channel, counted from 0; ``None`` if all may be affected.
        excess: Measured error divided by the largest expected error; above 1.
        reason: Measured and expected error, in words.
    """

    layer: str
    channel: int | None
    excess: float
    reason: str


def find_suspects(noises: Mapping[str, LayerNoise]) -> tuple[Suspect, ...]:
    """Find suspects among layers, the most suspicious first, at most one for each layer."""
    suspects = _weight_suspects(noises)
    suspects += [
        suspect for suspect in _error_suspects(noises) if suspect.layer not in {suspect.layer for suspect in suspects}
    ]
    known = {suspect.layer for suspect in suspects}
    shares = sorted(noise.cut / noise.count for noise in noises.values()) or [0.0]
    most_cut = max(CUT, SPREAD * shares[len(shares) // 2])
    suspects += [
        suspect
        for name, noise in noises.items()
        if name not in known and (suspect := _range_suspect(name, noise, most_cut))
    ]
    return tuple(sorted(suspects, key=lambda suspect: -suspect.excess))


def has_other_weights(noise: LayerNoise) -> bool:
    """Whether the weights are not the original's after rounding or pruning.

    If they cannot be read, the outputs for the same inputs decide.
    """
    if noise.kept_change is None:
        return not float(noise.error.sum()) <= OTHER_OUTPUT * float(noise.signal.sum())
    if not noise.carried_inputs.any():  # all weights are 0
        return True
    return float((noise.kept_change / noise.largest_weight.clamp_min(TINY)).median()) > OTHER_WEIGHT


def weight_levels(noises: Mapping[str, LayerNoise]) -> tuple[float, bool] | None:
    """Number of steps between 0 and the largest weight, and whether each channel has its own step.

    ``None`` if steps are not known.
    """
    known = {name: noise for name, noise in noises.items() if noise.weight_step is not None}
    if not known:
        return None
    steps = [noise.weight_step for noise in known.values() if noise.weight_step is not None]
    equal = torch.cat([(step / step.nanmedian() - 1).abs() < 1e-6 for step in steps])
    per_channel = bool(equal.double().mean() < 0.5)
    levels = [
        (_largest(noise, per_channel) / step).nanmedian() for noise, step in zip(known.values(), steps, strict=True)
    ]
    return float(torch.stack(levels).nanmedian()), per_channel


def expected_error(noise: LayerNoise, levels: tuple[float, bool]) -> Tensor:
    """Expected sum of squared errors from rounding weights and inputs, float64[channels]."""
    step = _largest(noise, levels[1]) / levels[0]
    return noise.carried_weights * step**2 + noise.carried_inputs * noise.input_step**2


def _largest(noise: LayerNoise, per_channel: bool) -> Tensor:
    largest = noise.largest_weight
    return largest if per_channel else largest.max().expand_as(largest)


def _weight_suspects(noises: Mapping[str, LayerNoise]) -> list[Suspect]:
    readable = {name: noise for name, noise in noises.items() if noise.weight_change is not None}
    if not readable:
        return []
    levels = weight_levels(noises)
    candidates = []
    for which, subject in (("weight_change", "a weight"), ("kept_change", "a weight that is not 0")):
        changes: dict[str, Tensor] = {name: getattr(noise, which) for name, noise in readable.items()}
        if levels is not None:
            steps = {
                name: change * levels[0] / _largest(noises[name], levels[1]).clamp_min(TINY)
                for name, change in changes.items()
            }
            keeps = [float((of_channels <= HALF_STEP).double().mean()) >= KEPT for of_channels in steps.values()]
            if 2 * sum(keeps) > len(keeps):
                text = subject + " is {:.3g} steps from the original's; rounding explains half a step"
                return _standing_out(steps, dict.fromkeys(steps, HALF_STEP), text)
        shares = {name: change / noises[name].largest_weight.clamp_min(TINY) for name, change in changes.items()}
        usual = float(torch.stack([of_channels.quantile(KEPT) for of_channels in shares.values()]).nanmedian())
        text = (
            subject
            + f" changed by {{:.3g}} of its channel's largest; for 90 % of a layer's channels it is usually at most {usual:.3g}"
        )
        candidates.append((usual, _standing_out(shares, dict.fromkeys(shares, SPREAD * usual), text)))
    (usual, of_all), (usual_kept, found_kept) = candidates
    # Pruning is recognised because the other weights are unchanged, or nearly.
    return found_kept if usual_kept < usual / 10 else of_all


def _standing_out(values: Mapping[str, Tensor], limits: Mapping[str, float], text: str) -> list[Suspect]:
    """Suspects for layers with a channel above the layer's limit, each with its highest channel."""
    suspects = []
    for name, of_channels in values.items():
        value, channel = of_channels.nan_to_num(nan=math.inf).max(0)
        if value > limits[name]:
            excess = float(value) / limits[name] if limits[name] else math.inf
            suspects.append(Suspect(name, int(channel), excess, text.format(float(value))))
    return suspects


def _error_suspects(noises: Mapping[str, LayerNoise]) -> list[Suspect]:
    levels = weight_levels(noises) or (127.0, True)
    ratios, allowances = {}, {}
    for name, noise in noises.items():
        if noise.unexplained is None:
            error, expected = noise.error, expected_error(noise, levels)
        else:
            error, expected = noise.unexplained, noise.carried_inputs * noise.input_step**2
        ratios[name] = error / (expected + ROUNDING**2 * noise.signal).clamp_min(TINY)
        ratios[name] = ratios[name].nan_to_num(nan=math.inf)
        is_known = noise.unexplained is not None or noise.input_range is not None
        allowances[name] = 1.0 if is_known else UNKNOWN_RANGE
    layers = {name: float(ratio.median()) for name, ratio in ratios.items()}
    usual = max(1.0, sorted(layers.values())[len(layers) // 2]) if layers else 1.0
    text = f"the error is {{:.3g}} times what rounding explains; {usual:.2g} times is usual in this network"
    excesses = {name: value / usual / SPREAD / allowances[name] for name, value in layers.items()}
    suspects = [
        Suspect(name, None, value, text.format(layers[name])) for name, value in excesses.items() if not value <= 1
    ]
    apart = {name: ratio / max(layers[name], ROUNDING) for name, ratio in ratios.items() if excesses[name] <= 1}
    text = "the error of this channel is {:.3g} times that of the layer's others"
    limits = {name: CHANNEL_SPREAD * allowance for name, allowance in allowances.items()}
    return suspects + _standing_out(apart, limits, text)


def _range_suspect(name: str, noise: LayerNoise, most_cut: float) -> Suspect | None:
    if noise.input_range is None:
        return None
    low, high = noise.input_range
    least, most = min(noise.inputs[0], 0.0), max(noise.inputs[1], 0.0)
    if most <= least or high <= low:
        return None
    width = (high - low) / (most - least)
    shift = abs((high + low) - (most + least)) / 2 / max(most - least, high - low)
    share = noise.cut / noise.count
    excess = max(width / WIDTH, 1 / width / WIDTH, shift / SHIFT, share / most_cut)
    if least == 0 and abs(low + high) > 0.05 * (high - low):  # not symmetric
        excess = max(excess, abs(low) / (high - low) / ZERO_SHIFT)
    if excess <= 1:
        return None
    text = (
        f"quantised inputs range from {low:.3g} to {high:.3g}; the inputs compared on, from {least:.3g} to {most:.3g}"
    )
    if noise.cut:
        text += f", of which {100 * share:.2g} % are cut off"
    return Suspect(name, None, excess, text)
