"""A program of ``torch.export`` as an ordinary module: its parameters under their original names, struck like any other.

What ``ExportedProgram.module()`` gives cannot be used as it stands: it refuses ``eval()``, prints to stderr when its code raises,
holds constants outside of buffers, and unties shared weights as soon as it is converted. `Program` takes over its tensors and
its generated code, and nothing else.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from unsilent.errors import UsageError

Convert = Callable[[Tensor], Tensor]
Slot = tuple[dict[str, Any], str]
"""Where a module holds a tensor: its table of parameters or buffers, and the key."""


class Program(nn.Module):
    """The module of an exported program, on the CPU.

    Every tensor that the program stores is a parameter or a buffer, constants that export lifted out of the code too. Tied
    weights stay tied when it is moved, and devices that are written into the code follow it.

    Args:
        exported: what ``torch.export.load`` gave.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        with quiet_warnings():
            module: Any = exported.module()
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, (Tensor, torch.ScriptObject)):
                setattr(self, name, value)
        _register_constants(self)
        _tie(_twins(self))
        self._code = Code(module.graph)
        self.to("cpu")
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One call, with the inputs of the original model."""
        return self._code.function(self, *args, **kwargs)

    @property
    def code(self) -> Code:
        """What runs."""
        return self._code

    @property
    def _in_spec(self) -> Any:
        return self._code.in_spec  # the generated code looks for it here

    @property
    def _out_spec(self) -> Any:
        return self._code.out_spec

    def _apply(self, fn: Convert, recurse: bool = True) -> Self:
        """Moves or converts all tensors; raises ``UsageError`` for a type that the code does not allow."""
        twins, before = _twins(self), _kinds(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _tie(twins)
        after = _kinds(self)
        if after != before:
            self._code.check_kind(after)
        for tensor in _tensors(self):
            self._code = self._code.on(tensor.device)
            break
        return self


class Code:
    """The code that was generated for a graph; never changed, and shared by copies of its program.

    Attributes:
        graph: what it was made from. function: ``function(module, *inputs)``. in_spec, out_spec: nesting of inputs and outputs.
    """

    def __init__(self, graph: fx.Graph, device: torch.device | None = None) -> None:
        self.graph, self._device = graph, device
        made = fx.GraphModule(_Anything(), graph)
        self.function: Callable[..., Any] = type(made).forward
        self.in_spec, self.out_spec = made._in_spec, made._out_spec

    def __deepcopy__(self, memo: object) -> Code:
        return self

    def on(self, device: torch.device) -> Code:
        """The same with every device that is written into it replaced by ``device``."""
        if device == self._device:
            return self
        with quiet_warnings():
            graph = copy.deepcopy(self.graph)
        for node in graph.nodes:
            node.args, node.kwargs = (
                fx.node.map_aggregate(part, lambda v: device if isinstance(v, torch.device) else v)
                for part in (node.args, node.kwargs)
            )
        return Code(graph, device)

    def check_kind(self, kinds: set[torch.dtype]) -> None:
        """Raise ``UsageError`` where another floating-point type than ``kinds`` is written into the code."""
        for node in self.graph.nodes:
            written: list[torch.dtype] = []
            fx.node.map_aggregate((node.args, node.kwargs), lambda v, w=written: w.append(v) if is_float(v) else None)
            if other := [t for t in written if t not in kinds]:
                raise UsageError(
                    f"the program cannot run in {_short(kinds)}, for {_short(other)} is written into it ({node.name}); "
                    "leave --dtype out, or export the model in that type"
                )
"""
"""
