"""Layers that adapters can change: convolutions and linear layers with torch's own ``forward`` and a weight.

Other layers compute something else from their weight, compute the weight anew in each pass, or their ``forward`` is not called:
the model might not compute with a changed weight.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
NONE_ERROR = "the model has no Conv1d, Conv2d, Conv3d or Linear layer; expected at least one: only these are {}"


def computes_as(layer: nn.Module) -> type[nn.Module] | None:
    """The class in `KINDS` whose ``forward`` and weight a layer uses, or None if there is none."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight and never calls it
    weight = layer.__dict__.get("_parameters", {}).get("weight")
    if weight is None or "forward" in layer.__dict__:
        return None
    for kind in KINDS:
        methods = [name for name in ("forward", "_conv_forward") if hasattr(kind, name)]
        if isinstance(layer, kind) and all(getattr(type(layer), name) is getattr(kind, name) for name in methods):
            return kind
    return None


def disable_fused_paths(model: nn.Module) -> None:
    """Make transformer encoders call their layers, instead of fused kernels that read their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # tells torch that no fused kernel computes this activation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
