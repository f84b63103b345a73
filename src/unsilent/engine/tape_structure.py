"""The structure that two tapes, or two operations, share when what was found out about one holds for the other.

Kernels are chosen by shapes, strides, data types, arguments and the alignment of memory, not by the numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

from unsilent.engine.tape import Node, Tape
from unsilent.engine.tape_values import StorageWindow

ALIGNMENT = 64
"""Bytes. Kernels may treat memory that starts between two multiples of this differently."""


def structure_of(tape: Tape) -> str:
    """A hash of everything on a tape but numbers: equal for batches of the same shape that take the same way."""
    digest = xxhash.xxh3_128(repr((tape.device, sorted(tape.inputs.items()), sorted(tape.caches.items()))).encode())
    for node in tape.nodes:
        content = (node.name, *_call(node), node.reads, node.writes, node.results, node.new_values)
        digest.update(repr(content).encode())
    for value in tape.values:
        place = _alignment(tape, value.index)
        digest.update(repr((value.producer, value.nbytes, value.storage_window, value.output, place)).encode())
    digest.update(repr([window for _, window in tape.output_tensors]).encode())
    return digest.hexdigest()


def kind_of_operation(tape: Tape, node: Node, note: Callable[[int], Any]) -> object:
    """Equal for operations that call the same kernel on memory that is laid out alike; ``note``: what else counts of a value."""
    numbers = {v: i for i, v in enumerate(dict.fromkeys([w.value for w in node.reads] + [*node.new_values]))}
    values = [
        (tape.values[v].nbytes, tape.values[v].storage_window._replace(value=0), _alignment(tape, v), note(v))
        for v in numbers
    ]
    windows = [
        w._replace(value=numbers.get(w.value, -1)) if isinstance(w, StorageWindow) else w
        for w in (*node.reads, *node.results)
    ]
    writes = [(numbers[w.old], numbers[w.new]) for w in node.writes]
    return repr((*_call(node), windows, writes, values))


def _call(node: Node) -> tuple[object, ...]:
    drawn = node.generator is not None
    return str(node.func), node.args, node.kwargs, node.slots, node.written, node.shared_arguments, drawn


def _alignment(tape: Tape, value: int) -> int:
    external = tape.externals.get(value)
    return -1 if external is None else external.untyped_storage().data_ptr() % ALIGNMENT
