"""Signals inside a model: gradients of the inputs of norm layers, and tensors that the user names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import tensors_in
from unsilent.guard.magnitudes import is_read
from unsilent.monitor.signals.input_gradients import read_input_gradient
from unsilent.sites.modules import named_modules

INPUT, OUTPUT, GRADIENT_OF_OUTPUT = "input", "output", "gradient"
PARTS = (INPUT, OUTPUT, GRADIENT_OF_OUTPUT)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)
Report = Callable[[Tensor], None]
"""A function that is called with a tensor when it is known."""
ReportGradient = Callable[..., None]
"""A function that is called with one or more parts whose sum is a gradient."""


def is_norm_layer(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, by its type or the name of its class.

    The name only counts for a module without submodules, for example ``LlamaRMSNorm``.
    """
    return isinstance(module, _NORMS) or ("norm" in type(module).__name__.lower() and not any(module.children()))


def named_values(model: nn.Module, wanted: Sequence[str]) -> list[tuple[str, nn.Module, str]]:
    """Modules and parts that ``MODULE:part`` texts name, each once.

    Raises ``UsageError`` for a text that matches no module.
    """
    modules = dict(named_modules(model))
    result: dict[str, tuple[nn.Module, str]] = {}
    for text in wanted:
        pattern, _, part = text.rpartition(":")
        if part not in PARTS or not pattern:
            raise UsageError(f"watch is {text!r}; expected MODULE:input, MODULE:output or MODULE:gradient")
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            known = [name for name in modules if name]
            parts = f"{', '.join(known[:8])}{' …' * (len(known) > 8)}" if known else "no parts"
            some = f"the model has {parts}"
            raise UsageError(f"watch is {text!r}, but no module is named {pattern!r}; {some}")
        result.update({f"{name}:{part}": (modules[name], part) for name in names})
    return [(name, module, part) for name, (module, part) in result.items()]


class Reader(NamedTuple):
    """Functions by which hooks read one value.

    Attributes:
        is_wanted: Returns whether it is the value's turn in this step.
        report: Called with a tensor in a forward pass.
        report_gradient: Called with a gradient in a backward pass; raises no errors.
        protect: Turns a function that may raise errors into a forward hook, which does not call it while `torch.compile` traces.
    """

    is_wanted: Callable[[], bool]
    report: Report
    report_gradient: ReportGradient
    protect: Callable[[Callable[..., None]], Callable[..., None]]


def hook_input_gradient(layer: nn.Module, reader: Reader) -> Any:
    """Attach a hook that reads the gradient of a layer's first input, and return its handle.

    Only the gradient through this layer is read.
    """

    def after(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or not reader.is_wanted():
            return
        inputs = [tensor for tensor in tensors_in((args, named)) if is_read(tensor)]
        if inputs and inputs[0].requires_grad:
            read_input_gradient(inputs[0], inputs[1:], list(tensors_in(output)), reader.report_gradient)

    return layer.register_forward_hook(reader.protect(after), with_kwargs=True)


def hook_value(module: nn.Module, part: str, reader: Reader) -> Any:
    """Attach a hook that reads an input or output of a module, or its gradient; return its handle.

    The first real or complex tensor among them is read.
    """

    def after(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or not reader.is_wanted():
            return
        value = next((t for t in tensors_in((args, named) if part == INPUT else output) if is_read(t)), None)
        if value is None:
            return
        if part != GRADIENT_OF_OUTPUT:
            reader.report(value)
        elif value.requires_grad:
            value.register_hook(reader.report_gradient)

    return module.register_forward_hook(reader.protect(after), with_kwargs=True)
