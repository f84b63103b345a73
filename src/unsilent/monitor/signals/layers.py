"""Signals inside of a model: gradients of the inputs of norm layers, and tensors that the user names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.errors import UsageError
from unsilent.nested import tensors_in
from unsilent.sites.modules import named_modules

INPUT, OUTPUT, GRADIENT_OF_OUTPUT = "input", "output", "gradient"
PARTS = (INPUT, OUTPUT, GRADIENT_OF_OUTPUT)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
Report = Callable[[Tensor], None]
"""Is called with a tensor when it is known."""


def is_norm_layer(module: nn.Module) -> bool:
    """Whether a module normalises: by its type, or a leaf whose class is called like one (``LlamaRMSNorm``)."""
    return isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and not any(module.children()))


def norm_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The norm layers of a model by name."""
    return [(name, module) for name, module in named_modules(model) if is_norm_layer(module)]


def named_values(model: nn.Module, wanted: Sequence[str]) -> list[tuple[str, nn.Module, str]]:
    """Modules and their parts that are named ``MODULE:part``, each once; raises ``UsageError`` for what matches nothing."""
    modules = dict(named_modules(model))
    result: dict[str, tuple[nn.Module, str]] = {}
    for text in wanted:
        pattern, _, part = text.rpartition(":")
        if part not in PARTS or not pattern:
            raise UsageError(f"watch is {text!r}; expected MODULE:input, MODULE:output or MODULE:gradient")
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            some = ", ".join([name for name in modules if name][:8])
            raise UsageError(f"watch is {text!r}, but no module is named {pattern!r}; the model has {some} …")
        result.update({f"{name}:{part}": (modules[name], part) for name in names})
    return [(name, module, part) for name, (module, part) in result.items()]


def hook_input_gradient(layer: nn.Module, is_wanted: Callable[[], bool], report: Report) -> Any:
    """Report the gradient of a layer's first input through this layer alone; the handle of the hook.

    The layer gets a view of its input, so that what flows around it (a residual connection) is not counted.
    """

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if torch.compiler.is_compiling() or not inputs or not _has_gradient(inputs[0]) or not is_wanted():
            return None
        view = inputs[0].view_as(inputs[0])
        view.register_hook(report)
        return (view, *inputs[1:])

    return layer.register_forward_pre_hook(before)


def hook_value(module: nn.Module, part: str, is_wanted: Callable[[], bool], report: Report) -> Any:
    """Report the first floating-point tensor of a module's inputs or outputs, or its gradient; the handle of the hook."""

    def after(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_wanted():
            return
        found = next((t for t in tensors_in((args, named) if part == INPUT else output) if t.is_floating_point()), None)
        if found is None:
            return
        if part != GRADIENT_OF_OUTPUT:
            report(found)
        elif _has_gradient(found):
            found.register_hook(report)

    return module.register_forward_hook(after, with_kwargs=True)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
