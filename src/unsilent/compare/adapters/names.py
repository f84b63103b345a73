"""Adapted copies of a model by name, such as ``int8`` or ``prune:0.8+int8``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.nested import map_tensors
from unsilent.compare.adapters.fake_quant import fake_quantised, quantised_layers
from unsilent.compare.adapters.pruning import pruned
from unsilent.report.text import count_text
from unsilent.workloads.base import call_model

ADAPTERS: Mapping[str, str] = {
    "int8": "8-bit weights per output channel and 8-bit activations (int8:tensor: one scale for all weights of a layer)",
    "int4": "4-bit weights per output channel and 8-bit activations (int4:tensor: one scale for all weights of a layer)",
    "prune": "prune:0.8: the 80 % of weights of least magnitude are 0, statistics of batch norms are taken again",
    "bf16": "all weights and activations in bfloat16",
    "fp16": "all weights and activations in float16",
    "compiled": "torch.compile with its defaults",
}
"""Descriptions of adapters; several are joined by +, like ``prune:0.8+int8``, and are applied from left to right."""

SHOWN_NAMES = 5
"""Maximum number of layers left in float32 that are named."""
LAST = ("int8", "int4", "bf16", "fp16", "compiled")
"""Adapters that must be the last one."""


class HalfPrecision(nn.Module):
    """A copy of a model in 16 bits, with inputs and outputs in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = copy.deepcopy(model).eval().to(dtype), dtype

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output of the copy in float32."""
        inputs, named = (map_tensors(values, self._in_own_dtype) for values in (inputs, named))
        return map_tensors(
            self.model(*inputs, **named), lambda _, tensor: tensor.float() if tensor.is_floating_point() else tensor
        )

    def _in_own_dtype(self, _: Any, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def first_adapter(text: str) -> str:
    """The first name in a text of adapters such as ``prune:0.8+int8``, known or not."""
    return text.partition("+")[0].partition(":")[0].strip()


def is_adapter(text: str) -> bool:
    """Whether a text begins with a known adapter."""
    return first_adapter(text) in ADAPTERS


def adapt(
    model: nn.Module, text: str, calibration: Sequence[Any], run: Callable[[nn.Module, Any], Any] = call_model
) -> nn.Module:
    """An adapted copy of a model in eval mode, also differentiable if it is quantised.

    For computation in integers see `fake_quant.converted`.

    Args:
        text: Names of `ADAPTERS`, joined by ``+``.
        calibration: Batches of clean inputs, for the ranges of quantised activations.
        run: Function that runs the model on a batch.

    Raises:
        UsageError: an adapter is unknown, has a wrong parameter, or does not fit the model.
    """
    parts = [part.strip() for part in text.split("+")]
    for part, following in pairwise(parts):
        if part.partition(":")[0] in LAST:
            raise UsageError(
                f"adapter {part!r} comes before {following!r} in {text!r}; expected it last: {following}+{part}"
            )
    for change in [_adapter(part, calibration, run) for part in parts]:
        model = change(model)
    return model


def describe(model: nn.Module) -> str:
    """Sentence on the quantised layers of a copy, and those left in float32, or an empty text."""
    quantised = set(quantised_layers(model))
    if not quantised:
        return ""
    holders = {
        name: module
        for name, module in model.named_modules()
        if any(p.ndim > 1 for p in module.parameters(recurse=False))
    }
    left = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in holders.items()
        if module not in quantised
    ]
    rounded = sum(weight.numel() for weight in {layer.weight for layer in quantised})
    share = rounded / sum(parameter.numel() for parameter in model.parameters())
    more = f" and {len(left) - SHOWN_NAMES:,} more" if len(left) > SHOWN_NAMES else ""
    return (
        f"{len(holders) - len(left):,} of {count_text(len(holders), 'layer')} with weights are quantised, "
        f"{math.floor(1000 * share) / 10:g} % of the parameters"
    ) + (f"; left in float32: {', '.join(left[:SHOWN_NAMES])}{more}" if left else "")


def _adapter(
    part: str, calibration: Sequence[Any], run: Callable[[nn.Module, Any], Any]
) -> Callable[[nn.Module], nn.Module]:
    name, _, parameter = part.partition(":")
    if name not in ADAPTERS:
        raise unknown_name_error("adapter", name, ADAPTERS)
    if name == "prune":
        try:
            share = float(parameter)
        except ValueError:
            raise UsageError(
                f"adapter {part!r} has no share of weights to prune; expected one, like prune:0.8"
            ) from None
        return lambda model: pruned(model, share, calibration, run)
    if name in ("int8", "int4"):
        if parameter not in ("", "tensor"):
            raise UsageError(f"adapter {part!r} has the parameter {parameter!r}; expected {name} or {name}:tensor")
        return lambda model: fake_quantised(model, calibration, int(name[3:]), per_channel=not parameter, run=run)
    if parameter:
        raise UsageError(f"adapter {part!r} has the parameter {parameter!r}; {name} takes none: leave it out")
    if name == "compiled":
        return lambda model: torch.compile(copy.deepcopy(model).eval())  # type: ignore[return-value]
    return lambda model: HalfPrecision(model, torch.bfloat16 if name == "bf16" else torch.float16).eval()
