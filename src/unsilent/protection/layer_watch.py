"""Hooks that report each run of a layer of a model to a listener, in the order in which layers run.

Layers are modules without children (and `torch.nn.MultiheadAttention`, whose children do not run) that return a tensor of
floating-point numbers, or a tuple that begins with one. With ``functions``, products and attention outside these modules
(`WATCHED_FUNCTIONS`) are layers as well. Changes between layers show in the next layer.

Names: ``head`` is the first run of a module in a forward pass, ``head#2`` the second one. Later passes of the same call, for
example the decoding steps of ``generate()``, have other inputs and separate names: ``head@later``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from unsilent.basics.closing import Hooked
from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.sites.modules import named_modules

LATER = "@later"
WATCHED_FUNCTIONS: Mapping[Any, str] = {
    torch.matmul: "matmul", torch.Tensor.matmul: "matmul", torch.Tensor.__matmul__: "matmul",
    torch.bmm: "matmul", torch.Tensor.bmm: "matmul",
    nn.functional.scaled_dot_product_attention: "scaled_dot_product_attention",
}  # fmt: skip
"""Functions that count as layers, and the names of their runs."""


class LayerRun(NamedTuple):
    """One run of a layer: its inputs and output.

    Attributes:
        name: Name of the module or function; see the module's docstring.
        number: Number of the forward pass in its call, from 1.
        compute: The module or function.
        inputs, named_inputs: Positional and keyword arguments of the call.
        output: [samples, ...], the returned tensor, or the first of a returned tuple.
    """

    name: str
    number: int
    compute: Callable[..., Any]
    inputs: tuple[Any, ...]
    named_inputs: Mapping[str, Any]
    output: Tensor

    @property
    def module_name(self) -> str:
        """The name of the module or function."""
        return module_name(self.name)

    def run_again(self) -> Tensor:
        """The output, computed again from the inputs without calling hooks."""
        forward = self.compute.forward if isinstance(self.compute, nn.Module) else self.compute
        with torch.no_grad():
            output = first_tensor(forward(*self.inputs, **self.named_inputs))
        assert output is not None
        return output


Listener = Callable[[LayerRun], Tensor | None]
"""Function that is called with each run of a layer; a tensor that it returns replaces the output."""


def module_name(run: str) -> str:
    """The name of the module or function in the name of a run."""
    return run.removesuffix(LATER).partition("#")[0]


def first_tensor(output: Any) -> Tensor | None:
    """The floating-point tensor that a layer returned, or the first of a tuple.

    Returns ``None`` for any other output.
    """
    value = output[0] if isinstance(output, tuple) and output else output
    return value if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and value.numel() else None


def find_layers(model: nn.Module, globs: Iterable[str] = ("*",)) -> dict[str, nn.Module]:
    """The modules that are layers, by name.

    Raises ``UsageError`` for a glob that matches none.
    """

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) or not any(module.children())

    every = {name: module for name, module in named_modules(model) if is_layer(module)}
    chosen: set[str] = set()
    for glob in globs:
        matched = {name for name in every if fnmatchcase(name, glob)}
        if not matched:
            raise unknown_name_error("layer", glob, every)
        chosen |= matched
    return {name: module for name, module in every.items() if name in chosen}


class LayerWatch(Hooked):
    """Hooks that report the layers of a model to a listener; a context manager that removes them.

    Args:
        model: Model whose layers are watched while there is a listener.
        layers: Globs over names of modules.
        wanted: Names of the runs that the listener is called for; ``None`` for all.
        functions: Whether functions are layers too; only within `listening`.

    Raises:
        UsageError: a glob matches no layer, or the model is compiled.

    Attributes:
        passes: Forward passes of the whole model since listening began.
        after_pass: Called after each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str] = ("*",),
        wanted: frozenset[str] | None = None,
        functions: bool = False,
    ) -> None:
        reject_compiled(model)
        self._wanted = wanted
        self._runs: Counter[str] = Counter()
        self._listener: Listener | None = None
        self.passes = 0
        self.after_pass: Callable[[], None] = lambda: None
        chosen = find_layers(model, layers)
        if wanted is not None:
            names = {module_name(name) for name in wanted}
            chosen = {name: module for name, module in chosen.items() if name in names}
        self._mode = _FunctionWatch(self._function_ran) if functions else None
        self._hooks = []
        for name, module in chosen.items():
            self._hooks.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        self._hooks.append(model.register_forward_pre_hook(self._begin_pass))
        self._hooks.append(model.register_forward_hook(self._end_pass))

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Context of one call of the model, whose runs of layers are reported to the listener."""
        self._listener, self.passes = listener, 0
        try:
            with nullcontext() if self._mode is None else self._mode:
                yield
        finally:
            self._listener = None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # so that a copy of the model does not copy its listener

    def _begin_pass(self, *_: Any) -> None:
        self._runs.clear()
        self.passes += 1

    def _end_pass(self, *_: Any) -> None:
        if self._listener is not None:
            self.after_pass()

    def _hook(self, name: str) -> Callable[..., Any]:
        def after(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            return None if self._listener is None else self._ran(name, module, inputs, named, output)

        return after

    def _function_ran(self, name: str, function: Any, inputs: tuple[Any, ...], named: Any, output: Any) -> Any:
        changed = self._ran(name, function, inputs, named, output)
        return output if changed is None else changed

    def _ran(self, name: str, compute: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> Any:
        self._runs[name] += 1
        run = name if self._runs[name] == 1 else f"{name}#{self._runs[name]}"
        run = run if self.passes <= 1 else run + LATER
        if self._wanted is not None and run not in self._wanted:
            return None
        value = first_tensor(output)
        if value is None or self._listener is None:
            return None
        layer = LayerRun(run, self.passes, compute, inputs, named, value)
        if not torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack():
            changed = self._listener(layer)
        else:
            with torch.no_grad(), no_dispatch():  # so that modes that inject faults do not see these calls
                changed = self._listener(layer)
        return changed if changed is None or value is output else (changed, *output[1:])


class _FunctionWatch(TorchFunctionMode):
    """Passes the output of each watched function to a callback, whose result replaces the output."""

    def __init__(self, ran: Callable[..., Any]) -> None:
        super().__init__()
        self._ran = ran

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = WATCHED_FUNCTIONS.get(func)
        return output if name is None else self._ran(name, func, args, kwargs or {}, output)


def is_compiled(model: nn.Module | None) -> bool:
    """Whether torch.compile was applied to a model."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def reject_compiled(model: nn.Module) -> None:
    """Raise ``UsageError`` for a model that is compiled or not a module.

    Hooks of the layers of a compiled model do not run.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is of type {type(model).__name__}; expected a torch.nn.Module")
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"the model is compiled ({type(model).__name__}), so that its layers cannot be watched; protect the model "
            "that is not compiled"
        )
