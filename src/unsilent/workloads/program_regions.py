"""Regions of an exported program, which export puts into separate graphs, made ordinary code again.

A block under ``torch.no_grad()`` or autocast becomes an operation that runs another graph, and so do ``torch.cond`` and
``torch.while_loop``. Dispatch modes do not see the operations inside some of them. Results do not change: the same
operations run on the same values in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator


def plain_cond(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    """``torch.cond`` as a plain Python ``if``."""
    return (yes if predicate else no)(*operands)


def plain_while_loop(
    goes_on: Callable[..., Any], step: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any] = ()
) -> Any:
    """``torch.while_loop`` as a plain Python loop."""
    values = tuple(carried)
    while goes_on(*values, *more):
        values = tuple(step(*values, *more))
    return values


CONTROL_FLOW_FUNCTIONS: dict[str, Callable[..., Any]] = {"cond": plain_cond, "while_loop": plain_while_loop}
INPUTS_AFTER = {"wrap_with_set_grad_enabled": 2, "wrap_with_autocast": 5}
"""Number of arguments before the inputs of an operation's graph, by operation. The last of these arguments is the
graph.
"""


def inline_regions(module: fx.GraphModule, autocast: bool = False) -> None:
    """Inline the regions that have no effect, and turn branches and loops into plain Python.

    Nothing is differentiated, so the gradient mode has no effect. A region that switches autocast off has no effect
    either, unless autocast is on around it (``autocast``).
    """
    for node in list(module.graph.nodes):
        if not isinstance(node.target, HigherOrderOperator):
            continue
        name = node.target.name()
        casts = name == "wrap_with_autocast" and bool(node.args[2])
        for argument in node.args:
            inner = _graph_of(module, argument)
            if inner is not None:
                inline_regions(inner, autocast or casts)
        if name in CONTROL_FLOW_FUNCTIONS:
            node.target = CONTROL_FLOW_FUNCTIONS[name]
        elif name in INPUTS_AFTER and not casts and not (autocast and name == "wrap_with_autocast"):
            _dissolve(module, node, INPUTS_AFTER[name])


def _graph_of(module: fx.GraphModule, argument: Any) -> fx.GraphModule | None:
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    value = getattr(module, str(argument.target), None)
    return value if isinstance(value, fx.GraphModule) else None


def _dissolve(module: fx.GraphModule, node: fx.Node, before: int) -> None:
    """Replace a region by its operations.

    A region with further graphs inside, or of an unusual form, is left unchanged.
    """
    body, inputs = node.args[before - 1], node.args[before:]
    inner = _graph_of(module, body)
    if inner is None or node.kwargs or inner.graph.find_nodes(op="get_attr"):
        return
    if any(user.target is not operator.getitem for user in node.users):
        return
    graph = module.graph
    known: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(inner.graph, known)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if isinstance(body, fx.Node) and not body.users:
        graph.erase_node(body)
        delattr(module, str(body.target))
