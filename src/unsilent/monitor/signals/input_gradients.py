"""The gradient of a layer's input through that layer alone, read from the graph of a backward pass.

A hook on the input itself would also count gradients that flow around the layer (a residual connection). An extra operation
before the layer would change the order in which gradients are added, and thus the last bits of the training. Therefore the
operations of the layer that take the input are found in the graph, and the gradients that they return for it are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

MOST_NODES = 200
"""Maximum number of operations of a layer that are searched; a larger layer is not read."""


class _Consumer(NamedTuple):
    """An operation that uses the input of a layer, and the positions of that input among its arguments."""

    node: Any
    places: list[int]


def read_input_gradient(
    layer_input: Tensor, further_inputs: Sequence[Tensor], outputs: Sequence[Tensor], report: Callable[..., None],
) -> None:  # fmt: skip
    """Report the gradient of a layer's input during the backward pass, as soon as it is complete.

    Args:
        layer_input: Input that requires a gradient.
        further_inputs: Further inputs; gradients that flow through them do not belong to the layer.
        outputs: Outputs of the layer.
        report: Called with one or more parts whose sum is the gradient; raises no errors.
    """
    consumers = _consumers(layer_input, further_inputs, outputs)
    parts: list[Tensor] = []
    count = missing = len(consumers)  # hooks that led to the operations would keep the graph in memory after the step

    def arrived(places: list[int], gradients: Sequence[Tensor | None]) -> None:
        nonlocal missing
        parts.extend(gradient for place in places if (gradient := gradients[place]) is not None)
        missing -= 1
        if missing:
            return
        if parts:
            report(*parts)
        parts.clear()
        missing = count

    for consumer in consumers:
        consumer.node.register_hook(lambda gradients, _, places=consumer.places: arrived(places, gradients))


def _consumers(layer_input: Tensor, further_inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[_Consumer]:
    """The operations of a layer that use its input, or none if the layer has too many operations."""
    target, borders = _edge(layer_input), {_edge(tensor) for tensor in further_inputs if tensor.requires_grad}
    borders.discard(target)
    waiting = [edge[0] for t in outputs if t.requires_grad and (edge := _edge(t)) != target and edge not in borders]
    seen, result = set(), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            return []
        edges = node.next_functions
        places = [place for place, edge in enumerate(edges) if edge == target]
        if places:
            result.append(_Consumer(node, places))
        waiting += [edge[0] for edge in edges if edge[0] is not None and edge != target and edge not in borders]
    return result


def _edge(tensor: Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
