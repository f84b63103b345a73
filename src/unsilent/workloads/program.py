"""A program of ``torch.export`` as an ordinary module with the names of the original model.

The module from ``ExportedProgram.module()`` cannot be used unchanged: it refuses ``eval()``, prints to stderr when its
code raises, holds constants outside of buffers, unties shared weights as soon as it is converted, and runs all
operations in one module. `Program` uses only its tensors and its graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from unsilent.workloads.program_code import ProgramCode, owners
from unsilent.workloads.program_regions import inline_regions

Slots = list[tuple[dict[str, Any], str]]
"""All places of one tensor in modules: tables of parameters or buffers, each with the key."""


class OriginalModule(nn.Module):
    """One module of the original model, with its tensors, through which its operations are called.

    Every tensor is a parameter or a buffer. This includes constants that export lifted out of the code: they are memory
    of the program and move with the other tensors. The class has no public attributes of its own, because a model may
    have a module with the same name.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        for name, parameter in source._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in source._buffers.items():
            self.register_buffer(name, buffer)
        for name, child in source._modules.items():
            if isinstance(child, fx.GraphModule):
                self.add_module(name, GraphRunningModule(child))
            elif type(child) is nn.Module:
                self.add_module(name, OriginalModule(child))
            else:  # the input checks that export adds: they are called, but are not a part of the model
                vars(self)[name] = child
        for name, value in vars(source).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            elif isinstance(value, torch.ScriptObject):
                setattr(self, name, value)

    def forward(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of one operation that belongs to this module."""
        return operation(*args, **kwargs)


class GraphRunningModule(OriginalModule):
    """A module that runs a graph: the whole program, or a part of it that has its own graph."""

    def __init__(self, source: fx.GraphModule) -> None:
        super().__init__(source)
        for path in owners(source.graph):
            _enter(self, path)
        self._program = ProgramCode(self, source.graph)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of running the graph with these inputs."""
        return self._program.function(self, *args, **kwargs)

    @property
    def _in_spec(self) -> Any:
        return self._program.in_spec  # the generated code looks for it here

    @property
    def _out_spec(self) -> Any:
        return self._program.out_spec


class Program(GraphRunningModule):
    """An exported program as a module on the CPU and in eval mode.

    It is called with the inputs of the original model. Tied weights stay tied when it is moved or converted, and
    devices that are written into the code follow it.

    Args:
        exported: Program that ``torch.export.load`` returned.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        with warnings_off():
            module: Any = exported.module()
            inline_regions(module)
            super().__init__(module)
            _tie(_twins(self))
            self.to("cpu").eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert all tensors.

        Raises ``UsageError`` for a dtype that the code does not allow.
        """
        twins, before = _twins(self), _kinds(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _tie(twins)
        after, tensor = _kinds(self), next(_tensors(self), None)
        for body in graph_running_modules(self):
            if after != before:
                body._program.check_dtypes(after)
            if tensor is not None:
                with warnings_off():
                    body._program = body._program.with_device(body, tensor.device)
        return self


def graph_running_modules(program: Program) -> list[GraphRunningModule]:
    """The modules of a program that run a graph; the program itself comes first."""
    return [module for module in program.modules() if isinstance(module, GraphRunningModule)]


def code_of(body: GraphRunningModule) -> ProgramCode:
    """The code that a module runs."""
    return body._program


@contextmanager
def warnings_off() -> Iterator[None]:
    """Context without warnings.

    Torch warns about its own internals while it makes modules of programs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _enter(module: nn.Module, path: str) -> None:
    """Create the missing modules on a path.

    Modules without tensors are missing from an exported program.
    """
    for name in path.split("."):
        if name not in module._modules:
            module.add_module(name, OriginalModule(nn.Module()))
        module = module.get_submodule(name)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _kinds(module: nn.Module) -> set[torch.dtype]:
    return {t.dtype for t in _tensors(module) if t.is_floating_point()}


def _twins(program: nn.Module) -> list[Slots]:
    """Groups of parameters or buffers that share the same memory under several names."""
    mapping: dict[tuple[Any, ...], Slots] = {}
    for module in program.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
                    kind = (tensor.dtype, isinstance(tensor, nn.Parameter))
                    mapping.setdefault((*place, *kind), []).append((table, name))
    return [slots for slots in mapping.values() if len(slots) > 1]


def _tie(twins: list[Slots]) -> None:
    """Make each group of names refer to one tensor object again."""
    for (first, key), *others in twins:
        for table, name in others:
            table[name] = first[key]
