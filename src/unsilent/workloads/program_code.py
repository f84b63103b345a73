"""The code of an exported program: Python code that fx generates from its graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import leaves_in
from unsilent.sites.memory import dtype_name


class ProgramCode:
    """The code of a program, or of a part of it.

    It is never changed, and copies of the program share it.

    Args:
        program: The module whose tensors the graph names.
        graph: Graph of ``ExportedProgram.module()``.

    Attributes:
        function: The compiled code, called as ``function(program, *inputs)``.
        in_spec, out_spec: Nesting of inputs and outputs.
    """

    def __init__(self, program: nn.Module, graph: fx.Graph) -> None:
        self._graph = graph
        module: Any = fx.GraphModule(program, _graph_with_module_scopes(graph))
        self.function: Callable[..., Any] = type(module).forward
        self.in_spec: Any = getattr(module, "_in_spec", None)
        self.out_spec: Any = getattr(module, "_out_spec", None)

    def __deepcopy__(self, memo: object) -> ProgramCode:
        return self

    def with_device(self, program: nn.Module, device: torch.device) -> ProgramCode:
        """The code for ``program`` with ``device`` in place of every device that is written into the code."""
        if all(v == device for _, v in self._written() if isinstance(v, torch.device)):
            return self
        graph = copy.deepcopy(self._graph)
        for node in graph.nodes:
            node.args, node.kwargs = (
                fx.node.map_aggregate(part, lambda v: device if isinstance(v, torch.device) else v)
                for part in (node.args, node.kwargs)
            )
            if isinstance(node.target, HigherOrderOperator) and node.target.name() == "wrap_with_autocast":
                node.args = (device.type, *node.args[1:])
        return ProgramCode(program, graph)

    def check_dtypes(self, kinds: set[torch.dtype]) -> None:
        """Raise ``UsageError`` if the code contains a floating-point dtype that is not in ``kinds``."""
        for node, kind in self._written():
            if isinstance(kind, torch.dtype) and kind.is_floating_point and kind not in kinds:
                raise UsageError(
                    f"the exported program cannot run in {', '.join(sorted(map(dtype_name, kinds)))}, because "
                    f"{dtype_name(kind)} is hard-coded in it ({node.name}); leave --dtype out, or export the model in that type"
                )

    def first_active_dropout(self) -> str | None:
        """The name of the first dropout in the code that is still active, or None."""
        for node in self._graph.nodes:
            if isinstance(node.target, OpOverload) and "dropout" in node.target.name():
                names = (argument.name for argument in node.target._schema.arguments)
                arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
                if arguments.get("train") and arguments.get("p"):
                    return str(node.name)
        return None

    def _written(self) -> Iterator[tuple[fx.Node, Any]]:
        """Pairs of a node and a value in its arguments."""
        for node in self._graph.nodes:
            for _, value in leaves_in((node.args, node.kwargs)):
                yield node, value


def _graph_with_module_scopes(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph in which each operation is called by the module that it belonged to."""
    scoped = copy.deepcopy(graph)
    for node in scoped.nodes:
        if isinstance(node.target, OpOverload) and (path := _owner(node)):
            node.args = (node.target, *node.args)
            node.op, node.target = "call_module", path
    return scoped


def owners(graph: fx.Graph) -> list[str]:
    """For each operation, the path of the module that it belongs to."""
    return sorted({_owner(node) for node in graph.nodes if isinstance(node.target, OpOverload)} - {""})


def _owner(node: fx.Node) -> str:
    """Path of the innermost module in which an operation was traced.

    Empty for the model itself and for operations without a recorded module.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack and stack[0][0] == "" else ""
    return path.partition("@")[0]  # a second call of a module
